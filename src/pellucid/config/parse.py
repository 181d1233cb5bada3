"""TOML files and flags -> one validated config.

    pellucid COMMAND [@ FILE.toml ...] [--section.key value ...]

Files are merged deeply in the order given, and flags win over files. pydantic-settings turns flags into
the nested keys that a file has, so that everything after it sees one kind of data. A tagged union
without a `type` is its default variant; a `type` that a later layer changes leaves the earlier variant's
keys behind, and they are refused by name. Every problem is one line of a single `ConfigError`.
"""

import json
import re
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from itertools import pairwise, takewhile
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast, get_args, get_origin

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliToggleFlag,
    CliUnknownArgs,
    SettingsConfigDict,
)

from pellucid.config.base import Section
from pellucid.config.commands import PARTS, RLConfig, RunConfig
from pellucid.errors import ConfigError

T = TypeVar("T", bound=Section)
Location = tuple[str | int, ...]

TAG = "type"
"""The key that selects the variant, in every tagged union."""


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """A command line as understood."""

    config: T
    dry_run: bool
    """Print the config instead of running."""


def parse(kind: type[T], argv: Sequence[str], *, prog: str) -> Parsed[T]:
    """The config that `argv` (without program and command) asks for; `prog` names the command in messages."""
    paths, words = _split_files(argv)
    flags = _read_flags(kind, words, prog)
    explain = _Explainer(kind, prog)
    problems = explain.unknown_words(flags.unknown)
    tables, unreadable = _read_files(paths)
    if unreadable:
        raise ConfigError("\n".join(unreadable + problems))
    own = [_without_other_parts(kind, table) for table in tables]
    data = _complete(kind, reduce(_merge, [*own, flags.values], {}))
    try:
        config = kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(problems + explain.invalid(data, error))) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return Parsed(config, flags.dry_run)


# Files


def _split_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`@ FILE` and `@FILE` apart from the other words; an `@` with nothing after it is an empty path."""
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
    """The tables of all readable files, and one line for each of the others."""
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
    """One file serves all parts of a run: keys of `pellucid rl` that this part does not read are left out."""
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


# Flags


@dataclass(frozen=True)
class _Flags:
    values: dict[str, Any]
    unknown: list[str]
    dry_run: bool


class _CommandLine(BaseSettings):
    """What a command line takes besides the command's config."""

    # `_FlagSource` decodes: pydantic-settings doubles the backslashes of JSON strings inside lists.
    model_config = SettingsConfigDict(use_attribute_docstrings=True, enable_decoding=False)

    dry_run: CliToggleFlag[bool] = False
    """Check everything and print the resolved config as TOML instead of running."""

    unknown: CliUnknownArgs
    """Words that are no flag and no value of one."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


class _FlagSource(CliSettingsSource[ArgumentParser]):
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """JSON as a value; broken JSON stays a string, which validation refuses by its whole key."""
        if isinstance(value, list):  # the unknown words
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value


def _read_flags(kind: type[Section], words: list[str], prog: str) -> _Flags:
    source = _flag_source(kind, words, prog)
    # Sections before their keys: a section that is set after one of its keys would overwrite it.
    source.env_vars = dict(sorted(source.env_vars.items(), key=lambda item: item[0].count(".")))
    values = source()
    return _Flags(unknown=values.pop("unknown"), dry_run=values.pop("dry_run", False), values=values)


def parser_of(kind: type[Section], *, prog: str) -> ArgumentParser:
    """The parser of a command's flags, for pages that are made of it."""
    return _flag_source(kind, False, prog).root_parser


def _flag_source(kind: type[Section], words: list[str] | Literal[False], prog: str) -> _FlagSource:
    settings = create_model(kind.__name__, __base__=(_CommandLine, kind))
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
        "and a value that starts with - or @ is written --section.key=VALUE.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


# The shape of a config


def _sections(annotation: Any) -> tuple[type[Section], ...]:
    """The sections in an annotation: one, the variants of a tagged union, or those of a list's elements."""
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, Section) else ()
    return tuple(section for part in get_args(annotation) for section in _sections(part))


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _tag(variant: type[Section]) -> str:
    tag: str = get_args(variant.model_fields[TAG].annotation)[0]
    return tag


def _keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key, sections included; the elements of a list are written `section[].key`."""
    for name, field in kind.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        for section in _sections(field.annotation):
            yield from _keys(section, f"{key}[]." if _is_list(field) else f"{key}.")


def _complete(kind: type[Section], data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with required sections present, so that what they lack has a name, and with default tags."""
    done = dict(data)
    for name, field in kind.model_fields.items():
        sections = _sections(field.annotation)
        if sections and not _is_list(field):
            if field.is_required():
                done.setdefault(name, {})
            if isinstance(value := done.get(name), Mapping):
                done[name] = _complete_section(field, sections, value)
    return done


def _complete_section(
    field: FieldInfo, variants: tuple[type[Section], ...], value: Mapping[str, Any]
) -> Mapping[str, Any]:
    if field.discriminator is None:
        return _complete(variants[0], value)
    tagged = {TAG: getattr(field.default, TAG), **value}
    chosen = [variant for variant in variants if _tag(variant) == tagged[TAG]]
    return _complete(chosen[0], tagged) if chosen else tagged


# Messages


@dataclass(frozen=True)
class _Place:
    """Where a problem is: `('trainer', 'loss', 'custom', 'kwargs')` is the key `trainer.loss.kwargs`."""

    path: Location
    sections: tuple[type[Section], ...]
    """The sections that may stand here; none for a leaf."""

    @classmethod
    def find(cls, kind: type[Section], location: Location) -> "_Place":
        path: list[str | int] = []
        sections: tuple[type[Section], ...] = (kind,)
        expects_tag = False
        for part in location:
            if expects_tag:
                sections = tuple(section for section in sections if _tag(section) == part)
                expects_tag = False
                continue
            path.append(part)
            if isinstance(part, str):
                field = next((s.model_fields[part] for s in sections if part in s.model_fields), None)
                sections = _sections(field.annotation) if field else ()
                expects_tag = field is not None and field.discriminator is not None
        return cls(tuple(path), sections)

    @property
    def key(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).removeprefix(".")

    @property
    def settable(self) -> tuple[str, ...]:
        """The part of the path that is a flag; what is inside a list is set with the list."""
        return tuple(map(str, takewhile(lambda part: isinstance(part, str), self.path)))

    def is_set(self, data: Any) -> bool:
        for part in self.settable:
            if not isinstance(data, Mapping) or part not in data:
                return False
            data = data[part]
        return True


class _Explainer:
    """One line per problem: key, value, rule and remedy, in terms of the command's keys."""

    def __init__(self, kind: type[Section], prog: str) -> None:
        self.kind = kind
        self.keys = tuple(dict.fromkeys(_keys(kind)))
        self.help = f"see `{prog} --help`"

    def unknown_words(self, words: Sequence[str]) -> list[str]:
        """Lines for words that the command does not take; an unknown flag and its value share one."""
        lines = []
        for previous, word in pairwise(["", *words]):
            if word.startswith("-"):
                lines.append(self._unknown_flag(word.partition("=")[0]))
            elif not previous.startswith("-") or "=" in previous:
                lines.append(f"{word}: unexpected argument; write @ {word} to read a file")
        return lines

    def invalid(self, data: Mapping[str, Any], error: ValidationError) -> list[str]:
        """Lines for values that validation refused; a part that a shared key filled does not repeat it."""
        problems = error.errors(include_url=False)
        places = [_Place.find(self.kind, problem["loc"]) for problem in problems]
        told = {_cause(p) for p, place in zip(problems, places, strict=True) if place.is_set(data)}
        return [
            self._line(problem, place)
            for problem, place in zip(problems, places, strict=True)
            if place.is_set(data) or _cause(problem) not in told
        ]

    def _line(self, problem: ErrorDetails, place: _Place) -> str:
        match problem["type"]:
            case "missing":
                return f"{place.key} is missing; set it in a file or with {_flag('.'.join(place.settable))}"
            case "union_tag_invalid":
                tags = " or ".join(repr(_tag(section)) for section in place.sections)
                return f"{place.key}.{TAG} = {_short(problem['input'][TAG])}: should be {tags}"
            case "value_error" if self._names_a_key(message := str(problem["ctx"]["error"])):
                return message
        return f"{place.key} = {_short(problem['input'])}: {self._rule(problem, place)}"

    def _names_a_key(self, message: str) -> bool:
        return message.partition(" ")[0] in self.keys

    def _rule(self, problem: ErrorDetails, place: _Place) -> str:
        match problem["type"]:
            case "extra_forbidden":
                return self._unknown_key(problem["loc"], place)
            case "value_error":
                return str(problem["ctx"]["error"])
            case "model_type" | "model_attributes_type":
                names = dict.fromkeys(name for section in place.sections for name in section.model_fields)
                return f"should be a table with the keys {', '.join(names)}"
            case "tuple_type":
                return "should be a list; a flag takes it as JSON, such as '[1, 2]'"
            case "dict_type":
                return "should be a table; a flag takes it as JSON, such as '{\"key\": 1}'"
        rule = re.sub(", unable to .*", "", problem["msg"].removeprefix("Input "))
        return rule[0].lower() + rule[1:]

    def _unknown_key(self, location: Location, place: _Place) -> str:
        if place.key in self.keys:
            return self._other_variant(location)
        index = next((part for part in place.path if isinstance(part, int)), 0)
        near = _nearest(place.key, [key.replace("[]", f"[{index}]") for key in self.keys])
        return f"unknown key; {f'did you mean {near}?' if near else self.help}"

    def _other_variant(self, location: Location) -> str:
        *outer, tag, name = location
        union = _Place.find(self.kind, tuple(outer))
        owners = " or ".join(
            repr(_tag(variant)) for variant in union.sections if name in variant.model_fields
        )
        return f"belongs to {union.key}.{TAG} = {owners}, not {tag!r}; remove it or change the type"

    def _unknown_flag(self, flag: str) -> str:
        flags = [_flag(key) for key in (*self.keys, "dry_run") if "[]" not in key]
        near = _nearest(flag, flags)
        return f"{flag}: unknown flag; {f'did you mean {near}?' if near else self.help}"


def _nearest(wanted: str, known: Sequence[str]) -> str | None:
    """The known key most like `wanted`; one that ends in the same name is meant however far away it is."""
    name = _last_name(wanted)
    same_name = [key for key in known if _last_name(key) == name]
    near = get_close_matches(wanted, same_name or known, n=1, cutoff=0.0 if same_name else 0.6)
    return near[0] if near else None


def _last_name(key: str) -> str:
    return key.removeprefix("--").rpartition(".")[2]


def _cause(problem: ErrorDetails) -> tuple[str, str]:
    return problem["msg"], repr(problem["input"])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
