"""How long a batch took, and how soon the next rollout may start."""

import time
from collections.abc import Callable


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


class RateLimit:
    """At most `per_minute` starts a minute, evenly: what was not used for a while is not made up for.

    limit = RateLimit(60)
    limit.wait_s()    -> 0.0; then, after limit.note():
    limit.wait_s()    -> 1.0
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._clock = clock
        self._next = clock()

    def wait_s(self) -> float:
        return max(0.0, self._next - self._clock())

    def note(self) -> None:
        """Records that a rollout was started."""
        self._next = max(self._next, self._clock()) + self._interval_s
