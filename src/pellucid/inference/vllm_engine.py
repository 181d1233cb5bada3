"""vLLM as an engine: it computes and samples; requests, books and policy versions are kept here.

    step    give free slots to waiting requests -> one step of vLLM's core -> take what it sampled

Invariants, besides those of `slots.py`:
- The core steps only when told to, so a weight swap lies between two steps and a token's version is known.
- Keys and values are shared among prompts of one policy version: the version is the salt of the prefix cache.
- Running sequences keep their cache and go on under new weights. One that has no token yet starts again, so
  that its prompt is of the version that samples its first token.
- Weights that fail half-way take the engine down: nobody knows any more what would be sampled.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pellucid.errors import InferenceError, TransportError
from pellucid.inference.client import SamplingParams
from pellucid.inference.scoring import Scoring
from pellucid.inference.slots import Request, SlottedEngine
from pellucid.inference.vllm_args import MAX_SCORINGS


class SampledToken(NamedTuple):
    key: str
    token: int
    logprob: float
    num_shared: int | None
    """Tokens of the prompt that were in the cache already; None after the first token."""


class Scored(NamedTuple):
    key: str
    logprobs: list[float]


class Core(Protocol):
    """The part of vLLM that the engine uses. Keys name requests and are never used twice."""

    def start(self, key: str, token_ids: Sequence[int], params: SamplingParams, salt: str) -> None:
        """Starts to sample up to `params.max_tokens`; stop tokens and strings are left to the caller."""

    def score(self, key: str, token_ids: Sequence[int]) -> None: ...

    def stop(self, key: str) -> None:
        """Ends a request; does nothing if it has ended already."""

    def step(self) -> tuple[Sequence[SampledToken], Sequence[Scored]]: ...

    def load(self, folder: Path) -> bool:
        """Loads published weights; returns whether running requests continue under them.

        If not, the caller has to start them again. Raises TransportError, having changed nothing, for weights
        that do not fit.
        """


class VllmEngine(SlottedEngine[str]):
    def __init__(
        self,
        core: Core,
        *,
        num_slots: int,
        max_length: int,
        max_queued: int,
        vocab_size: int,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        super().__init__(
            num_slots=num_slots,
            max_length=max_length,
            max_queued=max_queued,
            vocab_size=vocab_size,
            decode_text=decode_text,
        )
        self._core = core
        self._keys = map(str, itertools.count())
        self._scoring: dict[str, Scoring] = {}
        """Scorings that the core is computing, by key."""
        self._failure: BaseException | None = None

    def check_scoring(self, token_ids: Sequence[int], temperature: float) -> None:
        super().check_scoring(token_ids, temperature)
        if len(token_ids) == self._max_length:
            raise InferenceError(
                f"a sequence of {len(token_ids)} tokens leaves no room below inference.max_model_len = "
                f"{self._max_length} for the token that vLLM samples after it; shorten it or raise the limit"
            )
        if temperature != 1:
            raise InferenceError(
                f"temperature = {temperature}; vLLM gives the logprobs of given tokens at temperature 1 only"
            )

    def abandon_scoring(self, scoring: Scoring) -> None:
        super().abandon_scoring(scoring)
        for key in [key for key, running in self._scoring.items() if running is scoring]:
            del self._scoring[key]
            self._core.stop(key)

    def update_weights(self, version: int, folder: Path) -> None:
        try:
            goes_on = self._core.load(folder)
        except TransportError:
            raise
        except BaseException as error:
            self._failure = error
            raise
        self.version = version
        for request in list(self._running.values()):
            if not goes_on or not request.token_ids:
                self._restart(request)
        for key in self._scoring:
            self._core.stop(key)
        self._scoring.clear()

    def step(self) -> None:
        if self._failure is not None:
            raise InferenceError("weights could not be loaded, and it is not known which are served") from (
                self._failure
            )
        self._admit()
        sampled, scored = self._core.step()
        self._count_prompts(sampled)
        if sampled:
            self._take(
                [self._running[each.key] for each in sampled],
                [each.token for each in sampled],
                [each.logprob for each in sampled],
            )
        for key, logprobs in scored:
            scoring = self._scoring.pop(key)
            del self._scorings[scoring]
            self.counts.scored_tokens += len(logprobs)
            scoring.finish(logprobs, self.version)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.num_slots:
            request = next(iter(self._waiting))
            key = next(self._keys)
            self._start(request, key)
            self._core.start(key, request.prompt_ids, request.params, str(self.version))
        for scoring in list(self._scorings):
            if len(self._scoring) >= MAX_SCORINGS:
                break
            if scoring not in self._scoring.values():
                key = next(self._keys)
                self._scoring[key] = scoring
                self._core.score(key, scoring.token_ids)

    def _restart(self, request: Request) -> None:
        """Starts a request again under the current weights; its sampled tokens become part of its prompt."""
        old, key = request.slot, next(self._keys)
        self._core.stop(old)
        del self._running[old]
        self._running[key] = request
        request.slot, request.started_at = key, self.version
        params = request.params
        num_sampled = len(request.token_ids)
        self._core.start(
            key,
            [*request.prompt_ids, *request.token_ids],
            SamplingParams(
                temperature=params.temperature,
                max_tokens=params.max_tokens - num_sampled,
                # Not the same draws once more.
                seed=None if params.seed is None else params.seed + num_sampled,
            ),
            str(self.version),
        )

    def _count_prompts(self, sampled: Sequence[SampledToken]) -> None:
        for each in sampled:
            if each.num_shared is not None:
                request = self._running[each.key]
                self.counts.shared_tokens += each.num_shared
                self.counts.prefill_tokens += (
                    len(request.prompt_ids) + len(request.token_ids) - each.num_shared
                )

    def _free(self, slot: str) -> None:
        self._core.stop(slot)
