"""Runs a coroutine as the main program: a signal cancels it, and the exit code names the signal."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from signal import Signals
from typing import Any

from pellucid.orchestrator.tasks import finish_despite_cancellation, outlive
from pellucid.workers import DaemonThreads

log = logging.getLogger(__name__)

_THRESHOLDS = (2_000, 2_000, 10)
"""Thresholds of the garbage collector: it looks at new objects after every 2,000, in a few milliseconds, and
at those that survived only after every 4 million."""

Main = Callable[[], Coroutine[Any, Any, None]]


def run_until_signalled(main: Main) -> None:
    """Runs `main` to its end. SIGTERM and SIGINT cancel it; once it has returned, raises SystemExit(128 +
    signal).

    Tasks that ignore cancellation and threads that an environment left running do not delay the end.
    """
    received: list[Signals] = []
    runner = asyncio.Runner(loop_factory=loop_factory())
    stubborn: list[asyncio.Task[Any]] = []
    try:
        with infrequent_gc():
            runner.get_loop().set_default_executor(DaemonThreads())
            _run_to_the_end(runner.get_loop(), _cancelled_by_signals(main, received.append, stubborn))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None
    finally:
        if stubborn:
            # A runner would wait for them. The handler keeps asyncio quiet when they are deleted.
            runner.get_loop().set_exception_handler(lambda loop, context: None)
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
    main: Main, note: Callable[[Signals], None], stubborn: "list[asyncio.Task[Any]]"
) -> None:
    """Runs `main`, which signals cancel; tasks that ignore their cancellation are appended to `stubborn`."""
    task = asyncio.current_task()
    assert task is not None

    def stop(number: Signals) -> None:
        log.warning("%s: winding down", number.name)
        note(number)
        task.cancel()

    if sys.platform != "win32":
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await main()
    finally:
        await finish_despite_cancellation(outlive(asyncio.all_tasks() - {task}, stubborn.append))


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Context manager: the garbage collector rarely scans old objects, and never those made before (modules,
    tokenizer).

    Old objects are the rollouts in flight: with Python's defaults, scanning 10,000 of them stops the event
    loop for half a second, every other second.
    """
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory where uvloop exists: twice as many rollouts per second."""
    if sys.platform == "win32":  # uvloop does not exist there
        return None
    import uvloop

    return uvloop.new_event_loop
