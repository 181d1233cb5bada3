"""The journal of one process: append-only JSONL, each line the change since the last one.

    {"stage":"trainer","step":3,"run":"demo","env":"reverse-text","counts":{"received":812,"trained":810,"masked":2}}

A line is written whole or not at all; `close` appends a line that says the process ended in good order,
so that a reader can tell "still running or killed" from "done".
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from pellucid.data.files import append_whole, replace_file
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

    def __init__(self, path: Path, stage: Stage, *, resume: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=resume)
        except FileExistsError:
            raise LedgerError(
                f"{path} is the ledger of an earlier run; use another output_dir, or clear or resume this one"
            ) from None
        self._path = path
        self._stage = stage
        self._pending: dict[tuple[str, str], Counter[str]] = {}
        if any(entry.closed for entry in deque(read_journal(path), maxlen=1)):
            append_entries(path, [LedgerEntry(stage)])  # open again

    def count(self, run: str, env: str, what: State | Flow, tokens: int) -> None:
        if tokens:
            self._pending.setdefault((run, env), Counter())[what.value] += int(tokens)

    @property
    def num_bytes(self) -> int:
        """What is written so far: cut back to this length, the journal tells what it tells now."""
        return self._path.stat().st_size

    def totals(self) -> list[LedgerEntry]:
        """What is written so far, one entry per run and environment."""
        return sum_entries(read_journal(self._path))

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
        append_entries(self._path, entries)


def journals_of(ledger_dir: Path, stage: Stage) -> list[Path]:
    """`inference.jsonl`, `inference_1.jsonl`, …: one per process of the stage; the first even if missing."""
    first = ledger_dir / f"{stage.value}.jsonl"
    return [first, *sorted(ledger_dir.glob(f"{stage.value}_*.jsonl"))]


def sum_entries(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """One entry per stage, run and environment, with the last step of any."""
    totals: dict[tuple[Stage, str, str], Counter[str]] = {}
    last_step = 0
    for entry in entries:
        last_step = max(last_step, entry.step)
        if entry.counts:
            totals.setdefault((entry.stage, entry.run, entry.env), Counter()).update(entry.counts)
    return [
        LedgerEntry(stage, last_step, run, env, dict(counts))
        for (stage, run, env), counts in sorted(totals.items())
    ]


def append_entries(path: Path, entries: Sequence[LedgerEntry]) -> None:
    if entries:
        with path.open("ab", buffering=0) as file:
            append_whole(file, _encode(entries))


def replace_entries(path: Path, entries: Sequence[LedgerEntry]) -> None:
    replace_file(path, _encode(entries))


def _encode(entries: Sequence[LedgerEntry]) -> bytes:
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)


def read_journal(path: Path, num_bytes: int | None = None) -> Iterator[LedgerEntry]:
    """The entries of a journal, or of its first `num_bytes`.

    A torn last line (the process was killed while writing) is left out.
    """
    if not path.exists():
        return
    lines = path.read_bytes()[:num_bytes].split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield msgspec.json.decode(line, type=LedgerEntry)
        except msgspec.DecodeError as error:
            raise LedgerError(f"{path}:{number} is not a ledger entry: {error}") from error
