"""The rows of a data set, each with its place in the source, which error messages name.

    data.path = train.jsonl      train.jsonl:3                  line 3
    data.path = folder           folder[train] row 2            as `dataset[2]`
    data.name = user/chats       user/chats[train] row 2

A key without a value (null) counts as absent: data sets fill the columns that a row does not have.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from pellucid.config.trainer import DatasetConfig
from pellucid.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Row:
    where: str
    example_id: str
    record: Mapping[str, Any]


class SftRows(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Row]: ...


def open_rows(config: DatasetConfig) -> SftRows:
    """Opens a file, a folder or a hub data set; does not parse its rows yet."""
    rows: SftRows
    if config.path is not None and not config.path.is_dir():
        rows = _JsonlRows(config)
    else:
        rows = _DatasetRows(config)
    if not len(rows):
        raise DataError(f"{_setting(config)} holds no examples")
    return rows


def _setting(config: DatasetConfig) -> str:
    """Names the setting, for errors: `data.path = 'x.jsonl'` or `data.name = 'user/chats'`."""
    return (
        f"{config.KEY}.name = {config.name!r}"
        if config.path is None
        else f"{config.KEY}.path = {str(config.path)!r}"
    )


class _JsonlRows:
    """Rows of a JSONL file, read line by line; empty lines are skipped."""

    def __init__(self, config: DatasetConfig) -> None:
        assert config.path is not None
        for key in ("subset", "split"):
            if (value := getattr(config, key)) is not None:
                raise ConfigError(
                    f"{config.KEY}.{key} = {value!r} has no meaning for a file, {config.path}; leave it out, "
                    "or give the folder of a data set"
                )
        self._path = config.path
        try:
            with self._path.open("rb") as file:
                self._num_rows = sum(1 for line in file if line.strip())
        except OSError as error:
            raise DataError(f"{_setting(config)} cannot be read: {error.strerror}") from error

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{self._path}:{number}"
                    yield Row(where, str(number), _present(_parse(line, where)))


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    return record


def _present(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


class _DatasetRows:
    """Rows of the package `datasets`, which keeps them on disk."""

    def __init__(self, config: DatasetConfig) -> None:
        self._dataset = _load(config)
        self._title = f"{config.name or config.path}[{self._dataset.split or config.part[1]}]"

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Row]:
        for index, record in enumerate(self._dataset):
            yield Row(f"{self._title} row {index}", str(index), _present(record))


def _load(config: DatasetConfig) -> Any:
    datasets = _import_datasets(config)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if config.path is not None and _was_saved_to_disk(config.path):
            return _choose_split(datasets.load_from_disk(str(config.path)), config)
        return datasets.load_dataset(config.name or str(config.path), config.subset, split=config.part[1])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{_setting(config)} could not be loaded ({_reason(error)}); {_remedy(config, error)}"
        ) from error


def _import_datasets(config: DatasetConfig) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{_setting(config)} needs the package datasets, which cannot be imported ({error}); "
            "run `pip install 'pellucid[datasets]'`, or give a JSONL file"
        ) from error
    return datasets


def _was_saved_to_disk(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))


def _choose_split(saved: Any, config: DatasetConfig) -> Any:
    """Returns the split that `config` names, or the only one there is."""
    if config.subset is not None:
        raise ConfigError(
            f"{config.KEY}.subset = {config.subset!r}: {config.path} was written by save_to_disk and has no "
            "subsets; leave it out"
        )
    splits = saved if isinstance(saved, dict) else {str(saved.split or config.part[1]): saved}
    if config.split is None and len(splits) == 1:
        (only,) = splits.values()
        return only
    if config.part[1] not in splits:
        raise ConfigError(
            f"{config.KEY}.split = {config.part[1]!r} is not in {config.path}; it has "
            f"{', '.join(map(repr, splits))}"
        )
    return splits[config.part[1]]


def _reason(error: Exception) -> str:
    """Returns the first line of the root error; the errors around it only say that loading failed."""
    while isinstance(error.__cause__, Exception) and type(error).__module__.startswith("datasets"):
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _remedy(config: DatasetConfig, error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return (
            f"without the hub, download it elsewhere, write it with save_to_disk, and set {config.KEY}.path "
            "to that folder"
        )
    return f"check {config.KEY}.subset, {config.KEY}.split and the files"
