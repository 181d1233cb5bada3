"""The two ends of the way that batches take. Batches of a run arrive in order, each once."""

from dataclasses import dataclass
from typing import Protocol

from pellucid.data import TokenTable


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step of one run trains on."""

    run_id: str
    step: int
    table: TokenTable


class BatchSender(Protocol):
    def send(self, step: int, payload: bytes) -> None:
        """Hands an encoded batch over, whole or not at all."""


class BatchReceiver(Protocol):
    def receive(self, step: int) -> Batch:
        """Blocks until the batch of this step is there."""

    def release_before(self, step: int) -> None:
        """The batches of earlier steps are no longer needed; from this step on they may be received again."""
