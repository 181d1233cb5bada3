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
from pellucid.data.images import tensors_of
from pellucid.errors import InferenceError
from pellucid.inference.client import (
    SERVER_ID_HEADER,
    AbortRequest,
    Account,
    BusyError,
    ErrorResponse,
    GenerateManyLine,
    GenerateManyRequest,
    GenerateRequest,
    Health,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    ServedWeightsReport,
    UnreachableError,
    UpdateWeightsRequest,
    offered_at,
)
from pellucid.ledger import link_of

_READY_S = 600.0
_MAX_LINE_BYTES = 64 * 1024 * 1024
_POST_BYTES = 1 << 20
"""Bytes of prompts that are sent together; a longer prompt goes alone."""
_BYTES_PER_ID = 8


class _UnknownPathError(InferenceError):
    pass


@dataclass(slots=True)
class _Call:
    prompt_ids: Sequence[int]
    request: GenerateRequest
    answer: "asyncio.Future[Completion]"
    post: "asyncio.Task[None] | None" = None
    """The task that asks for this call and for `others`."""

    others: Sequence["_Call"] = ()

    def take(self, line: GenerateManyLine, server_id: str) -> None:
        if self.answer.done():
            return
        if line.completion is None:
            self.answer.set_exception(InferenceError(line.error))
        else:
            link = link_of(server_id, self.request.account.client)
            self.answer.set_result(msgspec.structs.replace(line.completion, link=link))

    def stop_post(self, answer: "asyncio.Future[Completion]") -> None:
        """Ends the post if this call was cancelled, and no other waits for its answer."""
        if answer.cancelled() and self.post is not None and all(each.answer.done() for each in self.others):
            self.post.cancel()


class HttpInferenceClient:
    """Must be made inside a running event loop."""

    def __init__(
        self, base_url: str, key: str | None = None, process: str = "", weights_url: str = ""
    ) -> None:
        """`key`: the key that the server was started with; without it, see `client.Access`.

        `process`: this process's name in the ledger. `weights_url`: where the server reads weights that the
        trainer offers; by default from the folder.
        """
        self._base_url, self._weights_url = base_url, weights_url
        self._process = process
        self.server_id = ""
        """`Health.server_id` of the process that answered last."""
        self._session = aiohttp.ClientSession(
            headers={"content-type": "application/json"}
            | ({} if key is None else {"authorization": f"Bearer {key}"}),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=_MAX_LINE_BYTES,
        )
        self._lines = msgspec.json.Decoder(GenerateManyLine)
        self._gathering: list[_Call] = []
        self._posts: set[asyncio.Task[None]] = set()

    async def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                await self.health()
                return
            except InferenceError as error:
                if time.monotonic() > deadline:
                    raise InferenceError(f"no inference server after {_READY_S:.0f} s: {error}") from error
            await asyncio.sleep(0.1)

    async def watch(self) -> None:
        """Never returns and never raises: a server that cannot be reached may come back."""
        await asyncio.Event().wait()

    async def health(self) -> Health:
        answer = await self._request("GET", "/health")
        try:
            return msgspec.json.decode(answer, type=Health)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreachableError(f"{self._base_url} is no inference server of ours: {error}") from error

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> "asyncio.Future[Completion]":
        if not prompt_ids:
            raise InferenceError("the prompt is empty; send at least one token")
        account = msgspec.structs.replace(account, client=self._process)
        request = GenerateRequest([], params, account, request_id)
        loop = asyncio.get_running_loop()
        if not self._gathering:
            loop.call_soon(self._post_gathered)
        call = _Call(prompt_ids, request, loop.create_future())
        call.answer.add_done_callback(call.stop_post)
        self._gathering.append(call)
        return call.answer

    def _post_gathered(self) -> None:
        """Sends one HTTP request for all calls of a turn of the event loop; several if prompts are long.

        Calls with one prompt, a group's, go together.
        """
        by_prompt: dict[int, list[_Call]] = {}
        for call in self._gathering:
            by_prompt.setdefault(id(call.prompt_ids), []).append(call)
        self._gathering = []
        posts: list[list[_Call]] = []
        room = 0
        for calls in by_prompt.values():
            num_bytes = _BYTES_PER_ID * len(calls[0].prompt_ids) + len(tensors_of(calls[0].prompt_ids))
            if num_bytes > room:
                posts.append([])
                room = _POST_BYTES
            posts[-1] += calls
            room -= num_bytes
        for calls in posts:
            post = asyncio.create_task(self._post(calls))
            self._posts.add(post)
            post.add_done_callback(self._posts.discard)
            for call in calls:
                call.post, call.others = post, calls

    async def _post(self, calls: Sequence["_Call"]) -> None:
        """Answers the calls line by line; an error becomes the answer of the calls that have none yet."""
        reason: Exception = UnreachableError(f"{self._base_url} ended the answer too early")
        try:
            url = f"{self._base_url}/inference/v1/generate_many"
            body = msgspec.json.encode(GenerateManyRequest(_with_prompts(calls)))
            async with self._session.post(url, data=body) as response:
                server_id = self._note_server(response)
                if response.status != 200:
                    reason = _refusal(response, await response.read())
                if isinstance(reason, BusyError) and len(calls) > 1:
                    # A server takes all of a post or nothing; maybe there is room for a part of it.
                    middle = len(calls) // 2
                    await asyncio.gather(self._post(calls[:middle]), self._post(calls[middle:]))
                if response.status != 200:
                    return
                async for line in response.content:
                    answer = self._lines.decode(line)
                    calls[answer.index].take(answer, server_id)
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
        if self._weights_url:
            body = UpdateWeightsRequest(version, url=offered_at(self._weights_url, version), run=run)
        else:
            body = UpdateWeightsRequest(version, str(folder.resolve()), run=run)
        await self._request("POST", "/update_weights", body)

    async def fetch_weights(self, version: int) -> None:
        if self._weights_url:
            url = offered_at(self._weights_url, version)
            await self._request(
                "POST", "/update_weights", UpdateWeightsRequest(version, url=url, only_fetch=True)
            )

    async def served_weights(self) -> ServedWeightsReport | None:
        try:
            answer = await self._request("GET", "/weights")
        except _UnknownPathError:
            return None
        try:
            return msgspec.json.decode(answer, type=ServedWeightsReport)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # a server of somebody else's, to whom the path means something else

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._request("POST", "/abort", AbortRequest(list(request_ids)))

    async def disown(self, request_ids: Sequence[str]) -> None:
        await self._request("POST", "/abort", AbortRequest(list(request_ids), disown=True))

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
                    raise _refusal(response, answer)
                return answer
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(f"{url} cannot be reached: {error}") from error

    def _note_server(self, response: aiohttp.ClientResponse) -> str:
        self.server_id = response.headers.get(SERVER_ID_HEADER, self.server_id)
        return self.server_id


def _with_prompts(calls: Sequence[_Call]) -> list[GenerateRequest]:
    """Returns the requests of these calls, of which the first with a prompt has it."""
    return [
        call.request
        if before is not None and before.prompt_ids is call.prompt_ids
        else msgspec.structs.replace(
            call.request, token_ids=list(call.prompt_ids), mm_tensors=tensors_of(call.prompt_ids)
        )
        for before, call in zip([None, *calls], calls, strict=False)
    ]


def _refusal(response: aiohttp.ClientResponse, answer: bytes) -> InferenceError:
    try:
        reason = msgspec.json.decode(answer, type=ErrorResponse).error.message
    except msgspec.DecodeError:
        reason = answer[:200].decode(errors="replace")
    message = f"{response.url} answered {response.status}: {reason}"
    if response.status in (404, 405):
        return _UnknownPathError(message)
    wait_s = response.headers.get("retry-after", "")
    if response.status in (429, 503) and wait_s.isdecimal():
        return BusyError(message, float(wait_s))
    return InferenceError(message)
