"""`pellucid view RUN`: the page over HTTP, by default for browsers of this machine only.

    GET  /                 the page, with the head of the run in it
    GET  /api/run          head of the run                   JSON
    GET  /api/slices       its points by rank and weights    JSON
    GET  /api/metrics      every metric over the steps       JSON
    GET  /api/timeline     who worked and who waited         JSON
    GET  /api/rollouts/N   saved rollouts of a step          JSON
    GET  /api/rollout/N/K     one of them, long messages included   JSON
    GET  /api/step/N       index of a step                   blob, see `blob`
    GET  /api/rows/N       measures of its records           blob
    GET  /api/chunk/N/K    tokens of some of its records     blob
    GET  /api/lead/N/R     first tokens of a long record     blob
    POST /api/texts        [id, …] -> texts of token ids     JSON
    POST /api/query        a question about the whole run    JSON, see `queries`
    GET  /api/pulse        {"steps": …, "summarised": …, "state": …, "writing": …}

Of several runs, / lists them, and each has all of this below a number of its own: /0/, /1/, … The list has

    GET  /api/run, /api/pulse    the list                                              JSON
    GET  /api/curves/R           every metric of a run, its steps in time and tokens   JSON
    GET  /api/examples/R         examples of its saved rollouts, by step               JSON
    GET  /api/attempts/R/N       saved rollouts of a step                              JSON

Within this machine answers are sent as they are: deflating them takes longer than sending them. Elsewhere
they are deflated (`Content-Encoding`).

Bound to 127.0.0.1, it answers to that name and to localhost. Bound elsewhere, it answers to whoever has the
random token of its address. A request that another site's page makes is refused; so is a frame.
"""

import asyncio
import logging
import re
import secrets
import socket
import threading
import webbrowser
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pellucid.errors import ConfigError, PellucidError
from pellucid.guard import answers_to, is_foreign, is_loopback, is_secret
from pellucid.viewer.frame import block, frame
from pellucid.viewer.runs import RunList
from pellucid.viewer.source import ServedRun
from pellucid.viewer.summary import as_json

log = logging.getLogger(__name__)

USUAL_PORT = 7357
MAX_IDS = 300_000
MAX_BODY_BYTES = 1 << 22
"""Size of a request's body: `MAX_IDS` ids of ten digits fit."""

BODY_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 200
"""Open connections, half-open ones included; further ones are answered with 503."""

MAX_PATH = 100
COOKIE = "pellucid-viewer"
DEFLATE_LEVEL = 1


@cache
def headers() -> Mapping[str, str]:
    """Returns the headers of every answer."""
    return {
        "Content-Security-Policy": f"{frame().policy}; connect-src 'self'; frame-ancestors 'none'",
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def make_app(run: ServedRun, *, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """Makes the application. `token`: secret that a visitor must show; None: it asks for none."""
    return _guarded(routes_of(run, is_near=is_loopback(host)), host, token)


def make_list_app(
    runs: RunList,
    open_run: Callable[[Path], ServedRun],
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
) -> Starlette:
    """Makes an application with a list of runs; each is opened by the first request for it."""

    is_near = is_loopback(host)
    opening = threading.Lock()

    def head() -> bytes:
        return as_json(runs.head(live=True))

    @cache
    def opened(number: int) -> Starlette:
        served = open_run(runs.path(number))
        threading.Thread(target=served.summarise, daemon=True).start()
        return Starlette(routes=routes_of(served, is_near=is_near), exception_handlers=_FAILURES)

    def opened_once(number: int) -> Starlette:
        with opening:
            return opened(number)

    async def one_run(scope: Scope, receive: Receive, send: Send) -> None:
        app = await run_in_threadpool(opened_once, scope["path_params"]["number"])
        await app(scope, receive, send)

    async def pulse(request: Request) -> Response:
        found = await run_in_threadpool(lambda: runs.head(live=True))
        return JSONResponse({name: found[name] for name in ("state", "writing")})

    get = _getter(is_near)
    routes: list[BaseRoute] = [
        _page_route(head),
        get("/api/run", head),
        get("/api/curves/{run:int}", lambda run: as_json(runs.curves(run))),
        get("/api/examples/{run:int}", lambda run: as_json(runs.examples(run))),
        get("/api/attempts/{run:int}/{step:int}", lambda run, step: as_json(runs.attempts(run, step))),
        Route("/api/pulse", pulse),
        Mount("/{number:int}", app=one_run),
    ]
    threading.Thread(target=runs.runs, daemon=True).start()  # what the first visitor would wait for
    return _guarded(routes, host, token)


async def _failed(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 404)


_FAILURES: Mapping[Any, Any] = {PellucidError: _failed, OSError: _failed}


def _guarded(routes: Sequence[BaseRoute], host: str, token: str | None) -> Starlette:
    app = Starlette(routes=routes, exception_handlers=_FAILURES)
    app.add_middleware(Guard, host=host, token=token)
    return app


def routes_of(run: ServedRun, *, is_near: bool) -> list[Route]:
    """`is_near`: readers are on this machine, and answers are not deflated."""

    get = _getter(is_near)

    async def texts(request: Request) -> Response:
        ids = await _read_json(request)
        if not isinstance(ids, list) or len(ids) > MAX_IDS or not all(type(i) is int for i in ids):
            return PlainTextResponse(f"expected a list of at most {MAX_IDS} token ids", 400)
        return await _answer(request, is_near, run.texts, ids)

    async def query(request: Request) -> Response:
        question = await _read_json(request)
        if not isinstance(question, dict):
            return PlainTextResponse("expected a question, see pellucid.viewer.queries", 400)
        return await _answer(request, is_near, run.query, question)

    async def pulse(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(run.pulse))

    return [
        _page_route(run.run),
        get("/api/run", run.run),
        get("/api/slices", run.slices),
        get("/api/metrics", run.metrics),
        get("/api/timeline", run.timeline),
        get("/api/rollouts/{step:int}", run.rollouts),
        get("/api/rollout/{step:int}/{number:int}", run.rollout),
        get("/api/step/{step:int}", run.step),
        get("/api/rows/{step:int}", run.rows),
        get("/api/chunk/{step:int}/{index:int}", run.chunk),
        get("/api/lead/{step:int}/{record:int}", run.lead),
        Route("/api/texts", texts, methods=["POST"]),
        Route("/api/query", query, methods=["POST"]),
        Route("/api/pulse", pulse),
    ]


def _page_route(head: Callable[[], bytes]) -> Route:
    async def page(request: Request) -> Response:
        data = block("run", await run_in_threadpool(head), is_served=True)
        html = frame()
        return Response(f"{html.opening}{data}{html.scripts}{html.closing}", media_type="text/html")

    return Route("/", page)


def _getter(is_near: bool) -> Callable[[str, Callable[..., bytes]], Route]:
    """Makes routes; what answers is called with the numbers of the path."""

    def get(path: str, make: Callable[..., bytes]) -> Route:
        names = re.findall(r"{(\w+):int}", path)

        async def answered(request: Request) -> Response:
            return await _answer(request, is_near, make, *(request.path_params[name] for name in names))

        return Route(path, answered)

    return get


async def _answer(request: Request, is_near: bool, make: Callable[..., bytes], *args: Any) -> Response:
    data = await run_in_threadpool(make, *args)
    is_deflated = not is_near and "deflate" in request.headers.get("accept-encoding", "")
    if is_deflated:
        data = await run_in_threadpool(zlib.compress, data, DEFLATE_LEVEL)
    encoding = {"Content-Encoding": "deflate"} if is_deflated else None
    return Response(data, media_type="application/octet-stream", headers=encoding)


async def _read_json(request: Request) -> Any:
    """Returns the body of a request; what is too large, too slow or no JSON is refused."""

    def refused(status: int, reason: str) -> HTTPException:
        return HTTPException(status, reason, {"Connection": "close"})

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise refused(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
        return orjson.loads(body)
    except ClientDisconnect as error:
        raise refused(400, "the body has no end") from error
    except TimeoutError as error:
        raise refused(408, f"the body took longer than {BODY_TIMEOUT_S:g} s") from error
    except orjson.JSONDecodeError as error:
        raise refused(400, f"the body is not JSON: {error}") from error


class Guard:
    """Refuses who may not ask, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, *, host: str, token: str | None) -> None:
        self._app = app
        self._host = host
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers())
            await send(message)

        answering = _refusal(Request(scope), self._host, self._token) or self._app
        await answering(scope, receive, send_with_headers)


class PromptHttp(H11Protocol):
    """An HTTP protocol that closes connections whose request head is not complete within `BODY_TIMEOUT_S`."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()

    def _watch(self) -> None:
        """Counts from the connection, or the first byte of a request, to the end of that request's head."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._patience is None:
            self._patience = self.loop.call_later(BODY_TIMEOUT_S, self.transport.close)
        elif not is_waiting and self._patience is not None:
            self._patience.cancel()
            self._patience = None


def serve(
    make: Callable[..., Starlette],
    *,
    host: str,
    port: int | None,
    open_browser: bool,
) -> None:
    """Serves what `make(host=…, token=…)` returns until interrupted."""
    listener = _listen(host, port)
    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    shown_host = f"[{host}]" if ":" in host else host
    address = f"http://{shown_host}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    app = make(host=host, token=token)
    log.info("open %s (Ctrl-C ends it)", address)
    if open_browser:
        webbrowser.open(address)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, http=PromptHttp, limit_concurrency=MAX_CONNECTIONS
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (USUAL_PORT, 0) if port is None else (port,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            return listener
        except OSError as error:
            listener.close()
            if port is not None or candidate == 0:
                raise ConfigError(
                    f"port = {candidate}: {host} cannot listen there ({error.strerror})"
                ) from error
    raise AssertionError("port 0 binds or fails")


def _refusal(request: Request, host: str, token: str | None) -> Response | None:
    """Other sites' pages reach a local server through the browser: by a name of theirs, or by forgery."""
    if len(request.url.path) > MAX_PATH:
        return PlainTextResponse("there is no such page", 404)
    named = request.headers.get("host", "")
    if not answers_to(host, named):
        return PlainTextResponse(f"this viewer does not answer to {named!r}", 403)
    if is_foreign(request.headers.get("origin"), named):
        return PlainTextResponse("a request of another site", 403)
    if token is None or is_secret(request.cookies.get(COOKIE, ""), token):
        return None
    if is_secret(request.query_params.get("token", ""), token):
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    return PlainTextResponse("the address of this viewer has a token: take it from where it was started", 403)
