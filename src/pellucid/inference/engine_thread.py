"""The engine on a thread of its own, behind an asyncio-friendly door.

    HTTP handlers (event loop) --commands--> engine thread --completions--> event loop

Only the engine thread touches the engine. Commands are run between two steps: that is where a weight
swap happens. If the engine raises, or its books cannot be written, every waiter gets what it has, whoever
asks from then on is refused, and the server goes down with the cause.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pellucid.data import Completion
from pellucid.data.spans import SpanLog
from pellucid.ending import DISK_SILENCE_S, SINK_SILENCE_S, say
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, GenerateRequest, ServedWeightsReport
from pellucid.inference.slots import QueueFullError, Request, Scoring, SlottedEngine
from pellucid.ledger import Flow, Journal, State, link_of
from pellucid.metrics import Sink
from pellucid.transport import MARKER

logger = logging.getLogger(__name__)
T = TypeVar("T")
StreamEvent = tuple[int, tuple[int, float] | Completion | InferenceError]
"""Index of a request, with its next token and logprob, its completion at the end, or why it is refused."""
_FLUSH_S = 0.25
_PAUSE_S = 0.05
"""Steps of the engine that are further apart belong to two spans."""

_STRETCH_S = 2.0
"""Longest span of steps: the mean number of sequences in it is that of a moment."""


class EngineDownError(InferenceError):
    pass


class EngineThread:
    def __init__(
        self,
        engine: SlottedEngine[Any],
        journal: Journal,
        sink: Sink,
        on_failure: Callable[[BaseException], None],
        spans: SpanLog | None = None,
    ) -> None:
        """`spans`: receives a span for every stretch of work and every load of weights."""
        self._work = WorkSpans(engine, spans)
        self._engine = engine
        self._journal = journal
        self._sink = sink
        self._reported: dict[str, float] = {}
        """Work done up to the last report."""
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._written: dict[Flow | State, Counter[Account]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._told_to_stop = False
        self._num_open = 0
        self._published: int | str | None = None
        """When the served weights were published, in ns (`_published_at`), or their digest; see `_swap`."""
        self.server_id = journal.process
        """Random id of this process, new at every start."""
        self.run = ""
        """Identity of the run whose weights are served; "" for those that the engine began with."""
        self.updating = False
        """Whether weights are being loaded; nothing is sampled meanwhile."""
        self.busy_s = 0.0
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step; running requests are counted as cancelled."""
        self._commands.put(None)
        self._thread.join()

    async def generate(
        self, asked: Sequence[GenerateRequest], *, tokens: bool = False
    ) -> AsyncGenerator[list[StreamEvent], None]:
        """Yields why requests are refused, then one completion per other request, as each ends: together
        what a step of the engine gave.

        Either all of the others are queued or none. With `tokens`, it also yields each token as it is
        sampled. Closing the generator frees the slots of running requests; completions that it has not
        yielded by then count as cancelled.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        told: deque[StreamEvent] = deque()

        def tell(index: int, event: tuple[int, float] | Completion) -> None:
            told.append((index, event))
            if len(told) == 1:  # otherwise the reader is awake, and takes all that is there
                loop.call_soon_threadsafe(news.set)

        refused = self._engine.refusals(asked)
        unread: dict[int, Request] = {}
        for index, each in enumerate(asked):
            if index not in refused:
                unread[index] = Request(
                    each.token_ids,
                    each.sampling_params,
                    each.account if each.account.run else Account(),  # whoever has no books has one account
                    partial(tell, index),
                    each.request_id,
                    each.mm_tensors,
                    partial(tell, index) if tokens else None,
                    is_checked=True,
                )

        def abandon() -> None:
            for request in unread.values():
                self._engine.abandon(request)

        def submit() -> None:
            try:
                for request in unread.values():
                    self._engine.submit(request)
            except InferenceError:
                abandon()
                raise

        with self._opening(len(unread)):
            try:
                await self._call(submit)
                if refused:
                    yield list(refused.items())
                while unread:
                    await news.wait()
                    news.clear()
                    together: list[StreamEvent] = []
                    while told:
                        index, event = told.popleft()
                        together.append((index, event))
                        if isinstance(event, Completion):
                            del unread[index]
                    if together:
                        yield together
            finally:
                self._commands.put(abandon)

    async def complete(self, asked: Sequence[GenerateRequest]) -> list[Completion]:
        """Returns the completion of each request; raises InferenceError if one is refused."""
        found = {}
        async with aclosing(self.generate(asked)) as events:
            async for together in events:
                for index, event in together:
                    if isinstance(event, InferenceError):
                        raise event
                    if isinstance(event, Completion):
                        found[index] = event
        return [found[index] for index in range(len(asked))]

    async def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Returns one logprob per token, NaN for the first; a cancellation removes it from the queue."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[float]] = loop.create_future()

        def resolve(result: list[float] | InferenceError) -> None:
            if answer.done():
                return  # whoever asked has gone away
            if isinstance(result, InferenceError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def tell(result: list[float] | InferenceError) -> None:
            loop.call_soon_threadsafe(resolve, result)

        scoring = Scoring(token_ids, temperature, tell)
        with self._opening(1):
            try:
                await self._call(lambda: self._engine.submit_scoring(scoring))
                return await answer
            finally:
                self._commands.put(lambda: self._engine.abandon_scoring(scoring))

    @contextmanager
    def _opening(self, num_answers: int) -> Iterator[None]:
        """Context manager: answers count against the queue until they have been read, so that slow readers
        cannot fill the memory."""
        capacity = self._engine.capacity
        if self._num_open + num_answers > capacity:
            raise QueueFullError(
                f"{num_answers} more requests do not fit: {self._num_open} of {capacity} are open already "
                "(inference.max_concurrent + inference.max_queued); try again later"
            )
        self._num_open += num_answers
        try:
            yield
        finally:
            self._num_open -= num_answers

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        """`run`: identity of the run that published `folder`."""

        def swap() -> None:
            load = partial(self._engine.update_weights, version, folder)
            self._swap(version, run, _published_at(folder), load)

        await self._call(swap)

    async def receive_weights(self, version: int, digest: str, run: str, receive: Callable[[], None]) -> None:
        """Has the engine `receive` what the trainer sends; `digest`: that of its `digests.json`."""
        await self._call(lambda: self._swap(version, run, digest, receive))

    def serves(self, version: int, run: str, digest: str) -> bool:
        return (version, run, digest) == (self._engine.version, self.run, self._published)

    async def served_weights(self) -> ServedWeightsReport:
        """Computes the digests of what is served, between two steps."""

        def report() -> ServedWeightsReport:
            engine = self._engine
            return ServedWeightsReport(
                engine.version,
                self.run,
                engine.served_digests(),
                as_read=engine.digests_as_read,
                ranks=engine.rank_weights(),
            )

        return await self._call(report)

    async def abort(self, request_ids: Collection[str], *, booked: bool = True) -> None:
        await self._call(lambda: self._engine.abort(request_ids, booked=booked))

    async def disown(self, request_ids: Collection[str]) -> None:
        await self._call(lambda: self._engine.disown(request_ids))

    async def _call(self, command: Callable[[], T]) -> T:
        """Runs a command on the engine thread and returns its result or raises its error."""
        outcome: Future[T] = Future()

        def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return  # the caller has gone away meanwhile
            try:
                if self.failure is not None:
                    raise EngineDownError(f"the engine failed: {name_error(self.failure)}")
                outcome.set_result(command())
            except Exception as error:
                outcome.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(outcome)

    def _swap(self, version: int, run: str, published: int | str | None, load: Callable[[], None]) -> None:
        """Loads the weights, unless they are served already.

        After a resume, a version can be published again under the same number; its date, or digest, then
        differs. If the folder of the served version is gone (None), the engine keeps serving it.
        """
        outgoing = self._engine.version
        if (version, run) != (outgoing, self.run) or published not in (None, self._published):
            self.updating = True
            try:
                with self._work.loading(version):
                    load()
            finally:
                self.updating = False
            self.run, self._published = run, published
            self._report(outgoing)

    def _report(self, version: int) -> None:
        """Logs the work done under a policy version, if any."""
        counts = self._engine.counts
        done = {
            "time/busy_s": self.busy_s,
            "sampled_tokens": counts.sampled.total(),
            "prefill_tokens": counts.prefill_tokens,
            "shared_tokens": counts.shared_tokens,
            "decode_steps": counts.decode_steps,
            "scored_tokens": counts.scored_tokens,
            **{
                f"rank/{each.rank}/sampled_tokens": each.sampled_tokens for each in self._engine.rank_health()
            },
        }
        values = {name: total - self._reported.get(name, 0) for name, total in done.items()}
        if any(values.values()):
            if values["time/busy_s"]:
                values["throughput/tokens_per_s"] = values["sampled_tokens"] / values["time/busy_s"]
            self._sink.log(version, values)
            self._reported = done

    def _run(self) -> None:
        self._attempt(self._serve)
        if self.failure is not None:
            self._attempt(self._engine.abort_all)
        # The books first: a sink may be slow, or hang.
        for last in (self._engine.abandon_all, self._close_books, self._close_sink, self._engine.close):
            self._attempt(last)
        self._refuse_commands()

    def _attempt(self, work: Callable[[], object]) -> None:
        """Runs `work` and catches whatever it raises; the first failure takes the server down."""
        try:
            work()
        except BaseException as error:
            logger.exception("the engine failed")
            if self.failure is None:
                self.failure = error
                self._on_failure(error)

    def _refuse_commands(self) -> None:
        """Answers the commands that still reach a failed engine with an error, until `stop`; see `_call`."""
        while not self._told_to_stop:
            command = self._commands.get()
            if command is None:
                self._told_to_stop = True
            else:
                self._attempt(command)

    def _close_books(self) -> None:
        say("closing its books", at_stake="the last tokens in them", silence_s=DISK_SILENCE_S)
        self._flush()
        self._journal.close(self._engine.version)

    def _close_sink(self) -> None:
        say("closing its metrics", silence_s=SINK_SILENCE_S)
        self._work.close()
        try:
            self._report(self._engine.version)
        finally:
            self._sink.close()

    def _serve(self) -> None:
        flushed = time.monotonic()
        while self._run_commands():
            if not self._engine.is_idle:
                with self._work.step() as started:
                    self._engine.step()
                self.busy_s += time.perf_counter() - started
            if time.monotonic() - flushed > _FLUSH_S:
                self._flush()
                flushed = time.monotonic()

    def _run_commands(self) -> bool:
        """Runs waiting commands, blocking only while there is nothing to decode; False after `stop`."""
        while True:
            try:
                command = self._commands.get(block=self._engine.is_idle, timeout=_FLUSH_S)
            except queue.Empty:
                return True
            if command is None:
                self._told_to_stop = True
                return False
            command()

    def _flush(self) -> None:
        """Writes new counts to the journal; requests without a run are not booked."""
        counts = self._engine.counts
        for what, counter in (
            (Flow.SAMPLED, counts.sampled),
            (Flow.DELIVERED, counts.delivered),
            (State.CANCELLED, counts.cancelled),
        ):
            written = self._written.setdefault(what, Counter())
            for account, tokens in counter.items():
                if account.run:
                    link = link_of(self.server_id, account.client)
                    self._journal.count(account.run, account.env, what, tokens - written[account], link)
            self._written[what] = Counter(counter)
        self._journal.flush(self._engine.version)
        self._work.flush()


class WorkSpans:
    """Joins the engine's steps to spans, `decode`, and adds one for each `load` of weights.

    A step takes milliseconds, and one forward computes new prompts and decodes: a span is a stretch of steps
    without a pause, under one policy version, with the mean number of sequences that they sampled for.
    """

    def __init__(self, engine: SlottedEngine[Any], spans: SpanLog | None) -> None:
        self._engine = engine
        self._spans = spans
        self._start = self._end = 0.0
        self._before: tuple[int, int] | None = None
        """Tokens sampled and steps taken before the stretch that is going on; None between two."""

    @contextmanager
    def step(self) -> Iterator[float]:
        """Context manager around a step of the engine; yields when it started."""
        started = SpanLog.clock()
        if self._before is not None and (
            started - self._end > _PAUSE_S or started - self._start > _STRETCH_S
        ):
            self._end_stretch()
        if self._before is None:
            self._start = self._end = started
            self._before = self._counts()
        yield started
        self._end = SpanLog.clock()

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Context manager around a load of weights, `version`."""
        self._end_stretch()
        started = SpanLog.clock()
        yield
        if self._spans is not None:
            self._spans.add("load", started, SpanLog.clock(), version)

    def flush(self) -> None:
        if self._before is not None and SpanLog.clock() - self._end > _PAUSE_S:
            self._end_stretch()
        if self._spans is not None:
            self._spans.flush()

    def close(self) -> None:
        self._end_stretch()
        if self._spans is not None:
            self._spans.flush()

    def _end_stretch(self) -> None:
        if self._before is None:
            return
        num_tokens, num_steps = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        self._before = None
        if self._spans is not None:
            load = num_tokens / num_steps if num_steps else None
            self._spans.add("decode", self._start, self._end, self._engine.version, load)

    def _counts(self) -> tuple[int, int]:
        counts = self._engine.counts
        return counts.sampled.total(), counts.decode_steps


def _published_at(folder: Path) -> int | None:
    """Returns when a folder of weights became visible, in ns; None if there is none."""
    try:
        return (folder / MARKER).stat().st_mtime_ns
    except OSError:
        return None


def name_error(error: BaseException) -> str:
    """`OutOfMemoryError: CUDA out of memory. …`"""
    return f"{type(error).__name__}: {error}"
