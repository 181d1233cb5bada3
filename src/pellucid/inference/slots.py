"""Requests from arrival to end, whatever computes their tokens.

Invariants:
- Every sampled token is counted once when it is sampled, and once more when its request ends: delivered,
  or cancelled if nobody waits for it any more. An answer that turns out to have reached nobody is moved from
  delivered to cancelled, once; see `abandon` and `disown`.
- A request holds one slot from its first step to its end; requests beyond the slots wait in order.
- Each token carries the policy version that sampled it."""

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pellucid.data import Completion, PackedArray
from pellucid.data.images import FAMILIES
from pellucid.errors import InferenceError
from pellucid.inference.client import (
    Account,
    GenerateRequest,
    RankHealth,
    RankWeightsReport,
    SamplingParams,
)


@dataclass(eq=False, slots=True)
class Scoring:
    """A sequence to score, and the callback that gets its logprobs or the error."""

    token_ids: Sequence[int]
    temperature: float
    on_finish: Callable[[list[float] | InferenceError], None]

    def finish(self, logprobs: list[float], version: int) -> None:
        for index, logprob in enumerate(logprobs[1:], start=1):
            if not math.isfinite(logprob):
                where = f"policy version {version} gives token {index} of the sequence the logprob {logprob}"
                self.on_finish(InferenceError(f"{where}; only finite ones can train"))
                return
        self.on_finish(logprobs)


Slot = TypeVar("Slot")
T = TypeVar("T")
_REMEMBERED_REQUESTS = 16_384


class QueueFullError(InferenceError):
    pass


@dataclass(eq=False, slots=True)
class Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    account: Account
    on_finish: Callable[[Completion], None]
    request_id: str = ""
    mm_tensors: bytes = b""
    """Tensors of the prompt's images."""

    on_token: Callable[[tuple[int, float]], None] | None = None
    """Called with each token and its logprob as it is sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    """Further columns of the schema: a number per sampled token."""

    experts: bytearray = field(default_factory=bytearray)
    """Routed experts of each token computed so far, and their weights, as bytes; empty if they are not
    recorded."""

    is_checked: bool = False
    """Whether `SlottedEngine.refusals` has found nothing wrong with it."""

    generator: random.Random = field(init=False)
    abandoned: bool = False
    delivery: "Delivery | None" = None
    """Set once its tokens count as delivered."""

    slot: Any = None
    """The engine's slot that it holds, once it runs."""

    prompt: tuple[bytes, bytes] = (b"", b"")
    """The prompt's token ids as int64, once it runs, and the tensors of its images: quick to compare."""

    started_after: int = -1
    """Number of loads of weights before the prompt was computed."""

    def __post_init__(self) -> None:
        self.generator = random.Random(self.params.seed)

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

    def completion(
        self,
        reason: str,
        routed_experts: PackedArray | None,
        expert_weights: PackedArray | None = None,
    ) -> Completion:
        runs = [(version, count) for version, count in self.versions]
        return Completion(
            self.token_ids,
            self.logprobs,
            runs,
            reason,
            routed_experts,
            columns=self.columns,
            expert_weights=expert_weights,
        )


@dataclass(slots=True)
class Delivery:
    """The number of tokens of one answer that count as delivered; 0 once they are moved to cancelled."""

    account: Account
    num_tokens: int


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
    """Tokens of sequences that were scored, not sampled."""


class SlottedEngine(ABC, Generic[Slot]):
    """Base class of the engines: gives slots to waiting requests and samples for those that run."""

    digests_as_read = False
    """Whether `served_digests` are those of tensors as they were read: the engine keeps them in another form,
    which cannot be compared."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        max_queued: int,
        vocab_size: int,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.counts = EngineCounts()
        self.version = 0
        self.num_loads = 0
        """Loads of weights by `update_weights`. A version may be loaded again, with other weights."""
        self.num_slots = num_slots
        """Sequences that are decoded together."""
        self._max_length = max_length
        self._max_queued = max_queued
        self._vocab_size = vocab_size
        self._decode_text = decode_text
        self._running: dict[Slot, Request] = {}
        self._waiting: dict[Request, None] = {}
        """Waiting requests in order of arrival; a dict, so that removing one needs no search."""
        self._scorings: dict[Scoring, None] = {}
        self._deliveries: dict[str, Delivery] = {}
        """Latest answers by request id, for clients that report later that one never reached them."""
        self._disowned: dict[str, None] = {}
        """Requests that were given up before they arrived."""

    @abstractmethod
    def step(self) -> None:
        """Samples one token for every running sequence, new ones included; then scores."""

    @abstractmethod
    def update_weights(self, version: int, folder: Path) -> None:
        """Serves policy version `version` from the next step on; a resumed run starts with this, too.

        On any error the engine keeps the weights that it has.
        """

    @abstractmethod
    def served_digests(self) -> dict[str, str]:
        """Computes the digests of the served weights, by the names under which they are published.

        Those that cannot be compared with a published tensor are left out.
        """

    def rank_weights(self) -> list[RankWeightsReport]:
        """Returns the digests of each data-parallel rank; nothing where there is one."""
        return []

    def rank_health(self) -> list[RankHealth]:
        return []

    def close(self) -> None:
        """Ends what runs in other processes for it."""

    @abstractmethod
    def _free(self, slot: Slot) -> None:
        """Frees a slot."""

    def _experts_of(self, request: Request) -> tuple[PackedArray | None, PackedArray | None]:
        """Returns the routed experts of its tokens, and their weights, as far as they are recorded."""
        return None, None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._scorings)

    @property
    def capacity(self) -> int:
        """Requests that the engine holds at a time, running or waiting."""
        return self.num_slots + self._max_queued

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running and not self._scorings

    def refusals(self, asked: Sequence[GenerateRequest]) -> dict[int, InferenceError]:
        """Returns why requests cannot be served, by index; a prompt that several share is checked once."""
        refused = {}
        checked: dict[tuple[int, int], str] = {}
        for index, each in enumerate(asked):
            prompt, key = each.token_ids, (id(each.token_ids), id(each.mm_tensors))
            if key not in checked:
                checked[key] = self._reason_against_prompt(prompt, each.mm_tensors)
            reason = checked[key] or self._reason_against(len(prompt), each.sampling_params)
            if reason:
                refused[index] = InferenceError(reason)
        return refused

    def _reason_against(self, num_prompt: int, params: SamplingParams) -> str:
        """Returns why a request cannot be served with these parameters, or ""."""
        if params.temperature != 0 and not _is_temperature(params.temperature):
            return f"temperature = {params.temperature}; must be 0 (greedy) or between 0.001 and 1000"
        if params.max_tokens < 1:
            return f"max_tokens = {params.max_tokens}; must be at least 1"
        if num_prompt + params.max_tokens > self._max_length:
            return (
                f"prompt of {num_prompt} + max_tokens of {params.max_tokens} exceeds "
                f"inference.max_model_len = {self._max_length}; shorten one of them or raise it"
            )
        if "" in params.stop:
            return "stop has an empty string; every text contains it, so leave it out"
        if params.stop and self._decode_text is None:
            return "stop strings need a tokenizer; use stop_token_ids"
        return ""

    def _reason_against_ids(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return "the prompt is empty; send at least one token"
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            return f"the prompt has a token id outside 0 … {self._vocab_size - 1}"
        return ""

    def _reason_against_prompt(self, token_ids: Sequence[int], mm_tensors: bytes) -> str:
        if reason := self._reason_against_ids(token_ids):
            return reason
        return self._reason_against_images(token_ids, mm_tensors)

    def _reason_against_images(self, token_ids: Sequence[int], mm_tensors: bytes) -> str:
        """Returns why a prompt with these images cannot be served, or ""; by default, none are."""
        if not mm_tensors:
            return ""
        return (
            "the prompt has images (mm_tensors), and this server takes text alone; serve a model of "
            f"{' or '.join(FAMILIES)} by the embedded engine"
        )

    def check_scoring(self, token_ids: Sequence[int], temperature: float) -> None:
        """Raises InferenceError if a sequence cannot be scored."""
        if not _is_temperature(temperature):
            raise InferenceError(f"temperature = {temperature}; must be between 0.001 and 1000")
        if len(token_ids) > self._max_length:
            raise InferenceError(
                f"a sequence of {len(token_ids)} tokens exceeds inference.max_model_len = "
                f"{self._max_length}; shorten it or raise the limit"
            )
        if reason := self._reason_against_ids(token_ids):
            raise InferenceError(reason)

    def submit(self, request: Request) -> None:
        if not request.is_checked:
            prompt = request.prompt_ids
            reason = self._reason_against_prompt(prompt, request.mm_tensors)
            reason = reason or self._reason_against(len(prompt), request.params)
            if reason:
                raise InferenceError(reason)
        if request.request_id in self._disowned:
            request.on_finish(request.completion("abort", None))
            return
        self._require_room()
        self._waiting[request] = None

    def submit_scoring(self, scoring: Scoring) -> None:
        self.check_scoring(scoring.token_ids, scoring.temperature)
        self._require_room()
        self._scorings[scoring] = None

    def abandon_scoring(self, scoring: Scoring) -> None:
        """Removes a scoring that nobody waits for any more; does nothing if it is done."""
        self._scorings.pop(scoring, None)

    def _require_room(self) -> None:
        if self.num_running + self.num_waiting >= self.capacity:
            raise QueueFullError(f"{self._max_queued} requests are waiting already; try again later")

    def abandon(self, request: Request) -> None:
        """Gives up a request whose answer nobody takes: frees its slot, counts its tokens as cancelled."""
        request.abandoned = True
        self._end(request, "abort")
        self._take_back(request.delivery)

    def _take_back(self, delivery: Delivery | None) -> None:
        if delivery is not None:
            self.counts.delivered[delivery.account] -= delivery.num_tokens
            self.counts.cancelled[delivery.account] += delivery.num_tokens
            delivery.num_tokens = 0

    def disown(self, request_ids: Collection[str]) -> None:
        """Abandons requests whose client got no answer, whether they run, have ended or have not arrived.

        A client that lost its connection cannot know which. A request that arrives later is never started.
        """
        for request in self._requests():
            if request.request_id in request_ids:
                self.abandon(request)
        for request_id in request_ids:
            self._take_back(self._deliveries.pop(request_id, None))
            _remember(self._disowned, request_id, None)

    def abort(self, request_ids: Collection[str], *, booked: bool = True) -> None:
        """Ends these requests now; each delivers what it has. If not `booked`, requests of a run go on."""
        for request in self._requests():
            if request.request_id in request_ids and (booked or not request.account.run):
                self._end(request, "abort")

    def abort_all(self) -> None:
        """Ends every request; each delivers what it has, and scorings an error."""
        for request in self._requests():
            self._end(request, "abort")
        for scoring in list(self._scorings):
            self.abandon_scoring(scoring)
            scoring.on_finish(InferenceError("the engine ended before it was scored"))

    def abandon_all(self) -> None:
        for scoring in list(self._scorings):
            self.abandon_scoring(scoring)
        for request in self._requests():
            self.abandon(request)

    def _requests(self) -> list[Request]:
        return [*self._waiting, *self._running.values()]

    def _start(self, request: Request, slot: Slot) -> None:
        """Moves a waiting request to its slot."""
        del self._waiting[request]
        self._running[slot] = request
        request.slot = slot
        request.started_after = self.num_loads

    def _take(
        self,
        requests: Sequence[Request],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        columns: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Appends one sampled token to each of these running requests, and ends those that are done.

        `columns` are further columns of the schema, by name: a number for each request.
        """
        if not math.isfinite(sum(logprobs)):
            raise InferenceError(
                f"policy version {self.version} gives logits that are not finite; it has diverged"
            )
        self.counts.decode_steps += 1
        self.counts.sampled.update(request.account for request in requests)
        for name, values in (columns or {}).items():
            for request, value in zip(requests, values, strict=True):
                request.columns.setdefault(name, []).append(value)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.append(token, logprob, self.version)
            if reason := self._finish_reason(request):
                self._end(request, reason)

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
        """Frees the slot and delivers the tokens, cancelled if abandoned; nothing if it has ended already."""
        if request in self._waiting:
            del self._waiting[request]
        elif self._running.get(request.slot) is request:  # its slot may be another's by now
            del self._running[request.slot]
            self._free(request.slot)
        else:
            return
        if request.abandoned:
            self.counts.cancelled[request.account] += len(request.token_ids)
        else:
            self.counts.delivered[request.account] += len(request.token_ids)
            request.delivery = Delivery(request.account, len(request.token_ids))
            if request.request_id:
                _remember(self._deliveries, request.request_id, request.delivery)
            request.on_finish(request.completion(reason, *self._experts_of(request)))


def _remember(memory: dict[str, T], key: str, value: T) -> None:
    memory[key] = value
    if len(memory) > _REMEMBERED_REQUESTS:
        del memory[next(iter(memory))]


def _is_temperature(value: float) -> bool:
    return 1e-3 <= value <= 1e3


def run_to_end(engine: SlottedEngine[Any], requests: Iterable[Request]) -> None:
    """Serves these requests and returns: for tests and benchmarks."""
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
