"""The records of evaluations: `metrics/eval.jsonl`, `rollouts/step_N/eval_rollouts.jsonl`, the ledger.

Each evaluated policy version N has one record, written once all its evaluations are over:

    {"step": 50, "time": …, "eval/reverse-text/avg@8": 0.81, "eval/reverse-text/pass@1": 0.5, …}

The rollouts are appended as each example is finished, whole lines at a time. A version that is evaluated
again, because the run was stopped before its record, replaces them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from pellucid.config import OrchestratorRunConfig
from pellucid.data import Rollout
from pellucid.data.files import append_whole, require_own
from pellucid.ledger import State
from pellucid.metrics import Tee, open_sinks, read_metrics
from pellucid.orchestrator.records import rollout_record
from pellucid.orchestrator.verdict import Verdict

FILE = "eval_rollouts.jsonl"

Account = Callable[[int, Sequence[Verdict]], None]
"""Enters the tokens of these verdicts into the orchestrator's journal, under a step."""


class EvalBooks:
    """Writes the records of a run's evaluations; a run without evaluations writes nothing."""

    def __init__(self, config: OrchestratorRunConfig, account: Account) -> None:
        self._rollouts = config.output_dir / "rollouts"
        self._account = account
        self._version: int | None = None
        """Policy version whose rollouts are being written."""
        self.done = {
            int(record["step"]) for record in read_metrics(config.output_dir / "metrics" / "eval.jsonl")
        }
        """Versions that have a record."""
        self._sink = Tee(open_sinks(config, "eval") if config.orchestrator.eval else [])

    def settle(self, version: int, rollouts: Sequence[Rollout], sampling_args: Mapping[str, Any]) -> None:
        """Saves the rollouts of one example and accounts for their tokens; later turns are not counted."""
        group_failed = any(rollout.error is not None for rollout in rollouts)
        verdicts = [
            Verdict(rollout, State.EVAL, _reason(rollout, group_failed=group_failed)) for rollout in rollouts
        ]
        self._account(version, verdicts)
        folder = self._rollouts / f"step_{version}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = b"".join(
            orjson.dumps(rollout_record(version, verdict, sampling_args), option=orjson.OPT_APPEND_NEWLINE)
            for verdict in verdicts
        )
        require_own(folder / FILE)
        with (folder / FILE).open("ab" if version == self._version else "wb", buffering=0) as file:
            append_whole(file, lines)
        self._version = version

    def report(self, version: int, values: Mapping[str, float]) -> None:
        self._sink.log(version, values)
        self.done.add(version)

    def close(self) -> None:
        self._sink.close()


def _reason(rollout: Rollout, *, group_failed: bool) -> str:
    """Why the rollout has no reward; empty if it has one."""
    if rollout.error is not None or rollout.reward is not None:
        return rollout.error or ""
    if group_failed:
        return "another rollout of its group failed, so the group was not scored"
    return "the run ended before this attempt did"
