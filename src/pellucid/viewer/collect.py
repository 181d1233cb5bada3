"""Everything a page holds, in two passes over the exports: measure all, then pack what is shown."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ModelError
from pellucid.export.reader import read_records
from pellucid.viewer.colour import NUM_CLASSES, scale_limits
from pellucid.viewer.records import pack_record, row_of, trainable_kl
from pellucid.viewer.roles import segments_of
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.spread import PAGE_BUDGET, Size, choose_spread, measure
from pellucid.viewer.vocabulary import Vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageData:
    head: dict[str, Any]
    """What the page needs at once: totals, notes, the table's columns, texts, curve, ledger."""

    records: list[str]
    """Each record on its own, compressed; inflated when it is opened."""


def collect(path: Path, run: RunFolder, tokenizer: str | None, budget: Size = PAGE_BUDGET) -> PageData:
    torn: dict[str, None] = {}
    spread = choose_spread(measure(read_records(path, report=torn.setdefault)), budget)
    vocabulary, vocabulary_note = _vocabulary(run, tokenizer)
    rows, records, kl = [], [], []
    for index, record in enumerate(read_records(path, spread.steps, report=torn.setdefault)):
        if index % spread.stride:
            continue
        segments = segments_of(record, [vocabulary.text(token_id) for token_id in record["token_ids"]])
        rows.append(row_of(record))
        records.append(pack_record(record, segments))
        kl.append(trainable_kl(record))
    for message in torn:
        log.warning(message)
    low, high = scale_limits(np.concatenate(kl))
    total = spread.total
    head = {
        "name": (run.folder or path).name,
        "totals": {"steps": len(spread.sizes), "records": total.records, "tokens": total.tokens},
        "notes": [note for note in (spread.note(len(records)), vocabulary_note, *torn) if note],
        "rows": {name: [row[name] for row in rows] for name in rows[0]},
        "scale": {"low": low, "high": high, "classes": NUM_CLASSES},
        "vocabulary": vocabulary.seen(),
        "reward": run.reward_curve(),
        "ledger": run.ledger(),
    }
    return PageData(head, records)


def _vocabulary(run: RunFolder, tokenizer: str | None) -> tuple[Vocabulary, str | None]:
    """The texts of the ids, and a note where there are none. A tokenizer that was asked for must load."""
    if tokenizer is not None:
        return Vocabulary(load_tokenizer(tokenizer)), None
    remedy = "pass --tokenizer with a folder or hub name to see text"
    folder = run.model_folder()
    if folder is None:
        return Vocabulary(), f"Tokens are shown as ids: no tokenizer was given and none was found; {remedy}."
    try:
        return Vocabulary(load_tokenizer(folder)), None
    except ModelError as error:
        return Vocabulary(), f"Tokens are shown as ids: {error}; {remedy}."
