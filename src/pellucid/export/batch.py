"""Some sequences in columns: what writers encode, readers decode and summaries count.

    lengths      [3, 2]
    token_ids    [5 6 9 | 5 8]                     one entry per token, sequences end to end
    entropy      [2.3 0.1 nan | 2.3 0.7]           NaN is null
    reward       [1.0, 0.0]                        one entry per sequence

A mask that is null somewhere (sft has no trust region) is float32 with NaN there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data import TokenTable, TrainingMode
from pellucid.data.rows import offsets_of, ranges
from pellucid.data.schema import FIELDS

if TYPE_CHECKING:
    from torch import Tensor

Integers = NDArray[np.int64]
Values = NDArray[Any]

SCHEMA_VERSION = 1

BY_NAME = {field.name: field for field in FIELDS}

KEY = ("step", "rank", "export_sequence_idx")
"""Fields that identify a record, and by which records are ordered."""

NAMES = ("env_name", "training_mode")
"""Fields that are text in every trainer's export: parts of a summary are distinguished by them."""


@dataclass(frozen=True)
class ColumnBatch:
    lengths: Integers
    columns: Mapping[str, Values]

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def offsets(self) -> Integers:
        """Where each sequence starts, and the number of tokens at the end."""
        return offsets_of(self.lengths)

    @cached_property
    def owners(self) -> Integers:
        """The sequence of each token."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def spread(self, name: str) -> Values:
        """Returns a per-sequence column with one entry per token."""
        return self.columns[name][self.owners]

    def tokens_of(self, rows: Integers) -> Integers:
        """Returns the tokens of these sequences, in this order."""
        return ranges(self.offsets[rows], self.lengths[rows])

    def take(self, rows: Sequence[int] | Integers) -> "ColumnBatch":
        """Returns these sequences, in this order."""
        chosen = np.asarray(rows, np.int64)
        if len(chosen) == self.num_sequences and (chosen == np.arange(len(chosen))).all():
            return self
        tokens = self.tokens_of(chosen)
        return ColumnBatch(
            self.lengths[chosen],
            {
                name: values[tokens if is_per_token(name, values, self) else chosen]
                for name, values in self.columns.items()
            },
        )

    @classmethod
    def concat(cls, batches: Sequence["ColumnBatch"]) -> "ColumnBatch":
        """Joins batches end to end, with the columns that all of them have."""
        if not batches:
            return cls(np.zeros(0, np.int64), {})
        if len(batches) == 1:
            return batches[0]
        names = [name for name in batches[0].columns if all(name in batch.columns for batch in batches)]
        return cls(
            np.concatenate([batch.lengths for batch in batches]),
            {name: np.concatenate([batch.columns[name] for batch in batches]) for name in names},
        )


def is_per_token(name: str, values: Values, batch: ColumnBatch) -> bool:
    """Whether a column has one value per token; for columns outside the schema, their length decides."""
    if name in BY_NAME:
        return BY_NAME[name].per_token
    return len(values) == batch.num_tokens != batch.num_sequences


def micro_batch_columns(
    table: TokenTable,
    observed: "Mapping[str, Tensor | None]",
    *,
    step: int,
    rank: int,
    micro_step: int,
    denominator: int,
    num_written: int,
    precision: str,
) -> tuple[ColumnBatch, int]:
    """Returns the exported columns of a micro batch, and the number of sequences without a trainable token.

    Only sequences with a trainable token are exported. `observed` are the per-token values of forward and
    loss, None where the loss has none. Padding, the sequence without an environment, is neither exported nor
    counted.
    """
    is_due = table.trainable_lengths > 0
    num_skipped = int(sum(bool(env) for env in table["env_name"][~is_due]))
    constant = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "rank": rank,
        "micro_step": micro_step,
        "denominator": denominator,
    }
    known: dict[str, Values] = {
        **{name: np.full(table.num_sequences, value, np.int64) for name, value in constant.items()},
        **{name: _observed(values, table.num_tokens) for name, values in observed.items()},
        "precision": np.full(table.num_sequences, precision, object),
        "micro_sequence_idx": np.arange(table.num_sequences),
        "export_sequence_idx": num_written + np.cumsum(is_due) - 1,
        "position_ids": table.positions(),
    }
    if table.has("advantages"):
        known["advantage"] = np.full(table.num_sequences, np.nan, np.float32)
    for field in FIELDS:
        if field.name not in known:
            values = table.dense(field.name) if field.per_token else table[field.name]
            known[field.name] = np.ascontiguousarray(values)
    columns = {field.name: known[field.name] for field in FIELDS}
    return ColumnBatch(table.lengths, columns).take(np.flatnonzero(is_due)), num_skipped


def _observed(values: "Tensor | None", num_tokens: int) -> Values:
    if values is None:
        return np.full(num_tokens, np.nan, np.float32)
    array: Values = values.detach().cpu().numpy()
    return array


RATIOS: Mapping[str, Callable[[Values, Values], Values]] = {
    "log_importance_ratio": lambda trainer, inference: trainer - inference,
    "importance_ratio": lambda trainer, inference: np.exp(trainer - inference),
    "mismatch_kl": lambda trainer, inference: np.expm1(trainer - inference) - (trainer - inference),
    "prob_delta": lambda trainer, inference: np.exp(trainer) - np.exp(inference),
}
"""Fields that follow from the logprobs of trainer and inference; as the loss has them, but for rounding."""

_LOGPROBS = ("trainer_logprobs", "inference_logprobs")


def sources(name: str) -> tuple[str, ...]:
    """Returns the fields that have to be read to derive this one."""
    if name in RATIOS:
        return (*_LOGPROBS, "training_mode")
    stand_in = BY_NAME[name].stand_in
    return () if stand_in is None else (stand_in,)


def derive(batch: ColumnBatch, name: str) -> Values:
    """Computes a derivable field that a file leaves out. Samples of sft have no ratios: null."""
    if name == "position_ids":
        return (np.arange(batch.num_tokens) - batch.offsets[batch.owners]).astype(np.int32)
    if name not in RATIOS:
        return batch.spread(*sources(name))
    with np.errstate(over="ignore"):
        values = RATIOS[name](*(batch.columns[each] for each in _LOGPROBS))
    if "training_mode" in batch.columns:
        values[batch.spread("training_mode") == TrainingMode.SFT.value] = np.nan
    return values
