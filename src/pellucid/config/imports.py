"""Objects named by `package.module:attribute` in a configuration."""

import importlib.util
import sys
import traceback
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pellucid.errors import ConfigError

_REMEDY = "write `package.module:name` of something installed, in the current folder, or on PYTHONPATH"


def load_attribute(path: str, key: str) -> Any:
    """What `path` names; `key` is the setting that holds it and is named in the refusal."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {path!r} cannot be imported: {error}; {_REMEDY}") from error
    except Exception as error:  # of somebody's own module
        raise ConfigError(f"{key} = {path!r} cannot be imported: {describe(error)}") from error


def require_package(path: str, key: str) -> None:
    """Refuses a path into a package that does not exist, without running any code of one that does.

    The current folder counts, whether or not it is on this process's own path: it is on that of its children.
    """
    package = path.partition(":")[0].partition(".")[0]
    found = package in sys.modules or importlib.util.find_spec(package) or PathFinder.find_spec(package, [""])
    if not found:
        raise ConfigError(f"{key} = {path!r} cannot be imported: No module named {package!r}; {_REMEDY}")


def describe(error: Exception) -> str:
    """`KeyError: 'answer' (my_env.py:31)`: an error in somebody's own code, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
