"""Batches through a folder that both ends see: `batches/step_N/batch.bin` + `STABLE` below the run folder."""

import logging
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from pellucid.errors import PayloadError, TransportError
from pellucid.transport.channel import Batch, check_size, refusal
from pellucid.transport.spool import Spool
from pellucid.transport.wire import Limits

logger = logging.getLogger(__name__)

_POLL_S = 0.005


class FilesystemSender:
    def __init__(self, run_dir: Path, *, hwm: int = 8, max_bytes: int = Limits().max_bytes) -> None:
        self._spool = Spool(run_dir)
        self._hwm = hwm
        self._max_bytes = max_bytes

    def send(self, step: int, payload: bytes) -> None:
        check_size(step, payload, self._max_bytes)
        while self._spool.num_waiting() >= self._hwm:
            self.check()
            time.sleep(_POLL_S)
        self._spool.store(step, payload)

    def check(self) -> None:
        for step, reason in self._spool.refusals().items():
            raise refusal(step, reason)

    def close(self) -> None:
        """Raises if a batch was refused; all that was sent is in the folder already."""
        self.check()


class FilesystemReceiver:
    def __init__(self, run_dir: Path, *, limits: Limits | None = None) -> None:
        self._spool = Spool(run_dir, limits)
        self._num_rejected = 0

    @property
    def num_rejected(self) -> int:
        return self._num_rejected

    def poll(self, step: int) -> Batch | None:
        if not self._spool.has(step):
            return None
        try:
            return self._spool.take(step)
        except PayloadError as error:
            self._num_rejected += 1
            logger.error("refused the batch of step %d: %s", step, error)
            raise

    def receive(self, step: int) -> Batch:
        while True:
            with suppress(PayloadError):
                if (batch := self.poll(step)) is not None:
                    return batch
            time.sleep(_POLL_S)

    def release_before(self, step: int) -> None:
        self._spool.release_before(step)

    def close(self) -> None:
        """Nothing to close."""


def first_missing_batch(
    run_dir: Path, start: int, stop: int | None, limits: Limits | None = None, *, trust_taken: bool = False
) -> int:
    """Returns the first step of `start` … `stop` whose batch is missing or damaged.

    Without `stop`, it looks up to the step after the last batch. `trust_taken`: batches that the trainer has
    taken count as intact and are not read.
    """
    spool = Spool(run_dir, limits)
    for step in count(start) if stop is None else range(start, stop):
        if trust_taken and spool.is_taken(step):
            continue
        try:
            spool.read(step)
        except (OSError, TransportError) as error:
            if stop is not None:
                logger.warning("the batch of step %d cannot be trained again: %s", step, error)
            return step
    assert stop is not None
    return stop
