"""docs/monitor.md names every metric that a step of the trainer logs."""

import re
from pathlib import Path

import pytest

from pellucid.config import TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.ledger import Journal, Stage
from pellucid.metrics import read_metrics
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import train
from pellucid.trainer.sft import Validation
from pellucid.transport import Batch, MemoryChannel, encode_batch

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"


def documented(section: str) -> list[re.Pattern[str]]:
    """The names in the table of a section, as patterns; a word in capitals stands for anything."""
    (table,) = re.findall(rf"^### {section}\n(.*?)(?:^### |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(.*?)`", cell)]
    return [re.compile(re.sub("[A-Z]+", "[^/]+", name)) for name in names]


def batch(mode: str) -> Batch:
    samples = [
        TrainingSample.from_turn(
            [5, 6, 7],
            [8, 9],
            [-0.01, -9.0],
            env_name=env,
            run_id="run",
            group_id=env,
            rollout_id=env,
            advantage=advantage,
            training_mode=mode,
        )
        for env, advantage in (("a", 1.0), ("b", -1.0))
    ]
    return Batch("run", 0, TokenTable.from_samples(samples))


@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_what_the_trainer_logs(tiny_model, tmp_path, mode):
    config = TrainerRunConfig.model_validate(
        {
            "output_dir": tmp_path,
            "max_steps": 1,
            "seq_len": 16,
            "model": {"name": str(tiny_model)},
            "trainer": {"threads": 1, "experimental": {"token_export": {}}},
        }
    )
    channel = MemoryChannel()
    channel.send(0, encode_batch(batch(mode)))
    journal = Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER)
    run = build_run(config, OrchestratorBatches(channel), journal, [], publishes=True)
    if mode == "sft":
        held = [run.pack(0, batch(mode).table)]
        run.validation = Validation(
            run.policy, run.forward, held, interval=1, max_steps=1, gather=run.ranks.gather
        )
    try:
        train(run)
    finally:
        run.close()
    (record,) = read_metrics(tmp_path / "metrics" / "trainer.jsonl")

    names = record.keys() - {"step", "time"}
    patterns = documented("Trainer")
    assert [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)] == []
    assert {"entropy/a/std", "loss", "total/tokens"} <= names
    assert ("validation/initial_loss" in names) == (mode == "sft")
