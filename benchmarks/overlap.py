"""Is the asynchrony real? Time per step of a whole RL run against the slower of its two halves.

Generation is the time the engine was busy per policy version, training the time the trainer was not
waiting for a batch; both are taken from the run's own metrics, one thread each. 1.0 would be perfect
overlap; a run that takes turns shows the sum of both.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.result import Result
from pellucid.metrics import read_metrics
from pellucid.model.tiny import make_tiny_model

STEPS = 40
WARM_UP = 8


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        return [_measure(folder, level) for level in (1, 0)]


def _measure(folder: Path, level: int) -> Result:
    output = folder / f"level_{level}"
    _train(folder / "model", output, level)
    trainer = list(read_metrics(output / "metrics" / "trainer.jsonl"))[WARM_UP:]
    engine = list(read_metrics(output / "metrics" / "inference.jsonl"))[WARM_UP:]
    step_s = mean(record["time/step_s"] for record in trainer)
    train_s = mean(record["time/train_s"] for record in trainer)
    generate_s = mean(record["time/busy_s"] for record in engine)
    against = f"max(generation {generate_s:.3f} s, training {train_s:.3f} s)"
    return Result(f"overlap, max_async_level {level}", step_s, max(generate_s, train_s), "s/step", against)


def _train(model: Path, output: Path, level: int) -> None:
    flags = {
        "output-dir": output,
        "model.name": model,
        "max-steps": STEPS,
        "max-async-level": level,
        "seq-len": 4096,
        "orchestrator.env": '[{"id": "reverse-text"}]',
        "orchestrator.sampling.max-tokens": 12,
        "orchestrator.max-inflight-rollouts": 128,
        "inference.max-concurrent": 128,
        "inference.threads": 1,
        "trainer.threads": 1,
    }
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    arguments.append("--no-orchestrator.filter-zero-advantages")
    command = [sys.executable, "-m", "pellucid.cli", "rl", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
