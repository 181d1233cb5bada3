"""The client of the embedded engine: one connection pool, token ids in and out."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from pellucid.data import Completion
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.protocol import (
    AbortRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Health,
    UpdateWeightsRequest,
)

_READY_TIMEOUT_S = 600.0


class HttpInferenceClient:
    """Must be made inside a running event loop."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        self._responses = msgspec.json.Decoder(GenerateResponse)

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

    async def health(self) -> Health:
        return msgspec.json.decode(await self._request("GET", "/health"), type=Health)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        body = GenerateRequest(list(prompt_ids), params, account, request_id, compact=True)
        answer = self._responses.decode(await self._request("POST", "/inference/v1/generate", body))
        choice = answer.choices[0]
        return Completion(
            choice.token_ids, choice.token_logprobs, choice.policy_versions, choice.finish_reason
        )

    async def update_weights(self, version: int, folder: Path) -> None:
        await self._request("POST", "/update_weights", UpdateWeightsRequest(version, str(folder.resolve())))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._request("POST", "/abort", AbortRequest(list(request_ids)))

    async def close(self) -> None:
        await self._session.close()

    async def _request(self, method: str, path: str, body: msgspec.Struct | None = None) -> bytes:
        url = self._base_url + path
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, url, data=data) as response:
                answer = await response.read()
                if response.status != 200:
                    raise InferenceError(f"{url} answered {response.status}: {_reason(answer)}")
                return answer
        except (aiohttp.ClientError, OSError) as error:
            raise InferenceError(f"{url} cannot be reached: {error}") from error


def _reason(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=ErrorResponse).error.message
    except msgspec.DecodeError:
        return answer[:200].decode(errors="replace")
