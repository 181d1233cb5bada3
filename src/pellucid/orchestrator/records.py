"""`rollouts/step_N/train_rollouts.jsonl`: every rollout settled since the last batch, whatever became of it.

One JSON object per rollout: ids, outcome (a state of the ledger, or `sent`) and its reason, reward,
advantage, messages, and the trajectory turn by turn. Rollouts are appended as they are settled, whole lines
at a time, so that a long wait for a batch can be looked into; `STABLE` says that the step is complete.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from pellucid.orchestrator.verdict import Verdict
from pellucid.transport.stable import MARKER

FILE = "train_rollouts.jsonl"


class RolloutLog:
    """The saved rollouts of a run, one step at a time."""

    def __init__(self, run_dir: Path, sampling_args: Mapping[str, Any]) -> None:
        self._parent = run_dir / "rollouts"
        self._sampling_args = sampling_args
        self._folder: Path | None = None

    def append(self, step: int, groups: Sequence[Sequence[Verdict]]) -> None:
        lines = b"".join(
            orjson.dumps(_record(step, verdict, self._sampling_args), option=orjson.OPT_APPEND_NEWLINE)
            for group in groups
            for verdict in group
        )
        folder = self._parent / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("ab" if folder == self._folder else "wb") as file:
            file.write(lines)
        self._folder = folder

    def finish_step(self) -> None:
        """The step that was appended to, if any, is complete."""
        if self._folder is not None:
            (self._folder / MARKER).touch()
            self._folder = None


def _record(step: int, verdict: Verdict, sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    rollout = verdict.rollout
    return {
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
        "stop_reason": rollout.stop_reason,
        "messages": [dict(message) for message in rollout.example.messages],
        "trajectory": [
            {
                "text": turn.text,
                "num_prompt_tokens": len(turn.prompt_ids),
                "num_tokens": len(turn.completion.token_ids),
                "finish_reason": turn.completion.finish_reason,
                "policy_versions": turn.completion.policy_versions,
            }
            for turn in rollout.turns
        ],
        "sampling_args": sampling_args,
    }
