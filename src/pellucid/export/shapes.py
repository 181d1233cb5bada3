"""One parsed JSON record in the columns of the schema, whatever trainer wrote it.

Fewer columns are fine, and so is the older form, a list of objects under `tokens`. Anything else is an error
that says what was expected and what was found.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from pellucid.errors import DataError
from pellucid.export.batch import Values
from pellucid.export.schema import BY_NAME, FIELDS, KEY, NAMES, SCHEMA_VERSION

TOKEN_COLUMNS = tuple(field.name for field in FIELDS if field.per_token)
"""A record may lack any of them but `token_ids`."""

OLDER_NAMES = {
    "id": "token_ids",
    "position": "position_ids",
    "advantage": "advantages",
    "reward": "rewards",
    "inference_logprob": "inference_logprobs",
    "trainer_logprob": "trainer_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "temperature": "temperatures",
    "policy_version": "policy_versions",
}
"""Key of a per-token object -> column; a key that is not here keeps its name."""


def as_record(value: Any) -> dict[str, Any]:
    """Returns the record with its columns as lists."""
    if not isinstance(value, dict):
        raise DataError(f"expected one JSON object per line, got {type(value).__name__}")
    record: dict[str, Any] = value if "token_ids" in value else _from_token_objects(value)
    ids = record["token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise DataError(f"expected token_ids to be a list of integers, got {_preview(ids)}")
    for name in TOKEN_COLUMNS:
        column = record.get(name)
        if column is not None and (not isinstance(column, list) or len(column) != len(ids)):
            got = f"{len(column)} entries" if isinstance(column, list) else type(column).__name__
            raise DataError(f"expected {name} to be a list of {len(ids)} entries, one per token, got {got}")
    key_of(record)
    if isinstance(version := record.get("schema_version"), int):
        _check_version(version)
    for name, rule in _RULES.items():
        if not isinstance(record.get(name), rule):
            raise DataError(f"expected {name} to be {_KINDS[rule]} or null, got {_preview(record[name])}")
    return record


_NUMBER, _TEXT, _ID = (int, float, type(None)), (str, type(None)), (int, float, str, type(None))
_KINDS = {_NUMBER: "a number", _TEXT: "text", _ID: "text, a number"}
_RULES = {
    field.name: _NUMBER if field.dtype is not str else _TEXT if field.name in NAMES else _ID
    for field in FIELDS
    if not field.per_token and field.dtype is not object
}
"""Other trainers number their examples and groups."""


def key_of(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the fields by which records are ordered; 0 for a missing one."""
    for name in KEY:
        if not isinstance(record.get(name, 0), int):
            raise DataError(f"expected {name} to be an integer, got {_preview(record[name])}")
    return tuple(record.get(name, 0) for name in KEY)


def _check_version(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise DataError(
            f"schema_version = {version} is of a newer pellucid; this one reads up to {SCHEMA_VERSION}; "
            "upgrade it"
        )


def check_values(columns: Mapping[str, Values]) -> None:
    """Raises DataError for a newer schema, and for a number that no record has and that would be taken for an
    index or a divisor."""
    for version in columns.get("schema_version", ()):
        _check_version(version)
    for name, least in (("position_ids", 0), ("denominator", 1)):
        values = columns.get(name)
        if values is not None and (wrong := values < least).any():  # null is NaN, which is not less
            raise DataError(f"expected {name} to be at least {least}, got {values[wrong][0]}")


def token_values(record: Mapping[str, Any], name: str) -> Values:
    """Returns a per-token column as an array; null is NaN, and a mask with nulls is float32."""
    values = record[name]
    dtype = np.dtype(BY_NAME[name].dtype) if name in BY_NAME else np.dtype(np.float64)
    try:
        if dtype.kind == "f":
            with np.errstate(over="ignore"):  # beyond float32 is infinite, which is null
                return np.array(values, dtype)
        if None in values:
            return np.array(values, np.float32 if dtype.kind == "b" else np.float64)
        return np.array(values).astype(dtype, casting="same_kind" if dtype.kind == "b" else "unsafe")
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name} is not a list of numbers: {error}") from error


def _from_token_objects(value: Mapping[str, Any]) -> dict[str, Any]:
    tokens = value.get("tokens")
    if not isinstance(tokens, list):
        raise DataError(
            "expected a record with token_ids (or, in the older form, a list of objects under tokens), "
            f"got the keys {sorted(value)[:8]}"
        )
    for index, token in enumerate(tokens):
        if not isinstance(token, dict) or "id" not in token:
            raise DataError(f"expected an object with an id at tokens[{index}], got {_preview(token)}")
    keys = dict.fromkeys(key for token in tokens for key in token)
    columns = {OLDER_NAMES.get(key, key): [token.get(key) for token in tokens] for key in keys}
    rest = {key: entry for key, entry in value.items() if key != "tokens"}
    return {"token_ids": [], **columns, **rest}


def _preview(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
