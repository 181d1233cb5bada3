"""What every sample has to obey, checked on the stored form: nothing is inflated to look at it.

- an environment's name, which is not the one that stands for all of them, and a known training mode
- nothing predicts the first token of a sequence, so it is never trainable
- outside of sft a trainable token was sampled, and its inference logprob is a number
- a temperature is above 0; advantages are numbers; a reward is a number, or NaN: nobody scored the sample
- what a loss multiplies on a trainable token stays within float32: see `_RANGES`

The same function judges a sample when it is built and a batch when it arrives.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pellucid.data.columns import COLUMNS, Stored, TrainingMode
from pellucid.data.rows import BitRows, MaskRows, Rows, SpanRows, ValueRows
from pellucid.errors import ColumnError

JUDGED = (
    *("env_name", "training_mode", "loss_mask", "sampled", "inference_logprobs"),
    *("teacher_logprobs", "advantages", "advantage", "reward", "temperatures", "temperature"),
)
_ALL = "all"
"""Stands for all environments together in metrics, views and reports."""

_MODES = frozenset(mode.value for mode in TrainingMode)


class _Range(NamedTuple):
    """Numbers that a trainable token may have in a column."""

    noun: str
    lowest: float
    highest: float
    why: str
    may_lack: bool = False
    """Whether NaN stands for a token that has none."""


_ANY = float(np.finfo(np.float32).max)
_MAX_ADVANTAGE = 1e19
_MIN_LOGPROB = -44.0
"""An importance ratio of at most e⁴⁴ = 1.3e19, times an advantage of at most 1e19, is a float32, and so is
the square of either, which a gradient's norm is made of. A token of probability e⁻⁴⁴ is never sampled:
samplers draw from 2²⁴ or 2³² numbers. Such a logprob is a placeholder, or something else chose the token."""

_RANGES = {
    "inference_logprobs": _Range(
        "logprob",
        _MIN_LOGPROB,
        -_MIN_LOGPROB,
        "a logprob beyond -44 or 44 overflows the importance ratio, and no engine samples such a token; "
        "unset loss_mask where the engine did not choose the token",
    ),
    "teacher_logprobs": _Range(
        "teacher logprob",
        np.nextafter(np.float32(-9999), np.float32(0)),
        _ANY,
        "-9999 is how engines write -inf; unset loss_mask where the teacher rules a token out",
        may_lack=True,
    ),
    "advantages": _Range("advantage", -_MAX_ADVANTAGE, _MAX_ADVANTAGE, "the loss would overflow; scale it"),
}


def check_rules(columns: Mapping[str, Rows], *, is_trained: bool = False) -> None:
    """Raises ColumnError with the first sequence that breaks a rule. Lengths are taken to be consistent.

    `is_trained`: another trainer has trained on them; numbers have to be finite, but may be of any size.
    """
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
    for name, allowed in _RANGES.items():
        if name in columns:
            any_size = allowed._replace(lowest=-_ANY, highest=_ANY)
            _check_range(name, any_size if is_trained else allowed, columns[name], loss_mask, sampled)
    _check_numbers(columns, _ANY if is_trained else _MAX_ADVANTAGE)


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


def _check_numbers(columns: Mapping[str, Rows], max_advantage: float) -> None:
    for name, highest, may_lack in (("advantage", max_advantage, False), ("reward", _ANY, True)):
        if name not in columns:
            continue
        values = columns[name].array
        if (first := _first(np.isinf(values) if may_lack else ~np.isfinite(values))) is not None:
            raise ColumnError(name, first, f"is {values[first]}; a number is needed")
        if (first := _first(np.abs(values) > highest)) is not None:
            raise ColumnError(name, first, f"is {values[first]:g}; {_RANGES['advantages'].why}")
    for name in ("temperature", "temperatures"):
        if name in columns and (first := _first_cold(columns[name])) is not None:
            values = _row(columns[name], first)
            found = values[~((values > 0) & (values < np.inf))][0]
            raise ColumnError(name, first, f"is {found:g}; training needs numbers above 0")


def _check_range(name: str, allowed: _Range, rows: Rows, loss_mask: MaskRows, sampled: MaskRows) -> None:
    if _is_within(rows, allowed):
        return
    is_per_token = COLUMNS[name].stored is Stored.TOKENS
    for row in range(len(rows.lengths)):
        values, trained, was_sampled = _row(rows, row), _row(loss_mask, row), _row(sampled, row)
        has_value = np.ones_like(trained) if is_per_token else was_sampled
        is_bad = ~((values >= allowed.lowest) & (values <= allowed.highest)) & trained[has_value]
        if allowed.may_lack:
            is_bad &= ~np.isnan(values)
        if is_bad.any():
            token, found = np.flatnonzero(has_value)[is_bad][0], values[is_bad][0]
            rule = f"a token whose {allowed.noun} is not finite cannot train"
            raise ColumnError(
                name, row, f"of token {token} is {found:g}; {allowed.why if np.isfinite(found) else rule}"
            )


def _is_within(rows: Rows, allowed: _Range) -> bool:
    """Whether all values of all tokens are, so that nobody has to look at which of them train."""
    assert isinstance(rows, ValueRows)
    least, most = (np.fmin, np.fmax) if allowed.may_lack else (np.minimum, np.maximum)
    for piece in rows.all_pieces():
        if piece.size:
            low, high = least.reduce(piece), most.reduce(piece)
            is_empty = allowed.may_lack and np.isnan(low)  # then all are
            if not is_empty and not (low >= allowed.lowest and high <= allowed.highest):
                return False
    return True


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
