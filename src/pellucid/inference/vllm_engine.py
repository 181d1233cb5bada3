"""vLLM as an engine: it computes and samples; requests, books and policy versions are kept here.

    step    give free slots to waiting requests -> one step of vLLM's core -> take what it sampled

Invariants, besides those of `slots.py`:
- The core steps only when told to, so a weight swap lies between two steps and a token's version is known.
- Keys and values are shared among prompts that start between two loads of weights: the number of loads is the
  salt of the prefix cache. A version may be loaded again, with other weights.
- Running sequences keep their cache and go on under new weights. One that has no token yet starts again, so
  that its prompt is of the version that samples its first token.
- Weights that fail half-way take the engine down: nobody knows any more what would be sampled."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pellucid.config import InferenceRunConfig
from pellucid.config.shared import require_vllm
from pellucid.data import PackedArray
from pellucid.data.tokenizer import check_vocabulary
from pellucid.errors import ConfigError, InferenceError, ModelError, TransportError
from pellucid.inference.client import RankHealth, RankWeightsReport, SamplingParams, group_of_request
from pellucid.inference.slots import Request, Scoring, SlottedEngine
from pellucid.inference.vllm_core import MAX_SCORINGS, Core, RecordedLayers, SampledToken, VllmCore
from pellucid.inference.vllm_ranks import RankedCore
from pellucid.model import RouterShape
from pellucid.model.adapter import adapted_head
from pellucid.model.load import default_device, empty_model, vocab_size
from pellucid.model.routing import known_routers, routed_layers, router_shape, routers_of
from pellucid.transport.weights import weight_shapes
from pellucid.transport.weights_transfer import Receiving


class VllmEngine(SlottedEngine[str]):
    digests_as_read = True

    def __init__(
        self,
        core: Core,
        experts: RouterShape | None = None,
        **options: Any,
    ) -> None:
        """`experts`: shape of those that the core returns, if any. `options`: those of `SlottedEngine`."""
        super().__init__(**options)
        self._core = core
        self._experts = experts
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

    @property
    def num_workers(self) -> int:
        return self._core.num_workers

    def update_weights(self, version: int, folder: Path) -> None:
        self._replace(version, lambda: self._core.load(folder))

    def receive_weights(self, version: int, receiving: Receiving) -> None:
        self._replace(version, lambda: self._core.receive(receiving))

    def _replace(self, version: int, load: Callable[[], bool]) -> None:
        try:
            goes_on = load()
        except TransportError:
            raise
        except BaseException as error:
            self._failure = error
            raise
        self.version = version
        self.num_loads += 1
        for request in list(self._running.values()):
            if not goes_on or not request.token_ids:
                self._restart(request)
        for key in self._scoring:
            self._core.stop(key)
        self._scoring.clear()

    def served_digests(self) -> dict[str, str]:
        return self._core.digests

    def rank_weights(self) -> list[RankWeightsReport]:
        return [RankWeightsReport(each.rank, self.version, each.digests) for _, each in self._core.ranks()]

    def rank_health(self) -> list[RankHealth]:
        return [
            RankHealth(each.rank, self.version, each.running, each.sampled_tokens)
            for each, _ in self._core.ranks()
        ]

    def close(self) -> None:
        self._core.close()

    def step(self) -> None:
        if self._failure is not None:
            raise InferenceError("weights could not be loaded, and it is not known which are served") from (
                self._failure
            )
        self._admit()
        sampled, scored = self._core.step()
        self._count_prompts(sampled)
        self._keep_experts(sampled)
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
            group = group_of_request(request.request_id)
            self._core.start(key, request.prompt_ids, request.params, str(self.num_loads), group)
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
        request.slot, request.started_after = key, self.num_loads
        request.experts.clear()  # all tokens are computed again, maybe by other experts
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
            str(self.num_loads),
            group_of_request(request.request_id),
        )

    def _count_prompts(self, sampled: Sequence[SampledToken]) -> None:
        for each in sampled:
            if each.num_shared is not None:
                request = self._running[each.key]
                num_prompt = len(request.prompt_ids) + len(request.token_ids)
                self.counts.shared_tokens += each.num_shared
                self.counts.prefill_tokens += num_prompt - each.num_shared

    def _keep_experts(self, sampled: Sequence[SampledToken]) -> None:
        """Stores the experts that came with the tokens: of every token before each, once."""
        if self._experts is None:
            return
        for each in sampled:
            request = self._running[each.key]
            request.experts += each.experts
            num_tokens = len(request.prompt_ids) + len(request.token_ids)
            if len(request.experts) != num_tokens * self._experts.num_bytes:
                raise InferenceError(
                    f"vLLM gave {len(request.experts)} bytes of routed experts for {num_tokens} tokens of "
                    f"{self._experts.num_bytes}; set inference.record_experts = false, or install vLLM "
                    f"{_RETURNS_EXPERTS}"
                )

    def _experts_of(self, request: Request) -> tuple[PackedArray | None, PackedArray | None]:
        return (None, None) if self._experts is None else self._experts.pack(request.experts)

    def _free(self, slot: str) -> None:
        self._core.stop(slot)


def open_vllm(config: InferenceRunConfig, tokenizer: Any) -> VllmEngine:
    require_vllm()
    settings, name = config.inference, config.model.name
    model = empty_model(config.model)
    shapes = weight_shapes(model)
    if not takes_new_weights(model):
        raise ModelError(
            f"model.name = {name!r} has experts of another kind than Qwen2-MoE, Qwen3-MoE and OLMoE, and "
            'inference.backend = "vllm" takes no new weights of these; use "embedded"'
        )
    if config.model.lora is not None and (head := adapted_head(model, config.model.lora)):
        raise ConfigError(
            f"model.lora.targets names the head ({head}), and whether vLLM takes its adapter was not tried; "
            'leave it out, or use inference.backend = "embedded"'
        )
    recorded = None
    if settings.record_experts:
        from vllm import __version__
        from vllm.engine.arg_utils import EngineArgs
        from vllm.outputs import CompletionOutput
        from vllm.triton_utils import HAS_TRITON

        require_experts(__version__, EngineArgs, CompletionOutput, has_triton=HAS_TRITON)
        routers = routers_of(model, "inference.record_experts")
        recorded = RecordedLayers(router_shape(routers), routed_layers(model, routers))
    num_ids = vocab_size(config.model)
    check_vocabulary(name, num_tokens=len(tokenizer), vocab_size=num_ids)
    core: Core
    if settings.vllm.data_parallel_size > 1:
        core = RankedCore(config, shapes, recorded, is_coupled=bool(known_routers(model)))
    else:
        core = VllmCore(config, shapes, recorded)
    return VllmEngine(
        core,
        None if recorded is None else recorded.shape,
        num_slots=settings.max_concurrent,
        max_length=settings.max_model_len,
        max_queued=settings.max_queued,
        vocab_size=num_ids,
        decode_text=tokenizer.decode,
    )


def takes_new_weights(model: torch.nn.Module) -> bool:
    """Returns whether vLLM takes new weights of a model that it has: not of experts that were not tried."""
    return bool(known_routers(model)) or not any(".experts." in name for name in weight_shapes(model))


_RETURNS_EXPERTS = "0.32.0"
"""A version that returns routed experts."""


def require_experts(version: str, arguments: type, output: type, *, has_triton: bool) -> None:
    """Raises ConfigError unless a vLLM with these classes returns routed experts with the tokens."""
    if not (hasattr(arguments, "enable_return_routed_experts") and hasattr(output, "routed_experts")):
        lacks, remedy = f"vLLM {version} returns no routed experts", f"install vLLM {_RETURNS_EXPERTS}"
    elif not has_triton:
        lacks = f"vLLM {version} returns routed experts by its model runner V2 alone, which needs Triton"
        remedy = "run it on a GPU (its CPU build has no Triton)"
    else:
        return
    raise ConfigError(
        f'inference.record_experts = true, and {lacks}; {remedy}, set inference.backend = "embedded", or '
        "leave out trainer.enable_router_replay"
    )


def restart_with_threads(num_threads: int) -> None:
    """Starts this program anew, unless the environment says how many threads OpenMP may use.

    vLLM's attention for CPUs plans in one thread what it does in another, and fails where their numbers
    differ. They agree only if OpenMP finds the number in the environment when it is loaded.
    """
    require_vllm()
    if default_device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
