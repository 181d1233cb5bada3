"""Training steps on a pretend accelerator: how often the host waits for the device, and what it computes.

Waits inside of the model are not counted here, only those of loss, observation, export, optimizer and data.
"""

from contextlib import closing, nullcontext
from pathlib import Path

import pytest

import pellucid.export
from pellucid.checks.rehearsal import Rehearsal, rehearsing
from pellucid.config import (
    CispoLossConfig,
    DppoLossConfig,
    GspoLossConfig,
    IcepopLossConfig,
    PpoClipLossConfig,
    TisLossConfig,
    TrainerRunConfig,
)
from pellucid.data import TokenTable, TrainingSample
from pellucid.loss import loss_for
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate
from pellucid.trainer.parallel import Ranks
from pellucid.transport import Batch, MemoryChannel, encode_batch
from tolerance import near, near_logprobs

RL_LOSSES = (
    DppoLossConfig(teacher_tau=0.5),
    PpoClipLossConfig(type="ppo_clip"),
    CispoLossConfig(type="cispo"),
    GspoLossConfig(type="gspo"),
    IcepopLossConfig(type="icepop"),
    TisLossConfig(type="tis"),
)
NUM_STEPS = len(RL_LOSSES) + 2


def table_of(mode: str) -> TokenTable:
    """Six samples in two groups; too many tokens for one micro batch."""
    samples = [
        TrainingSample.from_turn(
            [5 + index // 3, 7, 9, 11],
            [20 + index, 30, 40, 50, 60 + index],
            [-4.0, -4.5, -5.0, -4.25, -4.75],
            env_name="ab"[index % 2],
            run_id="run",
            group_id=f"g{index // 3}",
            rollout_id=f"r{index}",
            reward=float(index % 3),
            advantage=float(index % 3) - 1.0,
            stop_reason="stop",
            training_mode=mode,
            teacher_logprobs=[-3.0] * 9,
        )
        for index in range(6)
    ]
    return TokenTable.from_samples(samples)


class Reports(list):
    def log(self, step, values) -> None:
        self.append(dict(values))

    def close(self) -> None:
        """Nothing to close."""


KINDS = {
    "plain": {},
    "exported": {"trainer": {"experimental": {"token_export": {"own_process": False}}}},
    "lora": {"model": {"lora": {"rank": 4}}},
}


def steps(model: Path, folder: Path, kind: str, rehearsal: Rehearsal | None = None) -> Reports:
    """Trains a step with each loss, so slowly that rounding stays rounding; returns its reports."""
    settings = KINDS[kind]
    trainer = {"threads": 1, "optim": {"lr": 1e-7}, "loss": {"type": "dppo", "reduction": "group"}}
    config = TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": NUM_STEPS + 1,  # a checkpoint after the last step would wait, too
            "seq_len": 20,
            "model": {"name": str(model), **settings.get("model", {})},
            "trainer": {**trainer, **settings.get("trainer", {})},
        }
    )
    channel, reports = MemoryChannel(), Reports()
    for step, mode in enumerate(["rl"] * len(RL_LOSSES) + ["opd", "sft"]):
        channel.send(step, encode_batch(Batch("run", step, table_of(mode))))
    ranks = Ranks() if rehearsal is None else Ranks(device=rehearsal.device)

    def phase(name):
        return nullcontext() if rehearsal is None else rehearsal.phase(f"{kind} {name}")

    with closing(build_run(config, OrchestratorBatches(channel), None, [reports], ranks)) as run:
        for step in range(NUM_STEPS):
            run.losses = loss_for(RL_LOSSES[min(step, len(RL_LOSSES) - 1)])
            with phase("micro batches"):
                observer = accumulate(run, run.next_batch(step))
            with phase("rest"):
                run.finish(step, observer, run.update(observer))
            del observer
        run.publishes = True
        num_bytes = 0 if rehearsal is None else rehearsal.num_bytes
        with phase("writing"):
            run.publish(step)
            run.save_checkpoint()
        if rehearsal is not None:
            reports.append(rehearsal.peak_bytes[f"{kind} writing"] - num_bytes)
    return reports


def waits(rehearsal: Rehearsal, phase: str) -> list[str]:
    """Waits of a phase that are not the model's: operation and place of each."""
    return [
        f"{event.operation} in {event.where}"
        for event in rehearsal.events["sync"].elements()
        if event.phase == phase and not event.where.startswith("model/")
    ]


def compare(model: Path, folder: Path) -> dict:
    with rehearsing() as rehearsal:
        return {
            kind: {
                "found": (found := steps(model, folder / kind / "device", kind, rehearsal))[:-1],
                "num_bytes_to_write": found[-1],
                "expected": steps(model, folder / kind / "cpu", kind),
                "in_micro_batches": waits(rehearsal, f"{kind} micro batches"),
                "in_rest": waits(rehearsal, f"{kind} rest"),
            }
            for kind in KINDS
        }


@pytest.fixture(scope="module")
def compared(tiny_model, tmp_path_factory):
    """The folder of all runs, and what they found."""
    folder = tmp_path_factory.mktemp("waiting")
    return folder, compare(tiny_model, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_for_the_device_once_per_step(compared, kind) -> None:
    """Never in a micro batch; once more in step 0, whose weights are compared with AdamW's formula."""
    _, results = compared
    assert results[kind]["in_micro_batches"] == []
    assert len(results[kind]["in_rest"]) == NUM_STEPS + 1, results[kind]["in_rest"]
    assert sum(report["micro_batches"] for report in results[kind]["expected"]) >= 2 * NUM_STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_checkpoints_are_written_without_a_copy_on_the_device(compared, kind) -> None:
    """In float32; weights that are gathered or cast for it are there one bucket at a time."""
    assert compared[1][kind]["num_bytes_to_write"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_reports_what_the_cpu_does(compared, kind) -> None:
    for found, expected in zip(compared[1][kind]["found"], compared[1][kind]["expected"], strict=True):
        assert found.keys() == expected.keys()
        for name in found.keys() - {
            each for each in found if each.startswith(("time/", "throughput/", "memory/"))
        }:
            scale = max(1.0, abs(expected[name]))
            assert found[name] == near(expected[name], terms=1024, scale=scale), name


def test_the_device_exports_what_the_cpu_does(compared, tiny_model) -> None:
    here, there = (pellucid.export.open(compared[0] / "exported" / place) for place in ("device", "cpu"))
    assert here.steps == there.steps == tuple(range(NUM_STEPS))
    for step in here.steps:
        ours, theirs = here.step(step), there.step(step)
        assert ours.column("token_ids").tolist() == theirs.column("token_ids").tolist()
        assert ours.column("is_masked").tolist() == theirs.column("is_masked").tolist()
        logprobs = theirs.column("trainer_logprobs")
        assert ours.column("trainer_logprobs") == near_logprobs(logprobs, tiny_model, length=20)
