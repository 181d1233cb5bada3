"""The self-contained page: our script and style inlined, data as inert blocks, a policy that allows no more.

    <meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-…'; …">
    <script type="text/plain" id="chunk/7/0">eNqt…</script>

Nothing is ever loaded. A block is base64 of what the server would answer under the same name, deflated, so no
byte of a run is parsed as HTML. What every view needs stands first, and what the page opens with; then the
scripts, then the steps: a record is shown as soon as its own block has been read.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pellucid.errors import DataError, PellucidError
from pellucid.viewer.access import Exports, Records
from pellucid.viewer.encode import EncodedStep, encode_step
from pellucid.viewer.frame import block, frame
from pellucid.viewer.head import deflate_json, make_head, make_slices
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.spread import PAGE_BUDGET, Size, choose_spread
from pellucid.viewer.vocabulary import Vocabulary, open_vocabulary

KEEP_BUDGETS = 4
"""Encoded steps stay in memory up to so many times a page's budget; beyond it they are made again."""


@dataclass(frozen=True, slots=True)
class WrittenPage:
    num_records: int
    num_records_in_all: int
    num_steps: int
    num_steps_in_all: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.num_records == self.num_records_in_all

    def __str__(self) -> str:
        """`3,968 of 38,400 records from 31 of 300 steps, 2.1 MB`."""
        records = f"{self.num_records:,} of {self.num_records_in_all:,} records"
        steps = f"{self.num_steps:,} of {self.num_steps_in_all:,} steps"
        return f"{records} from {steps}, {self.num_bytes / 1e6:.1f} MB"


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
    run = RunFolder.around(exports.path)
    texts = open_vocabulary(tokenizer, run.model_folder(), trust_remote_code=trust_remote_code)
    contents = _Contents(exports, run, texts, budget, start_record, max_mismatch)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)  # a link that somebody put there would be followed
    try:
        with partial.open("w", encoding="utf-8") as file:
            steps = _write(file, contents)
        num_records = sum(size.records for size in steps.sizes.values())
        num_steps = len(steps.head["held"])
        page = WrittenPage(
            steps.num_records, num_records, num_steps, len(steps.sizes), partial.stat().st_size
        )
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return page


def page_text(exports: Exports, *, tokenizer: str | None = None, budget: Size = PAGE_BUDGET) -> str:
    file = StringIO()
    run = RunFolder.around(exports.path)
    _write(file, _Contents(exports, run, open_vocabulary(tokenizer, run.model_folder()), budget))
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class _Contents:
    """The sources of a page's content, and its limits."""

    exports: Exports
    run: RunFolder
    texts: tuple[Vocabulary, str | None]
    budget: Size | None
    start_record: int = 0
    max_mismatch: float | None = None


def _write(file: TextIO, contents: _Contents) -> "_Steps":
    with tempfile.TemporaryFile("w+", encoding="utf-8") as blocks:
        steps = _write_steps(blocks, contents)
        page = frame()
        meta = f'<meta http-equiv="Content-Security-Policy" content="{page.policy}">\n'
        file.write(page.opening.replace("<title>", f"{meta}<title>", 1))
        file.write(block("run", deflate_json(steps.head)))
        file.write(block("texts", deflate_json(steps.texts)))
        file.writelines(steps.ahead)
        file.write(page.scripts)
        file.write(block("slices", deflate_json(steps.slices)))
        blocks.seek(0)
        shutil.copyfileobj(blocks, file)
        file.write(page.closing)
    return steps


@dataclass(frozen=True, slots=True)
class _Steps:
    """The parts of a page before its steps, and the sizes of all steps."""

    ahead: list[str]
    """Blocks of the last step, which a page opens with: its index, and the lead of `start_record`."""

    head: dict[str, Any]
    texts: dict[str, Any]
    slices: dict[str, Any]
    num_records: int
    sizes: dict[int, Size]
    """Sizes of all steps, by step."""


def _write_steps(file: TextIO, contents: _Contents) -> _Steps:
    exports, budget = contents.exports, contents.budget
    vocabulary, vocabulary_note = contents.texts
    roles = RoleFinder(vocabulary)
    sizes: dict[int, Size] = {}
    summaries, held, kept = [], [], 0
    seen = np.empty(0, np.int64)
    encoded: dict[int, EncodedStep] = {}
    ahead: list[str] = []
    others: list[str] = []

    def put(step: int, made: EncodedStep) -> None:
        nonlocal ahead, others, kept, seen
        held.append(step)
        kept += made.summary["points"]["all"]["records"]
        seen = np.union1d(seen, made.token_ids)
        file.writelines([*ahead, *others])  # of the step before, which is not the last one
        leads = {record: block(f"lead/{step}/{record}", lead) for record, lead in made.leads.items()}
        start = contents.start_record
        first = [leads.pop(start)] if start in leads else []
        chunks = [block(f"chunk/{step}/{index}", chunk) for index, chunk in enumerate(made.chunks)]
        ahead = [block(f"step/{step}", made.index), *first]
        others = [block(f"rows/{step}", made.rows), *leads.values(), *chunks]

    for step in exports.steps():
        try:
            made = encode_step(step, exports, exports.records(step), roles)
        except (PellucidError, OSError) as error:
            exports.warn(step, error)
            continue
        summaries.append(made.summary)
        point = made.summary["points"]["all"]
        sizes[step] = Size(point["records"], point["tokens"])
        if budget is None:
            put(step, made)
        elif sum(size.tokens for size in sizes.values()) <= KEEP_BUDGETS * budget.tokens:
            encoded[step] = made
    if not sizes:
        raise DataError(f"{exports.path} has no step that can be shown; {'; '.join(exports.warnings)}")
    spread = choose_spread(sizes, budget or PAGE_BUDGET)
    for step in () if budget is None else sorted(spread.steps):
        if step in encoded and spread.tokens_per_step is None:
            made = encoded[step]
        else:
            records = _first_tokens(exports.records(step), spread.tokens_per_step)
            made = encode_step(step, exports, records, roles)
        put(step, made)
    notes = [note for note in (spread.note(kept), vocabulary_note, *exports.warnings) if note]
    head = make_head(
        exports.path,
        contents.run,
        summaries,
        held=held,
        notes=notes,
        start_record=contents.start_record,
        max_mismatch=contents.max_mismatch,
    )
    file.writelines(others)
    return _Steps(ahead, head, vocabulary.texts(seen.tolist()), make_slices(summaries), kept, sizes)


def _first_tokens(records: Records, limit: int | None) -> Records:
    """Returns the first records up to `limit` tokens: whole ones, and at least one."""
    if limit is None:
        return records
    fitting = int(np.searchsorted(np.cumsum(records.lengths), limit, side="right"))
    return records[: max(1, fitting)]
