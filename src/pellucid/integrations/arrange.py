"""From the tensors of another trainer to one value per token, sequences end to end.

    token_ids       [[0 5 6 9 8]        padded: `attention_mask` tells tokens from padding, at either end
                     [0 0 5 7 0]]
    attention_mask  [[. x x x x]
                     [. . x x .]]
    loss_mask             [[x x]        narrower: of the last columns, here the completion
                           [x .]]
    -> lengths [4, 2], token_ids [5 6 9 8 | 5 7], loss_mask [. . x x | . x]

A tensor has as many columns as `token_ids`, one less (logprobs of all but the first token), or as many as
`loss_mask`. Flat tensors come with `lengths` instead of a mask, and have one entry per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.data import Column
from pellucid.errors import ColumnError, DataError

Given = torch.Tensor | NDArray[Any]
"""A tensor or array with one value per token."""

PerSequence = torch.Tensor | NDArray[Any] | Sequence[float]

Values = NDArray[Any]


@dataclass(frozen=True)
class TensorArrangement:
    """Where the tokens of each sequence are in tensors of this shape."""

    is_token: NDArray[np.bool_]
    """[sequences, columns]; of flat tensors [1, tokens], all of them."""

    lengths: NDArray[np.int64]
    widths: frozenset[int]
    """Columns that a tensor may have: those that it has are the last ones."""

    @classmethod
    def of(
        cls,
        token_ids: Given,
        loss_mask: Given,
        attention_mask: Given | None,
        lengths: PerSequence | None,
    ) -> "TensorArrangement":
        if (attention_mask is None) == (lengths is None):
            raise DataError(
                "give attention_mask with padded [sequences, columns] tensors, or lengths with flat ones; "
                f"got {'neither' if lengths is None else 'both'}"
            )
        if attention_mask is not None:
            return cls._padded(_shape("token_ids", token_ids, 2), loss_mask, attention_mask)
        counts = as_array("lengths", lengths)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 1).any():
            raise ColumnError(
                "lengths", None, f"is {counts!r}; a sequence has a whole number of tokens, at least 1"
            )
        (num_tokens,) = _shape("token_ids", token_ids, 1)
        if counts.sum() != num_tokens:
            raise ColumnError(
                "lengths", None, f"adds up to {counts.sum()}; token_ids has {num_tokens} entries"
            )
        return cls(np.ones((1, num_tokens), np.bool_), counts.astype(np.int64), frozenset({num_tokens}))

    @classmethod
    def _padded(cls, shape: tuple[int, ...], loss_mask: Given, attention_mask: Given) -> "TensorArrangement":
        if (found := _shape("attention_mask", attention_mask, 2)) != shape:
            raise ColumnError("attention_mask", None, f"has shape {found}; token_ids has {shape}")
        is_token = as_mask("attention_mask", as_array("attention_mask", attention_mask))
        lengths = is_token.sum(axis=1).astype(np.int64)
        if (empty := np.flatnonzero(lengths == 0)).size:
            raise ColumnError("attention_mask", int(empty[0]), "has no token; leave such a row out")
        _refuse_holes(is_token, lengths)
        width, trained = shape[1], _shape("loss_mask", loss_mask, 2)[1]
        return cls(is_token, lengths, frozenset({width, width - 1, min(trained, width)}))

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def owners(self) -> NDArray[np.int64]:
        """The sequence of each token."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def column(self, name: str, column: Column, given: Any) -> Values:
        """Converts the argument `name` to a column with one entry per token or sequence.

        A column that a narrower tensor leaves out has the fill of the schema; NaN if it was observed.
        """
        if column.dtype is str:
            return self.texts(name, given)
        values = as_array(name, given)
        if column.dtype is np.bool_:
            return self._mask(name, values)
        if column.dtype is np.uint32:
            return self._ids(name, values)
        if values.dtype.kind not in "fiu":
            raise ColumnError(name, None, f"holds {values.dtype}; numbers are needed")
        if not column.per_token:
            return self._per_sequence(name, values)
        if name == "policy_version":
            return self._per_sequence(name, values)[self.owners].astype(column.dtype)
        fill = column.fill if column.in_batch else np.nan
        return self._flat(name, values.astype(np.float32), fill).astype(column.dtype, copy=False)

    def _ids(self, name: str, given: Values) -> NDArray[np.uint32]:
        values = self._flat(name, given, 0)
        if values.dtype.kind not in "iu":
            raise ColumnError(name, None, f"holds {values.dtype}; whole numbers are needed")
        if values.size and (values.min() < 0 or values.max() > np.iinfo(np.uint32).max):
            raise ColumnError(
                name, None, f"holds {values.min()} … {values.max()}; ids are from 0 to 2**32 - 1"
            )
        return values.astype(np.uint32)

    def _mask(self, name: str, given: Values) -> NDArray[np.bool_]:
        values = as_mask(name, given)
        flat: NDArray[np.bool_] = self._flat(name, values, False)
        if values.sum() != flat.sum():
            raise ColumnError(name, None, "marks padding; attention_mask says which entries are tokens")
        return flat

    def _per_sequence(self, name: str, values: Values) -> NDArray[np.float32]:
        if not self.is_per_sequence(values):
            num = self.num_sequences
            rule = f"has shape {values.shape}; one for each of the {num} sequences is needed"
            raise ColumnError(name, None, rule)
        each = np.broadcast_to(values.reshape(-1), self.num_sequences)
        return each.astype(np.float32)

    def is_per_sequence(self, values: Values) -> bool:
        """Returns whether these are one number for all sequences, or one for each."""
        return values.shape in {(), (self.num_sequences,), (self.num_sequences, 1)}

    def require_numbers(self, name: str, values: Values, trainable: NDArray[np.bool_]) -> None:
        """Raises ColumnError with the first trainable token whose value is not finite."""
        if (bad := np.flatnonzero(trainable & ~np.isfinite(values))).size:
            row = int(self.owners[bad[0]])
            token = int(bad[0] - self.lengths[:row].sum())
            rule = f"of token {token} is {values[bad[0]]}; a trainable token needs a number"
            raise ColumnError(name, row, rule)

    def texts(self, name: str, given: str | Sequence[str]) -> NDArray[Any]:
        """Returns a text per sequence, from one for all or one for each."""
        texts = [given] * self.num_sequences if isinstance(given, str) else list(given)
        if len(texts) != self.num_sequences:
            raise ColumnError(
                name, None, f"has {len(texts)} entries; there are {self.num_sequences} sequences"
            )
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise ColumnError(name, row, f"is {text!r}; a text is needed")
        return np.array(texts, object)

    def _flat(self, name: str, values: Values, fill: float | bool) -> Values:
        if values.ndim == 1 and len(self.is_token) == 1:
            values = values[None]
        num_rows, width = self.is_token.shape
        if values.ndim != 2 or len(values) != num_rows or values.shape[1] not in self.widths:
            wanted = " or ".join(str((num_rows, columns)) for columns in sorted(self.widths, reverse=True))
            wanted = wanted if num_rows != 1 else f"{self.num_tokens} entries, or {wanted}"
            raise ColumnError(name, None, f"has shape {values.shape}; expected {wanted}")
        missing = width - values.shape[1]
        if missing:
            left_out = np.full((num_rows, missing), fill, values.dtype)
            values = np.concatenate([left_out, values], axis=1)
        return np.ascontiguousarray(values[self.is_token])


def _refuse_holes(is_token: NDArray[np.bool_], lengths: NDArray[np.int64]) -> None:
    """Refuses rows whose tokens are not contiguous: the record would leave out what lies in a gap."""
    firsts = is_token.argmax(axis=1)
    stops = is_token.shape[1] - is_token[:, ::-1].argmax(axis=1)
    if (torn := np.flatnonzero(stops - firsts != lengths)).size:
        row = int(torn[0])
        hole = firsts[row] + int(is_token[row, firsts[row] :].argmin())
        raise ColumnError(
            "attention_mask",
            row,
            f"is 0 in column {hole}, between tokens, and what is there would not be recorded; pad a row "
            "at its ends alone, or give flat tensors with lengths",
        )


def as_array(name: str, given: Any) -> Values:
    if isinstance(given, torch.Tensor):
        given = given.detach()
        array: Values = (given.float() if given.is_floating_point() else given).cpu().numpy()
        return array
    try:
        return np.asarray(given)
    except ValueError as error:
        raise ColumnError(name, None, f"is not a tensor of numbers: {error}") from error


def as_mask(name: str, values: Values) -> NDArray[np.bool_]:
    """Many loops keep masks as 0 and 1 of some other type."""
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise ColumnError(name, None, f"holds {values.dtype} that are not all 0 or 1; a mask is needed")
    return values.astype(np.bool_)


def _shape(name: str, given: Given, num_dims: int) -> tuple[int, ...]:
    shape = tuple(getattr(given, "shape", ()))
    if len(shape) != num_dims:
        form = "padded tensors have [sequences, columns]" if num_dims == 2 else "flat tensors have [tokens]"
        raise ColumnError(name, None, f"has shape {shape}; {form}")
    return shape
