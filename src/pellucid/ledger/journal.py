"""The journal of one process: append-only JSONL, each line the change since the last one.

    {"stage":"trainer","step":3,"run":"demo","env":"reverse-text","counts":{"received":812,"trained":810,"masked":2}}

A line is written whole or not at all; `close` appends a line that says the process ended in good order,
so that a reader can tell "still running or killed" from "done".
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pellucid.errors import LedgerError
from pellucid.ledger.states import Flow, Stage, State


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    stage: Stage
    step: int = 0
    run: str = ""
    env: str = ""
    counts: dict[str, int] = {}
    closed: bool = False


class Journal:
    """Counts tokens in memory and appends them to the stage's file at `flush`."""

    def __init__(self, path: Path, stage: Stage) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise LedgerError(
                f"{path} is the ledger of an earlier run; use another output_dir, or clear this one"
            ) from None
        self._path = path
        self._stage = stage
        self._pending: dict[tuple[str, str], Counter[str]] = {}

    def count(self, run: str, env: str, what: State | Flow, tokens: int) -> None:
        if tokens:
            self._pending.setdefault((run, env), Counter())[what.value] += int(tokens)

    def flush(self, step: int) -> None:
        self._append(
            [
                LedgerEntry(self._stage, step, run, env, dict(counts))
                for (run, env), counts in self._pending.items()
            ]
        )
        self._pending.clear()

    def close(self, step: int) -> None:
        self.flush(step)
        self._append([LedgerEntry(self._stage, step, closed=True)])

    def _append(self, entries: list[LedgerEntry]) -> None:
        if entries:
            with self._path.open("ab", buffering=0) as file:
                file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))


def read_journal(path: Path) -> Iterator[LedgerEntry]:
    """The entries of a journal; a torn last line (the process was killed while writing) is left out."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield msgspec.json.decode(line, type=LedgerEntry)
        except msgspec.DecodeError as error:
            raise LedgerError(f"{path}:{number} is not a ledger entry: {error}") from error
