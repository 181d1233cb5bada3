"""One trainable token sequence of a rollout, stored as bytes from the moment it is built.

TrainingSample.from_turn([5, 6], [9, 8], [-0.1, -0.7], env_name="reverse-text", advantage=0.5)

token_ids            5     6     9     8
sampled              .     .     x     x
loss_mask            .     .     x     x      the first token of a sequence is never trainable
inference_logprobs               -0.1  -0.7   stored for sampled tokens only

Lengths, counts and rules (`pellucid.data.rules`) are read off the bytes: a sample is inflated only when a
micro batch is made of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pellucid.data.packed import BITS, PAIR_BYTES, RUN, SPAN, PackedArray
from pellucid.data.rows import BitRows, CellRows, Integers, PieceRows, Rows, RunRows, SpanRows
from pellucid.data.rules import JUDGED, check_rules
from pellucid.data.schema import COLUMNS, Axis, Column, Encoding
from pellucid.errors import ColumnError, DataError

_REQUIRED = [name for name, column in COLUMNS.items() if column.required]
_NUMBERS = frozenset(name for name, column in COLUMNS.items() if column.is_number)
_MASKS = [name for name, column in COLUMNS.items() if column.encoding is Encoding.SPANS]


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
        if missing := [name for name in _REQUIRED if name not in arrays and name not in values]:
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
    column, kind = COLUMNS[name], type(value)
    if kind is column.dtype or (kind in (float, int) and name in _NUMBERS):
        return  # nearly always
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


def gather(samples: Sequence[TrainingSample], only: Collection[str] = COLUMNS.keys()) -> dict[str, Rows]:
    """Gathers every column that some sample has; samples without it get its stand-in or its fill.

    Inflates nothing, and copies no large values.
    """
    lengths = {
        Axis.TOKENS: np.array([sample.length for sample in samples], np.int64),
        Axis.SAMPLED: np.array([sample.num_sampled for sample in samples], np.int64),
    }
    names = set[str]().union(*(sample.arrays for sample in samples), *(sample.values for sample in samples))
    rows: dict[str, Rows] = {}
    for name, column in COLUMNS.items():
        if name not in only or (name not in names and not column.required):
            continue
        if column.stored is Axis.SEQUENCES:
            cells = [sample.values.get(name, column.fill) for sample in samples]
            rows[name] = CellRows(np.fromiter(cells, column.array_dtype, count=len(cells)))
        elif column.encoding is Encoding.SPANS:
            rows[name] = _mask_rows(name, samples, lengths[column.stored])
        else:
            rows[name] = _value_rows(name, samples, lengths[column.stored])
    return rows


def _mask_rows(name: str, samples: Sequence[TrainingSample], lengths: Integers) -> Rows:
    """Gives both masks of a table the same form: bits if any sample stores a mask as bits, else spans."""
    packed = [sample.arrays[name] for sample in samples]
    if any(sample.arrays[mask].dtype == BITS for sample in samples for mask in _MASKS):
        bits = [
            mask.data if mask.dtype == BITS else np.packbits(mask.array(), bitorder="little").tobytes()
            for mask in packed
        ]
        return BitRows(np.frombuffer(b"".join(bits), np.uint8), lengths)
    num_spans = np.array([len(mask.data) // PAIR_BYTES for mask in packed], np.int64)
    spans = np.frombuffer(b"".join([mask.data for mask in packed]), SPAN).reshape(-1, 2)
    return SpanRows(spans, num_spans, lengths)


def _value_rows(name: str, samples: Sequence[TrainingSample], lengths: Integers) -> Rows:
    packed = [sample.arrays.get(name) for sample in samples]
    present = [array for array in packed if array is not None]
    if len(present) == len(samples) and all(array.is_runs for array in present):
        runs = np.frombuffer(b"".join([array.data for array in present]), RUN).reshape(-1, 2)
        num_runs = np.array([len(array.data) // PAIR_BYTES for array in present], np.int64)
        return RunRows(runs, num_runs, lengths, np.dtype(COLUMNS[name].dtype))
    shapes = {array.shape[1:] for array in present}
    if len(shapes) > 1:
        dims = " × ".join(COLUMNS[name].dims)
        raise ColumnError(name, None, f"has entries of {sorted(shapes)} ({dims}); they need one shape")
    entry = shapes.pop() if shapes else ()
    pieces = [
        _absent(name, sample, entry) if array is None else array.array()
        for sample, array in zip(samples, packed, strict=True)
    ]
    dtypes = {piece.dtype for piece in pieces} or {np.dtype(COLUMNS[name].dtype)}
    dtype = np.result_type(*dtypes)
    if len(dtypes) > 1:
        pieces = [piece.astype(dtype, copy=False) for piece in pieces]
    return PieceRows([(piece,) for piece in pieces], lengths, np.empty((0, *entry), dtype))


def _absent(name: str, sample: TrainingSample, dims: tuple[int, ...]) -> NDArray[Any]:
    column = COLUMNS[name]
    array = column.filled(sample.length if column.stored is Axis.TOKENS else sample.num_sampled, dims)
    if column.stand_in is not None and column.stand_in in sample.values:
        array[:] = sample.values[column.stand_in]
    return array


class _ListSample(msgspec.Struct, array_like=True):
    """The older form of a sample: one msgpack array of lists, or of packed arrays that replace them.

    Logprobs are doubles there and float32 here. The completion counts as sampled; multimodal tensors stay
    opaque.
    """

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    completion_temperatures: list[float]
    env_name: str
    teacher_logprobs: list[float] | None = None
    advantage: float | None = None
    reward: float | None = None
    completion_temperature: float | None = None
    mm_tensors: msgspec.Raw = msgspec.Raw(b"\xc0")
    routed_experts: PackedArray | None = None
    mm_token_type_ids: list[int] | None = None
    training_mode: str = "rl"
    packed_prompt_ids: PackedArray | None = None
    packed_prompt_mask: PackedArray | None = None
    packed_completion_ids: PackedArray | None = None
    packed_completion_mask: PackedArray | None = None
    packed_completion_logprobs: PackedArray | None = None
    packed_completion_temperatures: PackedArray | None = None
    packed_teacher_logprobs: PackedArray | None = None
    packed_mm_token_type_ids: PackedArray | None = None


def read_list_payload(payload: bytes) -> TrainingSample:
    """Decodes one sample of the older form, to convert recorded ones; no transport reads it."""
    try:
        old = msgspec.msgpack.decode(payload, type=_ListSample)
    except msgspec.DecodeError as error:
        raise DataError(f"not a sample of the older list form: {error}") from error

    def values(name: str) -> Any:
        """Returns the packed form if there is one, else the plain one."""
        packed: PackedArray | None = getattr(old, f"packed_{name}")
        return getattr(old, name) if packed is None else packed.array()

    prompt_ids, completion_ids = values("prompt_ids"), values("completion_ids")
    masks = values("prompt_mask"), values("completion_mask")
    temperatures = values("completion_temperatures")
    return TrainingSample.build(
        token_ids=[*prompt_ids, *completion_ids],
        loss_mask=np.concatenate([np.asarray(mask, np.bool_) for mask in masks]),
        sampled=np.arange(len(prompt_ids) + len(completion_ids)) >= len(prompt_ids),
        inference_logprobs=values("completion_logprobs"),
        policy_versions=np.zeros(len(completion_ids), np.int32),
        temperatures=temperatures if len(temperatures) else None,
        temperature=old.completion_temperature,
        teacher_logprobs=values("teacher_logprobs"),
        routed_experts=None if old.routed_experts is None else old.routed_experts.array(),
        mm_token_type_ids=values("mm_token_type_ids"),
        mm_tensors=None if bytes(old.mm_tensors) == b"\xc0" else bytes(old.mm_tensors),
        env_name=old.env_name,
        advantage=old.advantage,
        reward=old.reward,
        training_mode=old.training_mode,
    )
