"""Many token sequences in columns: the one type behind batches, micro batches, wire and export.

    lengths = [3, 2]            two sequences, five tokens
    token_ids    [5 6 9 | 5 8]  stored per token
    sampled      [. . x | . x]
    inference_logprobs [-0.1 | -0.7]   stored per sampled token
    env_name     ["a", "b"]            stored per sequence

Sequence boundaries are carried as lengths and never guessed from positions. Padding is a sequence of its
own, with no loss and no owner (`env_name` is empty).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data.columns import COLUMNS, Stored
from pellucid.data.sample import TrainingMode, TrainingSample
from pellucid.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenTable:
    lengths: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        """Equal length is checked here and nowhere else."""
        if self.lengths.dtype != np.int64 or self.lengths.ndim != 1 or (self.lengths < 1).any():
            raise DataError("table has a sequence without tokens, or lengths that are not int64")
        for name, column in COLUMNS.items():
            if column.required and name not in self.columns:
                raise DataError(f"table lacks the column {name}")
        if unknown := set(self["training_mode"]) - set(TrainingMode):
            modes = ", ".join(TrainingMode)
            raise DataError(f"table has training modes {sorted(map(str, unknown))}; known: {modes}")
        for name, array in self.columns.items():
            if name not in COLUMNS:
                raise DataError(f"table has an unknown column {name}")
            expected = int(self.offsets(COLUMNS[name].stored)[-1])
            if len(array) != expected:
                raise DataError(
                    f"table column {name} has {len(array)} entries; expected {expected} "
                    f"({COLUMNS[name].stored.value})"
                )

    @classmethod
    def from_samples(cls, samples: Sequence[TrainingSample]) -> "TokenTable":
        names = {name for sample in samples for name in (*sample.arrays, *sample.values)}
        columns = {}
        for name in COLUMNS:
            if name not in names and not COLUMNS[name].required:
                continue
            columns[name] = _column_of(name, samples)
        return cls(np.array([sample.length for sample in samples], np.int64), columns)

    @classmethod
    def padding(cls, num_tokens: int) -> "TokenTable":
        """One sequence without samples, loss or owner."""
        size = {Stored.TOKENS: num_tokens, Stored.SAMPLED: 0, Stored.SEQUENCES: 1}
        columns = {
            name: _filled(name, size[column.stored]) for name, column in COLUMNS.items() if column.required
        }
        return cls(np.array([num_tokens], np.int64), columns)

    @classmethod
    def concat(cls, tables: Sequence["TokenTable"]) -> "TokenTable":
        names = [name for name in COLUMNS if any(name in table.columns for table in tables)]
        columns = {name: np.concatenate([table._column_or_fill(name) for table in tables]) for name in names}
        return cls(np.concatenate([table.lengths for table in tables]), columns)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.token_offsets[-1])

    @property
    def num_sampled(self) -> int:
        return int(self.sampled_offsets[-1])

    @property
    def num_trainable(self) -> int:
        return int(self.columns["loss_mask"].sum())

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        return _offsets(self.lengths)

    @cached_property
    def sampled_offsets(self) -> NDArray[np.int64]:
        return _offsets(self.columns["sampled"].astype(np.int64))[self.token_offsets]

    def offsets(self, stored: Stored) -> NDArray[np.int64]:
        """Where each sequence starts on an axis, and the axis' length at the end."""
        if stored is Stored.TOKENS:
            return self.token_offsets
        if stored is Stored.SAMPLED:
            return self.sampled_offsets
        return np.arange(self.num_sequences + 1)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column as stored."""
        return self.columns[name] if name in self.columns else self._column_or_fill(name)

    def dense(self, name: str) -> NDArray[Any]:
        """A column with one value per token: sampled-only values in place, sequence values repeated."""
        column = COLUMNS[name]
        if name not in self.columns and column.stand_in is not None:
            return self.dense(column.stand_in)
        values = self[name]
        if column.stored is Stored.TOKENS:
            return values
        if column.stored is Stored.SEQUENCES:
            return np.repeat(values, self.lengths)
        dense = _filled(name, self.num_tokens)
        dense[self.columns["sampled"]] = values
        return dense

    def has(self, name: str) -> bool:
        return name in self.columns

    def positions(self) -> NDArray[np.int64]:
        """The position of each token in its sequence."""
        return _ranges(np.zeros_like(self.lengths), self.lengths)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> "TokenTable":
        """These sequences, in this order."""
        chosen = np.asarray(indices, np.int64)
        gather = {}
        for stored in Stored:
            offsets = self.offsets(stored)
            gather[stored] = _ranges(offsets[chosen], offsets[chosen + 1] - offsets[chosen])
        columns = {name: array[gather[COLUMNS[name].stored]] for name, array in self.columns.items()}
        return TokenTable(self.lengths[chosen], columns)

    def truncate(self, max_length: int) -> "TokenTable":
        """Every sequence cut to its first `max_length` tokens."""
        if (self.lengths <= max_length).all():
            return self
        kept = self.positions() < max_length
        keep = {
            Stored.TOKENS: kept,
            Stored.SAMPLED: kept[self.columns["sampled"]],
            Stored.SEQUENCES: slice(None),
        }
        columns = {name: array[keep[COLUMNS[name].stored]] for name, array in self.columns.items()}
        return TokenTable(np.minimum(self.lengths, max_length), columns)

    def pad_to(self, multiple: int) -> "TokenTable":
        """With a padding sequence at the end, so that the tokens fill a multiple."""
        missing = -self.num_tokens % multiple
        return TokenTable.concat([self, TokenTable.padding(missing)]) if missing else self

    def _column_or_fill(self, name: str) -> NDArray[Any]:
        if name in self.columns:
            return self.columns[name]
        stand_in = COLUMNS[name].stand_in
        if stand_in is not None:
            sampled: NDArray[Any] = self.dense(stand_in)[self.columns["sampled"]]
            return sampled
        return _filled(name, int(self.offsets(COLUMNS[name].stored)[-1]))


def _column_of(name: str, samples: Sequence[TrainingSample]) -> NDArray[Any]:
    column = COLUMNS[name]
    if column.stored is Stored.SEQUENCES:
        values = _filled(name, len(samples))
        for index, sample in enumerate(samples):
            if name in sample.values:
                values[index] = sample.values[name]
        return values
    parts = [_array_of(name, sample) for sample in samples]
    return np.concatenate(parts) if parts else _filled(name, 0)


def _array_of(name: str, sample: TrainingSample) -> NDArray[Any]:
    if name in sample.arrays:
        return sample.arrays[name].array()
    column = COLUMNS[name]
    array = _filled(name, sample.length if column.stored is Stored.TOKENS else sample.num_sampled)
    if column.stand_in is not None and column.stand_in in sample.values:
        array[:] = sample.values[column.stand_in]
    return array


def _filled(name: str, size: int) -> NDArray[Any]:
    column = COLUMNS[name]
    array: NDArray[Any] = np.empty(size, column.dtype)
    array.fill(column.fill)
    return array


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenated ranges: starts [0, 7], lengths [2, 3] -> [0, 1, 7, 8, 9]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shifts: NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total) + shifts
