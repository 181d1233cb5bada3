"""Objects named by `package.module:attribute` in a configuration."""

from importlib import import_module
from typing import Any

from pellucid.errors import ConfigError


def load_attribute(path: str, key: str) -> Any:
    """What `path` names; `key` is the setting that holds it and is named in the refusal."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key} = {path!r} cannot be imported: {error}; "
            "write `package.module:name` of something installed or on PYTHONPATH"
        ) from error
