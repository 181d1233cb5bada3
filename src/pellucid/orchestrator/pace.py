"""How long a batch took."""

import time


class Pace:
    """Seconds since the last batch, and how many of them nothing could start for lack of weights."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._blocked_since: float | None = None
        self._blocked_s = 0.0

    def note(self, *, blocked: bool) -> None:
        now = time.monotonic()
        if self._blocked_since is not None:
            self._blocked_s += now - self._blocked_since
        self._blocked_since = now if blocked else None

    def lap(self, *, blocked: bool) -> tuple[float, float]:
        self.note(blocked=blocked)
        now = time.monotonic()
        lap = now - self._started, self._blocked_s
        self._started, self._blocked_s = now, 0.0
        return lap
