"""Whether the model can train on the samples of a batch.

- they are text: the model's forward has no way in for pixels or sound, and would train their places as words
- with router replay every token has experts, and they are the model's
"""

from typing import NoReturn

import numpy as np

from pellucid.data import TokenTable
from pellucid.data.rows import ValueRows
from pellucid.errors import DataError
from pellucid.model import RouterShape

_COLUMN = "routed_experts"
_OTHER_MODEL = "the engine served another model than the trainer's; start both with the same model.name"


def check_text(table: TokenTable) -> None:
    """Raises DataError with the first sample that is not text alone."""
    for column, what in (("mm_tensors", "multimodal tensors"), ("mm_token_types", "multimodal tokens")):
        if not table.has(column):
            continue
        values = table[column].astype(np.bool_)
        if values.any():
            first = int(np.flatnonzero(values)[0])
            if len(values) != table.num_sequences:
                first = int(np.searchsorted(table.token_offsets, first, side="right")) - 1
            raise DataError(
                f"{_sample(table, first)} has {what} ({column}), and the trainer computes text alone: it "
                "would train on their places as if they were words; leave such samples out"
            )


def check_experts(table: TokenTable, shape: RouterShape) -> None:
    """Raises DataError with the first sample whose experts cannot be replayed."""
    if not table.has(_COLUMN):
        _refuse_missing(table, 0)
    rows = table.columns[_COLUMN]
    assert isinstance(rows, ValueRows)
    if rows.dims != (shape.num_layers, shape.top_k):
        layers, top_k = rows.dims
        raise DataError(
            f"{_sample(table, 0)}: routed_experts has {layers} layers × {top_k} experts per token; the model "
            f"has {shape.num_layers} × {shape.top_k}: {_OTHER_MODEL}"
        )
    for row, pieces in enumerate(rows.pieces()):
        for piece in pieces:
            if not piece.size:
                continue
            if piece.min() < 0:
                _refuse_missing(table, row)
            if piece.max() >= shape.num_experts:
                raise DataError(
                    f"{_sample(table, row)}: routed_experts holds {piece.max()}; the model has "
                    f"{shape.num_experts} experts: {_OTHER_MODEL}"
                )


def _refuse_missing(table: TokenTable, row: int) -> NoReturn:
    raise DataError(
        f"{_sample(table, row)} has no routed_experts, and trainer.enable_router_replay = true replays them; "
        "start the inference server with inference.record_experts = true, or leave out the replay"
    )


def _sample(table: TokenTable, row: int) -> str:
    name, env = table["sample_id"][row], table["env_name"][row]
    return f"sample {name or row} of {env}"
