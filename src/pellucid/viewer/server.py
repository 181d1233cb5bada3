"""`pellucid view RUN`: the page over HTTP, for this machine's browser only unless told otherwise.

    GET  /                 the page                          text/html
    GET  /assets/…         its modules, also as one bundle.js; styles
    GET  /api/run          head of the run                   deflated JSON
    GET  /api/slices       its points by rank and weights    deflated JSON
    GET  /api/step/N       index of a step                   deflated blob, see `blob`
    GET  /api/rows/N       measures of its records           deflated blob
    GET  /api/chunk/N/K    tokens of some of its records     deflated blob
    POST /api/texts        [id, …] -> texts of token ids     deflated JSON
    POST /api/query        a question about the whole run    deflated JSON, see `queries`
    GET  /api/pulse        {"steps": …, "last": …, "summarised": …}

Bound to 127.0.0.1, it answers to that name and to localhost. Bound elsewhere, it answers to whoever has the
random token of its address. A request that another site's page makes is refused; so is a frame.
"""

import logging
import secrets
import socket
import threading
import webbrowser
from collections.abc import Awaitable, Callable
from importlib.resources import files

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from pellucid.errors import ConfigError, DataError
from pellucid.viewer.bundle import asset, bundle
from pellucid.viewer.source import ServedRun

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
USUAL_PORT = 7357
MAX_IDS = 300_000
COOKIE = "pellucid-viewer"
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(run: ServedRun, *, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """`token`: what a visitor must show; None: whoever reaches it may look."""

    script = bundle()  # one request instead of one per module

    async def page(request: Request) -> Response:
        return Response(asset("page.html"), media_type="text/html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name == "bundle.js":
            return Response(script, media_type=TYPES["js"])
        root = files("pellucid.viewer") / "assets"
        kind = TYPES.get(name.rpartition(".")[2])
        if kind is None or ".." in name.split("/") or not (root / name).is_file():
            return PlainTextResponse("no such asset", 404)
        return Response((root / name).read_bytes(), media_type=kind)

    async def head(request: Request) -> Response:
        return _blob(await run_in_threadpool(run.run))

    async def slices(request: Request) -> Response:
        return _blob(await run_in_threadpool(run.slices))

    async def step(request: Request) -> Response:
        return _blob(await run_in_threadpool(run.step, request.path_params["step"]))

    async def rows(request: Request) -> Response:
        return _blob(await run_in_threadpool(run.rows, request.path_params["step"]))

    async def chunk(request: Request) -> Response:
        path = request.path_params
        return _blob(await run_in_threadpool(run.chunk, path["step"], path["index"]))

    async def texts(request: Request) -> Response:
        ids = await request.json()
        if not isinstance(ids, list) or len(ids) > MAX_IDS or not all(type(i) is int for i in ids):
            return PlainTextResponse(f"expected a list of at most {MAX_IDS} token ids", 400)
        return _blob(await run_in_threadpool(run.texts, ids))

    async def query(request: Request) -> Response:
        question = await request.json()
        if not isinstance(question, dict):
            return PlainTextResponse("expected a question, see pellucid.viewer.queries", 400)
        return _blob(await run_in_threadpool(run.query, question))

    async def pulse(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(run.pulse))

    async def failed(request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 404)

    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refusal(request, host, token) or await call_next(request)
        response.headers.update(HEADERS)
        return response

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/assets/{name:path}", file),
            Route("/api/run", head),
            Route("/api/slices", slices),
            Route("/api/step/{step:int}", step),
            Route("/api/rows/{step:int}", rows),
            Route("/api/chunk/{step:int}/{index:int}", chunk),
            Route("/api/texts", texts, methods=["POST"]),
            Route("/api/query", query, methods=["POST"]),
            Route("/api/pulse", pulse),
        ],
        exception_handlers={DataError: failed},
    )
    app.add_middleware(BaseHTTPMiddleware, dispatch=guard)
    return app


def serve(run: ServedRun, *, host: str, port: int | None, open_browser: bool) -> None:
    """Until interrupted."""
    listener = _listen(host, port)
    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    shown_host = f"[{host}]" if ":" in host else host
    address = f"http://{shown_host}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    summaries = threading.Thread(target=run.summarise, daemon=True)
    summaries.start()
    log.info("open %s (Ctrl-C ends it)", address)
    if open_browser:
        webbrowser.open(address)
    config = uvicorn.Config(make_app(run, host=host, token=token), log_level="warning", access_log=False)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        run.close()
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


def _blob(data: bytes) -> Response:
    return Response(data, media_type="application/octet-stream")


def _refusal(request: Request, host: str, token: str | None) -> Response | None:
    """Other sites' pages reach a local server through the browser: by a name of theirs, or by forgery."""
    named = request.headers.get("host", "")
    name = (
        named.rpartition(":")[0].strip("[]")
        if ":" in named and not named.endswith("]")
        else named.strip("[]")
    )
    if host in LOOPBACK and name not in LOOPBACK:
        return PlainTextResponse(f"this viewer does not answer to {named!r}", 403)
    origin = request.headers.get("origin")
    if origin is not None and origin not in (f"http://{named}", f"https://{named}"):
        return PlainTextResponse("a request of another site", 403)
    if token is None or secrets.compare_digest(request.cookies.get(COOKIE, ""), token):
        return None
    if secrets.compare_digest(request.query_params.get("token", ""), token):
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    return PlainTextResponse("the address of this viewer has a token: take it from where it was started", 403)
