"""Reads token exports back: one record per sequence, ordered by (step, rank, export_sequence_idx).

    outputs/demo/                       a run folder            finished steps only
    outputs/demo/token_exports/         its exports             finished steps only
    outputs/demo/token_exports/step_7/  one step                read even without its STABLE marker
    any/where/rank_0.jsonl              one file

Records carry the columns of the export format, fewer where the writer had fewer. The older form, a list of
objects under `tokens`, comes out in the same columns. A shape that is neither is an error with file and
line; so is an input without records.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from pellucid.errors import DataError
from pellucid.export.schema import FIELDS

log = logging.getLogger(__name__)

MARKER = "STABLE"

TOKEN_COLUMNS = tuple(field.name for field in FIELDS if field.per_token)
"""A record may lack any of them but `token_ids`."""

ORDER = ("step", "rank", "export_sequence_idx")

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


def read_records(
    path: Path,
    steps: Collection[int] | None = None,
    *,
    report: Callable[[str], object] = log.warning,
) -> Iterator[dict[str, Any]]:
    """The records below `path`; with `steps`, those of these steps only. A torn line goes to `report`."""
    found = False
    for files in _files_by_step(path, steps):
        records = [record for file in files for record in _read_file(file, report)]
        for record in sorted(records, key=_order):
            if steps is None or record.get("step", 0) in steps:
                found = True
                yield record
    if not found:
        which = "" if steps is None else f" of the steps {sorted(steps)}"
        raise DataError(f"{path} holds no token-export records{which}")


def read_json_lines(path: Path, report: Callable[[str], object] = log.warning) -> Iterator[tuple[int, Any]]:
    """(line number, value) of every line; a torn last line is reported and left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if line.endswith(b"\n"):
                    raise DataError(f"{path}:{number} is not JSON: {error}") from error
                report(f"{path}:{number} is cut short (still being written, or its writer died); skipped")


def _files_by_step(path: Path, steps: Collection[int] | None) -> Iterator[list[Path]]:
    """The files of each step, steps in order. Sorting within a step is then enough."""
    if path.is_file():
        if path.suffix != ".jsonl":
            raise DataError(f"{path}: expected a .jsonl file, got {path.suffix or 'no suffix'}")
        yield [path]
        return
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give a run, token_exports or step folder, or a .jsonl file")
    exports = path / "token_exports" if (path / "token_exports").is_dir() else path
    numbers = sorted(_step_numbers(exports))
    if numbers:
        finished = [number for number in numbers if (exports / f"step_{number}" / MARKER).exists()]
        if not finished:
            raise DataError(
                f"{exports} has {len(numbers)} steps, none of them finished (no {MARKER} marker); "
                f"name a step folder such as {exports / f'step_{numbers[0]}'} to read it as it is"
            )
        yield from (
            _rank_files(exports / f"step_{number}") for number in finished if steps is None or number in steps
        )
    else:
        yield _rank_files(exports)


def _step_numbers(exports: Path) -> Iterator[int]:
    for folder in exports.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdecimal() and folder.is_dir():
            yield int(number)


def _rank_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"{folder} holds no .jsonl token export; expected rank_R.jsonl, found {present}")
    return files


def _read_file(path: Path, report: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    for number, value in read_json_lines(path, report):
        try:
            yield _as_record(value)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error


def _as_record(value: Any) -> dict[str, Any]:
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
    for name in ORDER:
        if not isinstance(record.get(name, 0), int):
            raise DataError(f"expected {name} to be an integer, got {_preview(record[name])}")
    return record


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


def _order(record: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(record.get(name, 0) for name in ORDER)


def _preview(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
