"""Batches as folders below the run folder: `batches/step_N/batch.bin` + `STABLE`."""

import logging
import time
from pathlib import Path

from pellucid.errors import TransportError
from pellucid.transport.channel import Batch
from pellucid.transport.codec import decode_batch
from pellucid.transport.stable import is_stable, publish_folder, retract_folder, stable_steps

logger = logging.getLogger(__name__)

_FILE = "batch.bin"
_POLL_S = 0.005


class FilesystemSender:
    def __init__(self, run_dir: Path) -> None:
        self._batches = run_dir / "batches"

    def send(self, step: int, payload: bytes) -> None:
        publish_folder(_folder(self._batches, step), lambda folder: _write(folder / _FILE, payload))


class FilesystemReceiver:
    def __init__(self, run_dir: Path) -> None:
        self._batches = run_dir / "batches"

    def receive(self, step: int) -> Batch:
        folder = _folder(self._batches, step)
        while not is_stable(folder):
            time.sleep(_POLL_S)
        return _read(folder, step)

    def release_before(self, step: int) -> None:
        for old in stable_steps(self._batches):
            if old < step:
                retract_folder(_folder(self._batches, old))


def first_missing_batch(run_dir: Path, start: int, stop: int) -> int:
    """The first step of `start` … `stop` whose batch cannot be received: it is gone, or damaged."""
    batches = run_dir / "batches"
    for step in range(start, stop):
        try:
            _read(_folder(batches, step), step)
        except (OSError, TransportError) as error:
            logger.warning("the batch of step %d cannot be trained again: %s", step, error)
            return step
    return stop


def _read(folder: Path, step: int) -> Batch:
    path = folder / _FILE
    batch = decode_batch(path.read_bytes(), sender=str(path))
    if batch.step != step:
        raise TransportError(f"{path} holds the batch of step {batch.step}; expected step {step}")
    return batch


def _folder(batches: Path, step: int) -> Path:
    return batches / f"step_{step}"


def _write(path: Path, payload: bytes) -> None:
    path.write_bytes(payload)
