"""An inference server inside the process and without a model: for tests and for trying out environments.

    FakeInferenceClient(lambda prompt_ids, random: [7, 8, 3])

Tokens are sampled one at a time, so that weight updates and aborts fall between them as they do in an
engine. Every sampled token is delivered, or was sampled for a request that failed or was cancelled:
`sampled` and `delivered` are this server's side of the ledger. As over a network, requests and answers
take their time: an abort may overtake its request, and what is delivered is lost if nobody waits for it.
One that hangs answers nobody; when it recovers it goes on with all it was given, whoever still waits for it.
"""

import asyncio
import contextlib
import math
import random
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pellucid.data import Completion
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, Health, SamplingParams, ServedWeightsReport
from pellucid.transport.digests import read_digests

Respond = Callable[[Sequence[int], random.Random], Sequence[int]]
"""Prompt ids and random numbers seeded by the request -> completion ids; greedy requests have one seed."""

Scores = Callable[[Sequence[int], float], Sequence[float]]
"""Token ids and temperature -> the logprob of each, as `InferenceClient.score` gives them."""


def half(token_ids: Sequence[int], temperature: float) -> list[float]:
    """Gives every token probability 1/2, and NaN to the first."""
    return [math.nan] + [math.log(0.5)] * (len(token_ids) - 1)


class FakeInferenceClient:
    def __init__(
        self,
        respond: Respond,
        *,
        delay_s: Callable[[random.Random], float] = lambda generator: 0.0,
        fails: Callable[[random.Random], bool] = lambda generator: False,
        transit_s: float = 0.0,
        scores: Scores = half,
    ) -> None:
        """`transit_s`: seconds that a request takes to arrive, and an answer to come back."""
        self._respond = respond
        self._delay_s = delay_s
        self._fails = fails
        self._transit_s = transit_s
        self._scores = scores
        self._aborted: dict[str, asyncio.Event] = {}
        """Event of each running request, set when it is aborted."""
        self.model = "fake"
        self.vocabulary = ""
        self.max_model_len = 1 << 20
        self.server_id = uuid.uuid4().hex
        self.run = ""
        """Identity of the run whose weights it serves."""
        self.policy_version = 0
        self._awake = asyncio.Event()
        self._awake.set()
        self._serving: set[asyncio.Task[Completion]] = set()
        self._deliveries: dict[str, tuple[Account, int]] = {}
        self._disowned: set[str] = set()
        self.max_concurrent = 0
        """Sequences that `/health` claims are decoded together; 0: unknown."""
        self.max_queued = 0
        self.updates: list[tuple[int, Path]] = []
        """Every weight update, in order."""
        self.fetched: list[int] = []
        """Every version that it was told to read beforehand, in order."""
        self.reports_weights = True
        """Whether it tells the digests of its weights; servers of older versions cannot."""
        self.planted: dict[str, str] = {}
        """Digests of tensors that it serves in the place of published ones."""
        self.sampled: Counter[Account] = Counter()
        self.delivered: Counter[Account] = Counter()
        self.max_running = 0
        self.num_scored = 0
        """Sequences, not tokens."""

    @property
    def num_running(self) -> int:
        return len(self._aborted)

    async def wait_until_ready(self) -> None:
        """Always ready."""

    async def watch(self) -> None:
        await asyncio.Event().wait()  # never

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        serving = asyncio.create_task(self._serve(prompt_ids, params, account, request_id))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            return await asyncio.shield(serving)
        except asyncio.CancelledError:
            if self._awake.is_set():
                serving.cancel()  # it notices that the client has gone
            raise

    async def _serve(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        await asyncio.sleep(self._transit_s)
        await self._awake.wait()
        if request_id in self._aborted:
            raise InferenceError(f"request {request_id!r} is running already; give each an id of its own")
        aborted = self._aborted[request_id] = asyncio.Event()
        if request_id in self._disowned:
            aborted.set()
        self.max_running = max(self.max_running, self.num_running)
        try:
            completion = await self._sample(prompt_ids, params, account, aborted)
        finally:
            del self._aborted[request_id]
        await self._awake.wait()
        if request_id not in self._disowned:
            self.delivered[account] += len(completion.token_ids)
            self._deliveries[request_id] = account, len(completion.token_ids)
        await asyncio.sleep(self._transit_s)
        return completion

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        await asyncio.sleep(2 * self._transit_s)
        await self._awake.wait()
        self.num_scored += 1
        return list(self._scores(token_ids, temperature))

    def hang(self) -> None:
        """Stops answering and sampling until `recover`."""
        self._awake.clear()

    def recover(self) -> None:
        self._awake.set()

    async def health(self) -> Health:
        await self._awake.wait()
        return Health(
            model=self.model,
            vocabulary=self.vocabulary,
            max_model_len=self.max_model_len,
            policy_version=self.policy_version,
            run=self.run,
            server_id=self.server_id,
            max_concurrent=self.max_concurrent,
            max_queued=self.max_queued,
            running=self.num_running,
            sampled_tokens=self.sampled.total(),
            delivered_tokens=self.delivered.total(),
            scored_tokens=self.num_scored,
        )

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        await self._awake.wait()
        self.policy_version = version
        self.run = run
        self.updates.append((version, folder))

    async def fetch_weights(self, version: int) -> None:
        await self._awake.wait()
        self.fetched.append(version)

    async def served_weights(self) -> ServedWeightsReport | None:
        """Reports what was published in the folder of the last update, but for what is `planted`."""
        await self._awake.wait()
        if not self.reports_weights:
            return None
        digests = read_digests(self.updates[-1][1]) if self.updates else None
        found = {} if digests is None else {**digests.tensors, **self.planted}
        return ServedWeightsReport(self.policy_version, self.run, found)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._awake.wait()
        for request_id in self._aborted.keys() & set(request_ids):
            self._aborted[request_id].set()

    async def disown(self, request_ids: Sequence[str]) -> None:
        await self.abort(request_ids)
        self._disowned |= set(request_ids)
        for request_id in self._deliveries.keys() & set(request_ids):
            account, num_tokens = self._deliveries.pop(request_id)
            self.delivered[account] -= num_tokens

    async def close(self) -> None:
        """Nothing to close."""

    async def _sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, aborted: asyncio.Event
    ) -> Completion:
        generator = random.Random(params.seed)
        greedy = random.Random(0) if params.temperature == 0 else None
        planned = list(self._respond(prompt_ids, greedy or generator))
        num_tokens = min(len(planned), params.max_tokens)
        reason = "stop" if num_tokens == len(planned) else "length"
        pause_s = self._delay_s(generator) / max(num_tokens, 1)
        fails = self._fails(generator)
        versions: list[int] = []
        for _ in range(num_tokens):
            if await _happens_within(aborted, pause_s):
                reason = "abort"
                break
            await self._awake.wait()
            versions.append(self.policy_version)
            self.sampled[account] += 1
        if fails:
            raise InferenceError(f"injected failure after {len(versions)} tokens")
        return Completion(
            token_ids=planned[: len(versions)],
            logprobs=[-generator.random() for _ in versions],
            policy_versions=sorted(Counter(versions).items()),  # versions only grow
            finish_reason=reason,
        )


async def _happens_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
