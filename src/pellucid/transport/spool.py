"""`batches/` of a run folder: where a batch waits for the trainer, and stays until a checkpoint covers it.

    step_7/batch.bin + STABLE     a batch, whole; with TAKEN once the trainer has it
    refused_step_8/               one that was refused, with the reason; kept to be looked at

Both transports end here, so that a trainer that died finds its batches whichever way they came.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pellucid.data.files import read_whole, replace_file, step_number
from pellucid.errors import PayloadError
from pellucid.transport.channel import Batch
from pellucid.transport.codec import decode_batch
from pellucid.transport.stable import is_stable, publish_folder, retract_folder, stable_steps
from pellucid.transport.wire import PREAMBLE, Limits, too_large

_FILE = "batch.bin"
_REASON = "reason.txt"
_TAKEN = "TAKEN"
_REFUSED = "refused_step_"
_MAX_REASON_BYTES = 1 << 20


class Spool:
    def __init__(self, run_dir: Path, limits: Limits | None = None) -> None:
        self._batches = run_dir / "batches"
        self._limits = limits or Limits()

    def store(self, step: int, payload: bytes | memoryview) -> None:
        """Replaces an earlier batch of this step; one that was refused is forgotten."""
        shutil.rmtree(self._refused(step), ignore_errors=True)
        publish_folder(self._folder(step), lambda folder: _write(folder / _FILE, payload))

    def has(self, step: int) -> bool:
        return is_stable(self._folder(step))

    def is_taken(self, step: int) -> bool:
        """Whether the trainer has had the batch, which is still there."""
        return self.has(step) and (self._folder(step) / _TAKEN).exists()

    def checksum(self, step: int) -> int | None:
        """Returns the checksum in the header of the stored payload; None if there is none."""
        if not self.has(step):
            return None
        try:
            with self._open(step) as file:
                head = file.read(PREAMBLE.size)
        except PayloadError:
            return None
        return int(PREAMBLE.unpack(head)[3]) if len(head) == PREAMBLE.size else None

    def read(self, step: int) -> Batch:
        """Raises PayloadError for a bad one."""
        with self._open(step) as file:
            return self._judge(step, file)

    def take(self, step: int) -> Batch:
        """Reads the batch and marks it as taken. A bad one is put aside and can be replaced."""
        inode = _inode(self._folder(step) / _FILE)
        try:
            with self._open(step) as file:
                inode = os.fstat(file.fileno()).st_ino
                batch = self._judge(step, file)
        except PayloadError as error:
            self._put_aside(step, inode, error)
            raise
        (self._folder(step) / _TAKEN).touch()
        return batch

    def _open(self, step: int) -> BinaryIO:
        """Raises PayloadError where there is no file: a pipe, for one, would make us wait."""
        path = self._folder(step) / _FILE
        no_file = PayloadError(str(path), 0, "is gone, or no file")
        if not path.is_file():
            raise no_file
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise no_file from None

    def _judge(self, step: int, file: BinaryIO) -> Batch:
        sender, limit = file.name, self._limits.max_bytes
        if (num_bytes := os.fstat(file.fileno()).st_size) > limit:
            raise PayloadError(sender, 0, too_large(num_bytes, limit))
        batch = decode_batch(file.read(), sender=sender, limits=self._limits)
        if batch.step != step:
            raise PayloadError(sender, 24, f"the batch of step {batch.step}; expected step {step}")
        return batch

    def _put_aside(self, step: int, inode: int | None, error: PayloadError) -> None:
        """Moves a bad batch aside with the reason, unless another file has replaced it meanwhile."""
        folder, aside = self._folder(step), self._refused(step)
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(aside)
            if _inode(aside / _FILE) != inode:
                aside.rename(folder)
            else:
                replace_file(aside / _REASON, str(error).encode())

    def forget_refusals(self) -> None:
        """Deletes the refused batches: their steps are sampled again, and the new batches judged again."""
        for folder in self._batches.glob(f"{_REFUSED}*"):
            if folder.is_dir():
                retract_folder(folder)

    def refusals(self) -> dict[int, str]:
        """Why each batch that was put aside, and that no other has replaced yet, was refused."""
        found = {}
        for path in self._batches.glob(f"{_REFUSED}*/{_REASON}"):
            step = step_number(path.parent.name.removeprefix("refused_"))
            with suppress(FileNotFoundError):  # replaced meanwhile
                if step is not None:
                    found[step] = read_whole(path, _MAX_REASON_BYTES).decode(errors="replace")
        return found

    def num_waiting(self) -> int:
        """Batches that are stored and that the trainer has not taken yet."""
        return sum(not (self._folder(step) / _TAKEN).exists() for step in stable_steps(self._batches))

    def release_before(self, step: int) -> None:
        for old in stable_steps(self._batches):
            if old < step:
                retract_folder(self._folder(old))

    def _folder(self, step: int) -> Path:
        return self._batches / f"step_{step}"

    def _refused(self, step: int) -> Path:
        return self._batches / f"{_REFUSED}{step}"


def _inode(path: Path) -> int | None:
    """Returns the inode of a file; None if there is none, or a link that leads nowhere."""
    return path.stat().st_ino if path.exists() else None


def _write(path: Path, payload: bytes | memoryview) -> None:
    path.write_bytes(payload)
