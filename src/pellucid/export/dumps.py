"""Files of rollout dumps: which there are below a path, their format, and their records, a few at a time.

How a file is packed follows from its name: JSON lines, Parquet, one JSON object, or a zip archive of them.
Sizes are bounded, links are not followed, and a damaged file becomes a note.
"""

import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32
from zlib import error as deflate_error

import orjson

from pellucid.data.files import read_lines, read_whole, require_file, step_number
from pellucid.errors import DataError
from pellucid.export.foreign import (
    FORMATS,
    Rollout,
    as_rollouts,
    at,
    format_of,
    list_of,
    number_in,
    token_records,
)

MAX_LOG_BYTES = 1 << 28
"""Size of an inspect log in JSON, which has to be parsed at once."""

MAX_SAMPLE_BYTES = 1 << 26
"""Size of one sample of an inspect archive, inflated."""

MAX_GROUP_BYTES = 1 << 27
"""Size of a Parquet row group, inflated; its rows are read a few at a time."""

ROWS_AT_A_TIME = 64
FILES_LOOKED_AT = 8
"""Files of a folder that are opened to learn the format."""

_SUFFIXES = (".jsonl", ".parquet", ".eval", ".json")
_DEFLATED, _ZSTD = zipfile.ZIP_DEFLATED, 93
_LOCAL_HEADER_BYTES = 30


@dataclass(slots=True)
class StepScan:
    """Numbers of a step's rollouts: how many of each outcome, and sums of what can be averaged."""

    outcomes: Counter[str] = field(default_factory=Counter)
    sums: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rollout: Rollout) -> None:
        self.outcomes[rollout["outcome"]] += 1
        names = {f"metrics/{name}": value for name, value in rollout["metrics"].items()}
        for name, value in {"reward/all": rollout.get("reward"), **names}.items():
            if (number := number_in(value)) is not None:
                self.sums[name] = self.sums.get(name, 0.0) + number
                self.counts[name] += 1


@dataclass(slots=True)
class Dump:
    """The rollouts of another system below a path: one file, or a folder of them.

    A file is read once to learn its steps, and again when one of them is asked for or when it has changed.
    """

    path: Path
    name: str
    """A key of `FORMATS`."""

    problems: dict[str, None] = field(default_factory=dict)
    """Messages about files that cannot be read to their end, each once."""

    _scans: dict[Path, tuple[object, dict[int, StepScan]]] = field(default_factory=dict)
    """Steps of a file, with its size and time of change when it was read."""

    @property
    def title(self) -> str:
        return FORMATS[self.name].title

    @property
    def lacks(self) -> str:
        return FORMATS["trace" if self.name == "episode" else self.name].lacks

    def has_tokens(self) -> bool:
        """Whether the first record has token ids: then the reader of exports opens the file."""
        if self.name not in ("trace", "episode") or not self.path.is_file():
            return False
        return any(token_records(record) for record in islice(read_dump(self.path), 1))

    def steps(self) -> dict[int, list[Path]]:
        """Returns the files of every step; of logs without steps, each file is one, in the order of names."""
        found: dict[int, list[Path]] = {}
        for path, scans in self._scanned():
            for step in scans:
                found.setdefault(step, []).append(path)
        return dict(sorted(found.items()))

    def outcomes(self) -> dict[int, Counter[str]]:
        found: dict[int, Counter[str]] = {}
        for _, scans in self._scanned():
            for step, scan in scans.items():
                found[step] = found.get(step, Counter()) + scan.outcomes
        return dict(sorted(found.items()))

    def means(self) -> dict[str, dict[int, float]]:
        """Returns means of rewards and metrics over the rollouts of each step."""
        sums: dict[str, dict[int, tuple[float, int]]] = {}
        for _, scans in self._scanned():
            for step, scan in scans.items():
                for name, total in scan.sums.items():
                    before = sums.setdefault(name, {}).get(step, (0.0, 0))
                    sums[name][step] = before[0] + total, before[1] + scan.counts[name]
        return {
            name: {step: total / count for step, (total, count) in sorted(steps.items())}
            for name, steps in sums.items()
        }

    def rollouts(self, step: int) -> Iterator[Rollout]:
        """Yields the rollouts of a step, up to what cannot be read."""
        for place, path in enumerate(_files_below(self.path)):
            if step in self._scan(path, place):
                with suppress(DataError, OSError):
                    yield from (rollout for own, rollout in self._read(path, place) if own == step)

    def _scanned(self) -> Iterator[tuple[Path, dict[int, StepScan]]]:
        for place, path in enumerate(_files_below(self.path)):
            yield path, self._scan(path, place)

    def _scan(self, path: Path, place: int) -> dict[int, StepScan]:
        try:
            stamp = (stat := path.stat()).st_mtime_ns, stat.st_size
            if path in self._scans and self._scans[path][0] == stamp:
                return self._scans[path][1]
            scans: dict[int, StepScan] = {}
            self._scans[path] = stamp, scans
            for step, rollout in self._read(path, place):
                scans.setdefault(step, StepScan()).add(rollout)
        except (DataError, OSError) as error:
            self.problems.setdefault(str(error))
        return self._scans[path][1] if path in self._scans else {}

    def _read(self, path: Path, place: int) -> Iterator[tuple[int, Rollout]]:
        named = _step_in_name(path)
        for number, record in enumerate(read_dump(path)):
            if (name := format_of(record)) is None or FORMATS[name].title != self.title:
                raise DataError(f"{path}, record {number}: expected {self.title}, got {sorted(record)[:8]}")
            for rollout in as_rollouts(record):
                own = rollout.get("step")
                rollout.setdefault("rollout_id", f"{path.stem}-{number}")
                yield own if type(own) is int else place if named is None else named, rollout


def _step_in_name(path: Path) -> int | None:
    """Returns the step of a file `7.jsonl`, or below a folder `step_7`."""
    if path.stem.isdecimal():
        return int(path.stem)
    return next((step for part in reversed(path.parts) if (step := step_number(part)) is not None), None)


def find_dump(path: Path) -> Dump | None:
    """Returns the dump that a path holds; None where it holds none of a known format.

    Raises DataError for an inspect archive that cannot be read: no other reader takes it.
    """
    if path.suffix == ".eval" and path.is_file():
        next(_peek(path), None)
    for file in islice(_files_below(path), FILES_LOOKED_AT):
        with suppress(DataError, OSError):
            first = next(_peek(file), None)
            if first is not None and (name := format_of(first)) is not None:
                return Dump(path, name)
            if first is not None:
                return None
    return None


def _peek(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the first record, or only its keys: a log is not read whole to learn what it is."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return iter([dict.fromkeys(file.schema_arrow.names)])
    if path.suffix in (".json", ".jsonl"):
        require_file(path)
        with path.open("rb") as file:
            start = file.read(1 << 12).lstrip()
        if start[:1] != b"{":  # what is no record may be very long
            return iter([])
        if path.suffix == ".json":
            is_log = b'"eval"' in start and b'"version"' in start
            return iter([dict.fromkeys(FORMATS["inspect"].known_by)] if is_log else [])
    return read_dump(path)


def _files_below(path: Path) -> list[Path]:
    """Returns the files that may be a dump, in order: numbers in names by their value. Follows no links."""
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    if not path.is_dir():
        return []
    for folder in (path, path / "completions"):
        files = [file for suffix in _SUFFIXES for file in folder.glob(f"*{suffix}")]
        if files := [file for file in files if file.is_file() and not file.is_symlink()]:
            return sorted(files, key=_by_number)
    return []


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdecimal() else -1, path.name)


def read_dump(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the records of one file, one by one; raises DataError for what is no such file."""
    require_file(path)
    readers: Mapping[str, Callable[[Path], Iterator[Any]]] = {
        ".jsonl": _jsonl_records,
        ".parquet": _parquet_records,
        ".json": _log_samples,
        ".eval": _archive_samples,
    }
    for record in readers[path.suffix](path):
        if not isinstance(record, Mapping):
            raise DataError(f"{path}: expected objects, got {type(record).__name__}")
        yield record


def _jsonl_records(path: Path) -> Iterator[Any]:
    for number, line in read_lines(path):
        if line.strip():
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not line.endswith(b"\n"):
                    return  # still being written
                raise DataError(f"{path}:{number} is not JSON: {error}") from error


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    require_file(path)
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is cut short or damaged: {error}; copy it again") from error


def _parquet_records(path: Path) -> Iterator[Any]:
    with _parquet(path) as file:
        for group in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(group)
            if about.total_byte_size > MAX_GROUP_BYTES:
                raise DataError(
                    f"{path}, row group {group} unpacks to {about.total_byte_size:,} bytes; at most "
                    f"{MAX_GROUP_BYTES:,} are read: write it with smaller row groups"
                )
            size = max(1, min(ROWS_AT_A_TIME, MAX_GROUP_BYTES // max(1, about.total_byte_size)))
            for rows in file.iter_batches(size, row_groups=[group], use_threads=False):
                yield from rows.to_pylist()


def _log_samples(path: Path) -> Iterator[Any]:
    log = _json(read_whole(path, MAX_LOG_BYTES), path)
    if not isinstance(log, Mapping) or not isinstance(log.get("eval"), Mapping):
        raise DataError(f"{path}: expected an inspect log, an object with eval and samples")
    task = log["eval"].get("task")
    for sample in list_of(log.get("samples")):
        yield {"env_name": task, **sample} if isinstance(sample, Mapping) else sample


def _archive_samples(path: Path) -> Iterator[Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.NameToInfo
            start = names.get("header.json") or names.get("_journal/start.json")
            if start is None:
                raise DataError(f"{path}: expected an inspect archive, which has a header.json")
            task = at(_json(_inflate(path, start), path), "eval.task")
            for name in sorted(names, key=lambda name: names[name].header_offset):
                if name.startswith("samples/") and name.endswith(".json"):
                    sample = _json(_inflate(path, names[name]), path)
                    yield {"env_name": task, **sample} if isinstance(sample, Mapping) else sample
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise DataError(f"{path} is cut short or damaged: {error}; copy it again") from error


def _inflate(path: Path, entry: zipfile.ZipInfo) -> bytes:
    """Inflates a file of an archive. zipfile knows zstd, which inspect uses, from Python 3.14 on."""
    if entry.file_size > MAX_SAMPLE_BYTES or entry.compress_size > MAX_SAMPLE_BYTES:
        raise DataError(
            f"{path}: {entry.filename} has {entry.file_size:,} bytes; at most {MAX_SAMPLE_BYTES:,} are read"
        )
    if entry.compress_type != _ZSTD:
        with zipfile.ZipFile(path) as archive, archive.open(entry) as file:
            try:
                return file.read(MAX_SAMPLE_BYTES)
            except deflate_error as error:
                _damaged(path, entry, error)
    import pyarrow as pa

    with path.open("rb") as raw:
        raw.seek(entry.header_offset)
        header = raw.read(_LOCAL_HEADER_BYTES)
        raw.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), os.SEEK_CUR)
        data = raw.read(entry.compress_size)
    try:
        text: bytes = pa.decompress(data, entry.file_size, codec="zstd", asbytes=True)
    except OSError as error:
        _damaged(path, entry, error)
    if crc32(text) != entry.CRC:
        _damaged(path, entry, "its checksum is another")
    return text


def _damaged(path: Path, entry: zipfile.ZipInfo, why: object) -> NoReturn:
    raise DataError(f"{path}: {entry.filename} is damaged: {why}; copy it again")


def _json(text: bytes, path: Path) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
