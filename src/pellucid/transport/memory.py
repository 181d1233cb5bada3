"""A channel inside one process, through the same bytes as the real ones: for tests and single-process use."""

import logging
import queue
from contextlib import suppress

from pellucid.errors import PayloadError, TransportError
from pellucid.transport.channel import Batch
from pellucid.transport.codec import decode_batch

logger = logging.getLogger(__name__)


class MemoryChannel:
    """Sender and receiver in one."""

    def __init__(self, *, hwm: int = 0) -> None:
        """0 holds any number of batches."""
        self._queue: queue.Queue[bytes] = queue.Queue(hwm)
        self._refusals: list[PayloadError] = []

    def send(self, step: int, payload: bytes) -> None:
        self._queue.put(payload)

    def check(self) -> None:
        if self._refusals:
            raise TransportError(f"the trainer refused a batch: {self._refusals[-1]}")

    @property
    def num_rejected(self) -> int:
        return len(self._refusals)

    def poll(self, step: int) -> Batch | None:
        return None if self._queue.empty() else self._take(step)

    def receive(self, step: int) -> Batch:
        while True:
            with suppress(PayloadError):
                return self._take(step)

    def _take(self, step: int) -> Batch:
        try:
            batch = decode_batch(self._queue.get(), sender="memory")
        except PayloadError as error:
            logger.error("refused the batch of step %d: %s", step, error)
            self._refusals.append(error)
            raise
        if batch.step != step:
            raise TransportError(f"received the batch of step {batch.step}; expected step {step}")
        return batch

    def release_before(self, step: int) -> None:
        """Does nothing: a batch received from memory is gone, and is never received again."""

    def close(self) -> None:
        """Nothing to close."""
