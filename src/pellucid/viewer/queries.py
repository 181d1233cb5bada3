"""Questions about a whole run, answered by DuckDB from its Parquet files; a browser would read every token.

    {"ask": "worst", "metric": "kl", "kind": "all", "limit": 200,
     "env": "", "rank": -1, "weights": "", "filter": null}
        -> [[step, record, token, value], …]      furthest from 0 first
    {"ask": "find", "ids": [123, 45]}
        -> [[step, record], …]                    records that hold all of these token ids

DuckDB reads whole Parquet files itself. Of any other export (JSONL, a selection of records) it gets the
columns in question, some steps at a time.

A filter is a tree as `data/select.js` parses it. A question is data: of its text only values reach DuckDB, as
parameters. The answer is None where DuckDB cannot give it (it is not installed, a column is not recorded, a
filter looks at texts or at record numbers); the browser then looks through the run itself, to the same
answer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from pellucid.data import TokenTable
from pellucid.data.schema import FIELD_BY_NAME, FIELDS, TOKEN_FIELDS
from pellucid.errors import DataError
from pellucid.export.parquet import to_arrow
from pellucid.viewer.access import Exports, Records
from pellucid.viewer.rows import WORDS

HIGH_KL = 0.05
"""A mismatch KL that is high: of the class `trained`, as in `views/worst.js`."""

MOST = 1000

_FORMS = {
    "value": "{}",
    "negative": "-{}",
    "age": "CASE WHEN {0} >= 0 THEN step - {0} END",
}
_TOKEN_COLUMNS = tuple(field.name for field in TOKEN_FIELDS)
_METRICS = {
    field.shade.key: _FORMS[field.shade.of].format(field.name) for field in TOKEN_FIELDS if field.shade
}
_NUMBERS = {
    **{
        field.key or field.name: f"{field.name}::INT" if field.dtype is np.bool_ else field.name
        for field in TOKEN_FIELDS
    },
    **_METRICS,
    "at": "token",
    "step": "step",
    "rank": "rank",
    "tokens": "length",
    "micro_step": "micro_step",
}
_KINDS = {
    "all": "true",
    "trained": f"mismatch_kl >= {HIGH_KL} AND NOT coalesce(is_masked, false)",
    "untrainable": "sampled AND NOT loss_mask",
    "masked": "is_masked",
    "high": "is_masked_high",
    "low": "is_masked_low",
    "against": "advantages * log_importance_ratio < 0",
}
_COMPARISONS = {">": ">", "<": "<", ">=": ">=", "<=": "<=", "=": "=", "!=": "<>"}


_PARQUET = "read_parquet(?, union_by_name = true)"
TOKENS_AT_ONCE = 500_000


class _Unsupported(Exception):
    """A question that DuckDB cannot answer; the browser does."""


class RunQueries:
    def __init__(self, exports: Exports) -> None:
        self._exports = exports
        self._files: dict[int, list[str] | None] = {}

    def answer(self, question: Mapping[str, Any]) -> list[list[Any]] | None:
        if find_spec("duckdb") is None:
            return None
        duckdb = import_module("duckdb")
        asked = question.get("ask")
        if not isinstance(asked, str) or asked not in _ANSWERS:
            raise DataError(f"ask = {asked!r}: expected worst or find")
        try:
            sql, values = _ANSWERS[asked](question)
        except _Unsupported:
            return None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(f"the question {dict(question)} is not understood: {error!r}") from error
        files = self._parquet_files()
        try:
            with duckdb.connect() as connection:
                if files is not None:
                    rows = connection.execute(sql.format(source=_PARQUET), [files, *values]).fetchall()
                    found = _with_records(rows, map(self._exports.records, {row[0] for row in rows}))
                else:
                    found = []
                    for table, records in self._tables(sql):
                        connection.register("records", table)
                        rows = connection.execute(sql.format(source="records"), values).fetchall()
                        found += _with_records(rows, records)
                    found.sort(key=_ORDER[asked])
        except (duckdb.Error, DataError, OSError):  # a column that is not recorded, a file that is damaged
            return None
        return found[: _limit(question)] if asked == "worst" else found

    def _parquet_files(self) -> list[str] | None:
        """Returns the Parquet files of all finished steps; None where DuckDB cannot read them as they are."""
        found: list[str] = []
        for step in self._exports.steps():
            if step not in self._files:
                try:
                    self._files[step] = self._exports.records(step).whole_parquet_files()
                except (DataError, OSError):
                    self._files[step] = None
            if (files := self._files[step]) is None:
                return None
            found += files
        return found

    def _tables(self, sql: str) -> Iterator[tuple[Any, list[Records]]]:
        """Yields the columns that a question needs, of some steps at a time, as Arrow and the records."""
        names = [field.name for field in FIELDS if re.search(rf"\b{field.name}\b", sql)]
        held: list[TokenTable] = []
        steps: list[Records] = []
        for step in self._exports.steps():
            records = self._exports.records(step)
            table = records.batch(names)
            if not table.num_tokens:
                raise DataError(f"step {step} has no tokens")
            num_tokens = sum(each.num_tokens for each in held)
            if held and (num_tokens >= TOKENS_AT_ONCE or table.columns.keys() != held[0].columns.keys()):
                yield _as_arrow(held, names), steps
                held, steps = [], []
            held.append(table)
            steps.append(records)
        if held:
            yield _as_arrow(held, names), steps


def _as_arrow(tables: list[TokenTable], names: list[str]) -> Any:
    table = TokenTable.concat(tables)
    return to_arrow(table, [FIELD_BY_NAME[name] for name in names if name in table])


def _with_records(rows: list[tuple[Any, ...]], steps: Iterable[Records]) -> list[list[Any]]:
    """Replaces (step, rank, index in its file) by (step, record); DataError if that is not one record."""
    places: dict[tuple[int, ...], int] = {}
    num_records = 0
    for records in steps:
        num_records += len(records)
        places |= {key: place for place, key in enumerate(records.keys())}
    if len(places) < num_records or any(row[:3] not in places for row in rows):
        raise DataError("several records have the same step, rank and index")
    return [[row[0], places[row[:3]], *row[3:]] for row in rows]


def _find(question: Mapping[str, Any]) -> tuple[str, list[Any]]:
    ids = question.get("ids")
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise DataError(f"ids = {ids!r}: expected a list of token ids")
    return (
        "SELECT step, rank, export_sequence_idx FROM {source} WHERE list_has_all(token_ids, ?) ORDER BY ALL",
        [ids],
    )


def _worst(question: Mapping[str, Any]) -> tuple[str, list[Any]]:
    metric, kind = question.get("metric"), question.get("kind")
    if metric not in _METRICS or kind not in _KINDS:
        raise DataError(f"metric = {metric!r}, kind = {kind!r}: not among {[*_METRICS]} and {[*_KINDS]}")
    values: list[Any] = []
    tests = [_KINDS[kind]] if kind == "untrainable" else ["loss_mask", _KINDS[kind]]
    for name, column, none in (("env", "env_name", ""), ("rank", "rank", -1)):
        if (wanted := question.get(name, none)) != none:
            tests.append(f"{column} = ?")
            values.append(wanted)
    if weights := str(question.get("weights") or ""):
        is_age = weights.startswith("age")
        tests.append("oldest = step - ?" if is_age else "oldest = ?")
        values.append(int(weights.removeprefix("age" if is_age else "v")))
    if question.get("filter") is not None:
        tests.append(_filter(question["filter"], values))
    score = f"abs(({_METRICS[metric]})::DOUBLE)"
    where = " AND ".join(f"({test})" for test in tests)
    used = [name for name in _TOKEN_COLUMNS if name in f"{where} {score}" or name == "loss_mask"]
    words = [name for name in ("micro_step", *WORDS.values()) if name in where]
    oldest = (
        ["list_min(list_filter(policy_versions, lambda version: version >= 0)) AS oldest"]
        if "oldest" in where
        else []
    )
    sequence = ["step", "rank", "export_sequence_idx", "len(token_ids) AS length", *words, *oldest]
    token = ["unnest(range(len(token_ids))) AS token", *(f"unnest({name}) AS {name}" for name in used)]
    sql = (
        f"WITH tokens AS (SELECT {', '.join([*sequence, *token])} "
        "FROM {source}) "
        f"SELECT step, rank, export_sequence_idx, token, ({_METRICS[metric]})::DOUBLE FROM tokens "
        f"WHERE {where} AND {score} IS NOT NULL AND NOT isnan({score}) "
        f"ORDER BY {score} DESC, step, rank, export_sequence_idx, token LIMIT {_limit(question)}"
    )
    return sql, values


def _limit(question: Mapping[str, Any]) -> int:
    return min(int(question.get("limit", MOST)), MOST)


def _filter(tree: Any, values: list[Any]) -> str:
    """A value that a token lacks makes a comparison false, and its negation true."""
    match tree:
        case {"any": [*parts]}:
            return "(" + " OR ".join(_filter(part, values) for part in parts) + ")"
        case {"all": [*parts]}:
            return "(" + " AND ".join(_filter(part, values) for part in parts) + ")"
        case {"not": part}:
            return f"(NOT {_filter(part, values)})"
        case {"field": str(field)} if "is" not in tree:
            column = _NUMBERS.get(field) or _word(field)
            return f"coalesce({column} <> {0 if field in _NUMBERS else repr('')}, false)"
        case {"field": str(field), "is": "~", "value": str(value)} if field in WORDS:
            values.append(value)
            return f"coalesce(contains(lower({_word(field)}), lower(?)), false)"
        case {"field": str(field), "is": str(sign), "value": str(value)} if field in WORDS:
            values.append(value)
            return f"coalesce({_word(field)} {_COMPARISONS[sign]} ?, false)"
        case {"field": str(field), "is": str(sign), "value": int() | float() as value} if field in _NUMBERS:
            number = f"({_NUMBERS[field]})::DOUBLE"
            values.append(value)
            return f"coalesce(NOT isnan({number}) AND {number} {_COMPARISONS[sign]} ?, false)"
    raise _Unsupported


def _word(field: str) -> str:
    """An empty one is none."""
    if field not in WORDS:
        raise _Unsupported
    return f"nullif({WORDS[field]}, '')"


_ANSWERS: Mapping[Any, Callable[[Mapping[str, Any]], tuple[str, list[Any]]]] = {
    "find": _find,
    "worst": _worst,
}
_ORDER: Mapping[Any, Callable[[list[Any]], Any]] = {
    "find": lambda row: row,
    "worst": lambda row: (-abs(row[3]), *row[:3]),
}
"""The order of each answer, for answers that are put together."""
