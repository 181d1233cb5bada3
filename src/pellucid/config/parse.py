"""TOML files and flags -> one validated config.

    pellucid COMMAND [@ FILE.toml ...] [--section.key value ...]

Files are merged deeply in the order given, and flags win over files. pydantic-settings turns flags into
the nested keys that a file has, so that everything after it sees one kind of data. A tagged union
without a `type` is its default variant; a `type` that a later layer changes leaves the earlier variant's
keys behind, and they are refused by name. Every problem is one line of a single `ConfigError`.
A command that is one part of a run takes the keys of its own section without their prefix, too:
`pellucid inference --backend vllm` is `--inference.backend vllm`.
"""

import json
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliToggleFlag,
    CliUnknownArgs,
    SettingsConfigDict,
)

from pellucid.config.base import Section, complete, flag_of, sections_in
from pellucid.config.commands import PARTS, RLConfig, RunConfig
from pellucid.config.explain import Explainer
from pellucid.errors import ConfigError


class _CommandLine(BaseSettings):
    """Flags and words of a command line besides the command's config."""

    # `_FlagSource` decodes: pydantic-settings doubles the backslashes of JSON strings inside lists.
    model_config = SettingsConfigDict(use_attribute_docstrings=True, enable_decoding=False)

    dry_run: CliToggleFlag[bool] = False
    """Print the resolved config as TOML, then import and make what the command names, such as environments,
    losses and the model's folder, instead of running; the exit code tells whether that works."""

    unknown: CliUnknownArgs
    """Words that are neither a flag nor the value of one."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


class _FlagSource(CliSettingsSource[ArgumentParser]):
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Decodes JSON; broken JSON stays a string, which validation refuses with its whole key."""
        if isinstance(value, list):  # the unknown words
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value


def _read_flags(
    kind: type[Section], words: Sequence[str], prog: str
) -> tuple[dict[str, Any], list[str], bool]:
    """Returns the values that flags set, words that are no flags, and whether there is a `--dry-run`."""
    texts, words = _take_texts(kind, words)
    source = _flag_source(kind, [_with_section(kind, word) for word in words], prog)
    # Sections before their keys: a section that is set after one of its keys would overwrite it.
    source.env_vars = dict(sorted(source.env_vars.items(), key=lambda item: item[0].count(".")))
    values = {**source(), **texts}
    unknown, dry_run = values.pop("unknown"), values.pop("dry_run", False)
    return values, unknown, dry_run


def parser_of(kind: type[Section], *, prog: str) -> ArgumentParser:
    """Makes the parser of a command's flags, for the pages that list them."""
    return _flag_source(kind, False, prog).root_parser


def _take_texts(kind: type[Section], words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Splits off the values of flags that a tool takes several times, word for word, from the other words.

    pydantic-settings would split them at commas, and take brackets for JSON.
    """
    keys = {
        flag_of(field.alias or name): field.alias or name
        for name, field in kind.model_fields.items()
        if field.annotation == tuple[str, ...] and not issubclass(kind, RunConfig)
    }
    texts: dict[str, list[str]] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        flag, equals, text = (word := rest.pop(0)).partition("=")
        if flag in keys and (equals or rest):
            texts.setdefault(keys[flag], []).append(text if equals else rest.pop(0))
        else:
            others.append(word)
    return texts, others


def _with_section(kind: type[Section], word: str) -> str:
    """Adds the section to a flag such as `--backend` of `pellucid inference`; keeps other words."""
    section = PARTS.get(kind)
    if section is None or not word.startswith("--"):
        return word
    (settings,) = sections_in(kind.model_fields[section].annotation)
    prefix = "--no-" if word.startswith("--no-") else "--"
    key = word.removeprefix(prefix)
    name = key.partition("=")[0].partition(".")[0].replace("-", "_")
    is_of_section = name in settings.model_fields and name not in kind.model_fields
    return f"{prefix}{section}.{key}" if is_of_section else word


def _flag_source(kind: type[Section], words: list[str] | Literal[False], prog: str) -> _FlagSource:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [@ FILE.toml ...] [--section.key value ...]" if issubclass(kind, RunConfig) else None,
        description=kind.__doc__,
        epilog="Files are merged in order and flags win. Lists and tables are JSON, null unsets a value,\n"
        "and a value that starts with - or @ is written --section.key=VALUE."
        + (f" Keys of {PARTS[kind]} need no section." if kind in PARTS else ""),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # Fields bring their docstrings along; pydantic would search the source of every caller for more.
    no_search: dict[str, Any] = {"use_attribute_docstrings": False}
    settings = create_model(kind.__name__, __base__=(_CommandLine, kind), __cls_kwargs__=no_search)
    return _FlagSource(
        cast(type[BaseSettings], settings),
        root_parser=parser,
        cli_parse_args=words,
        cli_ignore_unknown_args=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )


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
    flags, unknown, dry_run = _read_flags(kind, words, prog)
    if "others" in kind.model_fields:  # a tool that takes any number of paths; a flag may stand between them
        flags["others"] = [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    explain = Explainer(kind, prog)
    problems = explain.unknown_words(unknown)
    tables, unreadable = [], []
    for path in paths:
        try:
            tables.append(_without_other_parts(kind, _read_file(path)))
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:
        raise ConfigError("\n".join(unreadable + problems))
    data = complete(kind, reduce(_merge, [*tables, flags], {}))
    try:
        config = kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(problems + explain.invalid(data, error))) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return Parsed(config, dry_run)


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
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merge(below, value)
        merged[key] = value
    return merged
