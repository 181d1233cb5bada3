"""Whatever is sent to any route: an answer that says what is wrong, a living engine, balanced books."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_server import AUTHORIZED, JSON, EngineServer

PARAMS = {"temperature": 0.5, "max_tokens": 3, "seed": 7, "stop_token_ids": [4], "stop": ["ab"]}
REQUEST = {
    "token_ids": [5, 6],
    "sampling_params": PARAMS,
    "account": {"run": "r", "env": "e"},
    "request_id": "a",
    "compact": True,
}
OPENAI = {
    "model": "tiny",
    "temperature": 0.5,
    "n": 2,
    "seed": 7,
    "stop": ["ab"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "max_tokens": 3,
}
BODIES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": REQUEST,
    "/inference/v1/generate_many": {"requests": [REQUEST, {"request_id": "b"}], "token_ids": [7]},
    "/inference/v1/score": {"token_ids": [5, 6], "temperature": 0.8},
    "/v1/chat/completions": {
        **OPENAI,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "logprobs": True,
        "max_completion_tokens": 3,
    },
    "/v1/completions": {**OPENAI, "prompt": "abc", "logprobs": 1},
    "/update_weights": {"version": 1, "folder": "weights/step_1", "run": "r"},
    "/abort": {"request_ids": ["a"], "disown": True},
    "/health": {},
    "/v1/models": {},
    "/v1/models/%00%ff/tiny": {},
    "/nowhere/": {},
}
"""A good body for each route: every field that it knows."""

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
def asked(draw: st.DrawFn) -> tuple[str, str, dict[str, str], bytes]:
    """Method, path, headers and body: mostly a good request of which something was changed."""
    path = draw(st.sampled_from(sorted(BODIES)))
    method = draw(st.sampled_from(["POST"] * 8 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"]))
    key = draw(
        st.sampled_from([AUTHORIZED, AUTHORIZED, {}, {"authorization": "Bearer \xe9"}, {"authorization": ""}])
    )
    kind = draw(
        st.sampled_from([JSON] * 8 + [{}, {"content-type": "text/plain"}, {"content-type": "\xff;;/"}])
    )
    body: Any = BODIES[path]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(sorted(paths_in(body), key=repr)))
        body = replaced(body, place, draw(VALUES))
    if isinstance(body, dict) and draw(st.booleans()):
        body = body | {
            draw(st.sampled_from(["x", "top_p", "tools", "logit_bias", "user", "echo"])): draw(VALUES)
        }
    raw = encode(body).encode("utf-8", "surrogatepass")
    match draw(st.sampled_from(["whole"] * 6 + ["cut", "broken", "noise"])):
        case "cut":
            raw = raw[: draw(st.integers(0, len(raw)))]
        case "broken":
            place = draw(st.integers(0, len(raw)))
            raw = raw[:place] + draw(st.binary(max_size=4)) + raw[place:]
        case "noise":
            raw = draw(st.binary(max_size=64))
    return method, path, key | kind, raw


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


def test_every_request_gets_an_answer_and_every_token_is_accounted_for(tiny_model, tmp_path) -> None:
    served = EngineServer(tiny_model, tmp_path, max_length=32)
    transport = httpx.ASGITransport(served.app)  # what a handler raises is raised here
    found: set[int] = set()

    with asyncio.Runner() as runner, errors_logged() as errors:
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

        @settings(max_examples=300)
        @given(asked())
        def every_request_gets_an_answer(request: tuple[str, str, dict[str, str], bytes]) -> None:
            method, path, headers, body = request
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = runner.run(client.request(method, path, headers=encoded, content=body))
            assert answer.status_code < 500 or answer.status_code == 503, answer.text
            if answer.status_code >= 400 and method != "HEAD":
                assert answer.json()["error"]["message"]
            assert errors == []
            found.add(answer.status_code)

        served.thread.start()
        try:
            every_request_gets_an_answer()
            fresh = {**REQUEST, "request_id": "not aborted before"}
            good = runner.run(client.post("/inference/v1/generate", json=fresh, headers=AUTHORIZED))
            assert good.status_code == 200
            assert good.json()["choices"][0]["finish_reason"] in ("length", "stop")
            health = runner.run(client.get("/health")).json()
        finally:
            runner.run(client.aclose())
            served.thread.stop()

    assert found >= {200, 400, 401, 404, 405, 415}
    assert (health["running"], health["waiting"], health["policy_version"]) == (0, 0, 0)
    assert health["sampled_tokens"] == health["delivered_tokens"] + health["cancelled_tokens"] > 0
    books = served.counts()
    assert books["sampled"] == books["delivered"] + books.get("cancelled", 0) > 0
    assert served.failures == []


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body])
def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(tiny_model, tmp_path, path) -> None:
    served = EngineServer(tiny_model, tmp_path, max_length=32)
    body = json.dumps(BODIES[path]).encode()
    sent: list[dict[str, Any]] = []

    async def leave(size: int) -> None:
        messages = iter([{"type": "http.request", "body": body[:size], "more_body": True}])

        async def receive() -> dict[str, Any]:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(name.encode(), value.encode()) for name, value in (JSON | AUTHORIZED).items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
        }
        scope |= {
            "headers": [*headers, (b"host", b"localhost")],
            "server": ("localhost", 80),
            "scheme": "http",
        }
        await served.app(scope, receive, send)

    async def run() -> httpx.Response:
        for size in (0, 1, len(body) // 2, len(body)):
            await leave(size)
        async with served.client() as client:
            return await client.post("/inference/v1/generate", json=REQUEST)

    with errors_logged() as errors:
        served.thread.start()
        try:
            assert asyncio.run(run()).status_code == 200
        finally:
            served.thread.stop()
    assert errors == served.failures == []
    assert {message["status"] for message in sent if message["type"] == "http.response.start"} == {503}
