"""The embedded engine: continuous batching over slots, synchronous and single-threaded.

Invariants:
- Every sampled token is counted once when it is sampled, and once more when its request ends: delivered,
  or cancelled if nobody waits for it any more.
- A request holds one slot from its prefill to its end; requests beyond the slots wait in order.
- Equal prompts are prefilled once, as long as one of their requests still runs under the same weights.
- A weight swap happens between two steps. Running sequences keep their cache and go on under the new
  weights; each token carries the version that sampled it.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pellucid.data import Completion
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.kv_cache import Decode, KVCache, Prefill
from pellucid.inference.sampling import draw
from pellucid.model import Policy
from pellucid.transport.weights import load_weights

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
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    generator: random.Random = field(init=False)
    abandoned: bool = False
    on_token: Callable[[tuple[int, float]], None] | None = None
    """Told each token with its logprob as it is sampled."""

    def __post_init__(self) -> None:
        self.generator = random.Random(self.params.seed)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += 1
        else:
            self.versions.append([version, 1])
        if self.on_token is not None:
            self.on_token((token, logprob))

    def completion(self, finish_reason: str) -> Completion:
        runs = [(version, count) for version, count in self.versions]
        return Completion(self.token_ids, self.logprobs, runs, finish_reason)


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


class Engine:
    def __init__(
        self,
        policy: Policy,
        *,
        num_slots: int,
        max_length: int,
        max_queued: int = 4096,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.counts = EngineCounts()
        self.version = 0
        self._policy = policy
        self._max_length = max_length
        self._max_queued = max_queued
        self._decode_text = decode_text
        self._cache = KVCache(policy, num_slots, max_length)
        self._slots: list[Request | None] = [None] * num_slots
        self._prefilled_at = [-1] * num_slots
        """Policy version that computed the prompt of a slot."""
        self._waiting: deque[Request] = deque()

    @property
    def num_running(self) -> int:
        return sum(request is not None for request in self._slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self.num_running == 0

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InferenceError with the reason why a request cannot be served."""
        if not prompt_ids:
            raise InferenceError("the prompt is empty; send at least one token")
        if params.temperature != 0 and not 1e-3 <= params.temperature <= 1e3:
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
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._policy.vocab_size:
            raise InferenceError(f"the prompt has a token id outside 0 … {self._policy.vocab_size - 1}")
        if params.stop and self._decode_text is None:
            raise InferenceError("stop strings need a tokenizer; use stop_token_ids")

    def submit(self, request: Request) -> None:
        self.check(request.prompt_ids, request.params)
        if len(self._waiting) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} requests are waiting already; try again later")
        self._waiting.append(request)

    def abandon(self, request: Request) -> None:
        """Nobody waits for this request any more: free its slot and count its tokens as cancelled."""
        request.abandoned = True
        self._abort(request)

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests now; each delivers what it has."""
        for request in self._requests():
            if request.request_id in request_ids:
                self._abort(request)

    def abort_all(self) -> None:
        for request in self._requests():
            self._abort(request)

    def abandon_all(self) -> None:
        for request in self._requests():
            self.abandon(request)

    def _abort(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._finish(request, "abort")
        elif request in self._slots:
            self._release(self._slots.index(request), "abort")

    def _requests(self) -> list[Request]:
        return [*self._waiting, *(request for request in self._slots if request is not None)]

    def update_weights(self, version: int, folder: Path) -> None:
        load_weights(self._policy.hf, folder)
        self.version = version

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits, then samples one token for every running sequence."""
        self._admit()
        self._compact()
        running = [slot for slot, request in enumerate(self._slots) if request is not None]
        if running:
            self._decode(running)

    def _compact(self) -> None:
        """Moves the last running sequences into free slots, so that decoding works on no empty rows."""
        running = [slot for slot, request in enumerate(self._slots) if request is not None]
        holes = [slot for slot in range(len(running)) if self._slots[slot] is None]
        for hole, source in zip(holes, reversed(running), strict=False):
            request = self._slots[source]
            assert request is not None
            self._cache.copy_prefix(source, [hole], request.length)
            self._slots[hole], self._slots[source] = request, None
            self._prefilled_at[hole] = self._prefilled_at[source]

    def _admit(self) -> None:
        free = [slot for slot, request in enumerate(self._slots) if request is None]
        donors = self._donors()
        placed: dict[tuple[int, ...], list[int]] = {}
        """New slots by prompt."""
        budget = MAX_PREFILL_TOKENS
        for slot in free:
            if not self._waiting or budget <= 0:
                break
            request = self._waiting.popleft()
            prompt = tuple(request.prompt_ids)
            if prompt not in placed and prompt not in donors:
                budget -= len(prompt)
            placed.setdefault(prompt, []).append(slot)
            self._slots[slot] = request
            self._prefilled_at[slot] = self.version
        if placed:
            self._prefill(placed, donors)

    def _donors(self) -> dict[tuple[int, ...], int]:
        """Running slots whose prompt was computed under the current weights, by prompt."""
        if not self._waiting:
            return {}
        return {
            tuple(request.prompt_ids): slot
            for slot, request in enumerate(self._slots)
            if request is not None and self._prefilled_at[slot] == self.version
        }

    def _prefill(self, placed: dict[tuple[int, ...], list[int]], donors: dict[tuple[int, ...], int]) -> None:
        """Computes each new prompt once, all but its last token, and gives it to every slot that needs it.

        The last prompt token is fed by the decode step, which predicts the first token of the completion.
        """
        fresh = [(p, slots[0]) for p, slots in placed.items() if p not in donors and len(p) > 1]
        self._cache.reserve(max(len(prompt) for prompt in placed) + 1)
        if fresh:
            lengths = [len(prompt) - 1 for prompt, _ in fresh]
            plan = Prefill(self._cache, [slot for _, slot in fresh], lengths)
            device = self._policy.device
            token_ids = torch.tensor([token for prompt, _ in fresh for token in prompt[:-1]], device=device)
            positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
            self._policy.hidden(token_ids[None], positions[None], plan)
            self.counts.prefill_tokens += len(token_ids)
        for prompt, slots in placed.items():
            source = donors.get(prompt, slots[0])
            targets = [slot for slot in slots if slot != source]
            if targets and len(prompt) > 1:
                self._cache.copy_prefix(source, targets, len(prompt) - 1)
                self.counts.shared_tokens += len(targets) * (len(prompt) - 1)

    def _decode(self, running: Sequence[int]) -> None:
        rows = running[-1] + 1
        requests = self._slots[:rows]
        fed = [_last_token(request) for request in requests]
        at = [request.length - 1 if request else 0 for request in requests]
        self._cache.reserve(max(at) + 1)
        device = self._policy.device
        positions = torch.tensor(at, device=device)
        hidden = self._policy.hidden(
            torch.tensor(fed, device=device)[:, None], positions[:, None], Decode(self._cache, positions)
        )
        logits = self._policy.logits(hidden[torch.tensor(running, device=device), 0])
        active = [request for request in requests if request is not None]
        tokens, logprobs = draw(
            logits,
            [request.params.temperature for request in active],
            [request.generator.random() for request in active],
        )
        self.counts.decode_steps += 1
        for slot, request, token, logprob in zip(running, active, tokens, logprobs, strict=True):
            request.append(token, logprob, self.version)
            self.counts.sampled[request.account] += 1
            if reason := self._finish_reason(request):
                self._release(slot, reason)

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

    def _release(self, slot: int, reason: str) -> None:
        request = self._slots[slot]
        assert request is not None
        self._slots[slot] = None
        self._finish(request, reason)

    def _finish(self, request: Request, reason: str) -> None:
        if request.abandoned:
            self.counts.cancelled[request.account] += len(request.token_ids)
        else:
            self.counts.delivered[request.account] += len(request.token_ids)
            request.on_finish(request.completion(reason))


def _last_token(request: Request | None) -> int:
    if request is None:
        return 0
    return request.token_ids[-1] if request.token_ids else request.prompt_ids[-1]


def run_to_end(engine: Engine, requests: Iterable[Request]) -> None:
    """Serves these requests and returns: for tests and benchmarks."""
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
