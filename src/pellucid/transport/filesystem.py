"""Batches as folders below the run folder: `batches/step_N/batch.bin` + `STABLE`."""

import time
from pathlib import Path

from pellucid.errors import TransportError
from pellucid.transport.channel import Batch
from pellucid.transport.codec import decode_batch, encode_batch
from pellucid.transport.stable import MARKER, is_stable, publish_folder

_FILE = "batch.bin"
_POLL_S = 0.005


class FilesystemSender:
    def __init__(self, run_dir: Path) -> None:
        self._batches = run_dir / "batches"

    def send(self, batch: Batch) -> int:
        payload = encode_batch(batch)
        publish_folder(_folder(self._batches, batch.step), lambda folder: _write(folder / _FILE, payload))
        return len(payload)


class FilesystemReceiver:
    def __init__(self, run_dir: Path) -> None:
        self._batches = run_dir / "batches"

    def receive(self, step: int) -> Batch:
        folder = _folder(self._batches, step)
        while not is_stable(folder):
            time.sleep(_POLL_S)
        path = folder / _FILE
        batch = decode_batch(path.read_bytes(), sender=str(path))
        if batch.step != step:
            raise TransportError(f"{path} holds the batch of step {batch.step}; expected step {step}")
        return batch

    def release(self, step: int) -> None:
        folder = _folder(self._batches, step)
        (folder / MARKER).unlink(missing_ok=True)
        (folder / _FILE).unlink(missing_ok=True)
        folder.rmdir()


def _folder(batches: Path, step: int) -> Path:
    return batches / f"step_{step}"


def _write(path: Path, payload: bytes) -> None:
    path.write_bytes(payload)
