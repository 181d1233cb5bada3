"""vLLM's engine in this process, stepped by hand: the only module that imports vLLM.

Its core runs here and not in a process of its own (workers of tensor parallelism do): what a step returns was
sampled in that step, under the weights of that step.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pellucid.config import InferenceRunConfig
from pellucid.data.tokenizer import check_vocabulary
from pellucid.errors import ModelError
from pellucid.inference.client import SamplingParams
from pellucid.inference.vllm_args import engine_args, require_vllm
from pellucid.inference.vllm_engine import SampledToken, Scored, VllmEngine
from pellucid.model.load import default_device, empty_model, resolve_dtype, vocab_size
from pellucid.transport.weights import check_adapter, check_weights, is_adapter, weight_shapes

_NUM_SEEDS = 2**63
_ADAPTER = 1
"""vLLM's number for the policy's adapter: a newer one takes its place, and what runs goes on with it."""


def open_vllm(config: InferenceRunConfig, tokenizer: Any) -> VllmEngine:
    require_vllm()
    settings, name = config.inference, config.model.name
    shapes = weight_shapes(empty_model(config.model))
    if any(".experts." in parameter for parameter in shapes):
        raise ModelError(
            f'model.name = {name!r} has experts, and inference.backend = "vllm" takes new weights of models '
            'without them only; use "embedded"'
        )
    num_ids = vocab_size(config.model)
    check_vocabulary(name, num_tokens=len(tokenizer), vocab_size=num_ids)
    return VllmEngine(
        VllmCore(config, shapes),
        num_slots=settings.max_concurrent,
        max_length=settings.max_model_len,
        max_queued=settings.max_queued,
        vocab_size=num_ids,
        decode_text=tokenizer.decode,
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
    """Implements `vllm_engine.Core`."""

    def __init__(self, config: InferenceRunConfig, shapes: Mapping[str, torch.Size]) -> None:
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
        self._engine = _start(args)
        self._shapes = shapes
        self._max_rank: int | None = args.get("max_lora_rank")
        self._adapter: Any = None
        self._new: set[str] = set()
        """Keys of requests that have no token yet."""

    def start(self, key: str, token_ids: Sequence[int], params: SamplingParams, salt: str) -> None:
        self._new.add(key)
        seed = None if params.seed is None else params.seed % _NUM_SEEDS
        wanted = {"temperature": params.temperature, "seed": seed, "max_tokens": params.max_tokens}
        self._add(key, token_ids, salt, **wanted)

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
            for token, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
                shared = output.num_cached_tokens if key in self._new else None
                self._new.discard(key)
                sampled.append(SampledToken(key, token, logprobs[token].logprob, shared))
        return sampled, scored

    def load(self, folder: Path) -> bool:
        before = self._adapter
        if is_adapter(folder):
            self._load_adapter(folder)
        else:
            check_weights(folder, self._shapes)
            self._engine.collective_rpc("load_published", args=(str(folder),))
            self._adapter = None
        return (before is None) == (self._adapter is None)

    def _load_adapter(self, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        check_adapter(folder, self._shapes, max_rank=self._max_rank or 0)
        self._engine.add_lora(LoRARequest("policy", _ADAPTER, str(folder), load_inplace=True))
        self._adapter = LoRARequest("policy", _ADAPTER, str(folder))


def _start(args: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = EngineArgs(**args).create_engine_config()
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
