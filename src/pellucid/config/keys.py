"""The shape of a config: its sections, their dotted keys, and the tags that a table may leave out."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from pellucid.config.base import Section

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
