"""The client of the embedded engine: one connection pool, token ids in and out."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from pellucid.data import Completion
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, SamplingParams, UnreachableError
from pellucid.inference.protocol import (
    SERVER_ID_HEADER,
    AbortRequest,
    ErrorResponse,
    GenerateManyLine,
    GenerateManyRequest,
    GenerateRequest,
    Health,
    ScoreRequest,
    ScoreResponse,
    UpdateWeightsRequest,
)

_READY_TIMEOUT_S = 600.0
_MAX_LINE_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class _Call:
    body: GenerateRequest
    answer: "asyncio.Future[Completion]"
    post: "_Post | None" = None

    def take(self, line: GenerateManyLine) -> None:
        if self.answer.done():
            return
        if line.choice is None:
            self.answer.set_exception(InferenceError(line.error))
            return
        choice = line.choice
        self.answer.set_result(
            Completion(
                choice.token_ids,
                choice.token_logprobs,
                choice.policy_versions,
                choice.finish_reason,
                choice.routed_experts,
            )
        )


@dataclass(frozen=True, slots=True)
class _Post:
    """The HTTP request that carries some calls."""

    calls: Sequence[_Call]
    task: "asyncio.Task[None]"


class HttpInferenceClient:
    """Must be made inside a running event loop."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.server_id = ""
        """`Health.server_id` of the process that answered last."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=_MAX_LINE_BYTES,
        )
        self._lines = msgspec.json.Decoder(GenerateManyLine)
        self._gathering: list[_Call] = []
        self._posts: set[asyncio.Task[None]] = set()

    async def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while True:
            try:
                await self.health()
                return
            except InferenceError as error:
                if time.monotonic() > deadline:
                    raise InferenceError(
                        f"no inference server after {_READY_TIMEOUT_S:.0f} s: {error}"
                    ) from error
            await asyncio.sleep(0.1)

    async def watch(self) -> None:
        """A server that cannot be reached may come back."""
        await asyncio.Event().wait()

    async def health(self) -> Health:
        return msgspec.json.decode(await self._request("GET", "/health"), type=Health)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        body = GenerateRequest(list(prompt_ids), params, account, request_id, compact=True)
        loop = asyncio.get_running_loop()
        if not self._gathering:
            loop.call_soon(self._post_gathered)
        call = _Call(body, loop.create_future())
        self._gathering.append(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if call.post is not None and all(other.answer.done() for other in call.post.calls):
                call.post.task.cancel()
            raise

    def _post_gathered(self) -> None:
        """One HTTP request for the calls of a turn of the event loop that have the same prompt: a group's."""
        by_prompt: dict[tuple[int, ...], list[_Call]] = {}
        for call in self._gathering:
            by_prompt.setdefault(tuple(call.body.token_ids), []).append(call)
        self._gathering = []
        for calls in by_prompt.values():
            task = asyncio.get_running_loop().create_task(self._post(calls))
            self._posts.add(task)
            task.add_done_callback(self._posts.discard)
            for call in calls:
                call.post = _Post(calls, task)

    async def _post(self, calls: Sequence["_Call"]) -> None:
        """Answers the calls line by line; whatever goes wrong is the answer of those that have none."""
        reason: Exception = UnreachableError(f"{self._base_url} ended the answer too early")
        try:
            url = f"{self._base_url}/inference/v1/generate_many"
            body = msgspec.json.encode(GenerateManyRequest([call.body for call in calls]))
            async with self._session.post(url, data=body) as response:
                self._note_server(response)
                if response.status != 200:
                    reason = InferenceError(
                        f"{url} answered {response.status}: {_reason(await response.read())}"
                    )
                    return
                async for line in response.content:
                    answer = self._lines.decode(line)
                    calls[answer.index].take(answer)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = UnreachableError(f"{self._base_url} cannot be reached: {error}")
        finally:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(reason)

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        body = ScoreRequest(list(token_ids), temperature)
        answer = await self._request("POST", "/inference/v1/score", body)
        logprobs = msgspec.json.decode(answer, type=ScoreResponse).logprobs
        return [math.nan if logprob is None else logprob for logprob in logprobs]

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        body = UpdateWeightsRequest(version, str(folder.resolve()), run)
        await self._request("POST", "/update_weights", body)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._request("POST", "/abort", AbortRequest(list(request_ids)))

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, path: str, body: msgspec.Struct | None = None) -> bytes:
        url = self._base_url + path
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, url, data=data) as response:
                self._note_server(response)
                answer = await response.read()
                if response.status != 200:
                    raise InferenceError(f"{url} answered {response.status}: {_reason(answer)}")
                return answer
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{url} cannot be reached: {error}") from error

    def _note_server(self, response: aiohttp.ClientResponse) -> None:
        self.server_id = response.headers.get(SERVER_ID_HEADER, self.server_id)


def _reason(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=ErrorResponse).error.message
    except msgspec.DecodeError:
        return answer[:200].decode(errors="replace")
