"""Why a process ended, from the end of its log."""

import os
from itertools import takewhile
from pathlib import Path

NUM_TAIL_BYTES = 64 * 1024
NUM_TAIL_LINES = 12
TRACEBACK = "Traceback (most recent call last)"


def read_cause(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_TAIL_BYTES))
        return find_cause(file.read().decode(errors="replace"))


def find_cause(log: str) -> list[str]:
    """The last `error: …` with its indented lines, else the last traceback's end, else the last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    if (start := _last(lines, "error: ")) is not None:
        return [lines[start], *_indented(lines[start + 1 :])]
    if (start := _last(lines, TRACEBACK)) is not None:
        return _traceback_end(lines[start:])
    return lines[-NUM_TAIL_LINES:]


def _traceback_end(lines: list[str]) -> list[str]:
    """The innermost frames, the exception, and the first lines after it: a message may have several."""
    exception = 1 + len(_indented(lines[1:]))
    half = NUM_TAIL_LINES // 2
    return lines[max(0, exception - half) : exception + half]


def _last(lines: list[str], prefix: str) -> int | None:
    found = [index for index, line in enumerate(lines) if line.startswith(prefix)]
    return found[-1] if found else None


def _indented(lines: list[str]) -> list[str]:
    return list(takewhile(lambda line: line.startswith(" "), lines))
