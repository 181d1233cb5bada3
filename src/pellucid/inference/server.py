"""An engine over HTTP, the embedded one or vLLM.

    POST /inference/v1/generate_many   the same for many requests, answered line by line as each ends
    POST /inference/v1/generate   token ids in, token ids with logprobs and policy versions out
    POST /inference/v1/score      token ids in, their logprobs out; nothing is sampled
    POST /v1/chat/completions     OpenAI style, messages in; whole or streamed
    POST /v1/completions          OpenAI style, text or token ids in; whole or streamed
    GET  /v1/models               the served model
    GET  /health                  version, load, counts
    POST /update_weights          swap weights between two decode steps
    POST /abort                   end some running requests; each answers with what it has

A bad request is answered with 4xx and the reason; a full queue with 503 and Retry-After. A client that
goes away frees its slots, and its tokens are counted as cancelled.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.config import InferenceRunConfig
from pellucid.data import Completion
from pellucid.data.model_folder import model_fingerprint
from pellucid.data.tokenizer import end_of_turn_ids, load_tokenizer
from pellucid.data.vocabulary import fingerprint
from pellucid.errors import ConfigError, InferenceError, TransportError
from pellucid.inference.client import Account
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineDownError, EngineThread, StreamEvent, name_error
from pellucid.inference.openai_answer import Served, answer_to, model_card
from pellucid.inference.openai_request import RequestError, check_model, decode_request
from pellucid.inference.protocol import (
    SERVER_ID_HEADER,
    AbortRequest,
    ChatRequest,
    Choice,
    CompletionRequest,
    ErrorBody,
    ErrorResponse,
    GenerateManyLine,
    GenerateManyRequest,
    GenerateRequest,
    GenerateResponse,
    Health,
    ScoreRequest,
    ScoreResponse,
    UpdateWeightsRequest,
)
from pellucid.inference.slots import QueueFullError, SlottedEngine
from pellucid.ledger import Journal, Stage
from pellucid.metrics import Tee, open_sinks
from pellucid.model import load_policy
from pellucid.model.load import check_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_BODY_BYTES = 32 * 1024 * 1024


class Server:
    """Handlers around one engine."""

    def __init__(
        self,
        engine: SlottedEngine[Any],
        thread: EngineThread,
        tokenizer: Any,
        model: str,
        max_model_len: int,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._served = Served(model, tokenizer, end_of_turn_ids(tokenizer), max_model_len)
        self._vocabulary = fingerprint(tokenizer)
        self._model_fingerprint = model_fingerprint(model)
        self._server_id = uuid.uuid4().hex
        self._started = int(time.time())
        self._ids = itertools.count()

    def app(self) -> ASGIApp:
        return SignedAnswers(self._routes(), self._server_id)

    def _routes(self) -> Starlette:
        return Starlette(
            lifespan=self._lifespan,
            exception_handlers=EXCEPTION_HANDLERS,
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/inference/v1/generate_many", self.generate_many, methods=["POST"]),
                Route("/inference/v1/score", self.score, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/update_weights", self.update_weights, methods=["POST"]),
                Route("/abort", self.abort, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
            ],
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._thread.start()
        yield
        await asyncio.to_thread(self._thread.stop)

    async def generate(self, http: HttpRequest) -> Response:
        body = await _body(http, GenerateRequest)
        (completion,) = await _unless_gone(http, _completions(self._thread.generate([body])))
        return _json(GenerateResponse(f"generate-{next(self._ids)}", [_choice(0, completion, body.compact)]))

    async def generate_many(self, http: HttpRequest) -> Response:
        lines = self._lines((await _body(http, GenerateManyRequest)).requests)
        return LineStream(await _unless_gone(http, anext(lines)), lines, "application/x-ndjson")

    async def _lines(self, requests: list[GenerateRequest]) -> AsyncGenerator[bytes, None]:
        """One line per request, in the order in which they end; what is refused comes before the rest."""
        refused = {index: reason for index, each in enumerate(requests) if (reason := self._refusal(each))}
        served = [index for index in range(len(requests)) if index not in refused]
        async with aclosing(self._thread.generate([requests[index] for index in served])) as events:
            first = await anext(events, None)  # if the queue is full, it says so here, before any line
            for index, reason in refused.items():
                yield _line(GenerateManyLine(index, error=reason))
            async for number, event in _chain(first, events):
                if isinstance(event, Completion):
                    index = served[number]
                    yield _line(GenerateManyLine(index, _choice(0, event, requests[index].compact)))

    async def score(self, http: HttpRequest) -> Response:
        body = await _body(http, ScoreRequest)
        logprobs = await _unless_gone(http, self._thread.score(body.token_ids, body.temperature))
        return _json(ScoreResponse([None, *logprobs[1:]]))

    def _refusal(self, request: GenerateRequest) -> str | None:
        try:
            self._engine.check(request.token_ids, request.sampling_params)
        except InferenceError as error:
            return str(error)
        return None

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, decode_request(await _raw_body(http), ChatRequest))

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, decode_request(await _raw_body(http), CompletionRequest))

    async def _answer(self, http: HttpRequest, request: ChatRequest | CompletionRequest) -> Response:
        answer = answer_to(request, self._served, number=next(self._ids), created=int(time.time()))
        asked = [GenerateRequest(answer.prompt_ids, params) for params in answer.params()]
        events = self._thread.generate(asked, tokens=request.stream)
        if not request.stream:
            return _json(answer.whole(await _unless_gone(http, _completions(events))))
        lines = answer.lines(events)
        # The status is sent with the first line: what is wrong with a request shows before that.
        return LineStream(await _unless_gone(http, anext(lines)), lines, "text/event-stream")

    async def models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, http: HttpRequest) -> Response:
        check_model(http.path_params["model"], self._served.model)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return model_card(self._served.model, self._started, self._served.max_model_len)

    async def update_weights(self, http: HttpRequest) -> Response:
        body = await _body(http, UpdateWeightsRequest)
        await self._thread.update_weights(body.version, Path(body.folder), body.run)
        return await self.health(http)

    async def abort(self, http: HttpRequest) -> Response:
        body = await _body(http, AbortRequest)
        await self._thread.abort(set(body.request_ids))
        return await self.health(http)

    async def health(self, http: HttpRequest) -> Response:
        counts = self._engine.counts
        return _json(
            Health(
                status="ok",
                model=self._served.model,
                model_fingerprint=self._model_fingerprint,
                vocabulary=self._vocabulary,
                max_model_len=self._served.max_model_len,
                policy_version=self._engine.version,
                run=self._thread.run,
                server_id=self._server_id,
                running=self._engine.num_running,
                waiting=self._engine.num_waiting,
                sampled_tokens=_total(counts.sampled),
                delivered_tokens=_total(counts.delivered),
                cancelled_tokens=_total(counts.cancelled),
                prefill_tokens=counts.prefill_tokens,
                shared_tokens=counts.shared_tokens,
                scored_tokens=counts.scored_tokens,
                busy_s=self._thread.busy_s,
            )
        )


async def _completions(events: AsyncIterator[StreamEvent]) -> list[Completion]:
    found = {index: event async for index, event in events if isinstance(event, Completion)}
    return [found[index] for index in sorted(found)]


async def _chain(first: T | None, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    if first is not None:
        yield first
    async for each in rest:
        yield each


class SignedAnswers:
    """An application whose answers all say which process gave them."""

    def __init__(self, app: ASGIApp, server_id: str) -> None:
        self._app = app
        self._server_id = server_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[SERVER_ID_HEADER] = self._server_id
            await send(message)

        await self._app(scope, receive, signed)


class LineStream(StreamingResponse):
    """An answer line by line. However the connection ends, the source is closed, which frees its slots."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], media_type: str) -> None:
        self._sources = [_chain(first, rest), rest]
        headers = {"cache-control": "no-cache"}
        super().__init__(self._sources[0], media_type=media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()


class ClientGoneError(InferenceError):
    pass


async def _unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled as soon as the client goes away."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client went away")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _body(http: HttpRequest, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await _raw_body(http), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(str(error)) from error


async def _raw_body(http: HttpRequest) -> bytes:
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(
                f"the body exceeds {MAX_BODY_BYTES} bytes; send a shorter prompt",
                status=413,
                code="request_too_large",
            )
    return bytes(raw)


def _line(body: GenerateManyLine) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _error(status: int, error: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode(ErrorResponse(error))
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def _refused(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _error(error.status, ErrorBody(str(error), code=error.code, param=error.param))
    return _error(400, ErrorBody(str(error)))


async def _busy(http: HttpRequest, error: Exception) -> Response:
    return _error(503, ErrorBody(str(error), "server_error", "queue_full"), {"retry-after": "1"})


async def _nobody_listens(http: HttpRequest, error: Exception) -> Response:
    return _error(503, ErrorBody(str(error), "server_error"))


async def _no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return _error(error.status_code, ErrorBody(message), error.headers)


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return _error(500, ErrorBody(name_error(error), "server_error"))


async def _engine_down(http: HttpRequest, error: Exception) -> Response:
    return _error(500, ErrorBody(str(error), "server_error", "engine_down"))


EXCEPTION_HANDLERS: Mapping[Any, Callable[[HttpRequest, Exception], Awaitable[Response]]] = {
    InferenceError: _refused,
    TransportError: _refused,
    QueueFullError: _busy,
    EngineDownError: _engine_down,
    ClientGoneError: _nobody_listens,
    ClientDisconnect: _nobody_listens,
    HTTPException: _no_route,
    Exception: _failed,
}
"""What went wrong, as a status and a reason; the closest class decides."""


def _total(counter: Counter[Account]) -> int:
    # The engine's thread may add an account meanwhile; making a tuple cannot be interrupted by it.
    return sum(tuple(counter.values()))


def _choice(index: int, completion: Completion, compact: bool) -> Choice:
    content = (
        None
        if compact
        else [
            {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    )
    return Choice(
        index=index,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        policy_versions=completion.policy_versions,
        token_logprobs=completion.logprobs if compact else [],
        logprobs=None if compact else {"content": content},
        routed_experts=completion.routed_experts,
    )


def run_inference(config: InferenceRunConfig) -> None:
    """Serves until it is told to stop (SIGTERM or Ctrl-C), which is a good end.

    uvicorn raises the signal that stopped it once more after it is done; one that comes before it serves
    ends the process at once.
    """
    settings = config.inference
    if settings.port == 0:
        raise ConfigError("inference.port = 0: the server on its own needs a port; set inference.port")
    num_threads = settings.threads or os.cpu_count() or 1
    if settings.backend == "vllm":
        from pellucid.inference.vllm_core import restart_with_threads

        restart_with_threads(num_threads)
    door = _bind(settings.host, settings.port)
    torch.set_num_threads(num_threads)
    tokenizer = load_tokenizer(config.model.name)
    engine = open_engine(config, tokenizer)
    name = f"inference_{settings.label}" if settings.label else "inference"
    journal = Journal(config.output_dir / "ledger" / f"{name}.jsonl", Stage.INFERENCE, resume=config.resume)
    sink = Tee(open_sinks(config, "inference", settings.label))
    failures: list[BaseException] = []

    def go_down(error: BaseException) -> None:
        failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = EngineThread(engine, journal, sink, go_down)
    app = Server(engine, thread, tokenizer, config.model.name, settings.max_model_len).app()
    logger.info("serving %s on http://%s:%d", config.model.name, settings.host, settings.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: None if thread.stopped else sys.exit(128 + number))
    uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    ).run(sockets=[door])
    if failures:
        _raise(failures[0])


def open_engine(config: InferenceRunConfig, tokenizer: Any) -> SlottedEngine[Any]:
    settings = config.inference
    if settings.backend == "vllm":
        from pellucid.inference.vllm_core import open_vllm

        return open_vllm(config, tokenizer)
    policy = load_policy(config.model, max_length=settings.max_model_len)
    check_tokenizer(policy, tokenizer, config.model.name)
    return Engine(
        policy,
        num_slots=settings.max_concurrent,
        max_length=settings.max_model_len,
        max_queued=settings.max_queued,
        decode_text=tokenizer.decode,
        record_experts=bool(settings.record_experts),
    )


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port before the model is loaded, which may take minutes; nobody is answered until then."""
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except OSError as error:
        door.close()
        raise ConfigError(
            f"inference.port = {port} cannot be used on inference.host = {host} ({error.strerror}); "
            "choose another port"
        ) from error
    return door


def _raise(failure: BaseException) -> NoReturn:
    """What ends the process; it is the command line that knows what to say of a full disk."""
    if isinstance(failure, OSError):
        raise failure
    raise InferenceError(f"the engine failed: {name_error(failure)}") from failure
