"""Told to stop, a trainer ends between two steps, where a checkpoint can be written.

SIGTERM, SIGINT or SIGHUP while a step trains     noted; raised at the next `check`
                          while it waits          raised at once (`interruptible`)
                          a second time           ends the process as it would any other

A signal that is ignored, as `nohup` does with SIGHUP, stays ignored.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """Training was told to stop. Not an error: nothing but the entry may catch it."""

    def __init__(self, number: Signals) -> None:
        super().__init__(number)
        self.signal = number

    def __str__(self) -> str:
        return self.signal.name


class StopRequest:
    def __init__(self) -> None:
        self._received: Signals | None = None
        self._waiting = False
        self._tell: Callable[[], None] = lambda: None
        self._heeded: list[Signals] = []

    @contextmanager
    def listening(self, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Signals arrive in the main thread only; in another, nothing is listened for.

        `tell` is called by the signal handler and says what has to be finished first.
        """
        self._tell = tell
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before: dict[Signals, Any] = {number: signal.signal(number, self._note) for number in self._heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        if self._received is not None:
            raise Stopped(self._received)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self._waiting = True
        try:
            self.check()
            yield
        finally:
            self._waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = Signals(number)
        self._tell()
        for each in self._heeded:
            signal.signal(each, signal.SIG_DFL)
        if self._waiting:
            self._waiting = False
            self.check()
