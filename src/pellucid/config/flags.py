"""Turns flags into the nested keys that a file has, so that later steps see one kind of data.

A command that is one part of a run takes the keys of its own section without their prefix, too:
`pellucid inference --backend vllm` is `--inference.backend vllm`.
"""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliToggleFlag,
    CliUnknownArgs,
    SettingsConfigDict,
)

from pellucid.config.base import Section
from pellucid.config.commands import PARTS, RunConfig
from pellucid.errors import ConfigError


@dataclass(frozen=True)
class Flags:
    values: dict[str, Any]
    unknown: list[str]
    dry_run: bool


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


def read_flags(kind: type[Section], words: Sequence[str], prog: str) -> Flags:
    texts, words = _take_texts(kind, words)
    source = _flag_source(kind, [_with_section(kind, word) for word in words], prog)
    # Sections before their keys: a section that is set after one of its keys would overwrite it.
    source.env_vars = dict(sorted(source.env_vars.items(), key=lambda item: item[0].count(".")))
    values = {**source(), **texts}
    return Flags(unknown=values.pop("unknown"), dry_run=values.pop("dry_run", False), values=values)


def parser_of(kind: type[Section], *, prog: str) -> ArgumentParser:
    """Makes the parser of a command's flags, for the pages that list them."""
    return _flag_source(kind, False, prog).root_parser


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


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
    own = kind.model_fields[section].annotation
    assert isinstance(own, type) and issubclass(own, Section)
    prefix = "--no-" if word.startswith("--no-") else "--"
    key = word.removeprefix(prefix)
    name = key.partition("=")[0].partition(".")[0].replace("-", "_")
    is_own = name in own.model_fields and name not in kind.model_fields
    return f"{prefix}{section}.{key}" if is_own else word


def _flag_source(kind: type[Section], words: list[str] | Literal[False], prog: str) -> _FlagSource:
    # Fields bring their docstrings along; pydantic would search the source of every caller for more.
    own: dict[str, Any] = {"use_attribute_docstrings": False}
    settings = create_model(kind.__name__, __base__=(_CommandLine, kind), __cls_kwargs__=own)
    return _FlagSource(
        cast(type[BaseSettings], settings),
        root_parser=_parser(kind, prog),
        cli_parse_args=words,
        cli_ignore_unknown_args=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )


def _parser(kind: type[Section], prog: str) -> ArgumentParser:
    is_run = issubclass(kind, RunConfig)
    return _Parser(
        prog=prog,
        usage=f"{prog} [@ FILE.toml ...] [--section.key value ...]" if is_run else None,
        description=kind.__doc__,
        epilog="Files are merged in order and flags win. Lists and tables are JSON, null unsets a value,\n"
        "and a value that starts with - or @ is written --section.key=VALUE."
        + (f" Keys of {PARTS[kind]} need no section." if kind in PARTS else ""),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
