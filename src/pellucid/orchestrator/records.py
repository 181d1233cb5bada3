"""Saved rollouts: `train_rollouts.jsonl` and `eval_rollouts.jsonl` in `rollouts/step_N`.

One JSON object per rollout, whatever became of it: ids, outcome (a state of the ledger, or `sent`) and its
reason, reward, advantage, messages, the trajectory turn by turn, how it was sampled, then what
`state_columns` asks for. Rollouts are appended as they are settled, whole lines at a time, so that a long
wait for a batch can be looked into; `STABLE` says that the rollouts of a step that trains are complete. Those
of an evaluation are under the policy version that was evaluated; one that is evaluated again, because the run
was stopped before its record, replaces them.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from pellucid.data.files import append_whole, read_lines, replace_file, require_own, step_folders, sync
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import MARKER

FILE = "train_rollouts.jsonl"
EVAL_FILE = "eval_rollouts.jsonl"


class RolloutLog:
    """One of the two files of saved rollouts, one step at a time."""

    def __init__(
        self, run_dir: Path, sampling_args: Mapping[str, Mapping[str, Any]], *, evaluates: bool = False
    ) -> None:
        """`sampling_args` by environment."""
        self._parent = run_dir / "rollouts"
        self._sampling_args = sampling_args
        self._evaluates = evaluates
        self._folder: Path | None = None
        self._unsynced: set[Path] = set()

    def append(self, step: int, groups: Sequence[Sequence[Verdict]]) -> None:
        lines = b"".join(
            orjson.dumps(
                rollout_record(step, verdict, self._sampling_args.get(verdict.rollout.env_name, {})),
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for group in groups
            for verdict in group
        )
        folder = self._parent / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (EVAL_FILE if self._evaluates else FILE)
        require_own(path)
        with path.open("wb" if self._evaluates and folder != self._folder else "ab", buffering=0) as file:
            append_whole(file, lines)
        if not self._evaluates:
            self._unsynced.add(path)
        self._folder = folder

    def sync(self) -> None:
        """Returns once what was appended would survive a power failure."""
        while self._unsynced:
            sync(self._unsynced.pop())

    def finish_step(self) -> None:
        """Marks the step that was appended to, if any, as complete."""
        if self._folder is not None:
            (self._folder / MARKER).touch()
            self._folder = None


def saved_bytes(run_dir: Path, start: int) -> dict[int, int]:
    """Returns the file lengths of the saved rollouts of step `start` and of later ones.

    Only a resumed run has later ones.
    """
    lengths: dict[int, int] = {}
    for step in count(start):
        path = run_dir / "rollouts" / f"step_{step}" / FILE
        if not path.exists():
            break
        lengths[step] = path.stat().st_size
    return lengths


def cut_rollouts(run_dir: Path, start: int, lengths: Mapping[int, int]) -> None:
    """Truncates the saved rollouts of step `start` and later ones to `lengths`; see `saved_bytes`."""
    for step, folder in step_folders(run_dir / "rollouts").items():
        path = folder / FILE
        if step in lengths or step >= start:
            require_own(path)
        if step in lengths and path.exists():
            os.truncate(path, min(lengths[step], path.stat().st_size))
        elif step >= start:
            path.unlink(missing_ok=True)


def discard_rollouts(run_dir: Path, steps: Iterable[int], trained: Collection[int]) -> None:
    """Marks the rollouts that were sent in these steps as lost, and reopens the steps.

    As in the ledger, rollouts of a step in `trained` become `rolled_back`, those of other steps `lost`.
    """
    for step in steps:
        outcome = State.ROLLED_BACK if step in trained else State.LOST
        folder = run_dir / "rollouts" / f"step_{step}"
        path = folder / FILE
        if path.exists():
            require_own(path)
            records = [_parsed(path, number, line) for number, line in read_lines(path)]
            for record in records:
                if record["outcome"] == Flow.SENT.value:
                    record |= {"outcome": outcome.value, "reason": "its batch did not survive"}
            replace_file(path, b"".join(orjson.dumps(record) + b"\n" for record in records))
            (folder / MARKER).unlink(missing_ok=True)


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}:{number} is damaged: {error}; delete that line") from error
    if not isinstance(record, dict) or "outcome" not in record:
        raise DataError(f"{path}:{number} is not a saved rollout; delete that line")
    return record


def rollout_record(step: int, verdict: Verdict, sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    rollout = verdict.rollout
    record = {
        "step": step,
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "sample_ids": [sample.values["sample_id"] for sample in verdict.samples],
        "env_name": rollout.env_name,
        "example_id": rollout.example.example_id,
        "outcome": verdict.outcome.value,
        "reason": verdict.reason,
        "error": rollout.error,
        "reward": rollout.reward,
        "advantage": verdict.advantage,
        "metrics": rollout.metrics,
        "num_tokens": rollout.num_sampled,
        "num_tool_tokens": rollout.num_tool_tokens,
        "stop_reason": rollout.stop_reason,
        "messages": [dict(message) for message in rollout.example.messages],
        "trajectory": [
            {
                "text": turn.text,
                "num_prompt_tokens": turn.num_prompt_tokens,
                "num_tokens": turn.num_tokens,
                "finish_reason": turn.finish_reason,
                "policy_versions": turn.policy_versions,
            }
            for turn in rollout.turns
        ],
        "sampling_args": sampling_args,
    }
    return record | {column: orjson.Fragment(text) for column, text in rollout.state.items()}
