"""Sampling ragged requests with logprobs: the embedded engine against HF `generate` on the same weights.

HF gets the same requests in padded batches of as many rows as the engine has slots, and stops each row at
its own length, which is the best that `generate` does with requests of different lengths.
"""

import random
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from pellucid.bench.result import Result, fastest_s
from pellucid.bench.shapes import MODELS
from pellucid.data import Completion
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine, Request, run_to_end
from pellucid.model import Policy

SLOTS = 64
CASES = [("tiny", 256, 128, 3), ("135M", 64, 32, 1)]
"""(model, requests, longest completion, repeats)."""


def run() -> list[Result]:
    torch.set_num_threads(1)
    return [_compare(*case) for case in CASES]


def _compare(model: str, num_requests: int, longest: int, repeats: int) -> Result:
    with MODELS[model]() as policy:
        requests = _requests(policy.vocab_size, num_requests, longest)
        our_s = fastest_s(lambda: _sample(policy, requests), repeats)
        policy.hf.set_attn_implementation("sdpa")
        their_s = fastest_s(lambda: _generate(policy.hf, requests), repeats)
    tokens = sum(count for _, count in requests)
    return Result(f"engine, {model}", tokens / our_s, tokens / their_s, "tok/s", "HF generate")


def _requests(vocab_size: int, num_requests: int, longest: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to sample), ragged."""
    generator = random.Random(0)
    return [
        (
            [generator.randrange(5, vocab_size) for _ in range(generator.randint(10, 60))],
            generator.randint(8, longest),
        )
        for _ in range(num_requests)
    ]


def _sample(policy: Policy, requests: list[tuple[list[int], int]]) -> None:
    finished: list[Completion] = []
    engine = Engine(policy, num_slots=SLOTS, max_length=256)
    run_to_end(
        engine,
        [Request(ids, SamplingParams(max_tokens=n), Account(), finished.append) for ids, n in requests],
    )


class _OwnLengths(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._lengths


@torch.inference_mode()
def _generate(hf: Any, requests: list[tuple[list[int], int]]) -> None:
    for start in range(0, len(requests), SLOTS):
        batch = requests[start : start + SLOTS]
        width = max(len(ids) for ids, _ in batch)
        prompts = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in batch])
        lengths = torch.tensor([width + count for _, count in batch])
        hf.generate(
            prompts,
            attention_mask=(prompts != 0).long(),
            max_new_tokens=int(lengths.max()) - width,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([_OwnLengths(lengths)]),
        )
