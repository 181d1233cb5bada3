"""Explains problems of a config, a line each with key, value, rule and remedy; writes a page of every key.

python -m pellucid.config.explain > docs/configuration.md
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise, takewhile
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pellucid.config.base import TAG, Section, dotted_keys, flag_of, sections_in, tag_of
from pellucid.config.commands import RLConfig, SFTConfig
from pellucid.config.orchestrator import OWN_DISTRIBUTION, RESHAPING

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class _Place:
    """Place of a problem: `('trainer', 'loss', 'custom', 'kwargs')` is the key `trainer.loss.kwargs`."""

    path: Location
    sections: tuple[type[Section], ...]
    """Sections that the key may hold; none for a leaf."""

    @classmethod
    def find(cls, kind: type[Section], location: Location) -> "_Place":
        path: list[str | int] = []
        sections: tuple[type[Section], ...] = (kind,)
        expects_tag = False
        for part in location:
            if expects_tag:
                sections = tuple(section for section in sections if tag_of(section) == part)
                expects_tag = False
                continue
            path.append(part)
            if isinstance(part, str):
                field = next((s.model_fields[part] for s in sections if part in s.model_fields), None)
                sections = sections_in(field.annotation) if field else ()
                expects_tag = field is not None and field.discriminator is not None
        return cls(tuple(path), sections)

    @property
    def key(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).removeprefix(".")

    @property
    def settable(self) -> tuple[str, ...]:
        """Part of the path that has a flag; keys inside a list are set with the list."""
        return tuple(map(str, takewhile(lambda part: isinstance(part, str), self.path)))

    def is_set(self, data: Any) -> bool:
        for part in self.settable:
            if not isinstance(data, Mapping) or part not in data:
                return False
            data = data[part]
        return True


class Explainer:
    """Explains problems in terms of one command's keys."""

    def __init__(self, kind: type[Section], prog: str) -> None:
        self.kind = kind
        self.keys = tuple(dict.fromkeys(dotted_keys(kind)))
        self.help = f"see `{prog} --help`"

    def unknown_words(self, words: Sequence[str]) -> list[str]:
        """Explains words that the command does not take; an unknown flag and its value share a line."""
        flags = [flag_of(key) for key in (*self.keys, "dry_run") if "[]" not in key]
        lines = []
        for previous, word in pairwise(["", *words]):
            if word.startswith("-"):
                flag = word.partition("=")[0]
                lines.append(f"{flag}: unknown flag; {self._remedy(flag, flags)}")
            elif not previous.startswith("-") or "=" in previous:
                lines.append(f"{word}: unexpected argument; write @ {word} to read a file")
        return lines

    def invalid(self, data: Mapping[str, Any], error: ValidationError) -> list[str]:
        """Explains values that validation refused; the problem of a shared key is told once, not per part."""
        found = [
            (problem, _Place.find(self.kind, problem["loc"])) for problem in error.errors(include_url=False)
        ]
        causes = {_cause(problem) for problem, place in found if place.is_set(data)}
        return [
            self._line(problem, place)
            for problem, place in found
            if place.is_set(data) or _cause(problem) not in causes
        ]

    def _line(self, problem: ErrorDetails, place: _Place) -> str:
        match problem["type"]:
            case "missing":
                return f"{place.key} is missing; set it in a file or with {flag_of('.'.join(place.settable))}"
            case "union_tag_invalid":
                tags = " or ".join(repr(tag_of(section)) for section in place.sections)
                return f"{place.key}.{TAG} = {_short(problem['input'][TAG])}: should be {tags}"
            case "value_error" if str(problem["ctx"]["error"]).partition(" ")[0] in self.keys:
                return str(problem["ctx"]["error"])
        return f"{place.key} = {_short(problem['input'])}: {self._rule(problem, place)}"

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
        if place.key not in self.keys:
            index = next((part for part in place.path if isinstance(part, int)), 0)
            keys = [key.replace("[]", f"[{index}]") for key in self.keys]
            return f"unknown key; {self._remedy(place.key, keys)}"
        *outer, tag, name = location
        union = _Place.find(self.kind, tuple(outer))
        owners = [repr(tag_of(variant)) for variant in union.sections if name in variant.model_fields]
        return (
            f"belongs to {union.key}.{TAG} = {' or '.join(owners)}, not {tag!r}; remove it or change the type"
        )

    def _remedy(self, wanted: str, known: Sequence[str]) -> str:
        if _last_name(wanted).replace("-", "_") in RESHAPING:
            return f"{OWN_DISTRIBUTION}; leave it out"
        near = nearest(wanted, known)
        return f"did you mean {near}?" if near else self.help


def nearest(wanted: str, known: Sequence[str]) -> str | None:
    """Finds the known key most like `wanted`, preferring keys that end in the same name."""
    same_name = [key for key in known if _last_name(key) == _last_name(wanted)]
    near = get_close_matches(wanted, same_name or known, n=1, cutoff=0.0 if same_name else 0.6)
    return near[0] if near else None


def _last_name(key: str) -> str:
    return key.removeprefix("--").rpartition(".")[2]


def _cause(problem: ErrorDetails) -> tuple[str, str]:
    return problem["msg"], repr(problem["input"])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_INTRODUCTION = """\
# Configuration

Every key of `pellucid rl` and `pellucid sft`; `pellucid trainer`, `pellucid orchestrator` and
`pellucid inference` read their own sections of the same tree. Write keys in a TOML file (`@ file.toml`)
or as flags (`--trainer.optim.lr 3e-4`); flags win. `--dry-run` prints the configuration as resolved.
"""


def reference() -> str:
    """Writes the whole page, in Markdown."""
    parts = {"Top level of `pellucid rl`": _rows(RLConfig), "Top level of `pellucid sft`": _rows(SFTConfig)}
    for kind in (RLConfig, SFTConfig):
        parts |= dict(_sections(kind, ""))
    lines = [_INTRODUCTION]
    for title, rows in parts.items():
        header = ["| key | default | meaning |", "|---|---|---|"] if rows else ["It has no keys."]
        lines += [f"## {title}", "", *header, *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections(kind: type[Section], path: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (title, rows) of every section below `kind`; each variant of a tagged union is a section."""
    for name, field in kind.model_fields.items():
        variants = sections_in(field.annotation)
        for each in variants:
            variant = f" with `{_tag(each)}`" if len(variants) > 1 else ""
            yield f"`[{path}{name}]`{variant}", _rows(each)
            yield from _sections(each, f"{path}{name}.")


def _rows(kind: type[Section]) -> list[str]:
    return [
        f"| `{name}` | {_default(field)} | {_prose(field.description)} |"
        for name, field in kind.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]


def _tag(variant: type[Section]) -> str:
    """Writes the tag of a variant as TOML does."""
    return f"{TAG} = {json.dumps(tag_of(variant))}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "not set"
    if isinstance(field.default, Section):
        return f"`{_tag(type(field.default))}`"
    return f"`{json.dumps(field.default, default=str)}`"


def _prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
