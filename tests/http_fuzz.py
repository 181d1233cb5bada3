"""Requests that nobody should send: what the tests that fuzz an HTTP server have in common.

A server's requests are given as a good body, or None, for each route: `{"/api/step/{step:int}": None}`.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st
from starlette.types import ASGIApp

NUMBERS = [
    "1e999",
    "-1e400",
    "1" * 400,
    "-" + "9" * 30,
    "1" * 5000,
    "0.1",
    "-0",
    "1e-400",
    str(2**63),
    str(2**64),
]
TEXTS = [
    '"\\ud800"',
    '"\\u0000"',
    '"' + "a" * 3000 + '"',
    '"<|im_start|>"',
    '"../../../etc/passwd"',
    '"\\u00e9世🙂"',
]
IN_PATHS = ["0", "1", "2", "-1", "007", "1e3", "x", "%00", "%ff/", "%C2%B2", "..", "", "9" * 30, "9" * 5000]
"""Stands where a route has a parameter."""

QUERIES = [
    "",
    "",
    "",
    "?",
    "?token=",
    "?token=%C3%A9",
    "?token=\xe9",
    "?a=%00&a=%ff",
    "?=&&;",
    "?" + "x" * 5000,
]
METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"]


class Literal(str):
    """JSON as it is sent; Python could not make it."""


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from([*NUMBERS, *TEXTS, "[" * 3000, "{}"]).map(Literal),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def encode(value: Any) -> str:
    match value:
        case Literal():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{encode(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(encode, value)) + "]"
        case _:
            return json.dumps(value)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths_in(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@st.composite
def bodies(draw: st.DrawFn, good: Any, more_keys: tuple[str, ...]) -> bytes:
    """Mostly a good body of which something was changed; `more_keys` are fields that it may get."""
    body = good
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(sorted(paths_in(body), key=repr)))
        body = replaced(body, place, draw(VALUES))
    if isinstance(body, dict) and draw(st.booleans()):
        body = body | {draw(st.sampled_from(more_keys)): draw(VALUES)}
    return draw(spoilt(encode(body).encode("utf-8", "surrogatepass")))


@st.composite
def spoilt(draw: st.DrawFn, raw: bytes) -> bytes:
    """Mostly as it is, else cut, with other bytes in it, or something else."""
    match draw(st.sampled_from(["whole"] * 6 + ["cut", "broken", "noise"])):
        case "cut":
            return raw[: draw(st.integers(0, len(raw)))]
        case "broken":
            place = draw(st.integers(0, len(raw)))
            return raw[:place] + draw(st.binary(max_size=4)) + raw[place:]
        case "noise":
            return draw(st.binary(max_size=64))
    return raw


@st.composite
def addresses(draw: st.DrawFn, route: str) -> str:
    """A path of the route, with odd values for its parameters, and maybe a query."""
    path = re.sub(r"\{[^}]*\}", lambda _: draw(st.sampled_from(IN_PATHS)), route)
    return path + draw(st.sampled_from(QUERIES))


class ErrorLog(logging.Handler):
    """What was logged with a traceback, or as an error."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))


@contextmanager
def errors_logged() -> Iterator[list[str]]:
    handler = ErrorLog()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.found
    finally:
        logging.getLogger().removeHandler(handler)


async def leave(app: ASGIApp, path: str, part: bytes, headers: Mapping[str, str]) -> int:
    """Sends a part of a body and is gone; returns the status of what nobody hears."""
    sent: list[Any] = []
    messages = iter([{"type": "http.request", "body": part, "more_body": True}])

    async def receive() -> dict[str, Any]:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("localhost", 80),
        "scheme": "http",
    }
    await app(scope, receive, send)
    (status,) = (message["status"] for message in sent if message["type"] == "http.response.start")
    return int(status)
