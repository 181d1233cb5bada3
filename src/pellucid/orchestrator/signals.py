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

log = logging.getLogger(__name__)

_THRESHOLDS = (2_000, 2_000, 10)
"""Of the garbage collector: what is new is looked at in bites of a few milliseconds, what has survived that
once in four million objects."""

Main = Callable[[], Coroutine[Any, Any, None]]


def run_until_signalled(main: Main) -> None:
    """Runs `main` to its end. SIGTERM and SIGINT cancel it; once it is back: SystemExit(128 + signal)."""
    received: list[Signals] = []
    try:
        with spare_the_loop(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_cancelled_by_signals(main, received.append))
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None


async def _cancelled_by_signals(main: Main, note: Callable[[Signals], None]) -> None:
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
    await main()


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
