"""`checkpoints/orchestrator.bin`: where an orchestrator stood after its last batch.

It is on the disk *before* that batch is handed over. Whatever happens in between, a resume finds a snapshot
that knows of every batch; a batch that it knows and cannot find was lost.

A resume cuts off what the orchestrator wrote down after the snapshot, and the ledger counts those tokens as
lost. Rollouts that were ready for the next batch are in the snapshot, whole.

    CRC-32 of the rest, 4 bytes, little-endian     MessagePack of a `Snapshot`

The one before is kept as `orchestrator.before.bin`: a damaged one is noticed by its checksum and passed over.
"""

import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pellucid.data import Example, PackedArray, Rollout, TrainingSample, Turn
from pellucid.data.files import replace_file, require_file
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.scheduler import RolloutLength, SchedulerState
from pellucid.orchestrator.verdict import Outcome, Verdict

logger = logging.getLogger(__name__)

_FILE = Path("checkpoints") / "orchestrator.bin"
_FILE_BEFORE = Path("checkpoints") / "orchestrator.before.bin"
_CHECKSUM_BYTES = 4


class HeldTurn(msgspec.Struct, frozen=True, array_like=True):
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str
    policy_versions: list[tuple[int, int]]
    role_spans: list[tuple[str, int, int]] = []
    link: str = ""


class HeldSample(msgspec.Struct, frozen=True, array_like=True):
    arrays: dict[str, PackedArray]
    values: dict[str, Any]


class HeldRollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict in a snapshot, without `Example.info`: only the reward reads it; it may not serialize."""

    rollout_id: str
    group_id: str
    env_name: str
    example_id: str
    messages: list[dict[str, Any]]
    temperature: float
    turns: list[HeldTurn]
    outcome: str
    reason: str = ""
    advantage: float | None = None
    samples: list[HeldSample] = []
    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str | None = None
    error_type: str | None = None
    state: dict[str, str] = {}

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)


def newest_version(group: Sequence[HeldRollout]) -> int:
    """Returns the newest policy version that sampled a token of the group."""
    turns = (turn for held in group for turn in held.turns)
    return max((version for turn in turns for version, _ in turn.policy_versions), default=0)


class Snapshot(msgspec.Struct, frozen=True):
    """The state that a resumed run continues from; without arguments, that of a run that has not begun."""

    batches_sent: int = 0
    positions: dict[str, int] = {}
    num_groups: int = 0
    generation: int = 0
    unfinished: list[tuple[str, int]] = []
    ready: list[list[HeldRollout]] = []
    mark: int = 0
    """Number of the snapshot; the journal has an entry with the same number where the snapshot was taken."""

    rollouts_bytes: dict[int, int] = {}
    """Lengths of the saved rollouts of step `batches_sent` and later ones; see `records.saved_bytes`."""

    credits: dict[str, float] = {}
    rollout_length: RolloutLength | None = None

    is_fallback: bool = False
    """Whether a newer snapshot was damaged: journal and batches may contain more than this one knows."""

    def held(self) -> Counter[tuple[str, str]]:
        """Counts sampled tokens that wait for a batch, by environment and link; they are not booked yet."""
        held: Counter[tuple[str, str]] = Counter()
        for group in self.ready:
            for each in group:
                for turn in each.turns:
                    held[each.env_name, turn.link] += turn.num_tokens
        return held

    def scheduler_state(self, run_id: str) -> SchedulerState:
        return SchedulerState(
            self.batches_sent,
            self.positions,
            self.credits,
            self.rollout_length,
            self.num_groups,
            self.generation,
            self.unfinished,
            [[_verdict(each, run_id) for each in group] for group in self.ready],
        )


def take_snapshot(state: SchedulerState, *, mark: int, rollouts_bytes: dict[int, int]) -> Snapshot:
    return Snapshot(
        state.batches_sent,
        dict(state.positions),
        state.num_groups,
        state.generation,
        list(state.unfinished),
        [[_hold(verdict) for verdict in verdicts] for verdicts in state.ready],
        mark,
        rollouts_bytes,
        dict(state.credits),
        state.rollout_length,
    )


def write_snapshot(run_dir: Path, snapshot: Snapshot) -> None:
    """Returns once it is on the disk; the last one is kept, unless it is known to be damaged."""
    payload = msgspec.msgpack.encode(msgspec.structs.replace(snapshot, is_fallback=False))
    replace_file(
        run_dir / _FILE,
        zlib.crc32(payload).to_bytes(_CHECKSUM_BYTES, "little") + payload,
        durable=True,
        keep_as=None if snapshot.is_fallback else run_dir / _FILE_BEFORE,
    )


def read_snapshot(run_dir: Path) -> Snapshot | None:
    """Returns the newest that is intact; None if the run sent no batch yet.

    Raises DataError if there are some, and none is intact.
    """
    found = [run_dir / name for name in (_FILE, _FILE_BEFORE) if (run_dir / name).exists()]
    errors: list[DataError] = []
    for path in found:
        try:
            snapshot = _decode(path)
        except DataError as error:
            errors.append(error)
            continue
        for passed_over in errors:
            logger.warning("%s; the one before is taken", passed_over)
        return msgspec.structs.replace(snapshot, is_fallback=bool(errors))
    if errors:
        raise DataError(
            f"{errors[0]}, and there is none before it, so the run cannot be resumed; its newest weights and "
            "checkpoint are intact: start another run from them"
        )
    return None


def _decode(path: Path) -> Snapshot:
    require_file(path)
    content = path.read_bytes()
    checksum, payload = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if zlib.crc32(payload) != int.from_bytes(checksum, "little"):
        raise DataError(f"{path} is damaged: its checksum is not what was written")
    try:
        return msgspec.msgpack.decode(payload, type=Snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is of another version of pellucid, or damaged: {error}") from error


def _hold(verdict: Verdict) -> HeldRollout:
    rollout = verdict.rollout
    return HeldRollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        env_name=rollout.env_name,
        example_id=rollout.example.example_id,
        messages=[dict(message) for message in rollout.example.messages],
        temperature=rollout.temperature,
        turns=[
            HeldTurn(
                turn.text,
                turn.num_prompt_tokens,
                turn.num_tokens,
                turn.finish_reason,
                turn.policy_versions,
                turn.role_spans if turn is rollout.turns[-1] else [],  # the others are its beginnings
                turn.link,
            )
            for turn in rollout.turns
        ],
        outcome=verdict.outcome.value,
        reason=verdict.reason,
        advantage=verdict.advantage,
        samples=[HeldSample(dict(sample.arrays), dict(sample.values)) for sample in verdict.samples],
        reward=rollout.reward,
        metrics=rollout.metrics,
        error=rollout.error,
        error_type=rollout.error_type,
        state=rollout.state,
    )


def _verdict(held: HeldRollout, run_id: str) -> Verdict:
    rollout = Rollout(
        held.rollout_id,
        held.group_id,
        Example(held.example_id, held.messages),
        held.env_name,
        held.temperature,
        [
            Turn.without_tokens(
                text=turn.text,
                num_prompt_tokens=turn.num_prompt_tokens,
                num_tokens=turn.num_tokens,
                finish_reason=turn.finish_reason,
                policy_versions=turn.policy_versions,
                role_spans=turn.role_spans,
                link=turn.link,
            )
            for turn in held.turns
        ],
        held.reward,
        held.metrics,
        held.error,
        held.error_type,
        held.state,
    )
    samples = [
        TrainingSample.from_packed(sample.arrays, {**sample.values, "run_id": run_id})
        for sample in held.samples
    ]
    outcome: Outcome = Flow.SENT if held.outcome == Flow.SENT.value else State(held.outcome)
    return Verdict(rollout, outcome, held.reason, held.advantage, samples)
