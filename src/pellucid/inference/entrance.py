"""Access to the engine's HTTP server: which requests reach a handler, and how long they may take.

    connection ── head, within HEAD_S ──> Host ──> Origin ──> key, beyond loopback ──> content type
    ──> handler ── body, within BODY_S ──> key, for what changes a run ──> engine

A page of another site gets no further than `Origin`; see `pellucid.guard`. The content type keeps out what a
browser sends across sites without asking first: forms and plain text. Whoever connects and asks nothing, or
asks without an end, is cut off, so that connections and memory are bounded by what is being served.
"""

import asyncio
import socket
from asyncio import TimerHandle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pellucid.errors import ConfigError
from pellucid.guard import answers_to, is_foreign, is_loopback, shows_key
from pellucid.inference.client import SERVER_ID_HEADER, Access, ErrorBody, ErrorResponse
from pellucid.inference.openai_request import RequestError
from pellucid.inference.slots import QueueFullError

HEAD_S = 10.0
"""Seconds that a client has to send the first line and the headers of a request, once connected."""
MAX_HEAD_BYTES = 64 * 1024
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

_ACCESS = "pellucid.access"


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server is bound, and the key that it was started with."""

    host: str
    key: str = field(repr=False)

    def access(self, http: HttpRequest) -> Access:
        """Returns what a request may do, by the key that it shows."""
        if shows_key(http.headers.get("authorization", ""), self.key):
            return "all"
        return "sampling" if is_loopback(self.host) else "none"

    def check(self, http: HttpRequest) -> None:
        """Raises RequestError with the reason if a request is not let in."""
        host = http.headers.get("host", "")
        if not answers_to(self.host, host):
            raise RequestError(
                f"this server does not answer to {host!r}; use the address that it is bound to", status=421
            )
        if is_foreign(http.headers.get("origin"), host):
            raise RequestError("a page of another site may not ask this server", status=403)
        if access_of(http) == "none" and http.url.path != "/health":
            raise _no_key()
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if http.method == "POST" and kind != "application/json":
            raise RequestError(f"content-type is {kind!r}; it has to be application/json", status=415)


class Entrance:
    """The ASGI application behind the door. Every answer names the process that gave it in a header."""

    def __init__(self, app: ASGIApp, door: Door, server_id: str) -> None:
        self._app = app
        self._door = door
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
        scope[_ACCESS] = self._door.access(http)
        answering = self._app
        try:
            self._door.check(http)
        except RequestError as error:
            answering = refusal(error)
        await answering(scope, receive, signed)


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


class PunctualProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on the time and the bytes that the head of a request may take."""

    head_s = HEAD_S
    _head_timer: TimerHandle | None = None
    _num_head_bytes: int | None = None
    """Bytes of the head received so far; None while no head is being received."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        self._end_wait()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head(self.timeout_keep_alive + self.head_s)

    def _await_head(self, within_s: float) -> None:
        self._end_wait()
        self._head_timer = self.loop.call_later(within_s, self.transport.close)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


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


def access_of(http: HttpRequest) -> Access:
    access: Access = http.scope[_ACCESS]
    return access


def require_key(http: HttpRequest) -> None:
    """Raises RequestError unless the request shows the key; whatever changes server or books needs it."""
    if access_of(http) != "all":
        raise _no_key()


def _no_key() -> RequestError:
    return RequestError(
        "this needs the key of the server, the word in `key` of its run folder, as `Authorization: Bearer "
        "KEY`; set inference.key_file, or api_key of an OpenAI client",
        status=401,
        code="invalid_api_key",
    )


def refusal(error: RequestError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return error_response(error.status, ErrorBody(str(error), code=error.code, param=error.param), headers)


def error_response(status: int, error: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode(ErrorResponse(error))
    return Response(body, status_code=status, media_type="application/json", headers=headers)
