"""`checkpoints/step_N/`: all that a trainer needs to continue with step N, bit by bit.

    state/           model and optimizer, written by torch.distributed.checkpoint
    progress.json    counters, random state, the ledger so far, and the checksum of every file in state/
    STABLE

A checkpoint is complete or does not exist, also after a power failure. Checksums reveal one that was damaged
later; the trainer then takes the one before. This module does not import torch: the launcher uses it, too.
"""

import logging
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from pellucid.data.files import read_whole, require_file, step_folders
from pellucid.data.model_folder import check_safetensors
from pellucid.errors import DataError, ModelError, TransportError
from pellucid.ledger import LedgerEntry, settle_trainer
from pellucid.transport import MARKER, publish_folder, retract_folder, retract_steps, stable_steps
from pellucid.transport.digests import read_digests

logger = logging.getLogger(__name__)

STATE = "state"
_PROGRESS = "progress.json"
_CHUNK_BYTES = 1 << 24


class FileSum(msgspec.Struct, frozen=True):
    num_bytes: int
    crc32: int


class Progress(msgspec.Struct, frozen=True):
    step: int
    """Number of trained steps, and index of the next one."""

    totals: dict[str, int]
    """Running totals of the metrics."""

    random_state: bytes
    """State of torch's random generator on the CPU, in the main process."""

    ledger: list[LedgerEntry]
    """Ledger of the trainer so far, one entry per run and environment."""

    random_states: list[list[bytes]] = []
    """States of the generators of each process: on the CPU, then on its GPU if it has one."""

    files: dict[str, FileSum] = {}
    """Size and checksum by file name; filled in when the checkpoint is written."""


def publish_checkpoint(
    run_dir: Path, progress: Progress, write_state: Callable[[Path], None], *, keep_last: int
) -> int:
    """Writes a checkpoint and deletes the oldest ones beyond `keep_last`.

    Returns the first step whose batch may be needed again: that of the oldest checkpoint kept, or 0 while
    there are fewer than `keep_last`.
    """

    def write(folder: Path) -> None:
        write_state(folder / STATE)
        files = {path.name: _checksum(path) for path in (folder / STATE).iterdir()}
        (folder / _PROGRESS).write_bytes(msgspec.json.encode(msgspec.structs.replace(progress, files=files)))

    parent = run_dir / "checkpoints"
    publish_folder(parent / f"step_{progress.step}", write, durable=True)
    steps = stable_steps(parent)
    for step in steps[:-keep_last]:
        retract_folder(parent / f"step_{step}")
    return steps[-keep_last] if len(steps) >= keep_last else 0


def newest_intact(run_dir: Path) -> Progress | None:
    """Reads the newest checkpoint whose checksums are right; newer ones lose their `STABLE`."""
    parent = run_dir / "checkpoints"
    for step in reversed(stable_steps(parent)):
        folder = parent / f"step_{step}"
        try:
            progress = read_progress(folder)
            _verify(folder, progress)
        except (OSError, DataError) as error:
            logger.warning("%s is passed over: %s", folder, error)
            (folder / MARKER).unlink()
        else:
            return progress
    return None


def take_back(run_dir: Path, progress: Progress | None) -> None:
    """Takes ledger and weights back to a checkpoint, or to the start of the run, after the trainer has ended.

    Newer policy versions are deleted: the trainer makes them again, and they may differ (changed settings,
    another number of processes, a GPU), so nobody may serve or evaluate the old ones. Versions with damaged
    tensors or digests, which nobody can serve, are deleted, too; the trainer publishes the version that it
    starts from again.
    """
    step, known = (0, None) if progress is None else (progress.step, progress.ledger)
    settle_trainer(run_dir / "ledger", step, known)
    retract_steps(run_dir / "weights", step + 1)
    for folder in step_folders(run_dir / "weights").values():
        try:
            for path in list(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
                check_safetensors(path)
            read_digests(folder)
        except (ModelError, TransportError) as error:
            logger.warning("%s is given up: %s", folder, error)
            retract_folder(folder)


def read_progress(folder: Path) -> Progress:
    path = folder / _PROGRESS
    try:
        return msgspec.json.decode(read_whole(path), type=Progress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _verify(folder: Path, progress: Progress) -> None:
    for name, expected in progress.files.items():
        path = folder / STATE / name
        if path.parent != folder / STATE:
            raise DataError(f"{folder / _PROGRESS} names {name!r}, which is no file of the checkpoint")
        require_file(path)
        if path.stat().st_size != expected.num_bytes or _checksum(path) != expected:
            raise DataError(f"{path} is damaged: its size or checksum is not what was written")


def _checksum(path: Path) -> FileSum:
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileSum(num_bytes, crc32)
