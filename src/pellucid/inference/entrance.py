"""Access to the engine's HTTP server: which requests reach a handler, how long they may take, and refusals.

    connection ── head, within HEAD_S ──> Host ──> Origin ──> key, beyond loopback ──> content type
    ──> handler ── body, within BODY_S ──> key, for what changes a run ──> engine

A page of another site gets no further than `Origin`; see `pellucid.guard`. The content type keeps out what a
browser sends across sites without asking first: forms and plain text. Whoever connects and asks nothing, or
asks without an end, is cut off, so that connections and memory are bounded by what is being served.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import FrameType

import msgspec
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.ending import SILENCE_S, say
from pellucid.errors import ConfigError, InferenceError, TransportError
from pellucid.guard import answers_to, is_foreign, is_loopback, shows_key
from pellucid.inference.client import SERVER_ID_HEADER, Access, ErrorBody, ErrorResponse
from pellucid.inference.engine_thread import EngineDownError, name_error
from pellucid.inference.slots import QueueFullError
from pellucid.transport.punctual import PunctualProtocol

LAST_ANSWERS_S = 5
"""Seconds that running answers get when the server is asked to stop."""
KEEP_ALIVE_S = 30
"""Seconds that an idle connection is kept: longer than clients keep theirs (aiohttp: 15 s), so that the
server never closes one while a request is under way."""
BODY_S = 120.0
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BODIES_BYTES = 8 * MAX_BODY_BYTES
"""Total size of the bodies that are being read, or made into prompts, at a time."""
_KEEPALIVE_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class RequestError(InferenceError):
    """A request that is refused: the status, and OpenAI's `code` and `param`."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ClientGoneError(InferenceError):
    pass


class Entrance:
    """The ASGI application behind the checks. Every answer names the process that gave it in a header."""

    def __init__(self, app: ASGIApp, *, host: str, key: str, server_id: str) -> None:
        """`host`: where the server is bound; `key`: the key that it was started with."""
        self._app = app
        self._host = host
        self._key = key
        self._server_id = server_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[SERVER_ID_HEADER] = self._server_id
            await send(message)

        http = HttpRequest(scope)
        http.state.access = self._access(http)
        answering = self._app
        try:
            self._check(http)
        except RequestError as error:
            answering = error_response(error)
        await answering(scope, receive, signed)

    def _access(self, http: HttpRequest) -> Access:
        """Returns what a request may do, by the key that it shows."""
        if shows_key(http.headers.get("authorization", ""), self._key):
            return "all"
        return "sampling" if is_loopback(self._host) else "none"

    def _check(self, http: HttpRequest) -> None:
        """Raises RequestError with the reason if a request is not let in."""
        host = http.headers.get("host", "")
        if not answers_to(self._host, host):
            raise RequestError(
                f"this server does not answer to {host!r}; use the address that it is bound to", status=421
            )
        if is_foreign(http.headers.get("origin"), host):
            raise RequestError("a page of another site may not ask this server", status=403)
        if http.state.access == "none" and http.url.path != "/health":
            require_key(http)
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if http.method == "POST" and kind != "application/json":
            raise RequestError(f"content-type is {kind!r}; it has to be application/json", status=415)


def require_key(http: HttpRequest) -> None:
    """Raises RequestError unless the request shows the key; whatever changes server or books needs it."""
    if http.state.access != "all":
        raise RequestError(
            "this needs the key of the server, the word in `key` of its run folder, as `Authorization: "
            "Bearer KEY`; set inference.key_file, or api_key of an OpenAI client",
            status=401,
            code="invalid_api_key",
        )


def error_response(error: Exception) -> Response:
    """Turns an exception into a status and a reason."""
    status, body, headers = 500, ErrorBody(name_error(error), "server_error"), None
    match error:
        case RequestError():
            status, body = error.status, ErrorBody(str(error), code=error.code, param=error.param)
            headers = {"www-authenticate": "Bearer"} if status == 401 else None
        case QueueFullError():
            status, body = 503, ErrorBody(str(error), "server_error", "queue_full")
            headers = {"retry-after": "1"}
        case EngineDownError():
            body = ErrorBody(str(error), "server_error", "engine_down")
        case ClientGoneError() | ClientDisconnect():  # nobody reads this
            status, body = 503, ErrorBody(str(error), "server_error")
        case InferenceError() | TransportError():
            status, body = 400, ErrorBody(str(error))
    return _json_error(status, body, headers)


async def answer_error(http: HttpRequest, error: Exception) -> Response:
    """Starlette's handler of every exception; those that it raises itself, 404 and 405, name the request."""
    if isinstance(error, HTTPException):
        body = ErrorBody(f"{http.method} {http.url.path}: {error.detail}")
        return _json_error(error.status_code, body, error.headers)
    return error_response(error)


def _json_error(status: int, body: ErrorBody, headers: Mapping[str, str] | None) -> Response:
    content = msgspec.json.encode(ErrorResponse(body))
    return Response(content, status_code=status, media_type="application/json", headers=headers)


class Intake:
    """Reads the bodies of requests, and bounds the memory of all of them together."""

    def __init__(self, *, body_s: float = BODY_S, max_bodies_bytes: int = MAX_BODIES_BYTES) -> None:
        self._body_s = body_s
        self._max_bodies_bytes = max_bodies_bytes
        self._num_bytes = 0

    @asynccontextmanager
    async def body(self, http: HttpRequest) -> AsyncIterator[bytes]:
        """Context manager: reads the body of a request, which counts against the bound until the exit."""
        raw = bytearray()
        try:
            try:
                async with asyncio.timeout(self._body_s):
                    async for chunk in http.stream():
                        self._num_bytes += len(chunk)
                        raw += chunk
                        self._check_room(len(raw))
            except TimeoutError as error:
                raise RequestError(
                    f"the body did not arrive within {self._body_s:g} s; send it faster", status=408
                ) from error
            yield bytes(raw)
        finally:
            self._num_bytes -= len(raw)

    def _check_room(self, num_bytes: int) -> None:
        if num_bytes > MAX_BODY_BYTES:
            raise RequestError(
                f"the body exceeds {MAX_BODY_BYTES} bytes; send a shorter prompt",
                status=413,
                code="request_too_large",
            )
        if self._num_bytes > self._max_bodies_bytes:
            raise QueueFullError(
                f"requests of more than {self._max_bodies_bytes} bytes are on their way; try again later"
            )


def web_config(app: ASGIApp, protocol: type[PunctualProtocol] = PunctualProtocol) -> uvicorn.Config:
    """Returns uvicorn's settings. Web sockets are off, since browsers open them across sites."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_ANSWERS_S,
    )


class EndingServer(uvicorn.Server):
    """Ends at SIGTERM or Ctrl-C, which may come before it serves, and reports that to the launcher.

    A handler that raises would not do: where Python is just deleting an object, it drops the exception, and
    the process would go on.
    """

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)  # uvicorn raises the signal once more when it has ended
        super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            say("ending its requests", at_stake="the tokens of these", silence_s=LAST_ANSWERS_S + SILENCE_S)
        super().handle_exit(sig, frame)


def bind(host: str, port: int) -> socket.socket:
    """Takes the port before the model is loaded, which may take minutes; no connection is answered until
    then.

    TCP keep-alive is on, so that the system notices when a client's machine is gone.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_PROBES.items():
        if hasattr(socket, name):  # macOS has other names
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"inference.port = {port} cannot be used on inference.host = {host} ({error.strerror}); "
            "choose another port"
        ) from error
    return listener
