"""A coroutine as the whole of a process: told to stop, it winds down, and the exit code says who told it."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from signal import Signals
from typing import Any

from pellucid.orchestrator.tasks import outlast, outlive
from pellucid.workers import DaemonThreads

log = logging.getLogger(__name__)

_THRESHOLDS = (2_000, 2_000, 10)
"""Of the garbage collector: what is new is looked at in bites of a few milliseconds, what has survived that
once in four million objects."""

Main = Callable[[], Coroutine[Any, Any, None]]


def run_until_signalled(main: Main) -> None:
    """Runs `main` to its end. SIGTERM and SIGINT cancel it; once it is back: SystemExit(128 + signal).

    What an environment left running does not keep it: neither tasks that will not be cancelled nor threads.
    """
    received: list[Signals] = []
    runner = asyncio.Runner(loop_factory=loop_factory())
    stubborn: list[asyncio.Task[Any]] = []
    try:
        with spare_the_loop():
            runner.get_loop().set_default_executor(DaemonThreads())
            _run_to_the_end(runner.get_loop(), _cancelled_by_signals(main, received.append, stubborn))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None
    finally:
        if stubborn:
            # A runner would wait for them. Nobody is told about them again when they are deleted.
            runner.get_loop().set_exception_handler(lambda loop, context: None)
        else:
            runner.close()


def _run_to_the_end(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> None:
    """Goes on when a task of an environment's own calls `sys.exit`, which ends an event loop.

    Whoever awaits that task gets the exception, too, and fails its rollout.
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
    """`stubborn` gets the tasks that are left."""
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
        await outlast(outlive(asyncio.all_tasks() - {task}, stubborn.append))


@contextmanager
def spare_the_loop() -> Iterator[None]:
    """Within, the garbage collector seldom walks what has lived for a while.

    That is every rollout in flight: 10,000 of them stop the loop for half a second, by default every other
    second. What is there at the start (modules, tokenizer) is left out altogether.
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
    """uvloop, where there is one: twice as many rollouts per second."""
    if sys.platform == "win32":  # uvloop does not exist there
        return None
    import uvloop

    return uvloop.new_event_loop
