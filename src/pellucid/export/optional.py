"""Packages that an export can do without, imported when they are first needed."""

from importlib import import_module
from typing import Any

from pellucid.errors import ConfigError


def require(package: str, what: str) -> Any:
    """Returns the module, or an error that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        raise ConfigError(
            f"{what} needs {root}, which is not installed; `pip install 'pellucid[export]'`"
        ) from error
