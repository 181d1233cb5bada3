"""TOML files and flags -> one validated config.

    pellucid COMMAND [@ FILE.toml ...] [--section.key value ...]

Files are merged deeply in the order given, and flags win over files. pydantic-settings turns flags into
the nested keys that a file has, so that everything after it sees one kind of data. A tagged union
without a `type` is its default variant; a `type` that a later layer changes leaves the earlier variant's
keys behind, and they are refused by name. Every problem is one line of a single `ConfigError`.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from pellucid.config.base import Section
from pellucid.config.commands import PARTS, RLConfig
from pellucid.config.explain import Explainer
from pellucid.config.flags import read_flags
from pellucid.config.keys import complete
from pellucid.errors import ConfigError

T = TypeVar("T", bound=Section)


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """The result of parsing a command line."""

    config: T
    dry_run: bool
    """Whether to print the config instead of running."""


def parse(kind: type[T], argv: Sequence[str], *, prog: str) -> Parsed[T]:
    """Reads the config from `argv` (without program and command); `prog` names the command in messages."""
    paths, words = _split_files(argv)
    flags = read_flags(kind, words, prog)
    explain = Explainer(kind, prog)
    problems = explain.unknown_words(flags.unknown)
    tables, unreadable = _read_files(paths)
    if unreadable:
        raise ConfigError("\n".join(unreadable + problems))
    own = [_without_other_parts(kind, table) for table in tables]
    data = complete(kind, reduce(_merge, [*own, flags.values], {}))
    try:
        config = kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(problems + explain.invalid(data, error))) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return Parsed(config, flags.dry_run)


def _split_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits `@ FILE` and `@FILE` off the other words; an `@` with nothing after it is an empty path."""
    paths: list[str] = []
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "@":
            paths.append(rest.pop(0) if rest and not rest[0].startswith("-") else "")
        elif word.startswith("@"):
            paths.append(word[1:])
        else:
            words.append(word)
    return paths, words


def _read_files(paths: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads the tables of all files; also returns one line for each that cannot be read."""
    tables: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in paths:
        try:
            tables.append(_read_file(path))
        except ConfigError as error:
            problems.append(str(error))
    return tables, problems


def _read_file(path: str) -> dict[str, Any]:
    if not path:
        raise ConfigError("@ has no file after it; write @ FILE.toml")
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path after @") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path after @") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; TOML has to be") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def _without_other_parts(kind: type[Section], table: dict[str, Any]) -> dict[str, Any]:
    """Leaves out keys of `pellucid rl` that this part does not read: one file serves all parts of a run."""
    foreign = RLConfig.model_fields.keys() - kind.model_fields.keys() if kind in PARTS else set()
    return {key: value for key, value in table.items() if key not in foreign}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        own = merged.get(key)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            value = _merge(own, value)
        merged[key] = value
    return merged
