"""A channel inside one process, through the same bytes as the real ones: for tests and single-process use."""

import queue

from pellucid.errors import TransportError
from pellucid.transport.channel import Batch
from pellucid.transport.codec import decode_batch


class MemoryChannel:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(self, step: int, payload: bytes) -> None:
        self._queue.put(payload)

    def receive(self, step: int) -> Batch:
        batch = decode_batch(self._queue.get(), sender="memory")
        if batch.step != step:
            raise TransportError(f"received the batch of step {batch.step}; expected step {step}")
        return batch

    def release_before(self, step: int) -> None:
        """The bytes are gone with the batch: what is received from memory is never received again."""
