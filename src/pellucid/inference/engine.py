"""The embedded engine: continuous batching over slots, synchronous and single-threaded.

    step    admit what fits -> arrange the cache -> one forward of new prompts and running sequences -> draw
            score what was asked for, as far as prompts have left room

Invariants:
- Every sampled token is counted once when it is sampled, and once more when its request ends: delivered,
  or cancelled if nobody waits for it any more.
- A request holds one slot from its first step to its end; requests beyond the slots wait in order.
- Equal prompts are computed once, as long as one of their requests still runs under the same weights.
- Prompts and scorings of a step are bounded by `MAX_PREFILL_TOKENS`, so neither holds up running sequences
  for long. Each step scores at least one sequence, however many prompts there are.
- A weight swap happens between two steps. Running sequences keep their cache and go on under the new
  weights; each token carries the version that sampled it.
- Where experts are recorded, a token's are those of the forward that computed its keys and values; requests
  that share a prompt have the same ones for it.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data import Completion, PackedArray
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.kv_cache import KVCache, Row
from pellucid.inference.sampling import draw
from pellucid.inference.scoring import Scoring, score
from pellucid.inference.step_attention import Prompt, StepAttention
from pellucid.model import ExpertRecorder, Policy, lean_forward
from pellucid.transport.adapter import ServedWeights

MAX_PREFILL_TOKENS = 8192


class QueueFullError(InferenceError):
    pass


@dataclass(eq=False, slots=True)
class Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    account: Account
    on_finish: Callable[[Completion], None]
    request_id: str = ""
    on_token: Callable[[tuple[int, float]], None] | None = None
    """Told each token with its logprob as it is sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    experts: bytearray = field(default_factory=bytearray)
    """Of each token computed so far, if they are recorded."""

    generator: random.Random = field(init=False)
    abandoned: bool = False
    row: Row | None = None
    """Of the cache, once it runs."""

    prompt: bytes = b""
    """The prompt's token ids as int64, once it runs: quick to compare."""

    started_at: int = -1
    """Policy version that computed the prompt."""

    def __post_init__(self) -> None:
        self.generator = random.Random(self.params.seed)

    def start(self, row: Row, version: int) -> None:
        self.row = row
        self.prompt = np.asarray(self.prompt_ids, np.int64).tobytes()
        self.started_at = version

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt_ids[-1]

    def append(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += 1
        else:
            self.versions.append([version, 1])
        if self.on_token is not None:
            self.on_token((token, logprob))

    def completion(self, finish_reason: str, routed_experts: PackedArray | None) -> Completion:
        runs = [(version, count) for version, count in self.versions]
        return Completion(self.token_ids, self.logprobs, runs, finish_reason, routed_experts)


@dataclass(slots=True)
class EngineCounts:
    """Tokens per account, for the ledger, and work done, for metrics."""

    sampled: Counter[Account] = field(default_factory=Counter)
    delivered: Counter[Account] = field(default_factory=Counter)
    cancelled: Counter[Account] = field(default_factory=Counter)
    prefill_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens that another request had already computed."""

    decode_steps: int = 0
    scored_tokens: int = 0
    """Of sequences that were scored, not sampled."""


class Engine:
    def __init__(
        self,
        policy: Policy,
        *,
        num_slots: int,
        max_length: int,
        max_queued: int = 4096,
        decode_text: Callable[[list[int]], str] | None = None,
        record_experts: bool = False,
    ) -> None:
        self.counts = EngineCounts()
        self.version = 0
        self._policy = policy
        self._weights = ServedWeights(policy.hf)
        self._hidden = lean_forward(policy)
        self._recorder = ExpertRecorder(policy.hf) if record_experts else None
        self._num_slots = num_slots
        self._max_length = max_length
        self._max_queued = max_queued
        self._decode_text = decode_text
        self._cache = KVCache(policy, num_slots, max_length)
        self._running: dict[Row, Request] = {}
        self._waiting: dict[Request, None] = {}
        """In order of arrival; a dict, so that one that leaves does not have to be looked for."""
        self._scorings: dict[Scoring, None] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._scorings)

    @property
    def capacity(self) -> int:
        """Requests that it holds at a time, running or waiting."""
        return self._num_slots + self._max_queued

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running and not self._scorings

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InferenceError with the reason why a request cannot be served."""
        self._check_ids(prompt_ids)
        if params.temperature != 0 and not _is_temperature(params.temperature):
            raise InferenceError(
                f"temperature = {params.temperature}; must be 0 (greedy) or between 0.001 and 1000"
            )
        if params.max_tokens < 1:
            raise InferenceError(f"max_tokens = {params.max_tokens}; must be at least 1")
        if len(prompt_ids) + params.max_tokens > self._max_length:
            raise InferenceError(
                f"prompt of {len(prompt_ids)} + max_tokens of {params.max_tokens} exceeds "
                f"inference.max_model_len = {self._max_length}; shorten one of them or raise it"
            )
        if "" in params.stop:
            raise InferenceError("stop has an empty string; every text contains it, so leave it out")
        if params.stop and self._decode_text is None:
            raise InferenceError("stop strings need a tokenizer; use stop_token_ids")

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InferenceError("the prompt is empty; send at least one token")
        if not 0 <= min(token_ids) <= max(token_ids) < self._policy.vocab_size:
            raise InferenceError(f"the prompt has a token id outside 0 … {self._policy.vocab_size - 1}")

    def submit(self, request: Request) -> None:
        self.check(request.prompt_ids, request.params)
        self._require_room()
        self._waiting[request] = None

    def submit_scoring(self, scoring: Scoring) -> None:
        self._check_ids(scoring.token_ids)
        if not _is_temperature(scoring.temperature):
            raise InferenceError(f"temperature = {scoring.temperature}; must be between 0.001 and 1000")
        if len(scoring.token_ids) > self._max_length:
            raise InferenceError(
                f"a sequence of {len(scoring.token_ids)} tokens exceeds inference.max_model_len = "
                f"{self._max_length}; shorten it or raise the limit"
            )
        self._require_room()
        self._scorings[scoring] = None

    def abandon_scoring(self, scoring: Scoring) -> None:
        """Nobody waits for it any more; one that is done is left alone."""
        self._scorings.pop(scoring, None)

    def _require_room(self) -> None:
        if self.num_running + self.num_waiting >= self.capacity:
            raise QueueFullError(f"{self._max_queued} requests are waiting already; try again later")

    def abandon(self, request: Request) -> None:
        """Nobody waits for this request any more: free its slot and count its tokens as cancelled."""
        request.abandoned = True
        self._end(request, "abort")

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests now; each delivers what it has."""
        for request in self._requests():
            if request.request_id in request_ids:
                self._end(request, "abort")

    def abort_all(self) -> None:
        for request in self._requests():
            self._end(request, "abort")
        while self._scorings:
            self._scorings.popitem()[0].on_finish(InferenceError("the engine ended before it was scored"))

    def abandon_all(self) -> None:
        self._scorings.clear()
        for request in self._requests():
            self.abandon(request)

    def _requests(self) -> list[Request]:
        return [*self._waiting, *self._running.values()]

    def update_weights(self, version: int, folder: Path) -> None:
        """Serves policy version `version` from the next step on; also where a resumed run begins.

        On any error the engine goes on with what it has.
        """
        self._weights.load(folder)
        self.version = version

    @torch.inference_mode()
    def step(self) -> None:
        """Samples one token for every running sequence, new ones included; then scores."""
        num_prefilled = self.counts.prefill_tokens
        self._sample()
        self._score(MAX_PREFILL_TOKENS - (self.counts.prefill_tokens - num_prefilled))

    def _sample(self) -> None:
        donors = self._donors()
        admitted = self._admit(donors)
        rows = self._cache.arrange()
        if not rows:
            return
        hidden = self._forward(self._share(admitted, donors), rows)
        requests = [self._running[row] for row in rows]
        tokens, logprobs = draw(
            self._policy.logits(hidden),
            [request.params.temperature for request in requests],
            [request.generator.random() for request in requests],
        )
        if not math.isfinite(sum(logprobs)):
            raise InferenceError(
                f"policy version {self.version} gives logits that are not finite; it has diverged"
            )
        self.counts.decode_steps += 1
        self.counts.sampled.update(request.account for request in requests)
        for row, request, token, logprob in zip(rows, requests, tokens, logprobs, strict=True):
            row.length += 1
            request.append(token, logprob, self.version)
            if reason := self._finish_reason(request):
                self._end(request, reason)

    def _score(self, budget: int) -> None:
        """What was asked for first; always one sequence, and more while they are within the budget."""
        due: list[Scoring] = []
        for scoring in self._scorings:
            budget -= len(scoring.token_ids)
            if due and budget < 0:
                break
            due.append(scoring)
        if due:
            for scoring, logprobs in zip(due, score(self._policy, self._hidden, due), strict=True):
                del self._scorings[scoring]
                self.counts.scored_tokens += len(logprobs)
                scoring.finish(logprobs, self.version)

    def _admit(self, donors: Mapping[bytes, Row]) -> dict[bytes, list[Row]]:
        """Gives waiting requests free slots; their rows, by prompt."""
        admitted: dict[bytes, list[Row]] = {}
        budget = MAX_PREFILL_TOKENS
        while self._waiting and len(self._running) < self._num_slots and budget > 0:
            request = next(iter(self._waiting))
            del self._waiting[request]
            row = self._cache.add(len(request.prompt_ids))
            request.start(row, self.version)
            self._running[row] = request
            if request.prompt not in admitted and request.prompt not in donors:
                budget -= row.length
            admitted.setdefault(request.prompt, []).append(row)
        return admitted

    def _donors(self) -> dict[bytes, Row]:
        """Rows whose prompt was computed under the current weights, by prompt."""
        if not self._waiting:
            return {}
        return {
            request.prompt: row
            for row, request in self._running.items()
            if request.started_at == self.version
        }

    def _share(self, admitted: Mapping[bytes, list[Row]], donors: Mapping[bytes, Row]) -> list[Prompt]:
        """Copies the prompts that are in the cache already; the others are to be computed, each once.

        The last token of a prompt is always computed by its request: it predicts the first token sampled.
        """
        fresh = []
        for prompt, rows in admitted.items():
            token_ids = np.frombuffer(prompt, np.int64)[:-1]
            donor = donors.get(prompt)
            if donor is None:
                fresh.append(Prompt(token_ids, rows))
                self.counts.prefill_tokens += len(token_ids)
            else:
                for row in rows:
                    self._cache.copy_prefix(donor, row, len(token_ids))
                    self._copy_experts(donor, row, len(token_ids))
            self.counts.shared_tokens += len(token_ids) * (len(rows) - (donor is None))
        return [prompt for prompt in fresh if len(prompt.token_ids)]

    def _forward(self, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Tensor:
        """Last hidden state of each row."""
        device = self._policy.device
        last_tokens = [self._running[row].last_token for row in rows]
        last_positions = [row.length - 1 for row in rows]
        token_ids = np.concatenate([*(prompt.token_ids for prompt in prompts), last_tokens])
        positions = np.concatenate([*(np.arange(len(p.token_ids)) for p in prompts), last_positions])
        plan = StepAttention(prompts, self._cache.shelves, device)
        hidden = self._hidden(
            torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device), plan
        )
        if self._recorder is not None:
            self._keep_experts(self._recorder.last(), prompts, rows)
        return hidden[-len(rows) :]

    def _keep_experts(self, experts: NDArray[Any], prompts: Sequence[Prompt], rows: Sequence[Row]) -> None:
        """Of the tokens of a step: a prompt's go to all who start with it, then one token's to each row."""
        first = 0
        for prompt in prompts:
            last = first + len(prompt.token_ids)
            for row in prompt.rows:
                self._running[row].experts += experts[first:last].tobytes()
            first = last
        for row, own in zip(rows, experts[first:], strict=True):
            self._running[row].experts += own.tobytes()

    def _copy_experts(self, source: Row, target: Row, num_tokens: int) -> None:
        if self._recorder is not None:
            num_bytes = num_tokens * self._recorder.shape.num_bytes
            self._running[target].experts += self._running[source].experts[:num_bytes]

    def _finish_reason(self, request: Request) -> str | None:
        params = request.params
        if request.token_ids[-1] in params.stop_token_ids or self._hit_stop_string(request):
            return "stop"
        return "length" if len(request.token_ids) >= params.max_tokens else None

    def _hit_stop_string(self, request: Request) -> bool:
        if not request.params.stop or self._decode_text is None:
            return False
        # A character takes at most four byte-level tokens, so the tail holds any stop string just completed.
        longest = max(len(stop) for stop in request.params.stop)
        tail = self._decode_text(request.token_ids[-(4 * longest + 1) :])
        return any(stop in tail for stop in request.params.stop)

    def _end(self, request: Request, reason: str) -> None:
        """Frees what the request holds, and tells its tokens; one that has ended already is left alone."""
        if request in self._waiting:
            del self._waiting[request]
        elif request.row in self._running:
            del self._running[request.row]
            self._cache.remove(request.row)
        else:
            return
        if request.abandoned:
            self.counts.cancelled[request.account] += len(request.token_ids)
        else:
            self.counts.delivered[request.account] += len(request.token_ids)
            experts = None if self._recorder is None else self._recorder.pack(request.experts)
            request.on_finish(request.completion(reason, experts))


def _is_temperature(value: float) -> bool:
    return 1e-3 <= value <= 1e3


def run_to_end(engine: Engine, requests: Iterable[Request]) -> None:
    """Serves these requests and returns: for tests and benchmarks."""
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
