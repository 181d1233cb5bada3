"""`rollouts/step_N/train_rollouts.jsonl`: every rollout settled since the last batch, whatever became of it.

One JSON object per rollout: ids, outcome (a state of the ledger, or `sent`) and its reason, reward,
advantage, messages, and the trajectory turn by turn. The folder appears whole or not at all.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import publish_folder

FILE = "train_rollouts.jsonl"


def save_rollouts(
    run_dir: Path, step: int, groups: Sequence[Sequence[Verdict]], sampling_args: Mapping[str, Any]
) -> None:
    lines = b"".join(
        orjson.dumps(_record(step, verdict, sampling_args), option=orjson.OPT_APPEND_NEWLINE)
        for group in groups
        for verdict in group
    )
    publish_folder(run_dir / "rollouts" / f"step_{step}", lambda folder: _write(folder / FILE, lines))


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


def _write(path: Path, lines: bytes) -> None:
    path.write_bytes(lines)
