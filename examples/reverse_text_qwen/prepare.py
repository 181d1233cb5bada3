"""What smollm.toml needs, without network: sentences to reverse, and SmolLM2-135M after a warm-up on others.

    python examples/reverse_text_qwen/prepare.py [outputs/reverse_text_qwen]

writes `data/` and `held_out/` for the taskset, `warmup.jsonl` and `sft/`; no sentence is in two of them.
A model that is there already is kept. The weights come from `examples/smollm/prepare.py`.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
"""The taskset's own instruction; a warm-up under another one would teach another task."""

SUBJECTS = ("A cat", "My dog", "The boy", "Our team", "A bird", "Her son", "One man", "A bus", "The sun")
VERBS = ("saw", "took", "left", "met", "led", "hit", "lost", "held", "sold", "built")
OBJECTS = ("a red car", "the old map", "no one", "two cows", "the boat", "a big tree", "his hat", "it")
PLACES = ("today", "at noon", "in May", "by the sea", "at home", "last year", "in the rain", "on foot")
NUM_WARM_UP, NUM_HELD_OUT, WARM_UP_STEPS = 1000, 128, 8


def sentences(seed: int = 0) -> list[str]:
    """Returns all sentences in one random order."""
    parts = itertools.product(SUBJECTS, VERBS, OBJECTS, PLACES)
    texts = [f"{' '.join(words)}." for words in parts]
    random.Random(seed).shuffle(texts)
    return texts


def warm_up(texts: list[str]) -> Iterator[dict[str, object]]:
    for text in texts:
        reply = f"<reversed_text>\n{text[::-1]}\n</reversed_text>"
        roles = (("system", SYSTEM), ("user", text), ("assistant", reply))
        yield {"messages": [{"role": role, "content": content} for role, content in roles]}


def write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what examples/reverse_text_qwen/smollm.toml needs.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/reverse_text_qwen"))
    folder = parser.parse_args().folder
    texts = sentences()
    write(folder / "warmup.jsonl", warm_up(texts[:NUM_WARM_UP]))
    slices = {"data": texts[NUM_WARM_UP:-NUM_HELD_OUT], "held_out": texts[-NUM_HELD_OUT:]}
    for name, prompts in slices.items():
        write(folder / name / "train.jsonl", ({"prompt": text} for text in prompts))
    if (folder / "sft" / "model" / "tokenizer.json").exists():
        print(f"{folder / 'sft' / 'model'} is there")
        return
    subprocess.run([sys.executable, "examples/smollm/prepare.py", "outputs/smollm"], check=True)
    options = {
        "--data.path": folder / "warmup.jsonl",
        "--output-dir": folder / "sft",
        "--max-steps": WARM_UP_STEPS,
        "--data.batch-size": 16,
        "--trainer.optim.lr": 3e-4,
    }
    flags = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "pellucid.cli", "sft", "@", "examples/evidence/sft.toml", *flags]
    subprocess.run([*command, "--clean-output-dir"], check=True)


if __name__ == "__main__":
    main()
