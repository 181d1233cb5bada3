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
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pellucid.config import InferenceRunConfig
from pellucid.config.shared import require_vllm
from pellucid.data import PackedArray
from pellucid.data.tokenizer import check_vocabulary
from pellucid.errors import ConfigError, InferenceError, ModelError, TransportError
from pellucid.inference.client import SamplingParams
from pellucid.inference.slots import Request, Scoring, SlottedEngine
from pellucid.model import RouterShape
from pellucid.model.adapter import adapted_head
from pellucid.model.load import default_device, empty_model, resolve_dtype, vocab_size
from pellucid.model.routing import known_routers, routed_layers, router_shape, routers_of
from pellucid.transport.weights import (
    check_adapter,
    check_weights,
    digest_of,
    is_adapter,
    read_weights,
    weight_shapes,
)

WORKER = "pellucid.inference.vllm_engine.PublishedWeights"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that vLLM offers; an adapter of a smaller rank fits as well."""
CPU_KV_CACHE_BYTES = 1 << 30
MAX_SCORINGS = 8
"""Sequences that are scored at a time, beside those that are sampled."""


def engine_args(config: InferenceRunConfig, *, dtype: str, on_cpu: bool) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `EngineArgs`."""
    settings, vllm = config.inference, config.inference.vllm
    cache = vllm.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    own: dict[str, Any] = {
        "model": config.model.name,
        "dtype": dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_concurrent + MAX_SCORINGS,
        "seed": config.seed + settings.replica,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": WORKER,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enforce_eager": on_cpu if vllm.enforce_eager is None else vllm.enforce_eager,
        **({"enable_return_routed_experts": True} if settings.record_experts else {}),
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        **({"kv_cache_memory_bytes": cache} if cache else {}),
    }
    if config.model.lora is not None:
        rank = max_lora_rank(config.model.lora.rank)
        own |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    for name in vllm.args:
        if name in own or name in ("enable_lora", "max_lora_rank", "max_loras", "kv_cache_memory_bytes"):
            raise ConfigError(
                f"inference.vllm.args.{name} follows from other settings; leave it out and set those"
            )
    return {**own, **vllm.args}


def max_lora_rank(rank: int) -> int:
    """Returns the smallest rank of vLLM's that is large enough: 12 -> 16."""
    for offered in LORA_RANKS:
        if rank <= offered:
            return offered
    raise ConfigError(f"model.lora.rank = {rank} exceeds {LORA_RANKS[-1]}, vLLM's largest; lower it")


class SampledToken(NamedTuple):
    key: str
    token: int
    logprob: float
    num_shared: int | None
    """Tokens of the prompt that were in the cache already; None after the first token."""

    experts: bytes = b""
    """Routed experts of the tokens before it that have come with no earlier one, if they are recorded."""


class Scored(NamedTuple):
    key: str
    logprobs: list[float]


class VllmEngine(SlottedEngine[str]):
    digests_as_read = True

    def __init__(
        self,
        core: "VllmCore",
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

    def update_weights(self, version: int, folder: Path) -> None:
        try:
            goes_on = self._core.load(folder)
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
            self._core.start(key, request.prompt_ids, request.params, str(self.num_loads))
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


_NUM_SEEDS = 2**63
_ADAPTER = 1
"""vLLM's number for the policy's adapter: a newer one takes its place, and what runs goes on with it."""


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
    return VllmEngine(
        VllmCore(config, shapes, recorded),
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


class RecordedLayers(NamedTuple):
    """The layers whose experts vLLM records."""

    shape: RouterShape
    layers: list[int]
    """Decoder layers with a router; vLLM returns experts for every layer."""


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


class VllmCore:
    """The part of vLLM that the engine uses. Keys name requests and are never used twice."""

    def __init__(
        self,
        config: InferenceRunConfig,
        shapes: Mapping[str, torch.Size],
        recorded: RecordedLayers | None = None,
    ) -> None:
        """`recorded`: layers whose experts are returned with the tokens."""
        device = default_device()
        dtype = str(resolve_dtype(config.model, device)).removeprefix("torch.")
        args = engine_args(config, dtype=dtype, on_cpu=device.type == "cpu")
        if device.type == "cpu" and args["enforce_eager"]:
            torch._dynamo.config.disable = True  # vLLM compiles parts of its sampler even so: 40 s
        # On a CPU, vLLM binds threads to cores, which others need, too.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if recorded is not None:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the other one returns no experts
        self._engine = _start(args)
        self._shapes = shapes
        self._recorded = recorded
        self._max_rank: int | None = args.get("max_lora_rank")
        self._adapter: Any = None
        self._new: set[str] = set()
        """Keys of requests that have no token yet."""

        self.digests: dict[str, str] = {}
        """Digests of the published tensors that the workers read last, each as it was handed to vLLM. vLLM
        fuses, shards and packs them, and reads adapters itself: of those there are none."""

    def start(self, key: str, token_ids: Sequence[int], params: SamplingParams, salt: str) -> None:
        """Starts to sample up to `params.max_tokens`; stop tokens and strings are left to the caller."""
        self._new.add(key)
        seed = None if params.seed is None else params.seed % _NUM_SEEDS
        self._add(
            key, token_ids, salt, temperature=params.temperature, seed=seed, max_tokens=params.max_tokens
        )

    def score(self, key: str, token_ids: Sequence[int]) -> None:
        """Asks for the logprobs of a prompt; vLLM always samples a token, too, which is ignored."""
        self._add(key, token_ids, salt=None, max_tokens=1, prompt_logprobs=0)

    def _add(self, key: str, token_ids: Sequence[int], salt: str | None, **params: Any) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(
            key,
            tokens_input(list(token_ids), cache_salt=salt),
            VllmParams(
                logprobs=0,  # that of the sampled token
                ignore_eos=True,  # who asks says where to stop
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                **params,
            ),
            lora_request=self._adapter,
        )

    def stop(self, key: str) -> None:
        """Ends a request; does nothing if it has ended already."""
        self._new.discard(key)
        self._engine.abort_request([key])

    def step(self) -> tuple[list[SampledToken], list[Scored]]:
        sampled, scored = [], []
        for output in self._engine.step():
            key = output.request_id
            if output.prompt_logprobs is not None:
                pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                scored.append(Scored(key, [math.nan, *(found[token].logprob for token, found in pairs)]))
                continue
            choice = output.outputs[0]
            experts = self._experts(output)
            for token, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
                shared = output.num_cached_tokens if key in self._new else None
                self._new.discard(key)
                sampled.append(SampledToken(key, token, logprobs[token].logprob, shared, experts))
                experts = b""
        return sampled, scored

    def _experts(self, output: Any) -> bytes:
        """Returns the routed experts that this step added to a request.

        vLLM gives all of them with a request's last token. A request that is stopped has no last token for
        vLLM, so those of other steps are taken from where vLLM gathers them.
        """
        if self._recorded is None:
            return b""
        if output.finished:
            rows = output.outputs[0].routed_experts
            chunks = [] if rows is None else [rows]
        else:
            processor = self._engine.output_processor
            (internal,) = processor.external_req_ids[output.request_id]
            gathered = processor.request_states[internal].routed_experts_chunks
            chunks = gathered[:]
            gathered.clear()
        dtype, layers = self._recorded.shape.dtype, self._recorded.layers
        return b"".join(chunk[:, layers].astype(dtype).tobytes() for chunk in chunks)

    def load(self, folder: Path) -> bool:
        """Loads published weights; returns whether running requests continue under them.

        If not, the caller has to start them again. Raises TransportError, having changed nothing, for weights
        that do not fit.
        """
        before = self._adapter
        if is_adapter(folder):
            self._load_adapter(folder)
            self.digests = {}
        else:
            check_weights(folder, self._shapes)
            self.digests = agreed(self._engine.collective_rpc("load_published", args=(str(folder),)))
            self._adapter = None
        return (before is None) == (self._adapter is None)

    def _load_adapter(self, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        check_adapter(folder, self._shapes, max_rank=self._max_rank or 0)
        self._engine.add_lora(LoRARequest("policy", _ADAPTER, str(folder), load_inplace=True))
        self._adapter = LoRARequest("policy", _ADAPTER, str(folder))


def agreed(workers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the digests of what every worker was handed; one that differs stands for all.

    `agreed([{"a": "F32-0"}, {"a": "F32-0", "b": "F32-1"}]) == {"a": "F32-0"}`
    """
    first, *others = workers
    found = {}
    for name, digest in first.items():
        digests = [worker.get(name) for worker in others]
        if None not in digests:
            found[name] = next((each for each in digests if each is not None and each != digest), digest)
    return found


def _start(args: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**args).create_engine_config()
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


class PublishedWeights:
    device: torch.device
    model_config: Any
    model_runner: Any
    reload_weights: Any

    def load_published(self, folder: str) -> dict[str, str]:
        """Loads the weights; each worker reads the whole file and keeps its shard.

        Returns the digests of the tensors that vLLM took.
        """
        digests: dict[str, str] = {}
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            forget_expert_kernels(model)
        self.reload_weights(weights_iterator=_digested(read_weights(Path(folder)), digests))
        if self.model_config.hf_text_config.tie_word_embeddings:
            # vLLM prepares again what it has loaded, and a tied head loads nothing of its own. On a CPU it
            # multiplies with a packed copy of the embedding, which would stay as it was.
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        return digests


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Makes vLLM pad and pack the experts that it loads next as its kernel for CPUs reads them, which it does
    where there is no kernel yet: for the first weights alone."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _digested(
    weights: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes tensors on, and notes the digest of each before it is handed over."""
    for name, tensor in weights:
        digests[name] = digest_of(tensor)
        yield name, tensor
