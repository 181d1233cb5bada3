"""Many token sequences in columns: the one type from the wire to the page.

    lengths = [3, 2]                       two sequences, five tokens
    token_ids          [5 6 9 | 5 8]       one entry per token
    sampled            [. . x | . x]
    inference_logprobs [-0.1 | -0.7]       one per sampled token, as samples and payloads store it
    entropy            [2.3 0.1 nan | …]   NaN is null; a mask that is null somewhere is float32
    env_name           ["a", "b"]          one per sequence

A table holds any columns of the schema, and columns of other trainers that the schema does not know. Whoever
takes in samples or payloads checks what a training batch must have (`data.rules`); the type checks no more
than that each column has as many entries as its axis. A column that samples store for sampled tokens has one
entry per token in exports; a table takes both.

Columns stay as they are stored, in samples, payloads or files. Selecting and cutting sequences copies
nothing, and counting inflates nothing. Reading a column (`table["token_ids"]`) inflates it once per table.

Sequence boundaries are carried as lengths and never guessed from positions. Padding is a sequence of its
own, with no loss and no owner (`env_name` is empty).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pellucid.data.rows import (
    CellRows,
    DenseMaskRows,
    FlatRows,
    Integers,
    MaskRows,
    Rows,
    offsets_of,
    ranges,
    spread,
)
from pellucid.data.sample import TrainingSample, gather
from pellucid.data.schema import COLUMNS, SCHEMA, Axis, Encoding
from pellucid.errors import DataError

Values = NDArray[Any]


class TokenTable:
    def __init__(self, lengths: Integers, columns: Mapping[str, Values | Rows]) -> None:
        """Takes arrays, each with one entry per token, sampled token or sequence, or stored rows."""
        self.lengths = lengths
        self.columns: Mapping[str, Rows] = {}
        if "sampled" in columns:  # it says how many entries the columns of sampled tokens have
            self.columns = {"sampled": self._as_rows("sampled", columns["sampled"])}
            columns = {**columns, **self.columns}
        self.columns = {name: self._as_rows(name, values) for name, values in columns.items()}

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
    def concat(cls, tables: Sequence["TokenTable"]) -> "TokenTable":
        """Joins tables end to end, with the columns that all of them have."""
        if not tables:
            return cls(np.zeros(0, np.int64), {})
        if len(tables) == 1:
            return tables[0]
        names = [name for name in tables[0].columns if all(name in table for table in tables)]
        columns = {name: np.concatenate([table[name] for table in tables]) for name in names}
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
        return _mask(self.columns, "sampled").counts

    @property
    def trainable_lengths(self) -> Integers:
        """Trainable tokens of each sequence."""
        return _mask(self.columns, "loss_mask").counts

    @property
    def prompt_lengths(self) -> Integers:
        """Tokens of each sequence before its first sampled one; all of them if none was sampled."""
        return _mask(self.columns, "sampled").first_true

    @cached_property
    def token_offsets(self) -> Integers:
        """Where each sequence starts, and the number of tokens at the end."""
        return offsets_of(self.lengths)

    @cached_property
    def sampled_offsets(self) -> Integers:
        return offsets_of(self.sampled_lengths)

    @cached_property
    def owners(self) -> Integers:
        """The sequence of each token."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def tokens_of(self, rows: Integers) -> Integers:
        """Returns the tokens of these sequences, in this order."""
        return ranges(self.token_offsets[rows], self.lengths[rows])

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Values:
        """Returns a column as it is stored; its stand-in or its fill if it is of a batch and the table lacks
        it."""
        if name in self.columns:
            return self.columns[name].array
        column = COLUMNS[name]
        if column.stand_in is not None:
            return spread(self[column.stand_in], self.sampled_lengths)
        if column.stored is Axis.SAMPLED:
            return column.filled(self.num_sampled)
        return column.filled(self.num_tokens if column.stored is Axis.TOKENS else self.num_sequences)

    @overload
    def get(self, name: str) -> Values | None: ...
    @overload
    def get(self, name: str, default: Values) -> Values: ...
    def get(self, name: str, default: Values | None = None) -> Values | None:
        """Returns a column as it is stored; `default` if the table lacks it."""
        return self[name] if name in self.columns else default

    def dense(self, name: str) -> Values:
        """Returns a column with one value per token; values of sequences are repeated, gaps are filled."""
        column = SCHEMA[name]
        if name not in self.columns and column.stand_in is not None:
            return self.dense(column.stand_in)
        if column.stored is Axis.SEQUENCES:
            return spread(self[name], self.lengths)
        if column.stored is Axis.TOKENS or _is_of_tokens(self.columns.get(name), self.num_tokens):
            return self[name]
        dense = column.filled(self.num_tokens)
        if name in self.columns:
            _mask(self.columns, "sampled").scatter(self.columns[name], dense)
        return dense

    def is_per_token(self, name: str) -> bool:
        """Returns whether a column has entries of tokens, not of sequences."""
        return not isinstance(self.columns[name], CellRows)

    def positions(self) -> NDArray[np.int32]:
        """Returns the position of each token in its sequence."""
        lengths = self.lengths.tolist()
        longest = _counted(1 << max(lengths, default=0).bit_length())
        return np.concatenate([longest[:0], *(longest[:length] for length in lengths)])

    def select(self, indices: Sequence[int] | Integers) -> "TokenTable":
        """Selects sequences, in the given order."""
        chosen = np.asarray(indices, np.int64)
        if len(chosen) == self.num_sequences and (chosen == np.arange(len(chosen))).all():
            return self
        return TokenTable.of_rows(self.lengths[chosen], _Selection(self, chosen))

    def truncate(self, max_length: int) -> "TokenTable":
        """Cuts every sequence to its first `max_length` tokens."""
        if (self.lengths <= max_length).all():
            return self
        lengths = np.minimum(self.lengths, max_length)
        everything = np.arange(self.num_sequences)
        return TokenTable.of_rows(lengths, _Selection(self, everything, lengths))

    def padding(self, num_tokens: int) -> "TokenTable":
        """Makes one sequence of padding, with the columns of this table and none of its tokens."""
        sizes = {Axis.TOKENS: num_tokens, Axis.SAMPLED: 0, Axis.SEQUENCES: 1}
        columns = {
            name: column.filled(sizes[column.stored], self[name].shape[1:])
            for name, column in COLUMNS.items()
            if name in self.columns
        }
        return TokenTable(np.array([num_tokens], np.int64), columns)

    def pad_to(self, multiple: int) -> "TokenTable":
        """Appends a padding sequence so that the number of tokens is a multiple of `multiple`."""
        missing = -self.num_tokens % multiple
        return TokenTable.concat([self, self.padding(missing)]) if missing else self

    def _as_rows(self, name: str, values: Values | Rows) -> Rows:
        """Converts a column to rows; the only place that checks its length."""
        num, num_tokens = _num_entries(values), self.num_tokens
        column = SCHEMA.get(name)
        if column is not None:
            axis = column.stored
        else:
            axis = Axis.TOKENS if num == num_tokens != self.num_sequences else Axis.SEQUENCES
        if axis is Axis.SAMPLED and (num == num_tokens or "sampled" not in self.columns):
            axis = Axis.TOKENS
        expected = num_tokens if axis is Axis.TOKENS else self.num_sequences
        if axis is Axis.SAMPLED:
            expected = self.num_sampled
        if num != expected:
            raise DataError(f"table column {name} has {num} entries; expected {expected} ({axis.value})")
        if isinstance(values, Rows):
            return values
        if axis is Axis.SEQUENCES:
            return CellRows(values)
        if column is not None and column.encoding is Encoding.SPANS and values.dtype == np.bool_:
            return DenseMaskRows(values, self.lengths)
        lengths = self.lengths if axis is Axis.TOKENS else self.sampled_lengths
        return FlatRows(np.ascontiguousarray(values), lengths)


def _num_entries(values: Values | Rows) -> int:
    return int(values.lengths.sum()) if isinstance(values, Rows) else len(values)


def _mask(columns: Mapping[str, Rows], name: str) -> MaskRows:
    mask = columns[name]
    assert isinstance(mask, MaskRows)
    return mask


def _is_of_tokens(rows: Rows | None, num_tokens: int) -> bool:
    return rows is not None and _num_entries(rows) == num_tokens


@lru_cache(maxsize=2)
def _counted(size: int) -> NDArray[np.int32]:
    """Counts 0, 1, 2, …; cached, because the micro batches of a step ask for the same few sizes."""
    return np.arange(size, dtype=np.int32)


class _Selection(Mapping[str, Rows]):
    """Some sequences of a table; each column is selected when it is first read."""

    def __init__(self, table: TokenTable, rows: Integers, lengths: Integers | None = None) -> None:
        """Takes `rows` whole, or cut to their first `lengths` tokens."""
        self._source = table.columns
        self._num_tokens = table.num_tokens
        self._rows = rows
        self._lengths = lengths
        self._found: dict[str, Rows] = {}

    def __getitem__(self, name: str) -> Rows:
        if name not in self._found:
            source, lengths = self._source[name], self._lengths
            if isinstance(source, CellRows):
                lengths = None
            elif lengths is not None and not _is_of_tokens(source, self._num_tokens):
                lengths = _mask(self, "sampled").counts
            self._found[name] = source.select(self._rows, lengths)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
