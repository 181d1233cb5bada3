"""Told to stop, a trainer ends between two steps, where a checkpoint can be written.

SIGTERM or SIGINT while a step trains     noted; raised at the next `check`
                  while it waits          raised at once (`interruptible`)
                  a second time           ends the process as it would any other
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals arrive in the main thread only; in another, nothing is listened for."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[Signals, Any] = {number: signal.signal(number, self._note) for number in _SIGNALS}
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
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if self._waiting:
            self._waiting = False
            self.check()
