"""The two ends of a channel for batches. Batches of a run arrive in order, each once.

    orchestrator ── send ──> [ stored, not yet taken: at most `hwm` ] ── receive ──> trainer

A batch that was received stays with the receiver until it is released, so that a trainer that died can
train it again. What cannot be a batch is refused, counted and logged with its sender; the receiver goes
on waiting for a good one, and the sender is told.
"""

from dataclasses import dataclass
from typing import Protocol

from pellucid.data import TokenTable
from pellucid.errors import TransportError


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples that one optimizer step of one run trains on."""

    run_id: str
    step: int
    table: TokenTable


class BatchSender(Protocol):
    def send(self, step: int, payload: bytes) -> None:
        """Hands an encoded batch over, whole or not at all; waits while `hwm` batches are not taken."""

    def check(self) -> None:
        """Raises TransportError if a batch that was sent will never be trained: it was refused."""

    def close(self) -> None:
        """Returns once all that was sent is safe with the receiver; raises TransportError if it is not."""


class BatchReceiver(Protocol):
    @property
    def num_rejected(self) -> int:
        """Payloads that were refused so far."""

    def poll(self, step: int) -> Batch | None:
        """Returns the batch of this step, None while it is missing; PayloadError if it was just refused."""

    def receive(self, step: int) -> Batch:
        """Blocks until a good batch of this step is there."""

    def release_before(self, step: int) -> None:
        """Releases the batches of earlier steps; those from this step on may be received again."""

    def close(self) -> None:
        """Ends receiving."""


def refusal(step: int, reason: str) -> TransportError:
    """Makes the error that a sender raises for a batch that the trainer refused."""
    return TransportError(
        f"the trainer refused the batch of step {step}: {reason}; go on with --resume, which gives it up and "
        "samples the step anew"
    )


def check_size(step: int, payload: bytes, max_bytes: int) -> None:
    """Raises TransportError if a batch is too large; the sender calls it, where the cause is."""
    if len(payload) > max_bytes:
        raise TransportError(
            f"the batch of step {step} has {len(payload)} bytes; transport.max_batch_bytes = {max_bytes} "
            "allows no more: raise it on both sides, or send smaller batches"
        )
