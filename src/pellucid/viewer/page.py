"""The self-contained page: our script and style inlined, data as inert blocks, a policy that allows no more.

    <meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-…'; …">
    <script type="text/plain" id="chunk/7/0">eNqt…</script>

Only the scripts and the style whose hashes are in the policy run or apply; nothing is ever loaded. A block is
base64 of what the server would answer under the same name, so no byte of a run is parsed as HTML.
"""

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import TextIO

import numpy as np

from pellucid.viewer.access import Exports, Records
from pellucid.viewer.bundle import asset, bundle
from pellucid.viewer.encode import EncodedStep, encode_step
from pellucid.viewer.head import deflate_json, make_head
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.spread import PAGE_BUDGET, Size, choose_spread
from pellucid.viewer.vocabulary import open_vocabulary

SCRIPTS = ("vendor/uPlot.iife.min.js",)
KEEP_BUDGETS = 4
"""Encoded steps stay in memory up to so many times a page's budget; beyond it they are made again."""

STYLES = ("vendor/uPlot.min.css", "page.css")


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
    before, after = frame()
    file.write(before)
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
        file.write(_block(f"step/{step}", made.index))
        file.write(_block(f"rows/{step}", made.rows))
        for index, chunk in enumerate(made.chunks):
            file.write(_block(f"chunk/{step}/{index}", chunk))
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
    file.write(_block("texts", deflate_json(vocabulary.texts(seen.tolist()))))
    file.write(_block("run", deflate_json(head)))
    file.write(after)


def _first_tokens(records: Records, limit: int | None) -> Records:
    """Whole records, at least one, up to so many tokens."""
    if limit is None:
        return records
    fitting = int(np.searchsorted(np.cumsum(records.lengths), limit, side="right"))
    return records[: max(1, fitting)]


def frame() -> tuple[str, str]:
    """What stands before and after the data of a page."""
    scripts = [asset(name) for name in SCRIPTS] + [bundle()]
    style = "\n".join(asset(name) for name in STYLES)
    policy = content_policy(scripts, style)
    html = asset("page.html")
    html = re.sub(r"<link [^>]*>\n?|<script [^>]*></script>\n?", "", html)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    html = html.replace("</head>", f"{meta}</head>")
    before, after = html.split("</body>")
    closing = "".join(f"<script>{script}</script>\n" for script in scripts)
    return before, f"{closing}</body>{after}"


def content_policy(scripts: list[str], style: str) -> str:
    allowed = " ".join(f"'{_hash(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _block(name: str, data: bytes) -> str:
    return f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode("ascii")}</script>\n'


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
