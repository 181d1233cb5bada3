"""Mismatch KL between engine and trainer of a model with experts: replayed against routed anew.

The engine samples from a tiny Qwen3-MoE model. The trainer has the same weights and a disturbance: noise on
the inputs of its routers, or float32 where the engine has bfloat16. Means over all sampled tokens; the lower,
the better.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.result import Result
from pellucid.config import ModelConfig
from pellucid.data import Completion, RecordedExperts, join_experts
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy, load_policy, packed_layout
from pellucid.model.routing import routers_of
from pellucid.model.tiny import make_tiny_moe_model

NUM_SAMPLES, PROMPT, COMPLETION = 16, 12, 40


@dataclass(frozen=True, slots=True)
class _Sampled:
    prompt_ids: list[int]
    completion: Completion


def run() -> list[Result]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make_tiny_moe_model(Path(name))
        exact = _sample(name, "float32")
        return [
            *(_compare(name, exact, f"router noise {std:g}", std) for std in (0.01, 0.1)),
            _compare(name, _sample(name, "bfloat16"), "engine in bfloat16", 0.0),
        ]


def _compare(model: str, samples: Sequence[_Sampled], what: str, noise: float) -> Result:
    replayed, routed = (_mean_kl(model, samples, noise, replay=replay) for replay in (True, False))
    return Result(f"mismatch KL, {what}", replayed, routed, "nat", "routed anew by the trainer")


def _sample(model: str, dtype: str) -> list[_Sampled]:
    generator = random.Random(0)
    samples: list[_Sampled] = []

    def keep(prompt_ids: list[int], completion: Completion) -> None:
        samples.append(_Sampled(prompt_ids, completion))

    requests = []
    for seed in range(NUM_SAMPLES):
        prompt_ids = [generator.randrange(5, 100) for _ in range(PROMPT)]
        params = SamplingParams(max_tokens=COMPLETION, seed=seed)
        requests.append(Request(prompt_ids, params, Account(), partial(keep, prompt_ids)))
    policy = load_policy(ModelConfig.model_validate({"name": model, "dtype": dtype}))
    engine = Engine(policy, num_slots=NUM_SAMPLES, max_length=PROMPT + COMPLETION, record_experts=True)
    run_to_end(engine, requests)
    return samples


def _mean_kl(model: str, samples: Sequence[_Sampled], noise: float, *, replay: bool) -> float:
    policy = load_policy(ModelConfig(name=model), trainable=True)
    if replay:
        policy.replay_experts()
    generator = torch.Generator().manual_seed(0)

    def disturb(router: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] + noise * torch.randn(inputs[0].shape, generator=generator),)

    for router in routers_of(policy.hf, "benchmark experts"):
        router.register_forward_pre_hook(disturb)
    return float(torch.cat([_kl(policy, sample) for sample in samples]).mean())


def _kl(policy: Policy, sample: _Sampled) -> Tensor:
    """Of each sampled token."""
    completion = sample.completion
    token_ids = torch.tensor([*sample.prompt_ids, *completion.token_ids])
    size = len(token_ids)
    experts = join_experts([RecordedExperts.of(completion.routed_experts)])
    assert experts is not None
    with torch.no_grad():
        output = policy(
            token_ids,
            torch.arange(size),
            torch.ones(size),
            packed_layout([size]),
            torch.from_numpy(experts),
        )
    gap = output.logprobs[len(sample.prompt_ids) :] - torch.tensor(completion.logprobs)
    kl: Tensor = torch.expm1(gap) - gap
    return kl
