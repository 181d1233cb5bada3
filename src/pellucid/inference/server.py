"""An engine over HTTP, the embedded one or vLLM.

    POST /inference/v1/generate_many   the same for many requests, answered line by line as each ends
    POST /inference/v1/generate   token ids in, token ids with logprobs and policy versions out
    POST /inference/v1/score      token ids in, their logprobs out; nothing is sampled
    POST /v1/chat/completions     OpenAI style, messages in; whole or streamed
    POST /v1/completions          OpenAI style, text or token ids in; whole or streamed
    GET  /v1/models               the served model
    GET  /health                  version, load, counts
    GET  /weights                 digests of the served weights, computed for the answer
    POST /update_weights          swap weights between two decode steps
    POST /abort                   end some running requests; each answers with what it has

A bad request is answered with 4xx and the reason; a full queue with 503 and Retry-After. A client that
goes away frees its slots, and its tokens are counted as cancelled. Who may ask for what: see `entrance`.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.config import InferenceRunConfig
from pellucid.data import Completion
from pellucid.data.images import load_image_processor, tensors_of
from pellucid.data.model_folder import model_fingerprint
from pellucid.data.spans import SpanLog
from pellucid.data.tokenizer import end_of_turn_ids, fingerprint, load_tokenizer
from pellucid.ending import say_failure, working
from pellucid.errors import InferenceError, TransportError
from pellucid.guard import server_key
from pellucid.inference.arrival import TransferringEngine, Transfers, WeightsArrival
from pellucid.inference.client import (
    AbortRequest,
    Account,
    Choice,
    GenerateManyLine,
    GenerateManyRequest,
    GenerateRequest,
    GenerateResponse,
    Health,
    ScoreRequest,
    ScoreResponse,
    UpdateWeightsRequest,
)
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineThread, name_error
from pellucid.inference.entrance import (
    ClientGoneError,
    EndingServer,
    Entrance,
    Intake,
    RequestError,
    answer_error,
    bind,
    require_key,
    web_config,
)
from pellucid.inference.openai import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    OpenAIAnswer,
    Served,
    decode_request,
    num_opened,
)
from pellucid.inference.slots import SlottedEngine
from pellucid.ledger import Journal, Stage
from pellucid.metrics import Tee, open_sinks
from pellucid.model import load_policy
from pellucid.model.load import check_tokenizer
from pellucid.transport.weights_pull import OfferClient, WeightsPuller, open_offer_client
from pellucid.workers import DaemonThreads, infrequent_gc, keep_freed_memory, num_cores

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LINES = msgspec.json.Encoder()
LONG_BODY_BYTES = 64 * 1024
"""Bodies longer than this are made into prompts by another thread: short ones never wait for them."""
_OBJECTS_PER_REQUEST = 8
_ANSWERED = (HTTPException, InferenceError, TransportError, ClientDisconnect, Exception)
"""Exceptions that `answer_error` turns into an answer; Starlette raises those of the last kind again."""
_SPARE_VALUES = 1 << 16
"""Values of a body besides prompts and requests: ids to abort, stop tokens, commas and braces in strings."""


class Server:
    """Handlers around one engine."""

    def __init__(
        self,
        engine: SlottedEngine[Any],
        thread: EngineThread,
        tokenizer: Any,
        model: str,
        max_model_len: int,
        *,
        run_dir: Path,
        host: str,
        key: str,
        puller: WeightsPuller | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """`run_dir`, `puller`, `transfers`: see `WeightsArrival`. `host` and `key`: see `Entrance`."""
        self._engine = engine
        self._host, self._key = host, key
        self._thread = thread
        stop_ids, images = end_of_turn_ids(tokenizer), load_image_processor(tokenizer)
        self._served = Served(model, tokenizer, stop_ids, max_model_len, images)
        self._vocabulary = fingerprint(tokenizer)
        self._model_fingerprint = model_fingerprint(model)
        self._started = int(time.time())
        self._ids = itertools.count()
        self._intake = Intake()
        self._arrival = WeightsArrival(thread, run_dir, puller, transfers)
        self._short_prompts, self._long_prompts = (
            DaemonThreads(1, name) for name in ("short-prompts", "long-prompts")
        )
        # From here on nothing changes in the tokenizer, which several threads use.
        tokenizer.encode("")

    def app(self) -> ASGIApp:
        return Entrance(self.routes(), host=self._host, key=self._key, server_id=self._thread.server_id)

    def routes(self) -> Starlette:
        return Starlette(
            lifespan=self._lifespan,
            exception_handlers=dict.fromkeys(_ANSWERED, answer_error),
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/inference/v1/generate_many", self.generate_many, methods=["POST"]),
                Route("/inference/v1/score", self.score, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/update_weights", self.update_weights, methods=["POST"]),
                Route("/weights", self.weights, methods=["GET"]),
                Route("/abort", self.abort, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
            ],
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._thread.start()
        yield
        with working("finishing the step that it is at", at_stake="the tokens of that step"):
            await asyncio.to_thread(self._thread.stop)
        for threads in (self._short_prompts, self._long_prompts):
            threads.shutdown(wait=False, cancel_futures=True)
        self._arrival.close()

    async def generate(self, http: HttpRequest) -> Response:
        body = await self._body(http, GenerateRequest)
        _require_key_for_books(http, [body])
        (completion,) = await _unless_gone(http.receive, self._thread.complete([body]))
        return _json(GenerateResponse(f"generate-{next(self._ids)}", [_choice(completion, body.compact)]))

    async def generate_many(self, http: HttpRequest) -> Response:
        requests = (await self._body(http, GenerateManyRequest)).members()
        _require_key_for_books(http, requests)
        lines = self._lines(requests)
        return LineStream(await _unless_gone(http.receive, anext(lines)), lines, "application/x-ndjson")

    async def _lines(self, requests: list[GenerateRequest]) -> AsyncGenerator[bytes, None]:
        """Yields one line per request, in the order in which they end; refused requests come first. Lines of
        requests that end together are one chunk."""
        async with aclosing(self._thread.generate(requests)) as events:
            async for together in events:
                lines = [
                    GenerateManyLine(index, event)
                    if isinstance(event, Completion)
                    else GenerateManyLine(index, error=str(event))
                    for index, event in together
                ]
                yield _LINES.encode_lines(lines)

    async def score(self, http: HttpRequest) -> Response:
        body = await self._body(http, ScoreRequest)
        logprobs = await _unless_gone(http.receive, self._thread.score(body.token_ids, body.temperature))
        return _json(ScoreResponse([None, *logprobs[1:]]))

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, ChatRequest)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, CompletionRequest)

    async def _body(self, http: HttpRequest, kind: type[T]) -> T:
        async with self._intake.body(http) as raw:
            self._check_counts(raw, self._engine.capacity if kind is GenerateManyRequest else 1)
            try:
                return msgspec.json.decode(raw, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise RequestError(str(error)) from error

    def _check_counts(self, raw: bytes, num_requests: int) -> None:
        """Refuses a body of more objects or values than so many requests can have, before any is made."""
        most_objects = _OBJECTS_PER_REQUEST * num_requests + _SPARE_VALUES
        most_values = (self._served.max_model_len + _SPARE_VALUES) * num_requests
        for what, num, most in (
            ("objects and lists", num_opened(raw), most_objects),
            ("values", raw.count(b",") + 1, most_values),
        ):
            if num > most:
                raise RequestError(
                    f"the body has {num} {what}; no more than {most} are looked at for {num_requests} "
                    f"requests of inference.max_model_len = {self._served.max_model_len}; send less at a time"
                )

    async def _answer(self, http: HttpRequest, kind: type[AnyRequest]) -> Response:
        number, created = next(self._ids), int(time.time())

        def prepare(raw: bytes) -> OpenAIAnswer:
            request = decode_request(raw, kind, self._served.max_model_len)
            return OpenAIAnswer(request, self._served, number=number, created=created)

        async with self._intake.body(http) as raw:
            prompts = self._short_prompts if len(raw) <= LONG_BODY_BYTES else self._long_prompts
            preparing = asyncio.get_running_loop().run_in_executor(prompts, prepare, raw)
            answer = await _unless_gone(http.receive, preparing)
        prompt_ids, mm_tensors = answer.prompt_ids, tensors_of(answer.prompt_ids)
        asked = [GenerateRequest(prompt_ids, params, mm_tensors=mm_tensors) for params in answer.params()]
        if not answer.request.stream:
            return _json(answer.whole(await _unless_gone(http.receive, self._thread.complete(asked))))
        lines = answer.lines(self._thread.generate(asked, tokens=True))
        # The status is sent with the first line: what is wrong with a request shows before that.
        return LineStream(await _unless_gone(http.receive, anext(lines)), lines, "text/event-stream")

    async def models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, http: HttpRequest) -> Response:
        self._served.check_model(http.path_params["model"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._served.model,
            "object": "model",
            "created": self._started,
            "owned_by": "pellucid",
            "max_model_len": self._served.max_model_len,
        }

    async def update_weights(self, http: HttpRequest) -> Response:
        require_key(http)
        body = await self._body(http, UpdateWeightsRequest)
        await self._arrival.take(body, self._engine.version)
        return await self.health(http)

    async def weights(self, http: HttpRequest) -> Response:
        require_key(http)  # the engine stops sampling for it
        return _json(await self._thread.served_weights())

    async def abort(self, http: HttpRequest) -> Response:
        body = await self._body(http, AbortRequest)
        if body.disown:
            require_key(http)
            await self._thread.disown(set(body.request_ids))
        else:
            await self._thread.abort(set(body.request_ids), booked=http.state.access == "all")
        return await self.health(http)

    async def health(self, http: HttpRequest) -> Response:
        counts = self._engine.counts
        return _json(
            Health(
                model=self._served.model,
                model_fingerprint=self._model_fingerprint,
                vocabulary=self._vocabulary,
                max_model_len=self._served.max_model_len,
                policy_version=self._engine.version,
                run=self._thread.run,
                server_id=self._thread.server_id,
                max_concurrent=self._engine.num_slots,
                max_queued=self._engine.capacity - self._engine.num_slots,
                updating=self._thread.updating,
                fetching=self._arrival.is_fetching,
                fetched_bytes=self._arrival.fetched_bytes,
                access=http.state.access,
                running=self._engine.num_running,
                waiting=self._engine.num_waiting,
                sampled_tokens=_total(counts.sampled),
                delivered_tokens=_total(counts.delivered),
                cancelled_tokens=_total(counts.cancelled),
                prefill_tokens=counts.prefill_tokens,
                shared_tokens=counts.shared_tokens,
                scored_tokens=counts.scored_tokens,
                busy_s=self._thread.busy_s,
                ranks=self._engine.rank_health(),
            )
        )


async def _chain(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    yield first
    async for each in rest:
        yield each


class LineStream(StreamingResponse):
    """An answer line by line. However the connection ends, the source is closed, which frees its slots."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], media_type: str) -> None:
        self._sources = [_chain(first, rest), rest]
        headers = {"cache-control": "no-cache"}
        super().__init__(self._sources[0], media_type=media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError):
                await _unless_gone(receive, self.stream_response(send))
        finally:
            for source in self._sources:
                await source.aclose()


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of the work, which is cancelled as soon as the client goes away, and has ended
    then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client went away")
        return working.result()
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _require_key_for_books(http: HttpRequest, requests: Sequence[GenerateRequest]) -> None:
    if any(request.account.run for request in requests):
        require_key(http)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _total(counter: Counter[Account]) -> int:
    # The engine's thread may add an account meanwhile; making a tuple cannot be interrupted by it.
    return sum(tuple(counter.values()))


def _choice(completion: Completion, compact: bool) -> Choice:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        if not compact
    ]
    return Choice(
        index=0,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        policy_versions=completion.policy_versions,
        token_logprobs=completion.logprobs if compact else [],
        logprobs=None if compact else {"content": content},
        routed_experts=completion.routed_experts,
        columns=completion.columns,
        expert_weights=completion.expert_weights,
    )


def run_inference(config: InferenceRunConfig) -> None:
    """Serves until SIGTERM or Ctrl-C, which is a successful end.

    One that comes before the engine is there ends the process at once.
    """
    settings = config.inference
    config.check_addresses()
    num_threads = settings.threads or num_cores()
    if settings.backend == "vllm":
        from pellucid.inference.vllm_engine import restart_with_threads

        restart_with_threads(num_threads)
    keep_freed_memory()
    torch.set_num_threads(num_threads)
    with bind(settings.host, settings.port) as listener, infrequent_gc():
        _serve(config, listener)


def _serve(config: InferenceRunConfig, listener: socket.socket) -> None:
    settings = config.inference
    key = server_key(config.output_dir, settings.key_file)
    tokenizer = load_tokenizer(config.model.name)
    engine = open_engine(config, tokenizer)
    name = f"inference_{settings.label}" if settings.label else "inference"
    journal = Journal(config.output_dir / "ledger" / f"{name}.jsonl", Stage.INFERENCE, resume=config.resume)
    sink = Tee(open_sinks(config, "inference", settings.label))
    failures: list[BaseException] = []

    def go_down(error: BaseException) -> None:
        failures.append(error)
        say_failure(error)
        os.kill(os.getpid(), signal.SIGTERM)

    spans = SpanLog(config.output_dir, name, load=settings.max_concurrent)
    thread = EngineThread(engine, journal, sink, go_down, spans)
    puller = open_puller(config, name)
    server = Server(
        engine,
        thread,
        tokenizer,
        config.model.name,
        settings.max_model_len,
        run_dir=config.output_dir,
        host=settings.host,
        key=key,
        puller=puller,
        transfers=open_transfers(config, engine, puller),
    )
    logger.info("serving %s on http://%s:%d", config.model.name, settings.host, settings.port)
    EndingServer(web_config(server.app())).run(sockets=[listener])
    if failures:
        if isinstance(failures[0], OSError):
            raise failures[0]  # the CLI explains a full disk
        raise InferenceError(f"the engine failed: {name_error(failures[0])}") from failures[0]


def open_puller(config: InferenceRunConfig, name: str) -> WeightsPuller | None:
    """Returns what reads weights for the server of this name; None if they are in the run folder."""
    if config.weights.transport == "filesystem" or config.inference.role == "teacher":
        return None
    offer = open_offer_client(config.weights, config.output_dir, config.inference.key_file)
    return WeightsPuller(offer, config.weights.cache(config.output_dir, name))


def open_transfers(
    config: InferenceRunConfig, engine: SlottedEngine[Any], puller: WeightsPuller | None
) -> Transfers | None:
    transfer = config.weights.transfer
    if transfer == "files" or puller is None:
        return None
    assert isinstance(puller.offer, OfferClient)  # `weights.transport` is "http"
    return Transfers(cast(TransferringEngine, engine), puller.offer, transfer)


def open_engine(config: InferenceRunConfig, tokenizer: Any) -> SlottedEngine[Any]:
    settings = config.inference
    if settings.backend == "vllm":
        from pellucid.inference.vllm_engine import open_vllm

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
        record_expert_weights=bool(settings.record_expert_weights),
    )
