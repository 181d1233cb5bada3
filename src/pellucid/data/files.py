"""Writes files that are whole or do not exist, also on a full disk or after a power failure.

Written data survives the end of its process at once, and that of its machine once it is synced: by `sync` for
content, by `replace_file(…, durable=True)` for a name. If the order of two writes matters, sync the first
before the second becomes visible.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

from pellucid.errors import DataError, DiskError

_PART_BYTES = 1 << 24

OUTCOME = "logs/OUTCOME"
"""File of a run folder that says how the run ended: `finished`, `interrupted`, or `failed` and why. Empty
while the run goes on, or if its launcher was killed."""

MAX_WHOLE_BYTES = 1 << 28
"""Largest file that is read whole; settings, indices and links are smaller by orders of magnitude."""

MAX_LINE_BYTES = 1 << 26
"""Longest line; those of journals, metrics and saved rollouts are shorter by orders of magnitude."""


def read_whole(path: Path, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
    """Reads a file that is small by its nature; raises DataError if it is larger, or no file."""
    require_file(path)
    if (num_bytes := path.stat().st_size) > max_bytes:
        raise DataError(f"{path} has {num_bytes:,} bytes; such a file has at most {max_bytes:,}")
    return path.read_bytes()


def require_file(path: Path) -> None:
    """Raises DataError if the path exists and is no file: opening a pipe would wait for a writer."""
    try:
        mode = path.stat().st_mode  # asked once: another process may delete the file at any time
    except ValueError:  # a name that no file can have
        return
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise DataError(f"{path} is {kind}, where a file is expected; was the folder copied whole?")


def require_own(path: Path) -> None:
    """Raises DataError if the path, or its folder, is a link: the file behind it may belong to anybody."""
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
    """Yields (number, line) of a JSONL file from byte `start` on; nothing if it does not exist.

    Only the last line may be incomplete: it is being written, or its writer died.
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
    """Replaces a file atomically: a reader sees the old or the new content; a killed writer leaves the old.

    With `durable`, that also holds after a power failure, and the new content is safe once this returns.
    With `keep_as`, the old content moves to that path; if the process is killed in between, it is only there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            partial.unlink(missing_ok=True)  # left by a killed writer, or a link
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
            if error.errno != errno.EINVAL:  # some network file systems answer so for a folder
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

    A nearly full disk silently takes a part of a write, and the next write would be appended to that part.
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
    """Locks a file; returns False if another process holds it. Closing the file, or a crash, unlocks it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager: turns disk errors inside into OSErrors that name the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # without a number it has only a text
            error.filename = error.filename or str(path)
        raise
    except Exception as error:
        if (number := _disk_error(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _disk_error(error: BaseException) -> int | None:
    """Finds the error number of a full or failing disk in an error or its causes; None if there is none.

    Libraries in Rust put it into the text (`SafetensorError: … (os error 28)`); torch's writer raises another
    error on top of it.
    """
    if isinstance(error, OSError) and error.errno in DiskError.REMEDIES:
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    cause = error.__cause__ or error.__context__
    return None if cause is None else _disk_error(cause)


def step_folders(parent: Path) -> dict[int, Path]:
    """Finds every folder `step_N` below `parent`, by N, finished or not."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(parent) as entries:
        for entry in entries:
            if (step := step_number(entry.name)) is not None and entry.is_dir():
                found[step] = parent / entry.name
    return found


def step_number(name: str) -> int | None:
    """Reads N of a name `step_N`; None for any other name. Leading zeros are refused: no run writes them."""
    match = re.fullmatch(r"step_(0|[1-9][0-9]{0,14})", name, re.ASCII)
    return None if match is None else int(match[1])
