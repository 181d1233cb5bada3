"""The embedded engine over HTTP.

    POST /inference/v1/generate   token ids in, token ids with logprobs and policy versions out
    POST /v1/completions          OpenAI style, text or token ids in
    GET  /health                  version, load, counts
    POST /update_weights          swap weights between two decode steps
    POST /abort                   end every running request; each answers with what it has

A bad request is answered with 4xx and the reason; a full queue with 503. A client that goes away frees
its slot, and its tokens are counted as cancelled.
"""

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from pellucid.config import InferenceRunConfig
from pellucid.data import Completion
from pellucid.data.tokenizer import end_of_turn_ids, load_tokenizer
from pellucid.errors import ConfigError, InferenceError, TransportError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine, QueueFullError
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.protocol import (
    Choice,
    CompletionRequest,
    ErrorBody,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Health,
    UpdateWeightsRequest,
)
from pellucid.ledger import Journal, Stage
from pellucid.metrics import JsonlSink
from pellucid.model import load_policy
from pellucid.model.load import check_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_BODY_BYTES = 32 * 1024 * 1024


class Server:
    """Handlers around one engine."""

    def __init__(self, engine: Engine, thread: EngineThread, tokenizer: Any, model: str) -> None:
        self._engine = engine
        self._thread = thread
        self._tokenizer = tokenizer
        self._model = model
        self._ids = itertools.count()

    def app(self) -> Starlette:
        return Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/inference/v1/generate", _answering(self.generate), methods=["POST"]),
                Route("/v1/completions", _answering(self.completions), methods=["POST"]),
                Route("/update_weights", _answering(self.update_weights), methods=["POST"]),
                Route("/abort", _answering(self.abort), methods=["POST"]),
                Route("/health", _answering(self.health), methods=["GET"]),
            ],
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._thread.start()
        yield
        await asyncio.to_thread(self._thread.stop)

    async def generate(self, http: HttpRequest) -> Response:
        body = await _body(http, GenerateRequest)
        completion = await self._sample(http, body.token_ids, body.sampling_params, body.account)
        return _json(GenerateResponse(f"generate-{next(self._ids)}", [_choice(0, completion, body.compact)]))

    async def completions(self, http: HttpRequest) -> Response:
        body = await _body(http, CompletionRequest)
        prompt = self._tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
        params = [
            SamplingParams(
                temperature=body.temperature,
                max_tokens=body.max_tokens,
                seed=None if body.seed is None else body.seed + index,
                stop_token_ids=end_of_turn_ids(self._tokenizer),
                stop=stop,
            )
            for index in range(body.n)
        ]
        sampled = await asyncio.gather(*(self._sample(http, prompt, each, Account()) for each in params))
        return _json(self._completions_body(body, prompt, sampled))

    def _completions_body(
        self, body: CompletionRequest, prompt: list[int], sampled: list[Completion]
    ) -> dict[str, Any]:
        num_sampled = sum(len(completion.token_ids) for completion in sampled)
        return {
            "id": f"cmpl-{next(self._ids)}",
            "object": "text_completion",
            "model": self._model,
            "choices": [self._completions_choice(body, i, each) for i, each in enumerate(sampled)],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": num_sampled,
                "total_tokens": len(prompt) + num_sampled,
            },
        }

    def _completions_choice(
        self, body: CompletionRequest, index: int, completion: Completion
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": self._tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            "finish_reason": completion.finish_reason,
        }
        if body.logprobs is not None:
            choice["logprobs"] = {
                "tokens": self._tokenizer.convert_ids_to_tokens(completion.token_ids),
                "token_logprobs": completion.logprobs,
            }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    async def update_weights(self, http: HttpRequest) -> Response:
        body = await _body(http, UpdateWeightsRequest)
        await self._thread.update_weights(body.version, Path(body.folder))
        return await self.health(http)

    async def abort(self, http: HttpRequest) -> Response:
        await self._thread.abort_all()
        return await self.health(http)

    async def health(self, http: HttpRequest) -> Response:
        counts = self._engine.counts
        return _json(
            Health(
                status="ok",
                model=self._model,
                policy_version=self._engine.version,
                running=self._engine.num_running,
                waiting=self._engine.num_waiting,
                sampled_tokens=sum(counts.sampled.values()),
                prefill_tokens=counts.prefill_tokens,
                shared_tokens=counts.shared_tokens,
                busy_s=self._thread.busy_s,
            )
        )

    async def _sample(
        self, http: HttpRequest, prompt: list[int], params: SamplingParams, account: Account
    ) -> Completion:
        sampling = asyncio.ensure_future(self._thread.generate(prompt, params, account))
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({sampling, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                raise ClientGoneError("the client went away")
            return sampling.result()
        finally:
            sampling.cancel()
            gone.cancel()


class ClientGoneError(InferenceError):
    pass


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[HttpRequest], Awaitable[Response]]


def _answering(handler: Handler) -> Handler:
    """Turns what went wrong into a status and a reason."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except (QueueFullError, ClientGoneError) as error:
            return _error(503, str(error))
        except (InferenceError, TransportError) as error:
            return _error(400, str(error))

    return answer


async def _body(http: HttpRequest, kind: type[T]) -> T:
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise InferenceError(f"the body exceeds {MAX_BODY_BYTES} bytes; send a shorter prompt")
    try:
        return msgspec.json.decode(bytes(raw), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InferenceError(str(error)) from error


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _error(status: int, message: str) -> Response:
    body = msgspec.json.encode(ErrorResponse(ErrorBody(message)))
    return Response(body, status_code=status, media_type="application/json")


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
    )


def run_inference(config: InferenceRunConfig) -> None:
    """Serves until it is told to stop (SIGTERM or Ctrl-C)."""
    settings = config.inference
    if settings.port == 0:
        raise ConfigError("inference.port = 0: the server on its own needs a port; set inference.port")
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    policy = load_policy(config.model)
    tokenizer = load_tokenizer(config.model.name)
    check_tokenizer(policy, tokenizer, config.model.name)
    engine = Engine(
        policy,
        num_slots=settings.max_concurrent,
        max_length=settings.max_model_len,
        max_queued=settings.max_queued,
        decode_text=tokenizer.decode,
    )
    journal = Journal(config.output_dir / "ledger" / "inference.jsonl", Stage.INFERENCE)
    sink = JsonlSink(config.output_dir / "metrics" / "inference.jsonl")
    failures: list[BaseException] = []

    def go_down(error: BaseException) -> None:
        failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    app = Server(engine, EngineThread(engine, journal, sink, go_down), tokenizer, config.model.name).app()
    logger.info("serving %s on http://%s:%d", config.model.name, settings.host, settings.port)
    # uvicorn raises the signal that stopped it once more; the server has ended in good order by then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    if failures:
        raise InferenceError(f"the engine failed: {failures[0]}")
