"""Whatever is sent to any route of the viewer: an answer that says what is wrong; none without its token."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from benchmarks.viewer_inputs import make_batch, write_file
from http_fuzz import METHODS, addresses, bodies, errors_logged, leave
from pellucid.viewer.access import Exports
from pellucid.viewer.server import COOKIE, headers, make_app
from pellucid.viewer.source import ServedRun

TOKEN = "secret"
FILTER = {"any": [{"field": "kl", "is": ">", "value": 0.5}, {"not": {"all": [{"field": "env"}]}}]}
BODIES: dict[str, Any] = {
    "/": None,
    "/api/run": None,
    "/api/slices": None,
    "/api/step/{step:int}": None,
    "/api/rows/{step:int}": None,
    "/api/chunk/{step:int}/{index:int}": None,
    "/api/lead/{step:int}/{record:int}": None,
    "/api/texts": [65, 66],
    "/api/query": {
        "ask": "worst",
        "metric": "kl",
        "kind": "all",
        "limit": 3,
        "env": "math",
        "rank": 0,
        "weights": "age1",
        "filter": FILTER,
        "ids": [65, 66],
    },
    "/api/metrics": None,
    "/api/timeline": None,
    "/api/rollouts/{step:int}": None,
    "/api/rollout/{step:int}/{number:int}": None,
    "/api/pulse": None,
}
"""A good body for each route: every field that it knows."""

HEADERS: list[dict[str, bytes]] = [
    {},
    {},
    {},
    {"host": b"evil.example"},
    {"host": b"\xe9"},
    {"host": b"[::1"},
    {"origin": b"null"},
    {"origin": b"http://\xff"},
    {"cookie": f"{COOKIE}=\xe9".encode("latin-1")},
    {"cookie": f"{COOKIE}".encode()},
    {"cookie": b"=;;\xff=\x01; a"},
    {"accept-encoding": b"deflate;q=\xff"},
    {"content-type": b"\xff;;/"},
    {"content-length": b"7"},
]


@pytest.fixture(scope="module")
def apps(made_run: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Starlette, bool]]:
    """Viewers of two formats, each for this machine and for others; whether they ask for a token."""
    parquet: Path = tmp_path_factory.mktemp("parquet") / "rank_0.parquet"
    write_file(parquet, make_batch(4, 64))
    runs = [ServedRun(Exports(path)) for path in (made_run.folder, parquet)]
    return [
        (make_app(run, host=host, token=token), token is not None)
        for run in runs
        for host, token in (("127.0.0.1", None), ("0.0.0.0", TOKEN))
    ]


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, str, dict[str, bytes], bytes]:
    """Method, address, headers and body."""
    route = draw(st.sampled_from([*BODIES, *("/api/texts", "/api/query") * 4, "/nowhere/"]))
    good = BODIES.get(route)
    method = draw(st.sampled_from(["GET" if good is None else "POST"] * 16 + METHODS))
    sent = draw(st.sampled_from(HEADERS))
    if draw(st.booleans()) and "cookie" not in sent:
        sent = {**sent, "cookie": f"{COOKIE}={TOKEN}".encode()}
    body = draw(bodies(good, ("ask", "metric", "filter", "x"))) if good or draw(st.booleans()) else b""
    if draw(st.booleans()) and route == "/api/query":
        body = body.replace(b'"worst"', b'"find"')
    return method, draw(addresses(route)), sent, body


def test_every_request_gets_an_answer_and_strangers_get_none(apps: list[tuple[Starlette, bool]]) -> None:
    found: set[int] = set()
    assert {route.path for route in apps[0][0].routes} == set(BODIES)  # type: ignore[attr-defined]

    with asyncio.Runner() as runner, errors_logged() as errors:
        clients = [
            # what a handler raises is raised here
            (httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:7357"), asks)
            for app, asks in apps
        ]

        @settings(max_examples=400)
        @given(st.sampled_from(clients), asked())
        def every_request_gets_an_answer(
            viewer: tuple[httpx.AsyncClient, bool], request: tuple[str, str, dict[str, bytes], bytes]
        ) -> None:
            (client, asks_for_token), (method, address, sent, body) = viewer, request
            client.cookies.clear()
            answer = runner.run(client.request(method, address, headers=sent, content=body))
            assert answer.status_code < 500, answer.text
            assert errors == []
            assert {name: answer.headers[name] for name in headers()} == headers()
            if asks_for_token and TOKEN.encode() not in sent.get("cookie", b""):
                assert answer.status_code in (403, 404)
                assert answer.status_code == 403 or answer.text == "there is no such page" or method == "HEAD"
            if answer.status_code >= 400 and method != "HEAD":
                assert answer.text
            found.add(answer.status_code)

        every_request_gets_an_answer()
        for client, _ in clients:
            runner.run(client.aclose())
    assert found >= {200, 400, 403, 404, 405}


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body])
def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_no_traceback(apps: Any, path: str) -> None:
    with errors_logged() as errors:
        for part in (b"", b"[", b'{"ask": "find", "ids": [1]}'):
            assert asyncio.run(leave(apps[0][0], path, part, {"host": "localhost"})) == 400
    assert errors == []


@pytest.mark.parametrize("shown", ["é", "secret\xff", "", "🙂"])
def test_a_token_of_any_letters_is_refused_in_a_line(apps: Any, shown: str) -> None:
    async def knock(**asked: Any) -> httpx.Response:
        transport = httpx.ASGITransport(apps[1][0])
        async with httpx.AsyncClient(transport=transport, base_url="http://box:7357") as client:
            return await client.get("/", **asked)

    cookie = f"{COOKIE}={shown}".encode()
    for asked in ({"params": {"token": shown}}, {"headers": {"cookie": cookie}}):
        answer = asyncio.run(knock(**asked))
        assert answer.status_code == 403
        assert answer.text.startswith("the address of this viewer has a token")
