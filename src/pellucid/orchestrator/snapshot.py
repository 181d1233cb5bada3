"""`checkpoints/orchestrator.bin`: where an orchestrator stood after its last batch.

It is written *before* that batch is handed over. Whatever happens in between, a resume finds a snapshot that
knows of every batch on disk; a batch that it knows and cannot find was lost.

What the orchestrator wrote down after the snapshot is cut off when the run is resumed, and the tokens it
told of are booked as lost. Rollouts that were ready for the next batch are in the snapshot, whole.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from pellucid.data import Rollout
from pellucid.data.files import replace_file
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.samples import build_samples
from pellucid.orchestrator.scheduler import SchedulerState
from pellucid.orchestrator.verdict import Verdict


class HeldRollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict; its samples are built again from the rollout and its advantage."""

    rollout: Rollout
    outcome: str
    reason: str = ""
    advantage: float | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """Without arguments: of a run that has not begun."""

    batches_sent: int = 0
    positions: dict[str, int] = {}
    num_groups: int = 0
    generation: int = 0
    unfinished: list[tuple[str, int]] = []
    ready: list[list[HeldRollout]] = []
    journal_bytes: int = 0
    """Length of the orchestrator's journal."""

    rollouts_bytes: int = 0
    """Length of the saved rollouts of step `batches_sent`."""

    def held(self) -> Counter[str]:
        """Sampled tokens of the rollouts that wait for a batch, per environment: in no journal yet."""
        held: Counter[str] = Counter()
        for group in self.ready:
            for each in group:
                held[each.rollout.env_name] += each.rollout.num_sampled
        return held

    def scheduler_state(self, run_id: str) -> SchedulerState:
        return SchedulerState(
            self.batches_sent,
            self.positions,
            self.num_groups,
            self.generation,
            self.unfinished,
            [[_verdict(each, run_id) for each in group] for group in self.ready],
        )


def take_snapshot(state: SchedulerState, *, journal_bytes: int, rollouts_bytes: int) -> Snapshot:
    return Snapshot(
        state.batches_sent,
        dict(state.positions),
        state.num_groups,
        state.generation,
        list(state.unfinished),
        [_hold(verdicts) for verdicts in state.ready],
        journal_bytes,
        rollouts_bytes,
    )


def write_snapshot(run_dir: Path, snapshot: Snapshot) -> None:
    replace_file(snapshot_path(run_dir), msgspec.msgpack.encode(snapshot))


def read_snapshot(run_dir: Path) -> Snapshot | None:
    """None if the run sent no batch yet."""
    path = snapshot_path(run_dir)
    if not path.exists():
        return None
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Snapshot)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path} is damaged ({error}), so the run cannot be resumed; its newest weights and checkpoint "
            "are intact: start another run from them"
        ) from error


def snapshot_path(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "orchestrator.bin"


def _hold(verdicts: Sequence[Verdict]) -> list[HeldRollout]:
    return [
        HeldRollout(_without_info(verdict.rollout), verdict.outcome.value, verdict.reason, verdict.advantage)
        for verdict in verdicts
    ]


def _without_info(rollout: Rollout) -> Rollout:
    """`Example.info` is for the reward, which is known; it may be anything, also what no file can hold."""
    return replace(rollout, example=replace(rollout.example, info={}))


def _verdict(held: HeldRollout, run_id: str) -> Verdict:
    if held.outcome != Flow.SENT.value:
        return Verdict(held.rollout, State(held.outcome), held.reason, held.advantage)
    assert held.advantage is not None
    samples = build_samples(held.rollout, run_id=run_id, advantage=held.advantage)
    return Verdict(held.rollout, Flow.SENT, held.reason, held.advantage, samples)
