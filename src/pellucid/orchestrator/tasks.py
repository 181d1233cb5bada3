"""Runs the coroutines of an orchestrator: cancellation, deadlines, pace, signals.

- A coroutine that must not be interrupted is finished despite its cancellation; one that ignores its own
  cancellation is left behind.
- The main coroutine is cancelled by a signal, and the exit code names the signal.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from signal import Signals
from typing import Any, TypeVar

from pellucid.data.spans import SpanLog
from pellucid.workers import DaemonThreads, infrequent_gc

log = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_S = 1.0  # for work that tidies up when it is cancelled
_FLEETING_S = 0.005

Main = Callable[[], Coroutine[Any, Any, None]]


async def finish_despite_cancellation(work: Awaitable[None]) -> None:
    """Runs `work` to its end; a cancellation that comes meanwhile is raised only then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class Deadline:
    """A time limit, counted from now, that several pieces of work share."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = asyncio.get_running_loop().time() + seconds

    async def bound(self, work: Coroutine[Any, Any, T], what: str = "") -> T:
        """Returns the result of `work`; raises TimeoutError if it takes too long, even if it ignores
        cancellation.

        A cancellation is passed on to `work`, which may still return or raise by itself.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task}, timeout=self._ends_at - asyncio.get_running_loop().time())
        except asyncio.CancelledError:
            await _cancel_patiently(task)
            if not task.done():
                raise
        else:
            if not task.done():
                await _cancel_patiently(task)
                raise TimeoutError(f"{what}not finished within {self._seconds:g} s") from _cancelled_at(task)
        return task.result()


def _cancelled_at(task: "asyncio.Task[T]") -> asyncio.CancelledError | None:
    """Returns the exception that ended a cancelled task: its traceback says where the task was waiting."""
    try:
        task.result()
    except asyncio.CancelledError as cancelled:
        return cancelled
    except (Exception, asyncio.InvalidStateError):
        pass  # the task raised another error, or ignored the cancellation
    return None


async def _cancel_patiently(task: "asyncio.Task[T]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)


async def cancel(tasks: Collection["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class PaceState:
    """One state of `Pace`, from `start` on."""

    name: str
    start: float
    end: float
    rollout_s: float = 0.0
    """Sum over the rollouts in flight of the seconds that they were so."""

    def merged(self, later: "PaceState") -> "PaceState":
        return replace(self, end=later.end, rollout_s=self.rollout_s + later.rollout_s)


class Pace:
    """The cause that the next batch waits for, at every moment: spans, and the seconds between two batches.

        wait_weights    nothing starts, and no batch forms, until newer weights are served
        sample          a rollout in flight has asked the policy's servers and waits for the answer
        environment     rollouts are in flight, and none of them waits for a server
        idle            no rollout is in flight: `tasks_per_minute`, a pause before a retry, the end

    The first that holds counts. A state that ends within a few milliseconds belongs to the one before it.
    """

    def __init__(self, spans: SpanLog, step: int, look: Callable[[], tuple[bool, int]]) -> None:
        """`step`: the first batch; `look` returns whether weights are waited for, and the rollouts in
        flight."""
        self._spans = spans
        self._step = step
        self._look = look
        self._num_asking = 0
        self._num_inflight = 0
        self._lap_start = spans.clock()
        self._blocked_s = 0.0
        self._now = PaceState("idle", self._lap_start, self._lap_start)
        self._before: PaceState | None = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context manager around a request to the policy's servers."""
        self._num_asking += 1
        if self._num_asking == 1:
            self.note()
        try:
            yield
        finally:
            self._num_asking -= 1
            if not self._num_asking:
                self.note()

    def note(self) -> None:
        """Looks at what is waited for now; to be called whenever it may have changed."""
        now = self._spans.clock()
        passed_s = now - self._now.end
        self._blocked_s += passed_s if self._now.name == "wait_weights" else 0.0
        self._now.end = now
        self._now.rollout_s += passed_s * self._num_inflight
        is_blocked, self._num_inflight = self._look()
        name = "sample" if self._num_asking else "environment" if self._num_inflight else "idle"
        name = "wait_weights" if is_blocked else name
        if name == self._now.name:
            return
        if self._before is not None and now - self._now.start < _FLEETING_S:
            self._before = self._before.merged(self._now)
        else:
            self._write(self._before)
            self._before = self._now
        self._now = PaceState(name, now, now)
        if self._before.name == name:
            self._now, self._before = self._before, None

    def lap(self) -> tuple[float, float]:
        """Ends a batch. Returns its seconds, and those of them in which weights were waited for."""
        self.note()
        now = self._now.end
        self._write(self._before)
        self._write(self._now)
        self._before, self._now = None, PaceState(self._now.name, now, now)
        lap = now - self._lap_start, self._blocked_s
        self._lap_start, self._blocked_s, self._step = now, 0.0, self._step + 1
        return lap

    def _write(self, state: PaceState | None) -> None:
        if state is not None and state.end > state.start:
            load = state.rollout_s / (state.end - state.start)
            self._spans.add(state.name, state.start, state.end, self._step, load)


class RateLimit:
    """At most `per_minute` starts a minute, evenly: what was not used for a while is not made up for."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._clock = clock
        self._next = clock()

    def wait_s(self) -> float:
        return max(0.0, self._next - self._clock())

    def note(self) -> None:
        """Records that a rollout was started."""
        self._next = max(self._next, self._clock()) + self._interval_s


def run_until_signalled(main: Main) -> None:
    """Runs `main` to its end. SIGTERM and SIGINT cancel it; once it has returned, raises SystemExit(128 +
    signal).

    Tasks that ignore cancellation and threads that an environment left running do not delay the end.
    """
    received: list[Signals] = []
    stubborn: set[asyncio.Task[Any]] = set()
    runner = asyncio.Runner(loop_factory=loop_factory())
    loop = runner.get_loop()
    try:
        with infrequent_gc():
            loop.set_default_executor(DaemonThreads())
            _run_to_the_end(loop, _cancelled_by_signals(main, received, stubborn))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None
    finally:
        if stubborn:
            # A runner would wait for them. The handler keeps asyncio quiet when they are deleted.
            loop.set_exception_handler(lambda loop, context: None)
        else:
            runner.close()


def _run_to_the_end(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> None:
    """Runs `main`, and restarts the event loop when a task of an environment ended it by `sys.exit`.

    The exception also reaches whoever awaits that task, and fails its rollout.
    """
    task = loop.create_task(main)
    while not task.done():
        try:
            loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit) as error:
            is_signal = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if task.done() or (is_signal and isinstance(error, KeyboardInterrupt)):
                raise
            log.warning("a task of an environment raised %s; the run goes on", type(error).__name__)


async def _cancelled_by_signals(
    main: Main, received: list[Signals], stubborn: "set[asyncio.Task[Any]]"
) -> None:
    """Runs `main`, which signals cancel; then cancels what is left, and notes tasks that ignore it."""
    this = asyncio.current_task()
    assert this is not None

    def stop(number: Signals) -> None:
        log.warning("%s: winding down", number.name)
        received.append(number)
        this.cancel()

    async def cancel_others() -> None:
        if others := asyncio.all_tasks() - {this, asyncio.current_task()}:
            for task in others:
                task.cancel()
            stubborn.update((await asyncio.wait(others, timeout=_GRACE_S))[1])
        for task in stubborn:
            log.warning("a task will not be cancelled, and is left behind: %s", task.get_coro())

    if sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await main()
    finally:
        await finish_despite_cancellation(cancel_others())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory where uvloop exists: twice as many rollouts per second."""
    if sys.platform == "win32":  # uvloop does not exist there
        return None
    import uvloop

    return uvloop.new_event_loop
