"""The orchestrator's records: ledger, metrics, saved rollouts, log. One class writes all four, so they agree.

Per run and environment, at every flush: received = the tokens of every state + sent.
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from pellucid.config import OrchestratorRunConfig
from pellucid.data import Rollout, TokenTable
from pellucid.ledger import Flow, Journal, Stage, State, orchestrator_of
from pellucid.metrics import Tee, open_sinks
from pellucid.orchestrator.bias import DropAudit
from pellucid.orchestrator.records import RolloutLog
from pellucid.orchestrator.report import (
    Groups,
    add_groups,
    add_off_policy_levels,
    count_survivors,
    is_dropped,
    is_partial,
    sample_line,
    step_line,
    zero_metrics,
)
from pellucid.orchestrator.verdict import Verdict

log = logging.getLogger(__name__)

_STEPS_BETWEEN_WARNINGS = 100


class Books:
    def __init__(self, config: OrchestratorRunConfig, process: str = "", last_mark: int = 0) -> None:
        """`process`: this process's name in the ledger; `last_mark`: mark of the snapshot to resume from."""
        self._run_id = config.run_name
        self._env_names = [env.label for env in config.orchestrator.env]
        path = config.output_dir / "ledger" / "orchestrator.jsonl"
        self._journal = Journal(path, Stage.ORCHESTRATOR, resume=config.resume, process=process)
        self._last_mark = last_mark
        self._entering = threading.Lock()
        self._sink = Tee(open_sinks(config, "orchestrator"))
        own = config.orchestrator
        self._group_size = own.rollouts_per_example
        sampling_args = {env.label: own.sampling_of(env).model_dump() for env in own.env}
        self._rollouts = RolloutLog(config.output_dir, sampling_args)
        self._metrics = zero_metrics(self._env_names)
        """Metrics of the groups settled since the last report."""
        self._torn: OSError | None = None
        """Error that interrupted `settle`: since then, journal and saved rollouts may disagree."""
        self._drops = DropAudit()
        self._next_warning = 0

    def settle(self, step: int, groups: Groups) -> None:
        """Accounts for the tokens of these groups, saves their rollouts, adds them to the next report."""
        for verdicts in groups:
            self._log_losses(verdicts)
            for verdict in verdicts:
                rollout = verdict.rollout
                self._drops.add(verdict.outcome, rollout.env_name, rollout.num_sampled, rollout.reward)
        try:
            self.account(step, [verdict for verdicts in groups for verdict in verdicts])
            self._rollouts.append(step, groups)
        except OSError as error:
            self._torn = error
            raise
        add_groups(self._metrics, groups, self._group_size)

    def account(self, step: int, verdicts: Sequence[Verdict]) -> None:
        """Enters the tokens of these verdicts into the journal, and nowhere else; from any thread."""
        with self._entering:
            for verdict in verdicts:
                self._count(verdict)
            self._journal.flush(step)

    def report(self, step: int, table: TokenTable, own: Mapping[str, float], sample: Rollout) -> None:
        """Writes the metrics of a batch, and logs it with one of its rollouts; `own`: metrics of the loop."""
        self._rollouts.finish_step()
        add_off_policy_levels(self._metrics, step, table)
        values = {**self._metrics.report(), **own}
        self._metrics = zero_metrics(self._env_names)
        self._sink.log(step, values)
        log.info(step_line(step, values))
        log.info(sample_line(step, sample))
        self._warn_of_bias(step)

    @property
    def process(self) -> str:
        """This process's name in the ledger."""
        return self._journal.process

    def mark(self, step: int) -> int:
        """Returns the number of the next snapshot, once journal and saved rollouts so far are on the disk.

        Raises if journal and saved rollouts may disagree: a run cannot resume from such a snapshot.
        """
        if self._torn is not None:
            raise self._torn
        self._rollouts.sync()
        with self._entering:
            self._last_mark += 1
            self._journal.mark(self._last_mark, step)
        return self._last_mark

    def finish(self, step: int) -> None:
        """Closes the step and the journal. Not called for a run that was stopped: it may be resumed."""
        self._rollouts.finish_step()
        self._journal.close(step)

    def close(self) -> None:
        """Closes the metrics, which may take long. `finish` closes everything else."""
        self._sink.close()

    def _warn_of_bias(self, step: int) -> None:
        """Logs the findings of the drop audit, repeated every so many steps while they last."""
        if step >= self._next_warning and (findings := self._drops.findings()):
            for finding in findings:
                log.warning("%s", finding)
            self._next_warning = step + _STEPS_BETWEEN_WARNINGS

    def _count(self, verdict: Verdict) -> None:
        env_name, num_settled, link = verdict.rollout.env_name, verdict.rollout.num_sampled, ""
        for turn in verdict.rollout.turns:
            link = turn.link
            self._journal.count(self._run_id, env_name, Flow.RECEIVED, turn.num_tokens, link)
            if link and orchestrator_of(link) != self._journal.process:  # it waited in a snapshot
                self._journal.count(self._run_id, env_name, Flow.HELD, -turn.num_tokens, link)
        if verdict.is_sent:
            num_settled = sum(sample.num_sampled for sample in verdict.samples)
        self._journal.count(self._run_id, env_name, verdict.outcome, num_settled, link)

    def _log_losses(self, verdicts: Sequence[Verdict]) -> None:
        """Logs a group that lacks rollouts, in counts: each failure was logged when it happened."""
        rollout, size = verdicts[0].rollout, self._group_size
        num_survivors = count_survivors(verdicts)
        if is_dropped(verdicts) or is_partial(verdicts, size):
            log.warning(
                "group %s of %s %s: %d of %d rollouts failed (%d attempts)",
                rollout.group_id,
                rollout.env_name,
                "dropped" if is_dropped(verdicts) else f"is partial and goes on with {num_survivors}",
                size - num_survivors,
                size,
                len(verdicts),
            )
        for verdict in verdicts:
            if verdict.outcome is State.REJECTED:
                log.warning(
                    "rollout %s of %s rejected: %s",
                    verdict.rollout.rollout_id,
                    rollout.env_name,
                    verdict.reason,
                )
