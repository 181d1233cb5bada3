"""Token storage that the turns of a conversation share: each turn stores only the tokens that it adds.

    line of tokens    a b X Y c Z              blocks    user assistant tool
    turn 0            a b|X Y                            0:2  2:…
    turn 1            a b X Y c|Z                        0:2  2:4  4:5  5:…

A turn that continues the end of a line extends it. A turn that continues from an earlier token, because
another turn has extended the line already, starts a new line with a copy. So the lines of a rollout hold
about as many tokens as its samples will.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

RoleSpan = tuple[str, int, int]
"""(role, start, stop) of a block, in tokens."""


class _Growing:
    """An array that grows at its end, by a sixteenth at least, so that appending is O(1) on average."""

    __slots__ = ("_buffer", "size")

    def __init__(self, dtype: DTypeLike) -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype)
        self.size = 0

    def extend(self, values: NDArray[Any]) -> None:
        size = self.size + len(values)
        dtype = np.result_type(self._buffer, values)
        if size > len(self._buffer) or dtype != self._buffer.dtype:
            # Views of the old buffer stay valid: their values never change.
            grown = np.empty(size if not self.size else size + size // 16, dtype)
            grown[: self.size] = self._buffer[: self.size]
            self._buffer = grown
        self._buffer[self.size : size] = values
        self.size = size

    def view(self, start: int, stop: int) -> NDArray[Any]:
        part = self._buffer[start:stop]
        part.flags.writeable = False
        return part


class TokenLine:
    """Token ids of a conversation, and logprobs of its sampled tokens."""

    __slots__ = ("_ids", "_logprobs")

    def __init__(self) -> None:
        self._ids = _Growing(np.uint32)
        self._logprobs = _Growing(np.float32)

    @property
    def num_ids(self) -> int:
        return self._ids.size

    @property
    def num_logprobs(self) -> int:
        return self._logprobs.size

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self._ids.extend(_as_ids(token_ids))
        self._logprobs.extend(np.array(logprobs, np.float32))

    def ids(self, start: int, stop: int) -> NDArray[np.integer[Any]]:
        return self._ids.view(start, stop)

    def logprobs(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._logprobs.view(start, stop)


class BlockLine:
    """Blocks of a conversation before its last reply; the reply is left out because it may still grow."""

    __slots__ = ("_bounds", "_roles")

    def __init__(self) -> None:
        self._roles: list[str] = []
        self._bounds = _Growing(np.int64)

    def __len__(self) -> int:
        return len(self._roles)

    def extend(self, spans: Sequence[RoleSpan]) -> None:
        self._roles += [role for role, _, _ in spans]
        self._bounds.extend(np.array([bound for _, *bounds in spans for bound in bounds], np.int64))

    def spans(self, num_blocks: int) -> list[RoleSpan]:
        bounds = iter(self._bounds.view(0, 2 * num_blocks).tolist())
        return list(zip(self._roles[:num_blocks], bounds, bounds, strict=True))


def _as_ids(values: Sequence[int]) -> NDArray[np.integer[Any]]:
    """Converts to uint32; keeps ids that do not fit, so that the sample is rejected and still counted."""
    try:
        return np.array(values, np.uint32)
    except OverflowError:
        return np.array(values, np.int64)
