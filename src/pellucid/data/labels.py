"""Checks the labels of samples: names, ids and role spans (see `rules`)."""

from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pellucid.data.rows import CellRows, Integers, Rows
from pellucid.data.schema import TrainingMode
from pellucid.errors import ColumnError

_ALL = "all"
"""Name of all environments together in metrics, views and reports."""

_MODES = frozenset(mode.value for mode in TrainingMode)
_MAX_ROLE_LENGTH = 64
_MAX_RUN_LENGTH = 200
"""Longest name of a run in characters, as for `run_id` of the configuration."""


def check_names(columns: Mapping[str, Rows]) -> None:
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

    _check_cells("env_name", columns, wrong)
    _check_cells("run_id", columns, odd)
    _check_cells("training_mode", columns, unknown)


def _check_cells(name: str, columns: Mapping[str, Rows], wrong: Callable[[str], str | None]) -> None:
    """Raises ColumnError if `wrong` finds a rule that a value breaks; checks each distinct value once."""
    if name not in columns:
        return
    rows = columns[name]
    assert isinstance(rows, CellRows)
    cells = rows.cells.tolist()
    rules = {cell: rule for cell in set(cells) if (rule := wrong(cell)) is not None}
    if rules:
        is_bad = rows.of_rows(np.array([cell in rules for cell in cells], np.bool_))
        if (first := first_row(is_bad)) is not None:
            raise ColumnError(name, first, rules[rows.array[first]])


def check_ids(columns: Mapping[str, Rows]) -> None:
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
    if "group_id" not in columns:
        return
    if _first_repeated(rollouts) is None:
        return
    groups: dict[str, str] = {"": ""}
    for row, (rollout, group) in enumerate(zip(rollouts, columns["group_id"].array.tolist(), strict=True)):
        if rollout and groups.setdefault(rollout, group) != group:
            raise ColumnError(
                "rollout_id",
                row,
                f"is {rollout!r}, of group {group!r} here and of {groups[rollout]!r} before",
            )


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


def check_roles(rows: Rows, lengths: Integers) -> None:
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
    if max(map(len, roles)) > _MAX_ROLE_LENGTH:
        is_bad |= np.fromiter(map(len, roles), np.int64, len(roles)) > _MAX_ROLE_LENGTH
    if (first := first_row(is_bad)) is not None:
        row = int(owner[first])
        raise ColumnError(
            "role_spans",
            row,
            f"has {roles[first][:_MAX_ROLE_LENGTH]!r} from {starts[first]} to {stops[first]} of "
            f"{lengths[row]} tokens; roles of at most {_MAX_ROLE_LENGTH} characters come in order and inside",
        )


def first_row(flags: NDArray[np.bool_]) -> int | None:
    """Finds the first True; None if there is none."""
    found = np.flatnonzero(flags)
    return int(found[0]) if found.size else None
