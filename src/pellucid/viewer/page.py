"""The self-contained page: our script and style inlined, data as inert blocks, a policy that allows no more.

    <meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-…'; …">
    <script type="text/plain" id="chunk/7/0">eNqt…</script>

Nothing is ever loaded. A block is base64 of what the server would answer under the same name, deflated, so no
byte of a run is parsed as HTML. What every view needs stands first, and what the page opens with; then the
scripts, then the steps: a record is shown as soon as its own block has been read.

A page that cannot hold all records has whole steps, evenly from the first to the last:

    300 steps of 128 records, at most 4,000 -> 31 steps: 0, 10, 20, …, 299

Only where the first and the last step alone are too many are they cut short, after as many tokens as fit.
"""

import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pellucid.errors import DataError, PellucidError
from pellucid.viewer.access import Exports, Records, RunFolder
from pellucid.viewer.encode import EncodedStep, encode_step
from pellucid.viewer.frame import block, frame
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.rollouts import SavedRollouts
from pellucid.viewer.runs import RunList, evenly
from pellucid.viewer.summary import as_json, make_head, make_slices
from pellucid.viewer.timeline import as_page
from pellucid.viewer.vocabulary import open_vocabulary

ROLLOUT_BYTES = 6_000_000
"""Saved rollouts in a page, as JSON before it is deflated; newer steps first. The texts of one step take half
of it at most."""

CURVE_BYTES = 60_000_000
"""Curves of several runs in a page, as JSON before it is deflated to about a quarter; newer runs first."""

MAX_TOLD_RUNS = 12
"""Runs, newest first, whose texts are in a page of several: as many as are laid over each other."""

MAX_TOLD_EXAMPLES = 500
"""Examples that several runs tried and whose texts are in a page, as far as `ROLLOUT_BYTES` allows."""

KEEP_BUDGETS = 4
"""Encoded steps stay in memory up to so many times a page's budget; beyond it they are made again."""


@dataclass(frozen=True, slots=True)
class Size:
    records: int = 0
    tokens: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.records + other.records, self.tokens + other.tokens)

    def over(self, budget: "Size") -> float:
        """How many times too large; at most 1 where it fits."""
        return max(self.records / budget.records, self.tokens / budget.tokens)


PAGE_BUDGET = Size(records=40_000, tokens=1_000_000)


@dataclass(frozen=True, slots=True)
class Spread:
    sizes: Mapping[int, Size]
    """All there is, by step."""

    budget: Size
    steps: frozenset[int]
    tokens_per_step: int | None
    """Where even the fewest steps are too many: of each, the records up to so many tokens."""

    @property
    def total(self) -> Size:
        return sum(self.sizes.values(), Size())

    def note(self, num_kept: int) -> str | None:
        """Says in a sentence what the page leaves out; None if it leaves out nothing."""
        if num_kept == self.total.records:
            return None
        which = "the first, the last and an even spread between"
        if self.tokens_per_step is not None:
            which += f", the first {self.tokens_per_step:,} tokens or so of each"
        return (
            f"This page shows {num_kept:,} of {self.total.records:,} records, "
            f"from {len(self.steps):,} of {len(self.sizes):,} steps: {which}. "
            f"A page is kept to about {self.budget.records:,} records and {self.budget.tokens:,} tokens; "
            "`--all-records` puts all of them into it, `pellucid view` without `-o` serves them."
        )


def choose_spread(sizes: Mapping[int, Size], budget: Size = PAGE_BUDGET) -> Spread:
    steps = sorted(sizes)
    excess = sum(sizes.values(), Size()).over(budget)
    count = len(steps) if excess <= 1 else max(2, ceil(len(steps) / excess))
    while True:
        chosen = evenly(steps, count)
        excess = sum((sizes[step] for step in chosen), Size()).over(budget)
        if excess <= 1 or count <= 2:
            return Spread(
                sizes, budget, frozenset(chosen), None if excess <= 1 else budget.tokens // len(chosen)
            )
        count -= 1


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """Counts of a page, and of all that it could have held."""

    num_records: int
    num_steps: int
    sizes: Mapping[int, Size]
    """Sizes of all steps, by step."""

    num_bytes: int
    num_rollouts: int = 0

    @property
    def is_whole(self) -> bool:
        return self.num_records == sum(size.records for size in self.sizes.values())

    def __str__(self) -> str:
        """`3,968 of 38,400 records from 31 of 300 steps, 2.1 MB`."""
        if not self.sizes:
            return f"{self.num_rollouts:,} rollouts and no tokens, {self.num_bytes / 1e6:.1f} MB"
        records = f"{self.num_records:,} of {sum(size.records for size in self.sizes.values()):,} records"
        return (
            f"{records} from {self.num_steps:,} of {len(self.sizes):,} steps, {self.num_bytes / 1e6:.1f} MB"
        )


def write_page(
    exports: Exports,
    output: Path,
    *,
    tokenizer: str | None = None,
    budget: Size | None = PAGE_BUDGET,
    start_record: int = 0,
    max_mismatch: float | None = None,
    trust_remote_code: bool = False,
) -> WrittenPage:
    """Writes the page, whole or not at all. `budget`: how much it holds at most; None: everything."""
    contents = _Contents(exports, tokenizer, budget, start_record, max_mismatch, trust_remote_code)
    num_bytes = _write_whole(output, contents.write)
    return WrittenPage(
        contents.num_records, len(contents.held), contents.sizes, num_bytes, contents.num_rollouts
    )


def _write_whole(output: Path, write: Callable[[TextIO], object]) -> int:
    """Writes a page, whole or not at all; returns its size in bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)  # a link that somebody put there would be followed
    try:
        with partial.open("w", encoding="utf-8") as file:
            write(file)
        num_bytes = partial.stat().st_size
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return num_bytes


def write_runs_page(runs: RunList, output: Path) -> str:
    """Writes a page of several runs: list, settings, curves, and the examples that several of them tried.

    Returns what it holds, in words.
    """
    listed = runs.runs()
    notes, held = [], list[int]()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as blocks:
        room = CURVE_BYTES
        for run in listed:
            data = as_json(runs.curves(run.number))
            room -= len(data)
            if room < 0 and held:
                break
            held.append(run.number)
            blocks.write(block(f"curves/{run.number}", zlib.compress(data, 6)))
        num_examples, num_shared = _write_examples(blocks, runs, held)
        if len(held) < len(listed):
            notes.append(
                f"This page has the curves of the {len(held)} newest of {len(listed)} runs; name fewer, or "
                "serve them: `pellucid view` without `-o`."
            )
        if num_examples < num_shared or len(held) > MAX_TOLD_RUNS:
            notes.append(
                f"This page has the texts of {num_examples:,} of {num_shared:,} examples that several of the "
                f"{min(len(held), MAX_TOLD_RUNS)} newest runs tried; `pellucid view` without `-o` serves all."
            )
        head = {**runs.head(live=False, notes=notes), "with_curves": held}

        def write(file: TextIO) -> None:
            _write_opening(file)
            file.write(_json_block("run", head))
            file.write(_json_block("texts", {"ids": [], "texts": [], "special": []}))
            file.write(frame().scripts)
            blocks.seek(0)
            shutil.copyfileobj(blocks, file)
            file.write(frame().closing)

        num_bytes = _write_whole(output, write)
    return f"{len(listed):,} runs, {num_examples:,} shared examples, {num_bytes / 1e6:.1f} MB"


def _write_examples(file: TextIO, runs: RunList, numbers: Sequence[int]) -> tuple[int, int]:
    """Writes the attempts at examples that several runs tried, those of most runs first, as far as they fit.

    Returns the number of examples written, and of all.
    """
    indexes = {number: runs.examples(number) for number in numbers[:MAX_TOLD_RUNS]}
    tried = Counter((env, example) for index in indexes.values() for env, example, _ in index)
    shared = [key for key, number in tried.most_common() if number > 1]
    candidates = set(shared[:MAX_TOLD_EXAMPLES])
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    for number, index in indexes.items():
        steps = {
            step for env, example, places in index if (env, example) in candidates for step, *_ in places
        }
        for step in sorted(steps):
            found = [row for row in runs.attempts(number, step) if _example_of(row) in candidates]
            rows[number, step] = found
            for row in found:
                sizes[_example_of(row)] += len(as_json(row))
    reached = list(accumulate(sizes[key] for key in shared[:MAX_TOLD_EXAMPLES]))
    kept = set(shared[: max(1, sum(total <= ROLLOUT_BYTES for total in reached))])
    for number in numbers:
        own = [each for each in indexes.get(number, ()) if (each[0], each[1]) in kept]
        file.write(_json_block(f"examples/{number}", own))
    for (number, step), found in rows.items():
        file.write(
            _json_block(f"attempts/{number}/{step}", [row for row in found if _example_of(row) in kept])
        )
    return len(kept), len(shared)


def _example_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["env"], row["example"]


def _write_opening(file: TextIO) -> None:
    page = frame()
    meta = f'<meta http-equiv="Content-Security-Policy" content="{page.policy}">\n'
    file.write(page.opening.replace("<title>", f"{meta}<title>", 1))


def page_text(exports: Exports, *, tokenizer: str | None = None) -> str:
    file = StringIO()
    _Contents(exports, tokenizer, PAGE_BUDGET).write(file)
    return file.getvalue()


@dataclass
class _Contents:
    """One page in the making: where its content comes from, its limits, and what it holds so far."""

    exports: Exports
    tokenizer: str | None
    budget: Size | None
    start_record: int = 0
    max_mismatch: float | None = None
    trust_remote_code: bool = False

    sizes: dict[int, Size] = field(default_factory=dict)
    """Sizes of all steps, by step."""

    held: list[int] = field(default_factory=list)
    num_records: int = 0
    num_rollouts: int = 0
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Distinct token ids of the steps held."""

    ahead: list[str] = field(default_factory=list)
    """Blocks of the last step, which a page opens with: its index, and the lead of `start_record`."""

    others: list[str] = field(default_factory=list)
    """The rest of the last step's blocks."""

    def write(self, file: TextIO) -> None:
        run = RunFolder.of(self.exports)
        vocabulary, note = open_vocabulary(
            self.tokenizer, run.model_folder(), trust_remote_code=self.trust_remote_code
        )
        with tempfile.TemporaryFile("w+", encoding="utf-8") as blocks:
            summaries, left_out = self._write_steps(blocks, RoleFinder(vocabulary))
            saved = run.rollouts()
            rollouts, unsaved = _write_rollouts(blocks, saved)
            self.num_rollouts = sum(sum(outcomes.values()) for outcomes in rollouts.values())
            metrics = run.metrics()
            head = make_head(
                self.exports.path,
                run,
                summaries,
                held=self.held,
                notes=[
                    str(text)
                    for text in (left_out, unsaved, self.held and note, *self.exports.warnings)
                    if text
                ],
                start_record=self.start_record,
                max_mismatch=self.max_mismatch,
                metrics=metrics,
                rollouts=rollouts,
                lacks=saved.lacks(),
            )
            page = frame()
            _write_opening(file)
            file.write(_json_block("run", head))
            file.write(_json_block("texts", vocabulary.texts(self.token_ids.tolist())))
            file.writelines(self.ahead)
            file.write(page.scripts)
            file.write(_json_block("metrics", metrics))
            file.write(_json_block("timeline", as_page(run.timeline())))
            file.write(_json_block("slices", make_slices(summaries)))
            blocks.seek(0)
            shutil.copyfileobj(blocks, file)
            file.write(page.closing)

    def _write_steps(self, file: TextIO, roles: RoleFinder) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the summaries of all steps, and a sentence about what the page leaves out."""
        exports, budget = self.exports, self.budget
        summaries = []
        encoded: dict[int, EncodedStep] = {}
        for step in exports.steps():
            try:
                made = encode_step(step, exports, exports.records(step), roles)
            except (PellucidError, OSError) as error:
                exports.warn(step, error)
                continue
            summaries.append(made.summary)
            point = made.summary["points"]["all"]
            self.sizes[step] = Size(point["records"], point["tokens"])
            if budget is None:
                self._put(file, step, made)
            elif sum(size.tokens for size in self.sizes.values()) <= KEEP_BUDGETS * budget.tokens:
                encoded[step] = made
        if not self.sizes and not exports.lacks_tokens():
            raise DataError(f"{exports.path} has no step that can be shown; {'; '.join(exports.warnings)}")
        if not self.sizes:
            return summaries, None
        spread = choose_spread(self.sizes, budget or PAGE_BUDGET)
        for step in () if budget is None else sorted(spread.steps):
            if step in encoded and spread.tokens_per_step is None:
                made = encoded[step]
            else:
                records = _first_tokens(exports.records(step), spread.tokens_per_step)
                made = encode_step(step, exports, records, roles)
            self._put(file, step, made)
        file.writelines(self.others)
        return summaries, spread.note(self.num_records)

    def _put(self, file: TextIO, step: int, made: EncodedStep) -> None:
        """Adds a step; the blocks of the last one stay in memory, since some of them stand first."""
        self.held.append(step)
        self.num_records += made.summary["points"]["all"]["records"]
        self.token_ids = np.union1d(self.token_ids, made.token_ids)
        file.writelines([*self.ahead, *self.others])  # of the step before, which is not the last one
        leads = {record: block(f"lead/{step}/{record}", lead) for record, lead in made.leads.items()}
        first = [leads.pop(self.start_record)] if self.start_record in leads else []
        chunks = [block(f"chunk/{step}/{index}", chunk) for index, chunk in enumerate(made.chunks)]
        self.ahead = [block(f"step/{step}", made.index), *first]
        self.others = [block(f"rows/{step}", made.rows), *leads.values(), *chunks]


def _write_rollouts(file: TextIO, saved: SavedRollouts) -> tuple[dict[str, dict[str, int]], str | None]:
    """Writes the saved rollouts that fit; returns their numbers, and a sentence about what is left out."""
    counts, room = saved.counts(), ROLLOUT_BYTES
    held: dict[str, dict[str, int]] = {}
    for step in sorted(map(int, counts), reverse=True):
        data = as_json(saved.rows(step, max_text=ROLLOUT_BYTES // 2))
        room -= len(data)
        if room < 0 and held:
            break
        held[str(step)] = counts[str(step)]
        file.write(block(f"rollouts/{step}", zlib.compress(data, 6)))
    if len(held) == len(counts):
        return held, None
    return held, (
        f"This page has the saved rollouts of the last {len(held):,} of {len(counts):,} steps; "
        "`pellucid view` without `-o` serves all of them."
    )


def _json_block(name: str, value: Any) -> str:
    return block(name, zlib.compress(as_json(value), 6))


def _first_tokens(records: Records, limit: int | None) -> Records:
    """Returns the first records up to `limit` tokens: whole ones, and at least one."""
    if limit is None:
        return records
    fitting = int(np.searchsorted(np.cumsum(records.lengths), limit, side="right"))
    return records[: max(1, fitting)]
