"""Files that are whole or not there, also on a disk that is full."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

from pellucid.errors import DiskError

_PART_BYTES = 1 << 24


def replace_file(path: Path, content: bytes) -> None:
    """A reader sees the file as it was or as it shall be; a killed writer leaves it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def append_whole(file: FileIO, data: bytes) -> None:
    """Appends all of `data`, or leaves the file as it was and raises.

    A disk that is nearly full takes a part of a write without a word, and what is written next would be glued
    to that part.
    """
    start = file.seek(0, os.SEEK_END)
    left = memoryview(data)
    with writing(Path(os.fsdecode(file.name))):
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(start)
            raise


def append_file(path: Path, source: Path) -> None:
    """Appends all of `source`, or leaves the file as it was and raises."""
    with writing(path), path.open("ab", buffering=0) as file, source.open("rb") as parts:
        start = file.seek(0, os.SEEK_END)
        try:
            while part := parts.read(_PART_BYTES):
                append_whole(file, part)
        except BaseException:
            with suppress(OSError):
                file.truncate(start)
            raise


def try_lock(file: IO[Any]) -> bool:
    """Whether nobody else had it; the system lets go of it when the file is closed, however that comes."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of a failed write are OSErrors that name the file, whatever a library makes of them."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # without a number it has a text of its own
            error.filename = error.filename or str(path)
        raise
    except Exception as error:
        if (number := _disk_error(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _disk_error(error: BaseException) -> int | None:
    """Libraries in Rust tell it in words, `SafetensorError: … No space left on device (os error 28)`; torch's
    writer trips over it and raises something else."""
    if isinstance(error, OSError) and error.errno in DiskError.REMEDIES:
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    cause = error.__cause__ or error.__context__
    return None if cause is None else _disk_error(cause)


def step_folders(parent: Path) -> dict[int, Path]:
    """Every `step_N` below `parent` by its N, finished or not."""
    found = {}
    for folder in parent.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdigit():
            found[int(number)] = folder
    return found
