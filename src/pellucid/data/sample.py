"""One trainable token sequence of a rollout, stored as bytes from the moment it is built.

TrainingSample.from_turn([5, 6], [9, 8], [-0.1, -0.7], env_name="reverse-text", advantage=0.5)

token_ids            5     6     9     8
sampled              .     .     x     x
loss_mask            .     .     x     x      the first token of a sequence is never trainable
inference_logprobs               -0.1  -0.7   stored for sampled tokens only

Lengths, counts and rules (`pellucid.data.rules`) are read off the bytes: a sample is inflated only when a
micro batch is made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pellucid.data.gather import gather
from pellucid.data.packed import PackedArray
from pellucid.data.rules import JUDGED, check_rules
from pellucid.data.schema import COLUMNS, Axis, Column
from pellucid.errors import ColumnError, DataError


@dataclass(frozen=True, slots=True)
class TrainingSample:
    length: int
    num_sampled: int
    num_trainable: int
    arrays: Mapping[str, PackedArray]
    values: Mapping[str, Any]

    @classmethod
    def build(cls, **columns: Any) -> "TrainingSample":
        """Builds a sample from lists, arrays or bytes; columns and storage are those of `COLUMNS`."""
        return cls.build_all([columns])[0]

    @classmethod
    def build_all(cls, samples: Sequence[Mapping[str, Any]]) -> "list[TrainingSample]":
        """Builds several samples and checks them together, which takes hardly longer than checking one."""
        return _judged([cls._of(*_packed(columns)) for columns in samples])

    @classmethod
    def from_packed(cls, arrays: Mapping[str, PackedArray], values: Mapping[str, Any]) -> "TrainingSample":
        """Builds a sample from columns that are packed already."""
        return _judged([cls._of(arrays, values)])[0]

    @classmethod
    def _of(cls, arrays: Mapping[str, PackedArray], values: Mapping[str, Any]) -> "TrainingSample":
        """Makes a sample without checking the rules; every caller passes it to `_judged`."""
        missing = [
            name
            for name, column in COLUMNS.items()
            if column.required and name not in arrays and name not in values
        ]
        if missing:
            raise DataError(f"sample lacks {', '.join(missing)}")
        for name, value in values.items():
            _check_value(name, value)
        num_sampled = arrays["sampled"].num_true()
        _check_lengths(arrays, num_sampled)
        return cls(
            length=len(arrays["token_ids"]),
            num_sampled=num_sampled,
            num_trainable=arrays["loss_mask"].num_true(),
            arrays=arrays,
            values=values,
        )

    @classmethod
    def from_turn(
        cls,
        prompt_ids: Sequence[int] | NDArray[Any],
        completion_ids: Sequence[int] | NDArray[Any],
        completion_logprobs: ArrayLike,
        *,
        policy_versions: ArrayLike = 0,
        completion_mask: ArrayLike = True,
        **columns: Any,
    ) -> "TrainingSample":
        """Builds a sample from one prompt and its completion, all of whose tokens were sampled."""
        num_prompt, num_completion = len(prompt_ids), len(completion_ids)
        sampled = np.arange(num_prompt + num_completion) >= num_prompt
        loss_mask = sampled.copy()
        loss_mask[num_prompt:] = completion_mask
        return cls.build(
            token_ids=np.concatenate([_as_array("token_ids", ids) for ids in (prompt_ids, completion_ids)]),
            loss_mask=loss_mask,
            sampled=sampled,
            inference_logprobs=completion_logprobs,
            policy_versions=np.broadcast_to(np.asarray(policy_versions, np.int32), (num_completion,)),
            **columns,
        )


def _packed(columns: Mapping[str, Any]) -> tuple[dict[str, PackedArray], dict[str, Any]]:
    """Packs the columns; returns arrays and per-sequence values."""
    unknown = sorted(columns.keys() - COLUMNS.keys())
    if unknown:
        raise DataError(f"sample has unknown columns {unknown}; known: {sorted(COLUMNS)}")
    arrays: dict[str, PackedArray] = {}
    values: dict[str, Any] = {}
    for name, value in columns.items():
        if value is None:
            continue
        if COLUMNS[name].stored is Axis.SEQUENCES:
            values[name] = value
        elif isinstance(value, PackedArray):
            arrays[name] = value
        else:
            array = _as_array(name, value)
            _check_dims(name, array.shape)
            arrays[name] = PackedArray.pack(array, COLUMNS[name].encoding)
    return arrays, values


def _judged(samples: list[TrainingSample]) -> list[TrainingSample]:
    if samples:
        try:
            check_rules(gather(samples, JUDGED))
        except ColumnError as error:
            raise DataError(f"sample: {error.column} {error.rule}") from error
    return samples


def _as_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """Converts values to the column's dtype; raises DataError if they do not fit, and never wraps around."""
    column = COLUMNS[name]
    try:
        array = np.asarray(value)
        if array.dtype == column.dtype and column.narrow is None:
            return array
        if array.size and array.dtype.kind != np.dtype(column.dtype).kind:
            array = _converted(array, column)
        if column.narrow is not None and _fits(array, column.narrow):
            return array.astype(column.narrow)
        if array.size and array.dtype.kind in "iu" and not _fits(array, column.dtype):
            raise OverflowError(f"{array.min()} … {array.max()} does not fit {np.dtype(column.dtype)}")
        return array.astype(column.dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"sample column {name}: {error}") from error


def _converted(array: NDArray[Any], column: Column) -> NDArray[Any]:
    kind = np.dtype(column.dtype).kind
    if kind == "b" and array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= 1:
        return array.astype(np.bool_)
    if array.dtype.kind in {"f": "iu", "i": "u", "u": "i"}.get(kind, ""):
        return array
    raise TypeError(f"holds {array.dtype}; expected {np.dtype(column.dtype)}")


def _fits(array: NDArray[Any], dtype: type) -> bool:
    """Returns whether every value fits an integer dtype; True for any other dtype."""
    if not np.issubdtype(dtype, np.integer):
        return True
    limits = np.iinfo(dtype)
    return array.size == 0 or bool(array.min() >= limits.min and array.max() <= limits.max)


def _check_value(name: str, value: Any) -> None:
    column = COLUMNS[name]
    holds = Real if column.is_number else column.dtype
    if isinstance(holds, type) and isinstance(value, holds):
        return
    try:
        msgspec.convert(value, float if column.is_number else holds)
    except msgspec.ValidationError as error:
        raise DataError(f"sample column {name} is {value!r}: {error}") from error


def _check_dims(name: str, shape: tuple[int, ...]) -> None:
    expected = 1 + len(COLUMNS[name].dims)
    if len(shape) != expected:
        raise DataError(f"sample column {name} has shape {shape}; expected {expected} dimensions")


def _check_lengths(arrays: Mapping[str, PackedArray], num_sampled: int) -> None:
    for name, array in arrays.items():
        _check_dims(name, array.shape)
    num_tokens = len(arrays["token_ids"])
    if num_tokens == 0:
        raise DataError("sample has no tokens")
    needed = {Axis.TOKENS: num_tokens, Axis.SAMPLED: num_sampled}
    for name, array in arrays.items():
        stored = COLUMNS[name].stored
        if len(array) != needed[stored]:
            raise DataError(
                f"sample column {name} has {len(array)} entries; expected {needed[stored]}, one per "
                f"{'token' if stored is Axis.TOKENS else 'sampled token'}"
            )
