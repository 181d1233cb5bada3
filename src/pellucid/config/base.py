"""Base of every section: frozen, unknown keys are refused, attribute docstrings are the help text.

Also the shape of a config (its sections, their dotted keys, the tags that a table may leave out), and the way
to write one as TOML, so that reading it back gives an equal config. TOML has no null: a key that is None is
left out, and None is the default of every key that may be None. Inside free-form tables (`kwargs`, `args`),
where leaving a key out would change its meaning, None is refused.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from pellucid.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """Yields what is wrong between several keys, as a message for the user; the first one is raised."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_problem(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self


MAX_NAME = 200


def is_name(text: str) -> bool:
    """Returns whether a text can be part of a metric's name, of a table and of a line of the console."""
    return "/" not in text and text.isprintable() and len(text) <= MAX_NAME


def _check_import_path(value: str) -> str:
    module, _, attribute = value.partition(":")
    if not module or not attribute:
        raise ValueError("is not an import path; write it as `package.module:function`")
    return value


ImportPath = Annotated[str, AfterValidator(_check_import_path)]


TAG = "type"
"""Key that selects the variant in every tagged union."""


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Lists the sections in an annotation: one, the variants of a tagged union, or a list's elements."""
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, Section) else ()
    return tuple(section for part in get_args(annotation) for section in sections_in(part))


def is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def tag_of(variant: type[Section]) -> str:
    tag: str = get_args(variant.model_fields[TAG].annotation)[0]
    return tag


def dotted_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Yields every dotted key, sections included; keys in the elements of a list are `section[].key`."""
    for name, field in kind.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        for section in sections_in(field.annotation):
            yield from dotted_keys(section, f"{key}[]." if is_list(field) else f"{key}.")


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def complete(kind: type[Section], data: Mapping[str, Any]) -> dict[str, Any]:
    """Adds empty required sections, so that validation names their missing keys, and default tags."""
    done = dict(data)
    for name, field in kind.model_fields.items():
        sections = sections_in(field.annotation)
        if sections and not is_list(field):
            if field.is_required():
                done.setdefault(name, {})
            if isinstance(value := done.get(name), Mapping):
                done[name] = _complete_section(field, sections, value)
    return done


def _complete_section(
    field: FieldInfo, variants: tuple[type[Section], ...], value: Mapping[str, Any]
) -> Mapping[str, Any]:
    if field.discriminator is None:
        return complete(variants[0], value)
    tagged = {TAG: getattr(field.default, TAG), **value}
    chosen = [variant for variant in variants if tag_of(variant) == tagged[TAG]]
    return complete(chosen[0], tagged) if chosen else tagged


def to_toml(config: Section) -> str:
    return tomli_w.dumps(_plain(config.model_dump(exclude_none=True, by_alias=True)))


def save(config: Section, path: Path) -> None:
    """Writes `config` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # or a link that is there would be followed
    partial.write_text(to_toml(config), encoding="utf-8")
    os.replace(partial, path)


def _plain(value: Any, key: str = "") -> Any:
    """Converts `value` to the types that TOML has."""
    match value:
        case Mapping():
            return {name: _plain(item, f"{key}.{name}".removeprefix(".")) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item, f"{key}[{index}]") for index, item in enumerate(value)]
        case Path():
            return str(value)
        case None:
            raise ConfigError(f"{key} = null: TOML has no null, so it cannot be saved; leave the key out")
        case _:
            return value
