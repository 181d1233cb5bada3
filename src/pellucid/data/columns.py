"""Declares every column of a token table once: dtype, fill, axis and encoding.

Everything that handles tables (samples, packing, wire, tensors, export) loops over this registry and
never names a column, so that a new column costs one line here, its producer and its consumer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np


class Axis(StrEnum):
    """Axis of a column: one entry per token, per sampled token, or per sequence."""

    TOKENS = "tokens"
    SAMPLED = "sampled"
    SEQUENCES = "sequences"


class Encoding(StrEnum):
    """Encoding of a sequence's values as bytes."""

    RAW = "raw"
    """Values one after the other."""

    SPANS = "spans"
    """Start and length of every run of True, for masks; bits where those are smaller."""

    RUNS = "runs"
    """Value and length of every run of equal values; raw where that is smaller."""


class TrainingMode(StrEnum):
    RL = "rl"
    OPD = "opd"
    SFT = "sft"


RoleSpans = list[tuple[str, int, int]]
"""(role, start, stop) of each block of a sequence, in tokens."""


@dataclass(frozen=True, slots=True)
class Column:
    dtype: type
    """numpy scalar type, or `object` for values that are no numbers (per sequence only)."""

    fill: Any
    """Value of padding, of tokens outside a sampled-only column, and of sequences that lack the column."""

    stored: Axis = Axis.TOKENS
    encoding: Encoding = Encoding.RAW
    required: bool = False

    stand_in: str | None = None
    """Per-sequence column that gives every token its value where this one is absent."""

    shares_prompts: bool = False
    """Whether members of a group have equal values on their common prompt, which are then sent once."""

    dims: tuple[str, ...] = ()
    """Names of the dimensions of an entry; empty for a single number."""

    narrow: type | None = None
    """Smaller dtype that is used if every value fits."""

    holds: Any = None
    """Type of the values of an `object` column."""


def _number(fill: float = 0.0) -> Column:
    return Column(np.float32, fill, Axis.SEQUENCES)


def _text(fill: str = "", *, required: bool = False) -> Column:
    return Column(object, fill, Axis.SEQUENCES, required=required, holds=str)


COLUMNS: dict[str, Column] = {
    "token_ids": Column(np.uint32, 0, required=True, shares_prompts=True),
    "loss_mask": Column(np.bool_, False, encoding=Encoding.SPANS, required=True),
    "sampled": Column(np.bool_, False, encoding=Encoding.SPANS, required=True),
    "teacher_logprobs": Column(np.float32, np.nan, shares_prompts=True),
    "routed_experts": Column(np.int16, -1, shares_prompts=True, dims=("layers", "top_k"), narrow=np.uint8),
    "mm_token_types": Column(np.uint8, 0, encoding=Encoding.RUNS),
    "inference_logprobs": Column(np.float32, 0.0, Axis.SAMPLED, required=True),
    "policy_versions": Column(np.int32, -1, Axis.SAMPLED, Encoding.RUNS, required=True),
    "temperatures": Column(np.float32, 1.0, Axis.SAMPLED, stand_in="temperature"),
    "advantages": Column(np.float32, 0.0, Axis.SAMPLED, stand_in="advantage"),
    "temperature": _number(1.0),
    "advantage": _number(),
    "reward": _number(np.nan),
    "training_mode": _text(TrainingMode.RL.value),
    "env_name": _text(required=True),
    "example_id": _text(),
    "group_id": _text(),
    "rollout_id": _text(),
    "sample_id": _text(),
    "run_id": _text(),
    "stop_reason": _text(),
    "role_spans": Column(object, (), Axis.SEQUENCES, holds=RoleSpans),
    "mm_tensors": Column(object, b"", Axis.SEQUENCES, holds=bytes),
}
