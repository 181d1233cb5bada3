"""A thread that writes books, snapshots and batches while the event loop goes on.

- Jobs run one after the other, in the order of the calls, and each to its end: a caller that is cancelled
  sees the cancellation only then. A job writes the state at the moment of the call.
- For a batch, the thread writes books, then snapshot, then the batch itself, each on the disk before the
  next. If process or machine die, the snapshot knows every batch that the trainer can have, and the books
  contain at least what the snapshot contains; see `snapshot`. A batch that was not written is sampled again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pellucid.config import OrchestratorRunConfig
from pellucid.data import TokenTable
from pellucid.orchestrator.books import Books
from pellucid.orchestrator.records import saved_bytes
from pellucid.orchestrator.report import Groups, waiting_line
from pellucid.orchestrator.scheduler import SchedulerState
from pellucid.orchestrator.snapshot import take_snapshot, write_snapshot
from pellucid.orchestrator.tasks import finish_despite_cancellation
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import Batch, BatchSender, encode_batch

log = logging.getLogger(__name__)


class Clerk:
    def __init__(self, config: OrchestratorRunConfig, books: Books, sender: BatchSender) -> None:
        self._config = config
        self._books = books
        self._sender = sender
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="clerk")

    async def send(
        self, verdicts: Sequence[Verdict], settled: Groups, state: SchedulerState, own: Mapping[str, float]
    ) -> None:
        """Writes books and snapshot, then sends the batch; `settled` are the groups for the books."""
        step = state.batches_sent - 1

        def job() -> None:
            table = TokenTable.from_samples([sample for verdict in verdicts for sample in verdict.samples])
            batch = Batch(self._config.run_name, step, table)
            payload = encode_batch(batch, compression=self._config.transport.compression)
            sizes = {
                "batch_rollouts": len(verdicts),
                "batch_tokens": table.num_tokens,
                "batch_bytes": len(payload),
            }
            self._books.settle(step, settled)
            self._books.report(step, table, {**sizes, **own}, sample=verdicts[0].rollout)
            self._write_snapshot(state)
            self._sender.send(step, payload)

        await self._do(job)

    async def settle(self, step: int, settled: Groups) -> None:
        """Enters settled groups into the books of a step whose batch is not full yet."""

        def job() -> None:
            self._books.settle(step, settled)
            log.info(waiting_line(step, settled))

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
        snapshot = take_snapshot(
            state,
            mark=self._books.mark(state.batches_sent),
            rollouts_bytes=saved_bytes(self._config.output_dir, state.batches_sent),
        )
        write_snapshot(self._config.output_dir, snapshot)

    async def _do(self, job: Callable[[], None]) -> None:
        given = asyncio.wrap_future(self._thread.submit(job))  # at once: the order is that of the calls
        await finish_despite_cancellation(_result(given))


async def _result(given: "asyncio.Future[None]") -> None:
    await given
