"""What every sample has to obey, checked on the stored form: nothing is inflated to look at it.

- an environment's name, which is not the one that stands for all of them, and a known training mode
- nothing predicts the first token of a sequence, so it is never trainable
- outside of sft a trainable token was sampled, and its inference logprob is a number
- a temperature is above 0; advantages are numbers; a reward is a number, or NaN: nobody scored the sample

The same function judges a sample when it is built and a batch when it arrives.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.data.columns import TrainingMode
from pellucid.data.rows import BitRows, MaskRows, Rows, SpanRows, ValueRows
from pellucid.errors import ColumnError

JUDGED = (
    *("env_name", "training_mode", "loss_mask", "sampled", "inference_logprobs"),
    *("advantages", "advantage", "reward", "temperatures", "temperature"),
)
_ALL = "all"
"""Stands for all environments together in metrics, views and reports."""

_MODES = frozenset(mode.value for mode in TrainingMode)


def check_rules(columns: Mapping[str, Rows]) -> None:
    """Raises ColumnError with the first sequence that breaks a rule. Lengths are taken to be consistent."""
    _check_names(columns)
    loss_mask, sampled = columns["loss_mask"], columns["sampled"]
    assert isinstance(loss_mask, MaskRows) and isinstance(sampled, MaskRows)
    if (first := _first(loss_mask.leads)) is not None:
        raise ColumnError(
            "loss_mask",
            first,
            "marks the first token trainable; nothing predicts that token: unset loss_mask[0]",
        )
    needs_sampled = ~_is_sft(columns, len(loss_mask.lengths))
    if (first := _first(_strays(loss_mask, sampled) & needs_sampled)) is not None:
        trained, was_sampled = _row(loss_mask, first), _row(sampled, first)
        token = np.flatnonzero(trained & ~was_sampled)[0]
        raise ColumnError(
            "loss_mask",
            first,
            f"marks token {token} trainable, but it was not sampled; its logprob is needed",
        )
    _check_numbers(columns, loss_mask, sampled)


def _check_names(columns: Mapping[str, Rows]) -> None:
    names = columns["env_name"].array
    if (first := _first(names == "")) is not None:
        raise ColumnError("env_name", first, "is empty; name the environment")
    if (first := _first(names == _ALL)) is not None:
        raise ColumnError(
            "env_name", first, f"is {_ALL!r}, which stands for all environments; choose another name"
        )
    if "training_mode" in columns:
        for index, mode in enumerate(columns["training_mode"].array):
            if mode not in _MODES:
                raise ColumnError("training_mode", index, f"is {mode!r}; known: {', '.join(TrainingMode)}")


def _check_numbers(columns: Mapping[str, Rows], loss_mask: MaskRows, sampled: MaskRows) -> None:
    for name, noun in (("inference_logprobs", "logprob"), ("advantages", "advantage")):
        if name in columns:
            _check_finite(name, noun, columns[name], loss_mask, sampled)
    for name, may_be_missing in (("advantage", False), ("reward", True)):
        if name in columns:
            values = columns[name].array
            is_bad = np.isinf(values) if may_be_missing else ~np.isfinite(values)
            if (first := _first(is_bad)) is not None:
                raise ColumnError(name, first, f"is {values[first]}; a number is needed")
    for name in ("temperature", "temperatures"):
        if name in columns and (first := _first_cold(columns[name])) is not None:
            values = _row(columns[name], first)
            found = values[~((values > 0) & (values < np.inf))][0]
            raise ColumnError(name, first, f"is {found:g}; training needs numbers above 0")


def _check_finite(name: str, noun: str, rows: Rows, loss_mask: MaskRows, sampled: MaskRows) -> None:
    if _all_finite(rows):
        return
    for row in range(len(rows.lengths)):
        values, trained, was_sampled = _row(rows, row), _row(loss_mask, row), _row(sampled, row)
        is_bad = ~np.isfinite(values) & trained[was_sampled]
        if is_bad.any():
            token = np.flatnonzero(was_sampled)[is_bad][0]
            raise ColumnError(
                name,
                row,
                f"of token {token} is {values[is_bad][0]}; a token whose {noun} is not finite cannot train",
            )


def _all_finite(rows: Rows) -> bool:
    """A sum is finite only if every term is; one that is not, for huge values perhaps, is looked at again."""
    assert isinstance(rows, ValueRows)
    with np.errstate(all="ignore"):
        return all(
            bool(np.isfinite(piece.sum())) or bool(np.isfinite(piece).all()) for piece in rows.all_pieces()
        )


def _first_cold(rows: Rows) -> int | None:
    pieces = rows.all_pieces() if isinstance(rows, ValueRows) else [rows.array]
    if all(piece.size == 0 or (piece.min() > 0 and piece.max() < np.inf) for piece in pieces):
        return None
    owner = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    return int(owner[~((rows.array > 0) & (rows.array < np.inf))][0])


def _is_sft(columns: Mapping[str, Rows], num_sequences: int) -> NDArray[np.bool_]:
    if "training_mode" not in columns:
        return np.zeros(num_sequences, np.bool_)
    is_sft: NDArray[np.bool_] = columns["training_mode"].array == TrainingMode.SFT.value
    return is_sft


def _strays(loss_mask: MaskRows, sampled: MaskRows) -> NDArray[np.bool_]:
    """Rows in which a trainable token was not sampled."""
    strays = np.zeros(len(loss_mask.lengths), np.bool_)
    if isinstance(loss_mask, SpanRows) and isinstance(sampled, SpanRows):
        owner = np.repeat(np.arange(len(strays)), loss_mask.num_spans)
        strays[owner[_is_outside(loss_mask, sampled)]] = True
    else:
        assert isinstance(loss_mask, BitRows) and isinstance(sampled, BitRows)
        odd = np.flatnonzero(loss_mask.bits & ~sampled.bits)
        strays[np.searchsorted(loss_mask.byte_offsets, odd, side="right") - 1] = True
    return strays


def _is_outside(inner: SpanRows, outer: SpanRows) -> NDArray[np.bool_]:
    """Spans of `inner` that are not within one span of `outer`; spans never touch, so one has to hold it."""
    inner_starts, inner_stops = inner.bounds()
    outer_starts, outer_stops = outer.bounds()
    holder = np.searchsorted(outer_starts, inner_starts, side="right") - 1
    if not len(outer_starts):
        return np.ones(len(inner_starts), np.bool_)
    return (holder < 0) | (inner_stops > outer_stops[holder])


def _row(rows: Rows, index: int) -> NDArray[Any]:
    return rows.select(np.array([index])).array


def _first(flags: NDArray[np.bool_]) -> int | None:
    found = np.flatnonzero(flags)
    return int(found[0]) if found.size else None
