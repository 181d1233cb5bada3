"""One export record as the page carries it: a row of the table, and its columns, compressed.

    token_ids [5, 9, 9]                       -> [5, 9, 9]
    advantages [0.5, 0.5, 0.5]                -> 0.5     one value stands for all tokens
    loss_mask [false, true, true]             -> [0, 1, 1]
    entropy [0.20812976360321045, null, 1.5]  -> [0.20812976, null, 1.5]   float32 in its shortest form

No number changes: a float is shortened only where reading it as float32 gives the recorded value back.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pellucid.errors import DataError
from pellucid.viewer.roles import Segment

COLUMNS = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "sampled",
    "advantages",
    "inference_logprobs",
    "trainer_logprobs",
    "entropy",
    "mismatch_kl",
    "importance_ratio",
    "prob_delta",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "token_loss",
    "policy_versions",
)
"""What the page shows of a token; no more, because each float costs the page five bytes a token."""

FIELDS = (
    "training_mode",
    "example_id",
    "group_id",
    "rollout_id",
    "sample_id",
    "run_id",
    "stop_reason",
    "rank",
    "micro_step",
    "micro_sequence_idx",
    "export_sequence_idx",
    "denominator",
)
"""What the page shows of a record beside its tokens and its row."""


def pack_record(record: Mapping[str, Any], segments: Sequence[Segment]) -> str:
    return deflate(
        {
            "columns": {name: compact(record, name) for name in COLUMNS if record.get(name) is not None},
            "segments": segments,
            "fields": {name: record[name] for name in FIELDS if record.get(name) not in (None, "")},
        }
    )


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's row in the table; None where the record does not say."""
    kl = trainable_kl(record)
    return {
        "step": record.get("step", 0),
        "env": record.get("env_name") or "",
        "reward": _overall(record, "reward", "rewards"),
        "advantage": _overall(record, "advantage", "advantages"),
        "tokens": len(record["token_ids"]),
        "trainable": None if record.get("loss_mask") is None else int(_trainable(record).sum()),
        "kl_mean": float(kl.mean()) if len(kl) else None,
        "kl_max": float(kl.max()) if len(kl) else None,
        "masked": _num_masked(record),
    }


def trainable_kl(record: Mapping[str, Any]) -> NDArray[np.float64]:
    """The recorded mismatch KL of the trainable tokens."""
    if record.get("mismatch_kl") is None:
        return np.empty(0)
    values = numbers(record, "mismatch_kl")
    return values[_trainable(record) & np.isfinite(values)]


def numbers(record: Mapping[str, Any], name: str) -> NDArray[np.float64]:
    """A column as floats; null is NaN."""
    try:
        return np.array(record[name], np.float64)
    except (TypeError, ValueError) as error:
        where = f"step {record.get('step', 0)}, rank {record.get('rank', 0)}"
        index = record.get("export_sequence_idx", 0)
        raise DataError(f"record {index} of {where}: {name} is not a list of numbers: {error}") from error


def compact(record: Mapping[str, Any], name: str) -> Any:
    values = numbers(record, name)
    known = np.isfinite(values)
    if known.all() and len(values) and (values == values[0]).all():
        return _shortest(values[:1])[0]
    if not known.any():
        return None
    return _shortest(values)


def deflate(value: Any) -> str:
    """JSON, zlib, base64: what the page inflates with `DecompressionStream("deflate")`."""
    payload = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return base64.b64encode(zlib.compress(payload, 9)).decode("ascii")


def _shortest(values: NDArray[np.float64]) -> Any:
    """Integers where all are, float32 where that is exact, else float64; null where not finite."""
    known = np.isfinite(values)
    if (values[known] == np.rint(values[known])).all() and (np.abs(values[known]) < 2**53).all():
        return [int(value) if finite else None for value, finite in zip(values, known, strict=True)]
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return single if (single[known] == values[known]).all() else values


def _trainable(record: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Where the loss mask is set; everywhere in a record that has none."""
    if record.get("loss_mask") is None:
        return np.ones(len(record["token_ids"]), np.bool_)
    mask: NDArray[np.bool_] = numbers(record, "loss_mask") == 1
    return mask


def _overall(record: Mapping[str, Any], field: str, column: str) -> float | None:
    """A value of the whole record, or else the mean over its trainable tokens."""
    if isinstance(value := record.get(field), int | float):
        return float(value)
    if record.get(column) is None:
        return None
    values = numbers(record, column)
    known = values[_trainable(record) & np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _num_masked(record: Mapping[str, Any]) -> int | None:
    if record.get("is_masked") is None:
        return None
    masked = numbers(record, "is_masked")
    return None if np.isnan(masked).all() else int((_trainable(record) & (masked == 1)).sum())
