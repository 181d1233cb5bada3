r"""Converts user data to a form that every file, message and log line of a run can hold.

    encodable("a\ud83d")              'a\\ud83d'                    half of a character has no UTF-8 form
    to_plain({1: {2}, "x": 10**30})   {'1': '{2}', 'x': '1000…0'}   what JSON or 64 bits cannot hold is text
    to_plain(tree)                    {'parent': '…', …}            what contains itself is cut off there

None of these functions raises, whatever it is given. Plain data comes back unchanged.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from enum import Enum
from typing import Any

import numpy as np
import orjson

_MAX_DEPTH = 100
_MAX_VALUES = 1_000_000
_MAX_INT, _MIN_INT = 2**64 - 1, -(2**63)
_LEFT_OUT = "…"


def encodable(text: str) -> str:
    """Spells out surrogates (`\\ud83d`), which no file and no message between processes can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def to_json(value: object) -> bytes:
    """Writes `value` as JSON on one line; a number that is not finite is null."""
    return orjson.dumps(to_plain(value))


def to_plain(value: object) -> Any:
    """Converts `value` to dicts, lists, text and numbers; any other object becomes its text."""
    return _Copy().of(value)


def printable(text: str) -> str:
    """Escapes control characters, which could redraw a terminal or end a line of a log early."""
    if text.isprintable():
        return text
    return "".join(each if each == "\n" or each.isprintable() else repr(each)[1:-1] for each in text)


def brief(value: object, width: int = 80) -> str:
    """Describes `value` for a message, by its repr and type: `{'role': None} (dict)`."""
    try:
        text = printable(repr(value))
    except Exception:  # of somebody's own class, or of a number with too many digits
        text = "<no repr>"
    shown = text if len(text) <= width else f"{text[: width - 1]}{_LEFT_OUT}"
    return f"{shown} ({type(value).__name__})"


def clip_middle(text: str, width: int) -> str:
    """Shortens `text` to at most `width` characters, by leaving out its middle: the ends tell most."""
    if len(text) <= width:
        return text
    kept = max(width - len(_LEFT_OUT), 0)
    return f"{text[: kept - kept // 2]}{_LEFT_OUT}{text[len(text) - kept // 2 :]}"


class _Copy:
    """One walk through user data, which may be deep, endless or contain itself."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        """Ids of the containers that the walk is inside of."""
        self._num_left = _MAX_VALUES

    def of(self, value: object) -> Any:
        self._num_left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return encodable(str.__str__(value))
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int):
            return int(value) if _MIN_INT <= value <= _MAX_INT else _in_words(value)
        try:
            return self._of_object(value)
        except Exception:  # of the methods of somebody's own class
            return _in_words(value)

    def _of_object(self, value: object) -> Any:
        if isinstance(value, Enum):
            return self.of(value.value)
        if isinstance(value, (date, time)):
            return value.isoformat()
        if isinstance(value, np.generic):
            item = value.item()
            return _in_words(value) if isinstance(item, np.generic) else self.of(item)
        if isinstance(value, np.ndarray):
            return self._inside(value, value.tolist())
        if is_dataclass(value) and not isinstance(value, type):
            return self._inside(value, {each.name: getattr(value, each.name) for each in fields(value)})
        if isinstance(value, (Mapping, list, tuple)):
            return self._inside(value, value)
        return _in_words(value)

    def _inside(self, owner: object, content: object) -> Any:
        is_inside_itself = id(owner) in self._open
        if is_inside_itself or len(self._open) >= _MAX_DEPTH or self._num_left <= 0:
            return _LEFT_OUT
        self._open.add(id(owner))
        try:
            if isinstance(content, Mapping):
                return {_key(key): self.of(each) for key, each in content.items() if self._num_left > 0}
            if isinstance(content, (list, tuple)):
                return [self.of(each) for each in content if self._num_left > 0]
            return self.of(content)  # an array of no dimension
        finally:
            self._open.discard(id(owner))


def _key(key: object) -> str:
    return encodable(str.__str__(key)) if isinstance(key, str) else str(_in_words(key))


def _in_words(value: object) -> str:
    try:
        return encodable(str(value))
    except Exception:  # it has no text, or too many digits
        return f"<{type(value).__name__}>"
