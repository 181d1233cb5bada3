"""Rules of every sample, checked on the stored form without inflating it.

- an environment's name is printable and not "all"; the training mode is known
- a sample's id is unique, and a rollout belongs to one group
- role spans are in order and inside of the sequence
- nothing predicts the first token of a sequence, so it is never trainable
- outside of sft a trainable token was sampled, and its inference logprob is a number
- in opd a trainable token has the teacher's logprob, too
- a temperature is above 0; advantages are numbers; a reward is a number, or NaN if the sample is not scored
- a policy version is -1 (unknown) or more
- factors of the loss of a trainable token stay within float32: see `_RANGES`

The same function checks a sample when it is built and a batch when it arrives. A trainer has two more rules
for a batch. It is text alone, or the images of each sample fill the tokens in their place: a model that takes
no pixels would train these as words. With router replay, every token has experts, and they fit the model.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from pellucid.data.images import FAMILIES, IMAGE, ImageShape
from pellucid.data.rows import (
    BitRows,
    CellRows,
    Integers,
    MaskRows,
    Rows,
    RunRows,
    SpanRows,
    ValueRows,
    offsets_of,
)
from pellucid.data.schema import COLUMNS, Axis, TrainingMode
from pellucid.errors import ColumnError

_NO_TEACHER = "opd needs teacher_logprobs on every trainable token: set orchestrator.teacher"
_ALL = "all"
"""Name of all environments together in metrics, views and reports."""

_MODES = frozenset(mode.value for mode in TrainingMode)
_MAX_ROLE_LENGTH = 64
_MAX_RUN_LENGTH = 200
"""Longest name of a run in characters, as for `run_id` of the configuration."""

_BLOCK_TOKENS = 1 << 20
"""Tokens whose masks are inflated at a time, to find out which of them train."""

Experts = tuple[int, int, int]
"""Layers with a router, experts per token, experts of a layer."""


class _Range(NamedTuple):
    """The range of numbers that a trainable token may have in a column."""

    noun: str
    lowest: float
    highest: float
    why: str
    may_lack: bool = False
    """Whether NaN is allowed, for a token without a value; never in opd."""


_ANY = float(np.finfo(np.float32).max)
_MAX_ADVANTAGE = 1e19
_MAX_LOGPROB = 0.01
"""Highest logprob. A probability is at most 1, but rounding lifts its log by up to 0.01 for logits of 1e5."""

_MIN_LOGPROB = -44.0
"""Lowest logprob. It bounds the importance ratio by e⁴⁴ = 1.3e19. Times an advantage of at most 1e19 that is
a float32, and so is the square of either, which a gradient's norm sums. No sampler draws a token of
probability e⁻⁴⁴: samplers draw from 2²⁴ or 2³² numbers. A lower logprob is a placeholder, or something else
chose the token."""

_RANGES = {
    "inference_logprobs": _Range(
        "logprob",
        _MIN_LOGPROB,
        _MAX_LOGPROB,
        "a logprob is 0 at most, and one below -44 overflows the importance ratio: no engine samples such a "
        "token; unset loss_mask where the engine did not choose the token",
    ),
    "teacher_logprobs": _Range(
        "teacher logprob",
        np.nextafter(np.float32(-9999), np.float32(0)),
        _MAX_LOGPROB,
        "a logprob is 0 at most, and -9999 is how engines write -inf; unset loss_mask where the teacher "
        "rules a token out",
        may_lack=True,
    ),
    "advantages": _Range("advantage", -_MAX_ADVANTAGE, _MAX_ADVANTAGE, "the loss would overflow; scale it"),
}

JUDGED = (
    *("env_name", "training_mode", "loss_mask", "sampled", *_RANGES),
    *("advantage", "reward", "temperatures", "temperature", "policy_versions"),
    *("role_spans", "group_id", "rollout_id", "sample_id"),
)
"""Columns that `check_rules` looks at."""


def check_rules(columns: Mapping[str, Rows], *, is_trained: bool = False) -> None:
    """Raises ColumnError with the first sequence that breaks a rule; the caller guarantees equal lengths.

    `is_trained` says that another trainer has trained on them: numbers must be finite, but can have any size.
    """
    _check_names(columns)
    if not is_trained:
        _check_ids(columns)
    if "role_spans" in columns:
        _check_roles(columns["role_spans"], columns["loss_mask"].lengths)
    loss_mask, sampled = columns["loss_mask"], columns["sampled"]
    assert isinstance(loss_mask, MaskRows) and isinstance(sampled, MaskRows)
    _refuse(
        "loss_mask",
        loss_mask.leads,
        lambda _: "marks the first token trainable; nothing predicts that token: unset loss_mask[0]",
    )

    def unsampled(row: int) -> str:
        token = np.flatnonzero(_row(loss_mask, row) & ~_row(sampled, row))[0]
        return f"marks token {token} trainable, but it was not sampled; its logprob is needed"

    _refuse("loss_mask", _strays(loss_mask, sampled) & ~_has_mode(columns, TrainingMode.SFT), unsampled)
    needs_teacher = _has_mode(columns, TrainingMode.OPD) & (not is_trained)
    for name, allowed in _RANGES.items():
        if name in columns:
            any_size = allowed._replace(lowest=-_ANY, highest=_ANY)
            may_lack = allowed.may_lack & ~needs_teacher
            _check_range(name, any_size if is_trained else allowed, may_lack, columns, loss_mask, sampled)
    if "teacher_logprobs" not in columns:
        _refuse("training_mode", needs_teacher & (loss_mask.counts > 0), lambda _: f"is opd; {_NO_TEACHER}")
    _check_numbers(columns, _ANY if is_trained else _MAX_ADVANTAGE)
    _check_versions(columns["policy_versions"])


def _refuse(name: str, is_bad: NDArray[np.bool_], rule: Callable[[int], str]) -> None:
    """Raises ColumnError for the first bad row, if there is one; `rule` says what is wrong with a row."""
    if is_bad.any():
        row = int(is_bad.argmax())
        raise ColumnError(name, row, rule(row))


def _check_names(columns: Mapping[str, Rows]) -> None:
    def wrong(name: str) -> str | None:
        if not name:
            return "is empty; name the environment"
        if name == _ALL:
            return f"is {_ALL!r}, which stands for all environments; choose another name"
        return None if name.isprintable() else f"is {name!r}, which cannot be printed; choose another name"

    def odd(run: str) -> str | None:
        if len(run) > _MAX_RUN_LENGTH or "/" in run or not run.isprintable():
            return (
                f"is {run[:_MAX_RUN_LENGTH]!r}; the name of a run has at most {_MAX_RUN_LENGTH} characters, "
                "no `/` and nothing that cannot be printed; choose another run_id"
            )
        return None

    def unknown(mode: str) -> str | None:
        return None if mode in _MODES else f"is {mode!r}; known: {', '.join(TrainingMode)}"

    for name, find in (("env_name", wrong), ("run_id", odd), ("training_mode", unknown)):
        if name in columns:
            rows = columns[name]
            assert isinstance(rows, CellRows)
            cells = rows.cells.tolist()
            rules = {cell: rule for cell in set(cells) if (rule := find(cell)) is not None}
            if not rules:
                continue
            is_bad = rows.of_rows(np.array([cell in rules for cell in cells], np.bool_))
            if is_bad.any():
                row = int(is_bad.argmax())
                raise ColumnError(name, row, rules[rows.array[row]])


def _check_ids(columns: Mapping[str, Rows]) -> None:
    """Raises ColumnError if a sampled token would count twice.

    A sample of a data set, which has no rollout, may occur twice: once in each of two epochs.
    """
    if "rollout_id" not in columns:
        return
    rollouts = columns["rollout_id"].array.tolist()
    if "sample_id" in columns:
        samples = columns["sample_id"].array.tolist()
        own = [sample if rollout else "" for sample, rollout in zip(samples, rollouts, strict=True)]
        if (first := _first_repeated(own)) is not None:
            raise ColumnError("sample_id", first, f"is {samples[first]!r}, which another sample has, too")
    if "group_id" not in columns or _first_repeated(rollouts) is None:
        return
    groups: dict[str, str] = {"": ""}
    for row, (rollout, group) in enumerate(zip(rollouts, columns["group_id"].array.tolist(), strict=True)):
        if rollout and groups.setdefault(rollout, group) != group:
            rule = f"is {rollout!r}, of group {group!r} here and of {groups[rollout]!r} before"
            raise ColumnError("rollout_id", row, rule)


def _first_repeated(ids: list[str]) -> int | None:
    """Finds the row where an id occurs for the second time; empty ids do not count."""
    if len(distinct := set(ids)) == len(ids) or distinct == {""}:
        return None
    seen: set[str] = set()
    for row, each in enumerate(ids):
        if each and each in seen:
            return row
        seen.add(each)
    return None


def _check_roles(rows: Rows, lengths: Integers) -> None:
    spans = rows.array.tolist()
    counts = np.fromiter(map(len, spans), np.int64, len(spans))
    flat = list(chain.from_iterable(spans))
    if not flat:
        return
    roles, first_tokens, ends = zip(*flat, strict=True)
    owner = np.repeat(np.arange(len(spans)), counts)
    try:
        starts, stops = np.array(first_tokens, np.int64), np.array(ends, np.int64)
    except OverflowError as error:
        raise ColumnError("role_spans", None, f"holds a number that is no token's: {error}") from error
    is_bad = (starts < 0) | (stops < starts) | (stops > lengths[owner])
    is_bad[1:] |= (starts[1:] < stops[:-1]) & (owner[1:] == owner[:-1])
    is_bad |= np.fromiter(map(len, roles), np.int64, len(roles)) > _MAX_ROLE_LENGTH
    if is_bad.any():
        first = int(is_bad.argmax())
        row = int(owner[first])
        rule = (
            f"has {roles[first][:_MAX_ROLE_LENGTH]!r} from {starts[first]} to {stops[first]} of "
            f"{lengths[row]} tokens; roles of at most {_MAX_ROLE_LENGTH} characters come in order and inside"
        )
        raise ColumnError("role_spans", row, rule)


def check_text(columns: Mapping[str, Rows]) -> None:
    """Raises ColumnError with the first sequence that is not text alone, which is all the model takes."""
    for name, what in (("mm_tensors", "multimodal tensors"), ("mm_token_type_ids", "multimodal tokens")):
        if name in columns and any(piece.any() for piece in columns[name].all_pieces()):
            rule = (
                f"holds {what}, and the model computes text alone: it would train on their places as if "
                f"they were words; leave such samples out, or train a model of {' or '.join(FAMILIES)}"
            )
            raise ColumnError(name, _first_owner(columns[name], columns[name].array.astype(np.bool_)), rule)


def check_images(columns: Mapping[str, Rows], shape: ImageShape) -> None:
    """Raises ColumnError with the first sequence whose images and the tokens in their place do not agree."""
    types, tensors = columns.get("mm_token_type_ids"), columns.get("mm_tensors")
    if types is None and tensors is None:
        return
    lengths = columns["token_ids"].lengths
    places = np.zeros(len(lengths), np.int64)
    if types is not None:
        flat = types.array
        if flat.max(initial=0) > IMAGE:
            row = _first_owner(types, flat > IMAGE)
            raise ColumnError(
                "mm_token_type_ids",
                row,
                f"holds {flat.max()}; {IMAGE} is an image and 0 is text, no other is known",
            )
        owner = np.repeat(np.arange(len(lengths)), lengths)
        places = np.bincount(owner, flat == IMAGE, len(lengths)).astype(np.int64)
    payloads = [b""] * len(lengths) if tensors is None else tensors.array.tolist()
    names = columns["sample_id"].array.tolist() if "sample_id" in columns else [""] * len(lengths)
    for row, (num_places, payload, name) in enumerate(zip(places.tolist(), payloads, names, strict=True)):
        if (payload or num_places) and (reason := shape.why_not(num_places, payload)):
            raise ColumnError("mm_tensors", row, f"{f'of sample {name} ' if name else ''}{reason}")


_COLUMN = "routed_experts"
_OTHER_MODEL = "the engine served another model than the trainer's; start both with the same model.name"


def check_experts(columns: Mapping[str, Rows], experts: Experts) -> None:
    """Raises ColumnError with the first sequence whose experts cannot be replayed."""
    num_layers, top_k, num_experts = experts
    if _COLUMN not in columns:
        _refuse_missing(0)
    rows = columns[_COLUMN]
    assert isinstance(rows, ValueRows)
    if rows.dims != (num_layers, top_k):
        found = " layers × ".join(map(str, rows.dims))
        raise ColumnError(
            _COLUMN, 0, f"has {found} experts per token; the model has {num_layers} × {top_k}: {_OTHER_MODEL}"
        )
    for row, pieces in enumerate(rows.pieces()):
        for piece in pieces:
            if piece.size and piece.min() < 0:
                _refuse_missing(row)
            if piece.size and piece.max() >= num_experts:
                raise ColumnError(
                    _COLUMN, row, f"holds {piece.max()}; the model has {num_experts} experts: {_OTHER_MODEL}"
                )


_WEIGHTS = "expert_weights"


def check_expert_weights(columns: Mapping[str, Rows], experts: Experts) -> None:
    """Raises ColumnError with the first sequence whose weights of experts cannot be replayed."""
    missing = (
        "is missing, and trainer.replay_expert_weights = true replays it; start the inference server with "
        "inference.record_expert_weights = true, or leave out the replay"
    )
    if _WEIGHTS not in columns:
        raise ColumnError(_WEIGHTS, 0, missing)
    rows = columns[_WEIGHTS]
    assert isinstance(rows, ValueRows)
    if rows.dims != experts[:2]:
        found, wanted = (" × ".join(map(str, dims)) for dims in (rows.dims, experts[:2]))
        raise ColumnError(
            _WEIGHTS, 0, f"has {found} weights per token; the model has {wanted} experts: {_OTHER_MODEL}"
        )
    for row, pieces in enumerate(rows.pieces()):
        for piece in pieces:
            if np.isnan(piece).any():
                raise ColumnError(_WEIGHTS, row, missing)
            if piece.size and not (piece.min() >= 0 and piece.max() < np.inf):
                raise ColumnError(_WEIGHTS, row, "holds a weight that is negative or infinite")


def _refuse_missing(row: int) -> NoReturn:
    raise ColumnError(
        _COLUMN,
        row,
        "is missing, and trainer.enable_router_replay = true replays it; start the inference server with "
        "inference.record_experts = true, or leave out the replay",
    )


def _check_versions(rows: Rows) -> None:
    values = rows.runs[:, :1] if isinstance(rows, RunRows) else rows.array
    if values.size and values.min() < -1:
        rule = f"holds {values.min()}; a version is 0 or more, or -1: unknown"
        raise ColumnError("policy_versions", _first_owner(rows, rows.array < -1), rule)


def _check_numbers(columns: Mapping[str, Rows], max_advantage: float) -> None:
    for name, highest, may_lack in (("advantage", max_advantage, False), ("reward", _ANY, True)):
        if name not in columns:
            continue
        values = columns[name].array
        for is_bad, rule in (
            (np.isinf(values) if may_lack else ~np.isfinite(values), "a number is needed"),
            (np.abs(values) > highest, _RANGES["advantages"].why),
        ):
            if is_bad.any():
                row = int(is_bad.argmax())
                raise ColumnError(name, row, f"is {values[row]:g}; {rule}")
    for name in ("temperature", "temperatures"):
        if name in columns:
            pieces = columns[name].all_pieces()
            if all(piece.size == 0 or (piece.min() > 0 and piece.max() < np.inf) for piece in pieces):
                continue
            values = columns[name].array
            is_bad = ~((values > 0) & (values < np.inf))
            row = _first_owner(columns[name], is_bad)
            raise ColumnError(name, row, f"is {values[is_bad][0]:g}; training needs numbers above 0")


def _check_range(
    name: str,
    allowed: _Range,
    may_lack: NDArray[np.bool_],
    columns: Mapping[str, Rows],
    loss_mask: MaskRows,
    sampled: MaskRows,
) -> None:
    """Raises ColumnError if a trainable token is out of range; NaN is in range where `may_lack`."""
    rows = columns[name]
    if _is_within(rows, allowed, bool(may_lack.all())):
        return
    is_per_token = COLUMNS[name].stored is Axis.TOKENS
    for block in _blocks(loss_mask.lengths):
        values, trained, was_sampled = (_part(each, block) for each in (rows, loss_mask, sampled))
        lengths = loss_mask.lengths[block]
        tokens = np.arange(len(trained)) if is_per_token else np.flatnonzero(was_sampled)
        is_bad = ~((values >= allowed.lowest) & (values <= allowed.highest)) & trained[tokens]
        if is_bad.any() and may_lack.any():
            is_bad &= ~(np.isnan(values) & np.repeat(may_lack[block], lengths)[tokens])
        if is_bad.any():
            first, offsets = int(is_bad.argmax()), offsets_of(lengths)
            row = int(np.searchsorted(offsets, tokens[first], side="right")) - 1
            rule = f"a token whose {allowed.noun} is not finite cannot train"
            if np.isnan(values[first]) and name == "teacher_logprobs":
                rule = _NO_TEACHER
            elif np.isfinite(values[first]):
                rule = allowed.why
            raise ColumnError(
                name, int(block[row]), f"of token {tokens[first] - offsets[row]} is {values[first]:g}; {rule}"
            )


def _blocks(lengths: Integers) -> Iterator[Integers]:
    """Yields indices of consecutive rows, with a million tokens or one row at a time."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        reached = ends[start] - lengths[start] + _BLOCK_TOKENS
        stop = max(start + 1, int(np.searchsorted(ends, reached, side="right")))
        yield np.arange(start, stop)
        start = stop


def _part(rows: Rows, block: Integers) -> NDArray[Any]:
    return rows.array if len(block) == len(rows.lengths) else rows.select(block).array


def _is_within(rows: Rows, allowed: _Range, may_lack: bool) -> bool:
    """Returns whether all values of all tokens are in range, trainable or not: that is quick to check."""
    assert isinstance(rows, ValueRows)
    least, most = (np.fmin, np.fmax) if may_lack else (np.minimum, np.maximum)
    for piece in rows.all_pieces():
        if piece.size:
            low, high = least.reduce(piece), most.reduce(piece)
            is_empty = may_lack and np.isnan(low)  # then all are NaN
            if not is_empty and not (low >= allowed.lowest and high <= allowed.highest):
                return False
    return True


def _has_mode(columns: Mapping[str, Rows], mode: TrainingMode) -> NDArray[np.bool_]:
    if "training_mode" not in columns:
        return np.full(len(columns["loss_mask"].lengths), mode is TrainingMode.RL)
    rows = columns["training_mode"]
    assert isinstance(rows, CellRows)
    return rows.of_rows(rows.cells == mode.value)


def _strays(loss_mask: MaskRows, sampled: MaskRows) -> NDArray[np.bool_]:
    """Finds the rows in which a trainable token was not sampled."""
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
    """Finds spans of `inner` that are not within one span of `outer`; adjacent spans do not occur."""
    inner_starts, inner_stops = inner.bounds()
    outer_starts, outer_stops = outer.bounds()
    holder = np.searchsorted(outer_starts, inner_starts, side="right") - 1
    if not len(outer_starts):
        return np.ones(len(inner_starts), np.bool_)
    return (holder < 0) | (inner_stops > outer_stops[holder])


def _row(rows: Rows, index: int) -> NDArray[Any]:
    return rows.select(np.array([index])).array


def _first_owner(rows: Rows, is_bad: NDArray[np.bool_]) -> int:
    """Finds the row of the first bad entry."""
    return int(np.repeat(np.arange(len(rows.lengths)), rows.lengths)[is_bad.argmax()])
