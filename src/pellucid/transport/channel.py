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
    def send(self, batch: Batch) -> int:
        """Hands the batch over, whole or not at all; returns its size in bytes."""


class BatchReceiver(Protocol):
    def receive(self, step: int) -> Batch:
        """Blocks until the batch of this step is there."""

    def release(self, step: int) -> None:
        """The batch of this step is no longer needed."""
