"""Folders that were damaged, or made to do harm: what the tests that give them to commands have in common."""

import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANY = 1 << 30
MAX_MEMORY_BYTES = 200 << 20
MAX_S = 20


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes every line of a JSONL file."""
    changed = lines(path)
    for entry in changed:
        change(entry)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in changed))


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def added(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes() + content)


def removed(name: str) -> Callable[[Path], object]:
    def remove(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    return remove


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else under the name of a file or folder."""

    def put(run: Path) -> None:
        removed(name)(run)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        make(run / name)

    return put


def linked_away(pattern: str) -> Callable[[Path], object]:
    """Links in the place of what lies outside of the folder now."""

    def link(run: Path) -> None:
        (run.parent / "outside").mkdir()
        for number, path in enumerate(sorted(run.glob(pattern))):
            target = run.parent / "outside" / f"{number}"
            path.rename(target)
            path.symlink_to(target)

    return link


def outside(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (run.parent / "outside").rglob("*") if path.is_file()}


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MANY)


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has to be short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


@contextmanager
def bounded() -> Iterator[None]:
    """Time and memory."""

    def ring(*_: object) -> None:
        raise AssertionError(f"still at it after {MAX_S} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MAX_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MAX_MEMORY_BYTES, f"{grown:,} bytes more"
