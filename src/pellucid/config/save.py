"""Writes a config as TOML, so that reading it back gives an equal config.

TOML has no null: a key that is None is left out, and None is the default of every key that may be None.
Inside free-form tables (`kwargs`, `args`), where leaving a key out would change its meaning, None is refused.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from pellucid.config.base import Section
from pellucid.errors import ConfigError


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
