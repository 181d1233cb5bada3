"""Many token sequences in columns: the one type behind batches, micro batches, wire and export.

    lengths = [3, 2]            two sequences, five tokens
    token_ids    [5 6 9 | 5 8]  stored per token
    sampled      [. . x | . x]
    inference_logprobs [-0.1 | -0.7]   stored per sampled token
    env_name     ["a", "b"]            stored per sequence

A table keeps its columns as they are stored, in samples or in a payload. Selecting and cutting sequences
copies nothing, and counting inflates nothing. Reading a column (`table["token_ids"]`) inflates it once per
table.

Sequence boundaries are carried as lengths and never guessed from positions. Padding is a sequence of its
own, with no loss and no owner (`env_name` is empty).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data.rows import CellRows, FlatRows, Integers, MaskRows, Rows, SpanRows, offsets_of, spread
from pellucid.data.sample import TrainingSample, gather
from pellucid.data.schema import COLUMNS, SCHEMA, Axis, Encoding, TrainingMode
from pellucid.errors import DataError


class TokenTable:
    def __init__(self, lengths: NDArray[np.int64], columns: Mapping[str, NDArray[Any] | Rows]) -> None:
        """Takes arrays, each with one entry per token, sampled token or sequence, or stored rows."""
        if lengths.dtype != np.int64 or lengths.ndim != 1 or (lengths < 1).any():
            raise DataError("table has a sequence without tokens, or lengths that are not int64")
        self.lengths = lengths
        self.columns: Mapping[str, Rows] = _as_rows(lengths, columns)
        if "training_mode" in columns and (unknown := set(self["training_mode"]) - set(TrainingMode)):
            modes = ", ".join(TrainingMode)
            raise DataError(f"table has training modes {sorted(map(str, unknown))}; known: {modes}")

    @classmethod
    def from_samples(cls, samples: Sequence[TrainingSample]) -> "TokenTable":
        return cls.of_rows(np.array([sample.length for sample in samples], np.int64), gather(samples))

    @classmethod
    def of_rows(cls, lengths: Integers, columns: Mapping[str, Rows]) -> "TokenTable":
        """Skips validation; the caller guarantees rows of consistent lengths."""
        table = cls.__new__(cls)
        table.lengths = lengths
        table.columns = columns
        return table

    @classmethod
    def padding(cls, num_tokens: int) -> "TokenTable":
        """Makes a sequence of padding, without sampled tokens, loss or environment."""
        size = {Axis.TOKENS: num_tokens, Axis.SAMPLED: 0, Axis.SEQUENCES: 1}
        columns = {
            name: column.filled(size[column.stored]) for name, column in COLUMNS.items() if column.required
        }
        return cls(np.array([num_tokens], np.int64), columns)

    @classmethod
    def concat(cls, tables: Sequence["TokenTable"]) -> "TokenTable":
        names = [name for name in COLUMNS if any(name in table.columns for table in tables)]
        columns = {name: np.concatenate(_alike([table[name] for table in tables])) for name in names}
        return cls(np.concatenate([table.lengths for table in tables]), columns)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.token_offsets[-1])

    @property
    def num_sampled(self) -> int:
        return int(self.sampled_lengths.sum())

    @property
    def num_trainable(self) -> int:
        return int(self.trainable_lengths.sum())

    @property
    def sampled_lengths(self) -> Integers:
        """Sampled tokens of each sequence."""
        return self._mask("sampled").counts

    @property
    def trainable_lengths(self) -> Integers:
        """Trainable tokens of each sequence."""
        return self._mask("loss_mask").counts

    @property
    def prompt_lengths(self) -> Integers:
        """Tokens of each sequence before its first sampled one; all of them if none was sampled."""
        return self._mask("sampled").first_true

    @cached_property
    def token_offsets(self) -> Integers:
        return offsets_of(self.lengths)

    @cached_property
    def sampled_offsets(self) -> Integers:
        return offsets_of(self.sampled_lengths)

    def offsets(self, stored: Axis) -> Integers:
        """Returns where each sequence starts on an axis, followed by the length of the axis."""
        if stored is Axis.TOKENS:
            return self.token_offsets
        if stored is Axis.SAMPLED:
            return self.sampled_offsets
        return np.arange(self.num_sequences + 1)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Returns a column along its own axis; its stand-in or its fill if the table lacks it."""
        if name in self.columns:
            return self.columns[name].array
        column = COLUMNS[name]
        if column.stand_in is not None:
            return spread(self[column.stand_in], self.sampled_lengths)
        return column.filled(int(self.offsets(column.stored)[-1]))

    def dense(self, name: str) -> NDArray[Any]:
        """Returns a column with one value per token; values of sequences are repeated, gaps are filled."""
        column = SCHEMA[name]
        if name not in self.columns and column.stand_in is not None:
            return self.dense(column.stand_in)
        if column.stored is Axis.TOKENS:
            return self[name]
        if column.stored is Axis.SEQUENCES:
            return spread(self[name], self.lengths)
        dense = column.filled(self.num_tokens)
        if name in self.columns:
            self._mask("sampled").scatter(self.columns[name], dense)
        return dense

    def has(self, name: str) -> bool:
        return name in self.columns

    def positions(self) -> NDArray[np.int32]:
        """Returns the position of each token in its sequence."""
        lengths = self.lengths.tolist()
        longest = _counted(1 << max(lengths, default=0).bit_length())
        return np.concatenate([longest[:0], *(longest[:length] for length in lengths)])

    def select(self, indices: Sequence[int] | Integers) -> "TokenTable":
        """Selects sequences, in the given order."""
        chosen = np.asarray(indices, np.int64)
        return TokenTable.of_rows(self.lengths[chosen], _Selection(self.columns, chosen))

    def truncate(self, max_length: int) -> "TokenTable":
        """Cuts every sequence to its first `max_length` tokens."""
        if (self.lengths <= max_length).all():
            return self
        lengths = np.minimum(self.lengths, max_length)
        everything = np.arange(self.num_sequences)
        return TokenTable.of_rows(lengths, _Selection(self.columns, everything, lengths))

    def pad_to(self, multiple: int) -> "TokenTable":
        """Appends a padding sequence so that the number of tokens is a multiple of `multiple`."""
        missing = -self.num_tokens % multiple
        return TokenTable.concat([self, TokenTable.padding(missing)]) if missing else self

    def _mask(self, name: str) -> MaskRows:
        mask = self.columns[name]
        assert isinstance(mask, MaskRows)
        return mask


@lru_cache(maxsize=2)
def _counted(size: int) -> NDArray[np.int32]:
    """Counts 0, 1, 2, …; cached, because the micro batches of a step ask for the same few sizes."""
    return np.arange(size, dtype=np.int32)


class _Selection(Mapping[str, Rows]):
    """Some sequences of a table; each column is selected when it is first read."""

    def __init__(self, source: Mapping[str, Rows], rows: Integers, lengths: Integers | None = None) -> None:
        """Takes `rows` whole, or cut to their first `lengths` tokens."""
        self._source = source
        self._rows = rows
        self._lengths = lengths
        self._found: dict[str, Rows] = {}

    def __getitem__(self, name: str) -> Rows:
        if name not in self._found:
            self._found[name] = self._source[name].select(self._rows, self._lengths_of(COLUMNS[name].stored))
        return self._found[name]

    def _lengths_of(self, stored: Axis) -> Integers | None:
        if self._lengths is None or stored is Axis.SEQUENCES:
            return None
        if stored is Axis.TOKENS:
            return self._lengths
        sampled = self["sampled"]
        assert isinstance(sampled, MaskRows)
        return sampled.counts

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def _as_rows(lengths: Integers, columns: Mapping[str, NDArray[Any] | Rows]) -> dict[str, Rows]:
    """Converts columns to rows; the only place that checks their lengths."""
    for name, column in COLUMNS.items():
        if column.required and name not in columns:
            raise DataError(f"table lacks the column {name}")
    sizes = {Axis.TOKENS: lengths, Axis.SEQUENCES: np.ones(len(lengths), np.int64)}
    rows: dict[str, Rows] = {}
    for name in sorted(columns, key=lambda name: name != "sampled"):
        if name not in COLUMNS:
            raise DataError(f"table has an unknown column {name}")
        if name == "sampled":
            rows[name] = _column_rows(name, columns[name], lengths)
            sampled = rows[name]
            assert isinstance(sampled, MaskRows)
            sizes[Axis.SAMPLED] = sampled.counts
        else:
            rows[name] = _column_rows(name, columns[name], sizes[COLUMNS[name].stored])
    return {name: rows[name] for name in COLUMNS if name in rows}


def _column_rows(name: str, values: NDArray[Any] | Rows, lengths: Integers) -> Rows:
    column = COLUMNS[name]
    found, expected = _num_entries(values), int(lengths.sum())
    if found != expected:
        raise DataError(
            f"table column {name} has {found} entries; expected {expected} ({column.stored.value})"
        )
    if isinstance(values, Rows):
        return values
    if column.stored is Axis.SEQUENCES:
        return CellRows(values)
    if column.encoding is Encoding.SPANS:
        return SpanRows.of(values, lengths)
    return FlatRows(np.ascontiguousarray(values), lengths)


def _num_entries(values: NDArray[Any] | Rows) -> int:
    return int(values.lengths.sum()) if isinstance(values, Rows) else len(values)


def _alike(parts: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Broadcasts parts that are only a fill to the entry shape of the others."""
    dims = max((part.shape[1:] for part in parts), key=len)
    return [
        part
        if part.shape[1:] == dims
        else np.broadcast_to(part.reshape(-1, *[1] * len(dims)), (len(part), *dims))
        for part in parts
    ]
