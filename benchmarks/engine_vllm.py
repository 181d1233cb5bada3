"""Sampling ragged requests with logprobs: the embedded engine against vLLM, same weights, one process.

    $ .venv-vllm/bin/python -m benchmarks engine_vllm      # made by `make vllm`

vLLM samples as its own `LLM.generate` does: all requests are given at once, none is streamed, and it
schedules ahead. It is asked twice: compiled, as it comes, and with `enforce_eager`. All have 64 slots and one
thread, draw from the whole distribution, and deliver the logprob of every token. They take turns, and the
fastest of several runs counts.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import SLOTS, Asked, draw_requests, sample
from benchmarks.result import Result, fastest_each_s
from benchmarks.shapes import MAKERS
from pellucid.config import ModelConfig
from pellucid.errors import MissingPackageError
from pellucid.model import load_policy
from pellucid.workers import keep_freed_memory

MODEL = "135M"
CASES = [(64, 24, 1), (64, 24, 8), (64, 128, 1)]
"""(requests, longest completion, requests with the same prompt)."""

KINDS = {"vLLM, compiled": False, "vLLM, eager": True}
CACHE_BYTES = 1 << 30


def run() -> list[Result]:
    if find_spec("vllm") is None:
        raise MissingPackageError(
            "vllm is not installed here; run `make vllm`, and this by .venv-vllm/bin/python"
        )
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        MAKERS[MODEL](Path(folder))
        policy = load_policy(ModelConfig(name=folder, dtype="float32"))
        engines = {kind: _open_vllm(folder, is_eager=is_eager) for kind, is_eager in KINDS.items()}
        results = []
        for num_requests, longest, group in CASES:
            asked = draw_requests(policy.vocab_size, num_requests, longest, group)
            sides: list[Callable[[Asked], object]] = [
                partial(sample, policy),
                *(partial(_generate, engine) for engine in engines.values()),
            ]
            for side in sides:
                side(asked[:8])
            our_s, *their_s = fastest_each_s([partial(side, asked) for side in sides], repeats=3)
            tokens = sum(count for _, count in asked)
            name = f"engine, {MODEL}, {num_requests} requests of up to {longest} tokens" + (
                f" in groups of {group}" if group > 1 else ""
            )
            results += [
                Result(name, tokens / our_s, tokens / seconds, "tok/s", kind)
                for kind, seconds in zip(engines, their_s, strict=True)
            ]
    return results


def _open_vllm(folder: str, *, is_eager: bool) -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(
        folder,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=SLOTS,
        enforce_eager=is_eager,
        skip_tokenizer_init=True,
        generation_config="vllm",
        kv_cache_memory_bytes=CACHE_BYTES,
    )


def _generate(engine: Any, asked: Asked) -> None:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    engine.reset_prefix_cache()  # ours starts with an empty one, too
    outputs = engine.generate(
        [tokens_input(list(ids)) for ids, _ in asked],
        [
            SamplingParams(max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False)
            for _, count in asked
        ],
        use_tqdm=False,
    )
    found = [len(output.outputs[0].logprobs) for output in outputs]
    assert found == [count for _, count in asked], "vLLM sampled other numbers of tokens"
