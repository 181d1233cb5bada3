"""The orchestrator's books: ledger, metrics, saved rollouts, log. One class writes all four, so they agree.

- Per run and environment, at every flush: received = the tokens of every state + sent.
- An evaluation has books like training: its tokens are `eval` in the ledger, its rollouts are saved. Each
  evaluated policy version has one record in `metrics/eval.jsonl`, written once its evaluations are over:

    {"step": 50, "time": …, "eval/reverse-text/avg@8": 0.81, "eval/reverse-text/pass@1": 0.5, …}

- The clerk, a thread, writes books, snapshots and batches while the event loop goes on. Jobs run one after
  the other, in the order of the calls, and each to its end: a caller that is cancelled sees the cancellation
  only then. A job writes the state at the moment of the call.
- For a batch, the clerk writes books, then snapshot, then the batch itself, each on the disk before the
  next. If process or machine die, the snapshot knows every batch that the trainer can have, and the books
  contain at least what the snapshot contains; see `snapshot`. A batch that was not written is sampled again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from pellucid.config import OrchestratorRunConfig
from pellucid.data import NOT_OURS, Completion, Rollout, TokenTable
from pellucid.inference.client import Account
from pellucid.ledger import Flow, Journal, Stage, link_of
from pellucid.ledger.reconcile import orchestrator_of
from pellucid.metrics import Tee, open_sinks, read_metrics
from pellucid.orchestrator import records
from pellucid.orchestrator.failures import DropAudit, log_losses
from pellucid.orchestrator.records import Groups, RolloutLog
from pellucid.orchestrator.scheduler import SchedulerState
from pellucid.orchestrator.snapshot import take_snapshot, write_snapshot
from pellucid.orchestrator.tasks import finish_despite_cancellation
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import Batch, BatchSender, encode_batch

log = logging.getLogger(__name__)

_STEPS_BETWEEN_WARNINGS = 100
_FLUSH_S = 0.25


class Books:
    """The records of one run. Methods of evaluations are for the event loop, others for the clerk."""

    def __init__(self, config: OrchestratorRunConfig, process: str = "", last_mark: int = 0) -> None:
        """`process`: this process's name in the ledger; `last_mark`: mark of the snapshot to resume from."""
        self._run_id = config.run_name
        self._env_names = [env.label for env in config.orchestrator.env]
        path = config.output_dir / "ledger" / "orchestrator.jsonl"
        self._journal = Journal(path, Stage.ORCHESTRATOR, resume=config.resume, process=process)
        self._last_mark = last_mark
        self._entering = threading.Lock()
        settings = config.orchestrator
        self._sink = Tee(open_sinks(config, "orchestrator"))
        eval_records = read_metrics(config.output_dir / "metrics" / "eval.jsonl")
        self.evaluated = {int(record["step"]) for record in eval_records}
        """Policy versions whose evaluations have a record."""
        self._eval_sink = Tee(open_sinks(config, "eval") if settings.eval else [])
        self._group_size = settings.rollouts_per_example
        sampling = {env.label: settings.sampling_of(env).model_dump() for env in settings.env}
        self._rollouts = RolloutLog(config.output_dir, sampling)
        eval_sampling: dict[str, dict[str, Any]] = {}
        for each in settings.eval:
            max_tokens = each.max_tokens or settings.sampling.max_tokens
            eval_sampling[each.label] = {"temperature": each.temperature, "max_tokens": max_tokens}
        self._eval_rollouts = RolloutLog(config.output_dir, eval_sampling, evaluates=True)
        self._metrics = records.zero_metrics(self._env_names)
        """Metrics of the groups settled since the last report."""
        self._torn: OSError | None = None
        """Error that interrupted `settle`: since then, journal and saved rollouts may disagree."""
        self._drops = DropAudit()
        self._next_warning = 0

    def settle(self, step: int, groups: Groups) -> None:
        """Accounts for the tokens of these groups, saves their rollouts, adds them to the next report."""
        settled = [verdict for verdicts in groups for verdict in verdicts]
        for verdicts in groups:
            log_losses(verdicts, self._group_size)
        for verdict in settled:
            rollout = verdict.rollout
            self._drops.add(verdict.outcome, rollout.env_name, rollout.num_sampled, rollout.reward)
        try:
            self.account(step, settled)
            self._rollouts.append(step, groups)
        except OSError as error:
            self._torn = error
            raise
        records.add_groups(self._metrics, groups, self._group_size)

    def account(self, step: int, verdicts: Sequence[Verdict]) -> None:
        """Enters the tokens of these verdicts into the journal, and nowhere else; from any thread."""
        with self._entering:
            for verdict in verdicts:
                self._count(verdict)
            self._journal.flush(step)

    def report(self, step: int, table: TokenTable, metrics: Mapping[str, float], sample: Rollout) -> None:
        """Writes the metrics of a batch, and logs it with one of its rollouts."""
        self._rollouts.finish_step()
        records.add_off_policy_levels(self._metrics, step, table)
        values = {**self._metrics.report(), **metrics}
        self._metrics = records.zero_metrics(self._env_names)
        self._sink.log(step, values)
        log.info(records.step_line(step, values))
        log.info(records.sample_line(step, sample))
        if step >= self._next_warning and (findings := self._drops.findings()):
            for finding in findings:
                log.warning("%s", finding)
            self._next_warning = step + _STEPS_BETWEEN_WARNINGS

    def settle_evaluation(self, version: int, verdicts: Sequence[Verdict]) -> None:
        """Accounts for the tokens of an evaluated group and saves its rollouts; later turns do not count."""
        self.account(version, verdicts)
        self._eval_rollouts.append(version, [verdicts])

    def report_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._eval_sink.log(version, values)
        self.evaluated.add(version)

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
        self._eval_sink.close()
        self._sink.close()

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


class Clerk:
    """The thread that writes, and the queue of its jobs."""

    def __init__(self, config: OrchestratorRunConfig, books: Books, sender: BatchSender) -> None:
        self._config = config
        self._books = books
        self._sender = sender
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="clerk")

    async def send(
        self, sent: Sequence[Verdict], settled: Groups, state: SchedulerState, metrics: Mapping[str, float]
    ) -> None:
        """Writes books and snapshot, then sends the batch; `settled` are the groups for the books."""
        step = state.batches_sent - 1

        def job() -> None:
            table = TokenTable.from_samples([sample for verdict in sent for sample in verdict.samples])
            batch = Batch(self._config.run_name, step, table)
            payload = encode_batch(batch, compression=self._config.transport.compression)
            sizes = {"batch_rollouts": len(sent), "batch_tokens": table.num_tokens}
            self._books.settle(step, settled)
            values = {**sizes, "batch_bytes": len(payload), **metrics}
            self._books.report(step, table, values, sample=sent[0].rollout)
            self._write_snapshot(state)
            self._sender.send(step, payload)

        await self._do(job)

    async def settle(self, step: int, settled: Groups) -> None:
        """Enters settled groups into the books of a step whose batch is not full yet."""

        def job() -> None:
            self._books.settle(step, settled)
            log.info(records.waiting_line(step, settled))

        await self._do(job)

    async def save(self, settled: Groups, state: SchedulerState) -> None:
        """Enters settled groups into the books and writes a snapshot, from which a resumed run continues."""

        def job() -> None:
            if settled:
                self._books.settle(state.batches_sent, settled)
            self._write_snapshot(state)

        await self._do(job)

    def close(self) -> None:
        """Waits until every job is done or has raised in its caller."""
        self._thread.shutdown()

    def _write_snapshot(self, state: SchedulerState) -> None:
        folder, step = self._config.output_dir, state.batches_sent
        mark = self._books.mark(step)
        saved = records.saved_bytes(folder, step)
        write_snapshot(folder, take_snapshot(state, mark=mark, rollouts_bytes=saved))

    async def _do(self, job: Callable[[], None]) -> None:
        await finish_despite_cancellation(asyncio.wrap_future(self._thread.submit(job)))


class TeacherBooks:
    """The completions of a teacher that samples in the policy's place.

    They carry no policy version, so they are never stale. A server that `pellucid rl` started writes the
    run's ledger itself; of any other server the run knows only what arrived, and books that as sampled.
    """

    def __init__(self, config: OrchestratorRunConfig, process: str) -> None:
        """`process`: this process's name in the ledger."""
        self._journal: Journal | None = None
        """Journal of arriving tokens; None if the teacher's server, which this run started, books them."""
        if config.orchestrator.teacher is not None and config.orchestrator.teacher.model is None:
            path = config.output_dir / "ledger" / "inference_teacher.jsonl"
            self._journal = Journal(path, Stage.INFERENCE, resume=config.resume, process=process)
        self._flushed = time.monotonic()

    def take(self, completion: Completion, account: Account) -> Completion:
        """Returns the completion as one of the teacher's; books it if its server does not."""
        num_tokens, link = len(completion.token_ids), completion.link
        if self._journal is not None:
            link = link_of(self._journal.process, self._journal.process)  # this process at both ends
            for flow in (Flow.SAMPLED, Flow.DELIVERED):
                self._journal.count(account.run, account.env, flow, num_tokens, link)
            if time.monotonic() - self._flushed > _FLUSH_S:
                self._journal.flush(0)
                self._flushed = time.monotonic()
        runs = [(NOT_OURS, num_tokens)] if num_tokens else []
        return msgspec.structs.replace(completion, policy_versions=runs, link=link)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close(0)
