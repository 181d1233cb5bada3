"""vLLM's engine arguments, from the configuration; vLLM itself is not imported here.

Logprobs have to be those of the distribution that was sampled, so vLLM is asked for processed ones. Nothing
is scheduled ahead of the step that is asked for: a policy version holds for whole steps.
"""

import importlib.util
from typing import Any

from pellucid.config import InferenceRunConfig
from pellucid.errors import ConfigError

WORKER = "pellucid.inference.vllm_worker.PublishedWeights"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that vLLM offers; an adapter of a smaller rank fits as well."""
CPU_KV_CACHE_BYTES = 1 << 30
MAX_SCORINGS = 8
"""Sequences that are scored at a time, beside those that are sampled."""
VLLM_REMEDY = (
    "`make vllm` makes an environment with it in .venv-vllm: set inference.python = "
    '".venv-vllm/bin/python" for `pellucid rl`, or start `.venv-vllm/bin/pellucid inference`'
)


def require_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # the latter: a folder of that name that happens to be there
        raise ConfigError(f'inference.backend = "vllm", and vLLM is not installed here; {VLLM_REMEDY}')


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
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        **({"kv_cache_memory_bytes": cache} if cache else {}),
        **_lora_args(config),
    }
    for name in vllm.args:
        if name in own or name in ("enable_lora", "max_lora_rank", "max_loras", "kv_cache_memory_bytes"):
            raise ConfigError(
                f"inference.vllm.args.{name} follows from other settings; leave it out and set those"
            )
    return {**own, **vllm.args}


def _lora_args(config: InferenceRunConfig) -> dict[str, Any]:
    if config.model.lora is None:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_lora_rank(config.model.lora.rank)}


def max_lora_rank(rank: int) -> int:
    """Returns the smallest rank of vLLM's that is large enough: 12 -> 16."""
    for offered in LORA_RANKS:
        if rank <= offered:
            return offered
    raise ConfigError(f"model.lora.rank = {rank} exceeds {LORA_RANKS[-1]}, vLLM's largest; lower it")
