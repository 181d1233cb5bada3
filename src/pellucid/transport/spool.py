"""Batches in folders that appear whole: `batches/step_N/batch.bin` + `STABLE` below the run folder.

    step_7/batch.bin + STABLE     a batch, whole; with TAKEN once the trainer has it
    refused_step_8/               one that was refused, with the reason; kept to be looked at

A folder is written beside its place, renamed into it and marked `STABLE`; a reader trusts it only once it
holds that marker, so that a killed writer leaves nothing that anybody misreads. Weights and checkpoints are
published in the same way. A folder published as durable is trusted after a power failure, too: its content
is on the disk before `STABLE` is. Readers of the others compare checksums.

Batches arrive in order, each once:

    orchestrator ── send ──> [ stored, not yet taken: at most `hwm` ] ── receive ──> trainer

A batch waits in the spool for the trainer, and stays until a checkpoint covers it. Both transports end here,
so that a trainer that died finds its batches whichever way they came. The receiver refuses what cannot be a
batch, counts it and logs it with its sender; it goes on waiting for a good one, and the sender is told.
"""

import logging
import os
import queue
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO, Protocol

from pellucid.data.files import read_whole, replace_file, step_folders, step_number, sync, sync_tree, writing
from pellucid.errors import PayloadError, TransportError
from pellucid.transport.batch import (
    PREAMBLE,
    Batch,
    batch_refused,
    check_size,
    declared_checksum,
    decode_batch,
)
from pellucid.transport.sections import Limits

logger = logging.getLogger(__name__)

MARKER = "STABLE"

_FILE = "batch.bin"
_REASON = "reason.txt"
_TAKEN = "TAKEN"
_REFUSED = "refused_step_"
_MAX_REASON_BYTES = 1 << 20
_POLL_S = 0.005


def publish_folder(target: Path, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Makes `target` with what `write` puts into it, replacing an earlier one."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with writing(target):
            partial.mkdir(parents=True)
            write(partial)
            if durable:
                sync_tree(partial)
            (partial / MARKER).touch()
            if durable:
                sync(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            if durable:
                sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def retract_folder(folder: Path) -> None:
    """Deletes it, the marker first: killed in between, it is not trusted any more.

    Of a link it deletes the link alone: what it leads to may be anybody's.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def retract_steps(parent: Path, start: int) -> None:
    """Deletes every `step_N` below `parent` from N = `start` on, finished or not."""
    for step, folder in step_folders(parent).items():
        if step >= start:
            retract_folder(folder)


def is_stable(folder: Path) -> bool:
    return (folder / MARKER).exists()


def stable_steps(parent: Path) -> list[int]:
    """Returns the N of every finished `step_N` below `parent`, ascending."""
    return sorted(step for step, folder in step_folders(parent).items() if is_stable(folder))


class Spool:
    """The folder `batches/` of a run."""

    def __init__(self, run_dir: Path, limits: Limits | None = None) -> None:
        self._batches = run_dir / "batches"
        self._limits = limits or Limits()
        self._decoded: Batch | None = None
        """A stored batch that was decoded when it arrived; it is not read again."""

    def store(self, step: int, payload: bytes | memoryview, decoded: Batch | None = None) -> None:
        """Replaces an earlier batch of this step; one that was refused is forgotten."""
        shutil.rmtree(self._refused(step), ignore_errors=True)
        publish_folder(self._folder(step), lambda folder: (folder / _FILE).write_bytes(payload))
        if decoded is not None or (self._decoded is not None and self._decoded.step == step):
            self._decoded = decoded

    def has(self, step: int) -> bool:
        return is_stable(self._folder(step))

    def is_taken(self, step: int) -> bool:
        """Whether the trainer has had the batch, which is still there."""
        return self.has(step) and (self._folder(step) / _TAKEN).exists()

    def checksum(self, step: int) -> int | None:
        """Returns the checksum in the preamble of the stored payload; None if there is none."""
        if not self.has(step):
            return None
        try:
            with self._open(step) as file:
                return declared_checksum(file.read(PREAMBLE.size))
        except PayloadError:
            return None

    def read(self, step: int) -> Batch:
        """Raises PayloadError for a bad one."""
        with self._open(step) as file:
            return self._judge(step, file)

    def take(self, step: int) -> Batch:
        """Returns the batch and marks it as taken. A bad one is put aside and can be replaced."""
        decoded, self._decoded = self._decoded, None
        if decoded is None or decoded.step != step:
            decoded = self._read_or_put_aside(step)
        (self._folder(step) / _TAKEN).touch()
        return decoded

    def _read_or_put_aside(self, step: int) -> Batch:
        inode = _inode(self._folder(step) / _FILE)
        try:
            with self._open(step) as file:
                inode = os.fstat(file.fileno()).st_ino
                return self._judge(step, file)
        except PayloadError as error:
            self._put_aside(step, inode, error)
            raise

    def _open(self, step: int) -> BinaryIO:
        """Raises PayloadError where there is no file: a pipe, for one, would make us wait."""
        path = self._folder(step) / _FILE
        with suppress(FileNotFoundError):
            if path.is_file():
                return path.open("rb")
        raise PayloadError(str(path), 0, "is gone, or no file")

    def _judge(self, step: int, file: BinaryIO) -> Batch:
        if (num_bytes := os.fstat(file.fileno()).st_size) > self._limits.max_bytes:
            raise PayloadError(file.name, 0, self._limits.too_large(num_bytes))
        batch = decode_batch(file.read(), sender=file.name, limits=self._limits)
        if batch.step != step:
            reason = f"the batch of step {batch.step}; expected step {step}"
            raise PayloadError(file.name, PREAMBLE.size, reason)
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

    def forget_from(self, step: int) -> None:
        retract_steps(self._batches, step)

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

    def has(self, step: int) -> bool:
        """Returns whether a batch of this step has arrived, good or not."""

    def poll(self, step: int) -> Batch | None:
        """Returns the batch of this step, None while it is missing; PayloadError if it was just refused."""

    def receive(self, step: int) -> Batch:
        """Blocks until a good batch of this step is there."""

    def expect(self, step: int) -> None:
        """Notes that the trainer goes on with this step, for an orchestrator elsewhere."""

    def finish_answering(self, within_s: float) -> None:
        """Waits until an orchestrator elsewhere knows which batch is missing, or has offered one."""

    def release_before(self, step: int) -> None:
        """Releases the batches of earlier steps; those from this step on may be received again."""

    def close(self) -> None:
        """Ends receiving."""


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
            raise batch_refused(step, reason)

    def close(self) -> None:
        """Raises if a batch was refused; all that was sent is in the folder already."""
        self.check()


class FilesystemReceiver:
    """Takes batches out of the run folder, where the orchestrator sees for itself what is there."""

    def __init__(self, run_dir: Path, *, limits: Limits | None = None) -> None:
        self._spool = Spool(run_dir, limits)
        self.num_rejected = 0

    def has(self, step: int) -> bool:
        return self._spool.has(step)

    def expect(self, step: int) -> None:
        """Nobody has to be told."""

    def finish_answering(self, within_s: float) -> None:
        """Nobody asks."""

    def poll(self, step: int) -> Batch | None:
        if not self._spool.has(step):
            return None
        try:
            return self._spool.take(step)
        except PayloadError as error:
            self.num_rejected += 1
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

    def has(self, step: int) -> bool:
        return not self._queue.empty()

    def expect(self, step: int) -> None:
        """Nobody has to be told."""

    def finish_answering(self, within_s: float) -> None:
        """Nobody asks."""

    def poll(self, step: int) -> Batch | None:
        return self._take(step) if self.has(step) else None

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
