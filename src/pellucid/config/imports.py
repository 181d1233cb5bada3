"""Imports objects that a configuration names as `package.module:attribute`."""

import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pellucid.errors import ConfigError, UserCodeError

_REMEDY = "write `package.module:name` of something installed, in the current folder, or on PYTHONPATH"


def load_attribute(path: str, key: str) -> Any:
    """Imports the object that `path` names; errors name `key`, the setting that holds the path."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # the path is wrong, or the user's module raises
        is_missing = isinstance(error, (ImportError, AttributeError)) and place_of(error) is None
        if is_missing:
            raise ConfigError(f"{key} = {path!r} cannot be imported: {error}; {_REMEDY}") from error
        raise UserCodeError(f"{key} = {path!r} cannot be imported: {describe(error)}") from error


def load_function(path: str, kwargs: Mapping[str, Any], section: str) -> Callable[[Any], Any]:
    """Imports `section`.import_path and binds `section`.kwargs; the function takes one more argument."""
    function = load_attribute(path, f"{section}.import_path")
    if not callable(function):
        raise ConfigError(f"{section}.import_path = {path!r} is {function!r}; name a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # the function is not written in Python
        return partial(function, **kwargs)
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{section}.import_path = {path!r} cannot be called with its inputs and {section}.kwargs = "
            f"{dict(kwargs)}: {error}; it takes {signature}"
        ) from error
    return partial(function, **kwargs)


def see_current_folder() -> None:
    """Lets modules of the current folder be imported, as `python -m` does; a console script does not."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def require_package(path: str, key: str) -> None:
    """Raises ConfigError if the package of a path does not exist; runs no code of the package."""
    package = path.partition(":")[0].partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{key} = {path!r} cannot be imported: No module named {package!r}; {_REMEDY}")


def describe(error: BaseException) -> str:
    """Describes an error and the line of user code it came from: `KeyError: 'answer' (envs/my_env.py:31)`."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = place_of(error)
    return summary if place is None else f"{summary} ({place})"


def place_of(error: BaseException) -> str | None:
    """Finds the line outside of pellucid that an error came from, `envs/my_env.py:31`; None if there is none.

    If the error came from a library, the line is that of the code that called it.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return _place(error.filename, error.lineno or 1)
    frames = [frame for frame in _frames(error) if _is_foreign(frame[0])]
    of_user = [frame for frame in frames if not _is_library(frame[0])]
    return _place(*(of_user[-1] if of_user else frames[0])) if frames else None


def place_of_code(function: Callable[..., Any]) -> str | None:
    """Finds the line where a function is written, `envs/my_env.py:31`; None if it is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else _place(code.co_filename, code.co_firstlineno)


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """Lists (file, line) from the outermost to the innermost frame; frames of the cause come last.

    A worker process sends its traceback as the text of the cause.
    """
    frames = [(frame.filename, frame.lineno or 1) for frame in traceback.extract_tb(error.__traceback__)]
    cause = error.__cause__
    if cause is None:
        return frames
    if cause.__traceback__ is None:
        return frames + [(file, int(line)) for file, line in _FRAME.findall(str(cause))]
    return frames + _frames(cause)


_FRAME = re.compile(r'^ +File "(.+)", line (\d+)', re.MULTILINE)
_PACKAGE = Path(__file__).parent.parent
_STDLIB = Path(sysconfig.get_path("stdlib"))


def _is_library(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_foreign(file: str) -> bool:
    """Returns whether a file is neither pellucid's, nor of the standard library, nor a frozen module."""
    path = Path(file)
    is_python = path.is_relative_to(_STDLIB) and not _is_library(file)
    return not (path.is_relative_to(_PACKAGE) or is_python or file.startswith("<"))


def _place(file: str, line: int) -> str:
    """Writes `file:line`, relative to the current folder if the file is inside of it."""
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
