"""Every column of a token table, declared once: dtype, fill, where it is stored, how it is encoded.

Everything that handles tables (samples, packing, wire, tensors, export) loops over this registry and
never names a column, so that a new column costs one line here, its producer and its consumer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np


class Stored(StrEnum):
    """The axis a column lives on: one entry per token, per sampled token, or per sequence."""

    TOKENS = "tokens"
    SAMPLED = "sampled"
    SEQUENCES = "sequences"


class Encoding(StrEnum):
    RAW = "raw"
    BITS = "bits"
    RUNS = "runs"


@dataclass(frozen=True, slots=True)
class Column:
    dtype: type
    """numpy scalar type, or `object` for strings and small structures (per sequence only)."""

    fill: Any
    """Value of padding, of tokens outside a sampled-only column, and of sequences that lack the column."""

    stored: Stored = Stored.TOKENS
    encoding: Encoding = Encoding.RAW
    required: bool = False

    stand_in: str | None = None
    """Per-sequence column that gives every token its value where this one is absent."""


def _per_sequence(dtype: type, fill: Any, *, required: bool = False) -> Column:
    return Column(dtype, fill, Stored.SEQUENCES, required=required)


COLUMNS: dict[str, Column] = {
    "token_ids": Column(np.uint32, 0, required=True),
    "loss_mask": Column(np.bool_, False, encoding=Encoding.BITS, required=True),
    "sampled": Column(np.bool_, False, encoding=Encoding.BITS, required=True),
    "teacher_logprobs": Column(np.float32, np.nan),
    "inference_logprobs": Column(np.float32, 0.0, Stored.SAMPLED, required=True),
    "policy_versions": Column(np.int32, -1, Stored.SAMPLED, Encoding.RUNS, required=True),
    "temperatures": Column(np.float32, 1.0, Stored.SAMPLED, stand_in="temperature"),
    "advantages": Column(np.float32, 0.0, Stored.SAMPLED, stand_in="advantage"),
    "temperature": _per_sequence(np.float32, 1.0),
    "advantage": _per_sequence(np.float32, 0.0),
    "reward": _per_sequence(np.float32, 0.0),
    "training_mode": _per_sequence(object, "rl"),
    "env_name": _per_sequence(object, "", required=True),
    "example_id": _per_sequence(object, ""),
    "group_id": _per_sequence(object, ""),
    "rollout_id": _per_sequence(object, ""),
    "sample_id": _per_sequence(object, ""),
    "run_id": _per_sequence(object, ""),
    "stop_reason": _per_sequence(object, ""),
    "role_spans": _per_sequence(object, ()),
}
