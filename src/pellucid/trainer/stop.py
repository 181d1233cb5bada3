"""Stop requests: on a signal, a trainer ends between two steps, where it can write a checkpoint.

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
    """Raised when a signal asks training to stop. It is no error: only the entries of a trainer catch it."""

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
        """Context manager: handles signals inside, in the main thread; in any other thread it does nothing.

        The signal handler calls `tell`, which tells the launcher what the trainer finishes first.
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
