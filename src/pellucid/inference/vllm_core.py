"""The part of vLLM that the engine uses, through a narrow door that a fake fits, too; see `vllm_engine`.

`VllmCore` is one of vLLM's engines in this process. `vllm_ranks.RankedCore` is several of them, each in a
process of its own, behind the same methods."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pellucid.config import InferenceRunConfig
from pellucid.config.shared import InferenceConfig
from pellucid.errors import ConfigError, InferenceError, TransportError
from pellucid.inference.client import SamplingParams
from pellucid.model import RouterShape
from pellucid.model.load import default_device, resolve_dtype
from pellucid.transport.weights import check_adapter, check_weights, is_adapter, require_shapes
from pellucid.transport.weights_transfer import Receiving, why_no_transfer

WORKER = "pellucid.inference.vllm_worker.PublishedWeights"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that vLLM offers; an adapter of a smaller rank fits as well."""
CPU_KV_CACHE_BYTES = 1 << 30
MAX_SCORINGS = 8
"""Sequences that are scored at a time, beside those that are sampled."""


_FOLLOW = ("enable_lora", "max_lora_rank", "max_loras", "kv_cache_memory_bytes", "weight_transfer_config")
"""Arguments that follow from other settings, besides those that are always given."""


def slots_per_rank(settings: InferenceConfig) -> int:
    return -(-settings.max_concurrent // settings.vllm.data_parallel_size)


def engine_args(
    config: InferenceRunConfig, *, dtype: str, on_cpu: bool, is_sent: bool = False
) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `EngineArgs`. `is_sent`: the trainer may send weights."""
    settings, vllm = config.inference, config.inference.vllm
    cache = vllm.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    own: dict[str, Any] = {
        "model": config.model.name,
        "dtype": dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": slots_per_rank(settings) + MAX_SCORINGS,
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
    if is_sent:
        own["weight_transfer_config"] = {"backend": config.weights.transfer}
    for name in vllm.args:
        if name in own or name in _FOLLOW:
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


class RecordedLayers(NamedTuple):
    """The layers whose experts vLLM records."""

    shape: RouterShape
    layers: list[int]
    """Decoder layers with a router; vLLM returns experts for every layer."""


_NUM_SEEDS = 2**63
_ADAPTER = 1
"""vLLM's number for the policy's adapter: a newer one takes its place, and what runs goes on with it."""


class RankWeights(NamedTuple):
    """The weights that a data-parallel rank serves."""

    rank: int
    digests: dict[str, str]
    """Those of the published tensors that its workers were handed last; see `Core.digests`."""


class RankLoad(NamedTuple):
    rank: int
    running: int
    sampled_tokens: int


class Core(Protocol):
    """Keys name requests and are never used twice."""

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the published tensors that the workers took last, each as it was handed to vLLM. vLLM
        fuses, shards and packs them, and reads adapters itself: of those there are none."""

    num_workers: int
    """Processes that take weights."""

    def start(
        self, key: str, token_ids: Sequence[int], params: SamplingParams, salt: str, group: str
    ) -> None:
        """Starts to sample up to `params.max_tokens`; stop tokens and strings are left to the caller.

        Requests of a `group` share prompts; "" is none.
        """

    def score(self, key: str, token_ids: Sequence[int]) -> None:
        """Asks for the logprobs of a prompt; vLLM always samples a token, too, which is ignored."""

    def stop(self, key: str) -> None:
        """Ends a request; does nothing if it has ended already."""

    def step(self) -> tuple[list[SampledToken], list[Scored]]: ...

    def load(self, folder: Path) -> bool:
        """Loads published weights; returns whether running requests continue under them.

        If not, the caller has to start them again. Raises TransportError, having changed nothing, for weights
        that do not fit.
        """

    def receive(self, receiving: Receiving) -> bool:
        """Like `load`, with weights that the trainer sends."""

    def ranks(self) -> list[tuple[RankLoad, RankWeights]]:
        """Returns what each data-parallel rank does and serves; nothing where there is one."""

    def close(self) -> None: ...


class VllmCore:
    def __init__(
        self,
        config: InferenceRunConfig,
        shapes: Mapping[str, torch.Size],
        recorded: RecordedLayers | None = None,
        rank: "DataParallelRank | None" = None,
    ) -> None:
        """`recorded`: layers whose experts are returned with the tokens. `rank`: which of several this is."""
        device = default_device()
        dtype = str(resolve_dtype(config.model, device)).removeprefix("torch.")
        transfer = config.weights.transfer
        is_sent = transfer != "files" and not why_no_transfer(transfer)
        args = engine_args(config, dtype=dtype, on_cpu=device.type == "cpu", is_sent=is_sent)
        if device.type == "cpu" and args["enforce_eager"]:
            torch._dynamo.config.disable = True  # vLLM compiles parts of its sampler even so: 40 s
        # On a CPU, vLLM binds threads to cores, which others need, too.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if transfer == "ipc":
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles come pickled, from the trainer
        if recorded is not None:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the other one returns no experts
        self._engine = _start(args, rank)
        self._is_coupled = rank is not None and rank.is_coupled
        self.num_workers: int = self._engine.vllm_config.parallel_config.world_size
        self._shapes = shapes
        self._recorded = recorded
        self._max_rank: int = args.get("max_lora_rank") or 0
        self._adapter: Any = None
        self._new: set[str] = set()
        """Keys of requests that have no token yet."""

        self.digests: dict[str, str] = {}
        self._arrived: dict[str, str] = {}
        """Those of a load that is under way."""

    def start(
        self, key: str, token_ids: Sequence[int], params: SamplingParams, salt: str, group: str = ""
    ) -> None:
        self._new.add(key)
        seed = None if params.seed is None else params.seed % _NUM_SEEDS
        self._add(
            key, token_ids, salt, temperature=params.temperature, seed=seed, max_tokens=params.max_tokens
        )

    def score(self, key: str, token_ids: Sequence[int]) -> None:
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
        self._new.discard(key)
        self._engine.abort_request([key])

    def step(self) -> tuple[list[SampledToken], list[Scored]]:
        sampled, scored = [], []
        if self._is_coupled:
            self._engine.has_unfinished_requests()  # all ranks ask; one without has to compute along
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
        check_published(folder, self._shapes, self._max_rank)
        if is_adapter(folder):
            return self._load_adapter(folder)
        self.call_workers("load_published", {"folder": str(folder)})
        return self.take_arrived()

    def receive(self, receiving: Receiving) -> bool:
        received(receiving, self._shapes, self.call_workers)
        return self.take_arrived()

    def call_workers(self, method: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Has every worker do it; returns the digests of the tensors that came with it."""
        results = self._engine.collective_rpc(method, kwargs=dict(arguments))
        digests = agreed([result or {} for result in results])
        self._arrived |= digests
        return digests

    def take_arrived(self) -> bool:
        """Serves the weights that the workers have by now; returns whether running requests continue."""
        goes_on = self._adapter is None
        self.digests, self._arrived, self._adapter = self._arrived, {}, None
        return goes_on

    def ranks(self) -> list[tuple[RankLoad, RankWeights]]:
        return []

    def close(self) -> None:
        """Nothing: it ends with the process."""

    def _load_adapter(self, folder: Path) -> bool:
        from vllm.lora.request import LoRARequest

        goes_on = self._adapter is not None
        self._engine.add_lora(LoRARequest("policy", _ADAPTER, str(folder), load_inplace=True))
        self._adapter = LoRARequest("policy", _ADAPTER, str(folder))
        self.digests = {}
        return goes_on


def check_published(folder: Path, shapes: Mapping[str, torch.Size], max_rank: int) -> None:
    """Raises TransportError unless the published weights, or the adapter, fit the model."""
    if is_adapter(folder):
        check_adapter(folder, shapes, max_rank=max_rank)
    else:
        check_weights(folder, shapes)


_OWN = {
    "start_weight_update": "start_transfer",
    "update_weights": "receive_published",
    "finish_weight_update": "finish_transfer",
}
"""Methods of `vllm_worker` for calls of vLLM's protocol that take more than vLLM does."""


def received(
    receiving: Receiving,
    shapes: Mapping[str, torch.Size],
    call: Callable[[str, Mapping[str, Any]], dict[str, str]],
) -> dict[str, str]:
    """Has the workers take what the trainer sends; returns the digests of all tensors, as they arrived.

    `call` has all workers do something. Raises TransportError, having changed nothing, if the weights do not
    fit the model.
    """
    try:
        require_shapes(receiving.shapes, shapes, "what the trainer sends")
    except TransportError as error:
        receiving.refuse(str(error))
        raise
    digests: dict[str, str] = {}
    try:
        receiving.carry_out(
            lambda method, arguments: digests.update(call(_OWN.get(method, method), arguments))
        )
    except TransportError as error:
        raise InferenceError(f"the trainer's weights came by half: {error}") from error
    call("shutdown_weight_transfer_engine", {})
    if missing := sorted(shapes.keys() - digests.keys()):
        raise InferenceError(f"the trainer's weights came by half: {missing[:3]} are missing")
    return digests


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


class DataParallelRank(NamedTuple):
    """One of several of vLLM's engines that serve together."""

    rank: int
    size: int
    is_coupled: bool
    """Whether its layers of experts exchange tokens with those of the others, so that all step together."""

    port: int
    """Where coupled ranks meet, on this machine."""


def _start(args: Mapping[str, Any], rank: DataParallelRank | None) -> Any:
    if rank is not None and rank.is_coupled:
        numbers = {"RANK": rank.rank, "RANK_LOCAL": rank.rank, "SIZE": rank.size, "MASTER_PORT": rank.port}
        os.environ |= {f"VLLM_DP_{name}": str(number) for name, number in numbers.items()}
        os.environ["VLLM_DP_MASTER_IP"] = "127.0.0.1"

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**args).create_engine_config()
    if rank is not None and not rank.is_coupled:
        # As vLLM numbers the ranks of a dense model: which GPUs are theirs, and how they draw.
        config.parallel_config.data_parallel_index = rank.rank
        config.parallel_config.data_parallel_rank_local = rank.rank
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
