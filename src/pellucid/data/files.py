"""Files that are whole or not there, also on a disk that is full or after a power failure.

What was written survives the end of its process at once, and that of its machine once it is synced: `sync`
for content, `replace_file(…, durable=True)` for a name. Whoever writes two things in an order that matters
syncs the first before the second becomes visible.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

from pellucid.errors import DataError, DiskError

_PART_BYTES = 1 << 24

MAX_WHOLE_BYTES = 1 << 28
"""Files that are read whole (settings, indices, links) are smaller by orders of magnitude."""

MAX_LINE_BYTES = 1 << 26
"""Lines of journals, metrics and saved rollouts are shorter by orders of magnitude."""


def read_whole(path: Path, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
    """The content of a file that is small by its nature; anything else under its name is a DataError."""
    require_file(path)
    if (num_bytes := path.stat().st_size) > max_bytes:
        raise DataError(f"{path} has {num_bytes:,} bytes; such a file has at most {max_bytes:,}")
    return path.read_bytes()


def require_file(path: Path) -> None:
    """Refuses what is there and is no file: to open a pipe would wait for somebody who writes into it."""
    try:
        is_other = path.exists() and not path.is_file()
    except OSError as error:  # links that lead to each other
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if is_other:
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise DataError(f"{path} is {kind}, where a file is expected; was the folder copied whole?")


def require_own(path: Path) -> None:
    """Refuses to change a file that a link leads to: it may be anybody's."""
    require_file(path)
    for each in (path.parent, path):
        if each.is_symlink():
            raise DataError(
                f"{each} is a link, and a run changes only files of its own; put a copy in its place"
            )


def open_lock(path: Path) -> IO[str]:
    """Opens the file that a process locks, and makes it if there is none; a link is refused, as by
    `require_own`, but the folder may be one."""
    require_file(path)
    if path.is_symlink():
        raise DataError(f"{path} is a link, where a file is expected that processes lock; delete it")
    return path.open("a+", encoding="utf-8", errors="replace")


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(number, line) of a JSONL file from byte `start` on; nothing if it does not exist.

    Only the last line may lack its end: it is being written, or its writer died.
    """
    require_file(path)
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise DataError(f"{path}:{number} has more than {MAX_LINE_BYTES:,} bytes, which no line has")
            yield number, line


def replace_file(
    path: Path, content: bytes | Iterable[bytes], *, durable: bool = False, keep_as: Path | None = None
) -> None:
    """A reader sees the file as it was or as it shall be; a killed writer leaves it as it was.

    `durable`: also a machine that loses power leaves one of the two, and the new one once this returns.
    `keep_as`: what the file was is there from then on; killed in between, it is there only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            partial.unlink(missing_ok=True)  # of a killed writer, or a link that somebody put there
            with partial.open("wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            if keep_as is not None and path.exists():
                path.replace(keep_as)
            partial.replace(path)
            if durable:
                sync(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """Returns once the content of a file, or the names in a folder, would survive a power failure."""
    with writing(path):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what some network file systems say to a folder
                raise
        finally:
            os.close(opened)


def sync_tree(folder: Path) -> None:
    """Syncs every file below the folder, and the folders."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


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
    """Every folder `step_N` below `parent` by its N, finished or not."""
    found = {}
    for folder in parent.glob("step_*") if parent.is_dir() else ():
        if (step := step_number(folder.name)) is not None and folder.is_dir():
            found[step] = folder
    return found


def step_number(name: str) -> int | None:
    """The N of a name `step_N`, None of any other: what a run writes has no leading zeros, for instance."""
    match = re.fullmatch(r"step_(0|[1-9][0-9]{0,14})", name, re.ASCII)
    return None if match is None else int(match[1])
