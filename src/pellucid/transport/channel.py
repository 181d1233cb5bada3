"""The two ends of a channel for batches, as `[transport]` asks for them. Batches arrive in order, each once.

    orchestrator ── send ──> [ stored, not yet taken: at most `hwm` ] ── receive ──> trainer

A batch that was received stays with the receiver until it is released, so that a trainer that died can
train it again. The receiver refuses what cannot be a batch, counts it and logs it with its sender; it goes on
waiting for a good one, and the sender is told.
"""

import logging
import queue
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pellucid.config import TransportConfig, ZmqTransportConfig
from pellucid.data.rules import Experts
from pellucid.errors import ConfigError, PayloadError, TransportError
from pellucid.transport.batch import Batch, decode_batch
from pellucid.transport.sections import Limits
from pellucid.transport.spool import FilesystemReceiver, FilesystemSender
from pellucid.transport.zmq_link import allowed_keys, own_keys, tcp_address, trainer_key
from pellucid.transport.zmq_receiver import ZmqReceiver
from pellucid.transport.zmq_sender import ZmqSender

logger = logging.getLogger(__name__)


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


class MemoryChannel:
    """Sender and receiver inside one process, through the same bytes as the real ones."""

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


def limits_of(
    config: TransportConfig, *, vocab_size: int | None = None, experts: Experts | None = None
) -> Limits:
    """Returns the receiver's limits. Bytes bound the tokens: each takes one, unless it is shared."""
    return Limits(
        config.max_batch_bytes,
        max_tokens=config.max_batch_bytes,
        vocab_size=vocab_size,
        text_only=True,
        experts=experts,
    )


def open_sender(config: TransportConfig, run_dir: Path, run_id: str) -> BatchSender:
    if not isinstance(config, ZmqTransportConfig):
        return FilesystemSender(run_dir, hwm=config.hwm, max_bytes=config.max_batch_bytes)
    return ZmqSender(
        batch_address(config),
        run_id,
        hwm=config.hwm,
        max_bytes=config.max_batch_bytes,
        keys=own_keys(config.keys, "orchestrator") if config.keys else None,
        trainer_key=trainer_key(config.keys) if config.keys else None,
    )


def open_receiver(
    config: TransportConfig,
    run_dir: Path,
    run_id: str,
    *,
    vocab_size: int | None = None,
    experts: Experts | None = None,
) -> BatchReceiver:
    """`vocab_size`: a batch with a token id beyond it is refused; `experts`: one without these experts."""
    limits = limits_of(config, vocab_size=vocab_size, experts=experts)
    if not isinstance(config, ZmqTransportConfig):
        return FilesystemReceiver(run_dir, limits=limits)
    return ZmqReceiver(
        batch_address(config),
        run_dir,
        run_id,
        hwm=config.hwm,
        limits=limits,
        keys=own_keys(config.keys, "trainer") if config.keys else None,
        allowed_keys=allowed_keys(config.keys) if config.keys else frozenset(),
    )


def batch_address(config: ZmqTransportConfig) -> str:
    """Returns where the trainer listens; raises ConfigError if its port is not set."""
    if config.port == 0:
        raise ConfigError(
            "transport.port = 0 does not say where the trainer is; set the port that it listens on, or start "
            "all parts with `pellucid rl`"
        )
    return tcp_address(config.host, config.port)
