"""Loading a model in four processes: each reads its rows of the files, against one that reads all.

    python -m benchmarks loading                      0.94 billion parameters, all three ways
    python -m benchmarks.loading --shape 7b           one way, by process; 13.5 GB of temporary files

    way       what is trained            weights are held in
    rows      all weights                float32
    whole     all weights                float32; the first process reads the whole model
    adapter   LoRA, in bfloat16          bfloat16

What counts is the peak of resident memory (`VmHWM`). The weights are random, and bfloat16 on disk. With
`--turns`, each process takes the memory of its shard once the one before has given up its own. So a machine
with memory for one shard finds the same peaks.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import distributed as dist

from benchmarks.result import Result
from pellucid.config import ModelConfig, TrainerRunConfig
from pellucid.launch.rl import places
from pellucid.model.load import empty_model
from pellucid.model.stored import NotByRows, StoredWeights
from pellucid.model.tiny import character_tokenizer
from pellucid.trainer import parallel
from pellucid.trainer.alarms import local_shard
from pellucid.trainer.build import load_trained
from pellucid.transport.weights import named_weights, write_tensors

NUM_PROCESSES = 4
NUM_FILES = 4
SHAPES: Mapping[str, Mapping[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 16,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
}
WAYS = ("rows", "whole", "adapter")
GIB = 1 << 30


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="pellucid_loading_") as folder:
        num_parameters = make_model(Path(folder), "1b")
        rows, whole, adapter = (_measure(Path(folder), way) for way in WAYS)
    name = f"loading {num_parameters / 1e9:.2f} B parameters in {NUM_PROCESSES} processes, peak memory"
    beyond, beyond_whole, beyond_half = (
        max(each["peak"] - each["shard"] for each in measured) / 1e9 for measured in (rows, whole, adapter)
    )
    first, *others = (each["peak"] / 1e9 for each in rows)
    first_whole, *others_whole = (each["peak"] / 1e9 for each in whole)
    return [
        Result(f"{name} of the first", first, first_whole, "GB", "one process reads all"),
        Result(f"{name} of the fullest other", max(others), max(others_whole), "GB", "one reads all"),
        Result(f"{name} beyond its float32 shard", beyond, beyond_whole, "GB", "same"),
        Result(f"{name} beyond its bfloat16 shard, with an adapter", beyond_half, beyond, "GB", "float32"),
    ]


def make_model(folder: Path, shape: str) -> int:
    """Writes a Qwen3 model of random bfloat16 weights, one at a time; returns the number of parameters."""
    from transformers import Qwen3Config

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    weights = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in named_weights(empty_model(ModelConfig(name=str(folder)))).items()
    }
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def drawn(names: list[str]) -> Iterator[torch.Tensor]:
        for name in names:
            yield block.repeat(-(-weights[name].numel() // len(block)))[: weights[name].numel()]

    where: dict[str, str] = {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        names = list(weights)[number::NUM_FILES]
        write_tensors(folder / file, {name: weights[name] for name in names}, drawn(names))
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.numel() for tensor in weights.values())


def _measure(folder: Path, way: str, *, turns: bool = False) -> list[dict[str, float]]:
    """Returns what each process says, first to last."""
    command = [sys.executable, "-m", "benchmarks.loading", "--way", way, "--load", str(folder)]
    started = [
        subprocess.Popen(
            [*command, *(["--turns"] if turns else [])],
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places(NUM_PROCESSES)
    ]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a process of the benchmark failed")
    return [json.loads(answer) for answer in answers]


def _load(folder: Path, way: str, turns: bool) -> dict[str, float]:
    """Loads a model as the trainer does; returns the bytes of its peak and its shard, and the seconds."""
    adapts = way == "adapter"
    config = TrainerRunConfig.model_validate(
        {
            "model": {"name": str(folder), "lora": {} if adapts else None},
            "trainer": {"model": {"precision": "bfloat16" if adapts else "float32"}},
            "seq_len": 64,
        }
    )
    started = time.monotonic()
    refused = patch.object(parallel, "unread_policy", side_effect=NotByRows("the benchmark asks for it"))
    with parallel.joined(config.trainer) as ranks:
        with _turns(ranks.process) if turns else nullcontext(), ExitStack() as stack:
            if way == "whole":
                stack.enter_context(refused)
            (trained,) = load_trained(config, ranks)
        shard = sum(local_shard(weight).nbytes for weight in trained.policy.parameters())
        return {"peak": _peak_bytes(), "shard": shard, "seconds": time.monotonic() - started}


def _turns(process: int) -> AbstractContextManager[object]:
    """Context manager: a process waits for those before it, and gives its shard up once it has read it."""
    allocate, fill = parallel._allocate, StoredWeights.fill

    def wait(module: torch.nn.Module, device: torch.device) -> None:
        for _ in range(process):
            dist.barrier()
        allocate(module, device)

    def give_up(stored: StoredWeights) -> None:
        fill(stored)
        for module, attribute in stored._sources:
            local_shard(getattr(module, attribute)).untyped_storage().resize_(0)
        ctypes.CDLL(None).malloc_trim(0)
        for _ in range(process, NUM_PROCESSES - 1):
            dist.barrier()

    stack = ExitStack()
    stack.enter_context(patch.object(parallel, "_allocate", wait))
    stack.enter_context(patch.object(StoredWeights, "fill", give_up))
    return stack


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--way", choices=WAYS, default="adapter")
    parser.add_argument("--folder", type=Path, help="where the model is, or is made; it stays there")
    parser.add_argument("--turns", action="store_true", help="on a machine without memory for all shards")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        print(json.dumps(_load(given.load, given.way, given.turns)))
        return
    with tempfile.TemporaryDirectory(prefix="pellucid_loading_") as temporary:
        folder = given.folder or Path(temporary)
        if not (folder / "model.safetensors.index.json").exists():
            folder.mkdir(exist_ok=True)
            print(f"{make_model(folder, given.shape) / 1e9:.2f} billion parameters in {folder}", flush=True)
        for number, each in enumerate(_measure(folder, given.way, turns=given.turns)):
            peak, shard = each["peak"] / GIB, each["shard"] / GIB
            print(
                f"process {number}: peak {peak:.2f} GiB, shard {shard:.2f} GiB, beyond it {peak - shard:.2f} "
                f"GiB, after {each['seconds']:.0f} s"
            )


if __name__ == "__main__":
    main()
