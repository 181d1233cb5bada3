"""The self-contained page: our script and style inlined, data as inert blocks, a policy that allows no more.

    <meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-…'; …">
    <script type="text/plain" id="chunk/7/0">eNqt…</script>

Nothing is ever loaded. A block is base64 of what the server would answer under the same name, deflated, so no
byte of a run is parsed as HTML. What every view needs stands first, then the scripts, then the steps: a
record is shown as soon as its own block has been read.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pellucid.viewer.access import Exports, Records
from pellucid.viewer.encode import EncodedStep, encode_step
from pellucid.viewer.frame import block, frame
from pellucid.viewer.head import deflate_json, make_head
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.spread import PAGE_BUDGET, Size, choose_spread
from pellucid.viewer.vocabulary import open_vocabulary

KEEP_BUDGETS = 4
"""Encoded steps stay in memory up to so many times a page's budget; beyond it they are made again."""


def write_page(
    exports: Exports,
    output: Path,
    *,
    tokenizer: str | None = None,
    budget: Size = PAGE_BUDGET,
    start_record: int = 0,
    max_mismatch: float | None = None,
) -> int:
    """Writes the page, whole or not at all; returns its length in bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            _write(file, exports, tokenizer, budget, start_record, max_mismatch)
        num_bytes = partial.stat().st_size
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return num_bytes


def page_text(exports: Exports, *, tokenizer: str | None = None, budget: Size = PAGE_BUDGET) -> str:
    from io import StringIO

    file = StringIO()
    _write(file, exports, tokenizer, budget, 0, None)
    return file.getvalue()


def _write(
    file: TextIO,
    exports: Exports,
    tokenizer: str | None,
    budget: Size,
    start_record: int,
    max_mismatch: float | None,
) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as steps:
        head, texts = _write_steps(steps, exports, tokenizer, budget, start_record, max_mismatch)
        page = frame()
        meta = f'<meta http-equiv="Content-Security-Policy" content="{page.policy}">\n'
        file.write(page.opening.replace("<title>", f"{meta}<title>", 1))
        file.write(block("run", deflate_json(head)))
        file.write(block("texts", deflate_json(texts)))
        file.write(page.scripts)
        steps.seek(0)
        shutil.copyfileobj(steps, file)
        file.write(page.closing)


def _write_steps(
    file: TextIO,
    exports: Exports,
    tokenizer: str | None,
    budget: Size,
    start_record: int,
    max_mismatch: float | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks of the steps; returns what stands before them: the head, and the texts of their tokens."""
    run = RunFolder.around(exports.path)
    vocabulary, vocabulary_note = open_vocabulary(tokenizer, run.model_folder())
    roles = RoleFinder(vocabulary)
    sizes, summaries, held, kept = {}, [], [], 0
    seen = np.empty(0, np.int64)
    encoded: dict[int, EncodedStep] = {}
    for step in exports.steps():
        made = encode_step(step, exports, exports.records(step), roles)
        summaries.append(made.summary)
        point = made.summary["points"]["all"]
        sizes[step] = Size(point["records"], point["tokens"])
        if sum(size.tokens for size in sizes.values()) <= KEEP_BUDGETS * budget.tokens:
            encoded[step] = made
    spread = choose_spread(sizes, budget)
    for step in sorted(spread.steps):
        if step in encoded and spread.tokens_per_step is None:
            made = encoded[step]
        else:
            records = _first_tokens(exports.records(step), spread.tokens_per_step)
            made = encode_step(step, exports, records, roles)
        held.append(step)
        kept += made.summary["points"]["all"]["records"]
        seen = np.union1d(seen, made.token_ids)
        file.write(block(f"step/{step}", made.index))
        file.write(block(f"rows/{step}", made.rows))
        for record, lead in made.leads.items():
            file.write(block(f"lead/{step}/{record}", lead))
        for index, chunk in enumerate(made.chunks):
            file.write(block(f"chunk/{step}/{index}", chunk))
    notes = [note for note in (spread.note(kept), vocabulary_note, *exports.warnings) if note]
    head = make_head(
        exports.path,
        run,
        summaries,
        held=held,
        notes=notes,
        start_record=start_record,
        max_mismatch=max_mismatch,
    )
    return head, vocabulary.texts(seen.tolist())


def _first_tokens(records: Records, limit: int | None) -> Records:
    """Whole records, at least one, up to so many tokens."""
    if limit is None:
        return records
    fitting = int(np.searchsorted(np.cumsum(records.lengths), limit, side="right"))
    return records[: max(1, fitting)]
