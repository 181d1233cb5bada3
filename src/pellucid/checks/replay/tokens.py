"""One record, token by token: what was recorded, and what was recomputed beside it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from pellucid.checks.replay.comparison import record_name
from pellucid.checks.replay.losses import MASKS
from pellucid.export.batch import ColumnBatch, Values, is_per_token

_SHOWN = {
    "inference_logprobs": "log μ",
    "trainer_logprobs": "log π",
    "advantages": "A",
    "importance_ratio": "r",
    "prob_delta": "π − μ",
    "is_masked": "masked",
    "token_loss": "loss",
}


def tokens_table(step: ColumnBatch, recomputed: Mapping[str, Values], row: int) -> Table:
    """Recorded values; a recomputed one is put beside it where the two differ in the digits shown."""
    table = Table(box=None, header_style="bold", title_justify="left", padding=(0, 1))
    table.title = record_name(step, row)
    for title in ("token", "id", "trainable", *_SHOWN.values()):
        table.add_column(title, justify="right")
    start, stop = int(step.offsets[row]), int(step.offsets[row + 1])
    for token in range(start, stop):
        cells = [str(token - start), str(step.columns["token_ids"][token])]
        cells.append("yes" if step.columns["loss_mask"][token] else "")
        for name in _SHOWN:
            own = _cell(name, step.columns[name][token]) if name in step.columns else "-"
            other = _cell(name, recomputed[name][token]) if name in recomputed else own
            cells.append(own if own == other else f"{own} ≠ {other}")
        table.add_row(*cells, style=None if step.columns["loss_mask"][token] else "dim")
    return table


def tokens_as_dict(step: ColumnBatch, recomputed: Mapping[str, Values], row: int) -> dict[str, Any]:
    start, stop = int(step.offsets[row]), int(step.offsets[row + 1])
    recorded = {
        name: values[start:stop] if is_per_token(name, values, step) else values[row]
        for name, values in step.columns.items()
    }
    return {
        "recorded": recorded,
        "recomputed": {name: values[start:stop] for name, values in recomputed.items()},
    }


def _cell(name: str, value: Any) -> str:
    if np.isnan(value):
        return "-"
    if name in MASKS:
        return "yes" if value == 1 else ""
    return f"{value:.4f}"
