"""A batch on its way in, chunk by chunk: what to ask for next. The clock is passed in.

    0          received         asked                    num_bytes
    |──────────────|── 32 K ──|── 32 K ──|                |

- At most `_DEPTH` chunks are on their way. They grow while they come quickly and shrink when they come
  slowly, so that a fast link is kept busy, and heartbeats on a slow one never wait long behind them.
- Memory is taken for bytes that arrived, never for those that were offered.
- Whatever happens to a connection, what was received stays; the rest is asked for again.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.transport.zmq_messages import Offer

_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a link may be silent, and how much may be on its way.

    A link on which a chunk of `min_chunk_bytes` takes less than `dead_after_s` delivers whatever it is given.
    """

    dead_after_s: float = 20.0
    """Without a chunk, an answer or a heartbeat."""

    min_chunk_bytes: int = 16 << 10
    max_chunk_bytes: int = 16 << 20

    @property
    def quick_s(self) -> float:
        """Chunks that take less grow."""
        return self.dead_after_s / 80

    @property
    def slow_s(self) -> float:
        """Chunks that take more shrink."""
        return self.dead_after_s / 10


class _Ask(NamedTuple):
    start: int
    num_bytes: int
    asked_s: float


class Transfer:
    def __init__(self, offer: Offer, peer: bytes, patience: Patience, now_s: float) -> None:
        self.offer = offer
        self.peer: bytes | None = peer
        """Connection that sends it; None while the sender cannot be reached."""

        self.has_stalled = False
        """Whether nothing came for too long, and nothing has come since."""

        self._patience = patience
        self._data = bytearray()
        self._asked: deque[_Ask] = deque()
        self._chunk_bytes = patience.min_chunk_bytes
        self._heard_s = now_s

    @property
    def num_received(self) -> int:
        return len(self._data)

    @property
    def is_complete(self) -> bool:
        return len(self._data) == self.offer.num_bytes

    def payload(self) -> memoryview:
        return memoryview(self._data)

    def asks(self, now_s: float) -> list[tuple[int, int]]:
        """Returns (start, bytes) of each chunk to ask for now, and notes that it was asked for."""
        last = self._asked[-1] if self._asked else None
        start = len(self._data) if last is None else last.start + last.num_bytes
        found = []
        while len(self._asked) < _DEPTH and start < self.offer.num_bytes:
            num_bytes = min(self._chunk_bytes, self.offer.num_bytes - start)
            self._asked.append(_Ask(start, num_bytes, now_s))
            found.append((start, num_bytes))
            start += num_bytes
        return found

    def take(self, start: int, chunk: memoryview, now_s: float) -> bool:
        """Whether it is the next that was asked for; one that came before, or too early, changes nothing."""
        if not self._asked or (start, len(chunk)) != self._asked[0][:2]:
            return False
        took_s = now_s - self._asked.popleft().asked_s
        self._data += chunk
        self._heard_s, self.has_stalled = now_s, False
        if took_s < self._patience.quick_s:
            self._chunk_bytes = min(2 * self._chunk_bytes, self._patience.max_chunk_bytes)
        elif took_s > self._patience.slow_s:
            self._chunk_bytes = max(self._chunk_bytes // 2, self._patience.min_chunk_bytes)
        return True

    def is_stalled(self, now_s: float) -> bool:
        """Whether nothing has come for too long from whoever sends it."""
        return self.peer is not None and now_s - self._heard_s > self._patience.dead_after_s

    def go_on(self, peer: bytes | None, now_s: float) -> None:
        """Nothing is on its way any more: the rest is asked for again, in small chunks at first."""
        self.peer = peer
        self._asked.clear()
        self._chunk_bytes = self._patience.min_chunk_bytes
        self._heard_s = now_s
