"""Loading a model in four processes: each reads its rows of the files, against one that reads all.

What counts is the peak of resident memory (`VmHWM`) of the first process, which is the fuller one either way.
The model has 0.94 billion parameters, in bfloat16 on disk. It takes 2 GB of temporary files.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.result import Result
from pellucid.config import ModelConfig, TrainerRunConfig
from pellucid.launch.rl import places
from pellucid.model.load import empty_model
from pellucid.model.stored import NotByRows
from pellucid.model.tiny import character_tokenizer
from pellucid.trainer import parallel
from pellucid.trainer.build import load_trained
from pellucid.transport.weights import named_weights, write_tensors

NUM_PROCESSES = 4
SHAPE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "head_dim": 128}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="pellucid_loading_") as folder:
        num_parameters = make_model(Path(folder))
        shard_gb = 4 * num_parameters / NUM_PROCESSES / 1e9
        by_rows, whole = (_peaks_gb(Path(folder), how) for how in ("rows", "whole"))
    name = f"loading {num_parameters / 1e9:.2f} B parameters in {NUM_PROCESSES} processes, peak memory"
    return [
        Result(f"{name} of the first", by_rows[0], whole[0], "GB", "one process reads all"),
        Result(f"{name} of the fullest other", max(by_rows[1:]), max(whole[1:]), "GB", "one reads all"),
        Result(
            f"{name} beyond its float32 shard", max(by_rows) - shard_gb, max(whole) - shard_gb, "GB", "same"
        ),
    ]


def make_model(folder: Path) -> int:
    """Writes a Qwen3 model of random bfloat16 weights, one at a time; returns the number of parameters."""
    from transformers import Qwen3Config

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(**SHAPE, **HEADS, vocab_size=32768, tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    weights = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in named_weights(empty_model(ModelConfig(name=str(folder)))).items()
    }
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def drawn() -> Iterator[torch.Tensor]:
        for tensor in weights.values():
            yield block.repeat(-(-tensor.numel() // len(block)))[: tensor.numel()]

    write_tensors(folder / "model.safetensors", weights, drawn())
    return sum(tensor.numel() for tensor in weights.values())


def _peaks_gb(folder: Path, how: str) -> list[float]:
    """Returns the peak of each process, first to last."""
    command = [sys.executable, "-m", "benchmarks.loading", str(folder), how]
    started = [
        subprocess.Popen(command, env={**os.environ, **place}, stdout=subprocess.PIPE, text=True)
        for place in places(NUM_PROCESSES)
    ]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a process of the benchmark failed")
    return [json.loads(answer) for answer in answers]


def _load(folder: str, how: str) -> None:
    config = TrainerRunConfig(model=ModelConfig(name=folder), seq_len=64)
    refused = NotByRows("the benchmark asks for it")
    with parallel.joined(config.trainer) as ranks:
        if how == "whole":
            with patch.object(parallel, "unread_policy", side_effect=refused):
                kept = load_trained(config, ranks)
        else:
            kept = load_trained(config, ranks)
        assert kept
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        print(json.dumps(peak_kb * 1024 / 1e9))


if __name__ == "__main__":
    _load(*sys.argv[1:])
