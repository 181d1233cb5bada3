"""What a run says between two batches."""

from pathlib import Path

from pellucid.data import Example, Rollout
from pellucid.ledger import Flow, State
from pellucid.orchestrator.records import (
    BatchProgress,
    progress_path,
    read_progress,
    write_progress,
)
from pellucid.orchestrator.verdict import Outcome, Verdict


def verdict(name: str, outcome: Outcome, *, reward: float = 0.0, reason: str = "") -> Verdict:
    return Verdict(Rollout(name, "g0", Example("0", []), "env", 1.0, reward=reward), outcome, reason)


GROUPS = [
    [
        verdict("g0-r0", State.ZERO_ADVANTAGE, reward=0.25),
        verdict("g0-r1", State.ZERO_ADVANTAGE, reward=0.25),
    ],
    [
        verdict("g1-r0", State.FAILED_ROLLOUT, reason="ValueError: no\nanswer"),
        verdict("g1-r1", Flow.SENT, reward=1.0),
        verdict("g1-r2", State.ZERO_ADVANTAGE, reward=1.0),
    ],
    [verdict("g2-r0", State.STALE, reason="too old")],
]


def progress_of(groups: list[list[Verdict]], *, waits_for_weights: bool = False) -> BatchProgress:
    return BatchProgress(7, 12, 1640, waits_for_weights).add(groups)


def test_rollouts_that_do_not_train_are_told_by_reason_with_the_first_failure() -> None:
    assert progress_of(GROUPS).lines() == [
        "step 7: 12 rollouts ready, 1,640 running; do not train: 3 without a signal (equal rewards in a "
        "group, mean 0.500), 1 failed, 1 stale",
        "  the first that failed or was dropped: rollout g1-r0 of env, failed_rollout: ValueError: no answer",
    ]


def test_nothing_is_explained_where_nothing_is_lost() -> None:
    assert progress_of([], waits_for_weights=True).lines() == [
        "step 7: 12 rollouts ready, 1,640 running; waits for newer weights"
    ]


def test_nothing_is_said_before_the_first_rollout_starts() -> None:
    assert BatchProgress(step=0, num_ready=0, num_running=0).lines() == []


def test_what_is_written_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = progress_path(tmp_path)
    assert read_progress(path) is None
    progress = progress_of(GROUPS)
    write_progress(tmp_path, progress)
    assert read_progress(path) == progress
    path.write_bytes(b"{")
    assert read_progress(path) is None
