"""Whatever is sent to any route: an answer that says what is wrong, a living engine, balanced books."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_server import AUTHORIZED, JSON, EngineServer
from http_fuzz import METHODS, addresses, bodies, errors_logged, leave

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
    "/weights": {},
    "/v1/models": {},
    "/v1/models/{model:path}": {},
}
"""A good body for each route: every field that it knows."""


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, str, dict[str, str], bytes]:
    """Method, address, headers and body."""
    route = draw(st.sampled_from([*BODIES, "/nowhere/"]))
    method = draw(st.sampled_from(["POST"] * 8 + METHODS))
    key = draw(
        st.sampled_from([AUTHORIZED, AUTHORIZED, {}, {"authorization": "Bearer \xe9"}, {"authorization": ""}])
    )
    kind = draw(
        st.sampled_from([JSON] * 8 + [{}, {"content-type": "text/plain"}, {"content-type": "\xff;;/"}])
    )
    body = draw(bodies(BODIES.get(route, {}), ("x", "top_p", "tools", "logit_bias", "user", "echo")))
    return method, draw(addresses(route)), key | kind, body


def test_every_request_gets_an_answer_and_every_token_is_accounted_for(tiny_model, tmp_path) -> None:
    served = EngineServer(tiny_model, tmp_path, max_length=32)
    assert served.paths == set(BODIES)
    transport = httpx.ASGITransport(served.app)  # what a handler raises is raised here
    found: set[int] = set()

    with asyncio.Runner() as runner, errors_logged() as errors:
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

        @settings(max_examples=300)
        @given(asked())
        def every_request_gets_an_answer(request: tuple[str, str, dict[str, str], bytes]) -> None:
            method, address, headers, body = request
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = runner.run(client.request(method, address, headers=encoded, content=body))
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

    async def run() -> httpx.Response:
        for size in (0, 1, len(body) // 2, len(body)):
            headers = {"host": "localhost", **JSON, **AUTHORIZED}
            assert await leave(served.app, path, body[:size], headers) == 503
        async with served.client() as client:
            return await client.post("/inference/v1/generate", json=REQUEST)

    with errors_logged() as errors:
        served.thread.start()
        try:
            assert asyncio.run(run()).status_code == 200
        finally:
            served.thread.stop()
    assert errors == served.failures == []
