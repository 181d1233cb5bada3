"""Sampling ragged requests with logprobs: the embedded engine against HF `generate` on the same weights.

HF gets what a careful user would give it: inference mode, SDPA, its dynamic cache (the static is no faster
here), batches of as many rows as the engine has slots, and requests sorted by the length of their prompts, so
that little is padded. A row ends at its own length, which nobody knows beforehand; the batch ends with its
longest. Both sides run on one thread and deliver the logprob of every token. They take turns, and the fastest
of several runs counts.

A model of gated delta nets ("hybrid") goes through the engine in cohorts of groups, each by HF's own forward.

Then steps of the engine: the lean forward (`model/lean.py`) against HF's modules, in turns. The CPU
time of the fastest step counts.
"""

import copy
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks.result import Result, fastest_each_s
from benchmarks.shapes import made_policy
from pellucid.data import Completion
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.kv_cache import PackedDecoder
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy, hf_forward
from pellucid.workers import keep_freed_memory

SLOTS = 64
CASES = [
    ("tiny", 256, 128, 1),
    ("tiny", 64, 128, 1),
    ("135M", 64, 24, 1),
    ("hybrid", 64, 64, 8),
    ("hybrid", 64, 64, 1),
]
"""(model, requests, longest completion, requests with the same prompt)."""

STEPS = [("tiny", 1, 150), ("tiny", 8, 150), ("tiny", 64, 120), ("135M", 8, 16)]
"""(model, sequences, steps of each forward)."""

Asked = Sequence[tuple[list[int], int]]
"""(prompt, tokens to sample)."""


def run() -> list[Result]:
    keep_freed_memory()
    torch.set_num_threads(1)
    return [_compare(*case) for case in CASES] + [_compare_forwards(*case) for case in STEPS]


def _compare(model: str, num_requests: int, longest: int, group: int) -> Result:
    with made_policy(model) as policy:
        theirs = copy.deepcopy(policy)  # the engine changes how its policy multiplies
        asked = draw_requests(policy.vocab_size, num_requests, longest, group)
        sides = (partial(sample, policy), partial(_generate, theirs))
        for side in sides:
            side(asked[:8])
        our_s, their_s = fastest_each_s([partial(side, asked) for side in sides])
    tokens = sum(count for _, count in asked)
    name = f"engine, {model}, {num_requests} requests" + (f" in groups of {group}" if group > 1 else "")
    return Result(name, tokens / our_s, tokens / their_s, "tok/s", "HF generate")


def _compare_forwards(model: str, num_sequences: int, num_steps: int) -> Result:
    with made_policy(model) as policy:
        engine = Engine(policy, num_slots=num_sequences, max_length=1024)
        decoder = engine._decoder
        assert isinstance(decoder, PackedDecoder)
        params = SamplingParams(max_tokens=900)
        for number in range(num_sequences):
            engine.submit(Request([5 + number] * 30, params, Account(), lambda completion: None))
        engine.step()
        forwards = (decoder.hidden, hf_forward(policy))
        fastest = [float("inf")] * 2
        for step in range(2 * num_steps):
            decoder.hidden = forwards[step % 2]
            started = time.thread_time()
            engine.step()
            fastest[step % 2] = min(fastest[step % 2], time.thread_time() - started)
    our_s, their_s = fastest
    name = f"a step of the engine, {model}, {num_sequences} sequences"
    return Result(name, 1 / our_s, 1 / their_s, "steps/s", "HF's forward")


def draw_requests(vocab_size: int, num_requests: int, longest: int, group: int) -> Asked:
    generator = random.Random(0)
    asked: list[tuple[list[int], int]] = []
    for number in range(num_requests):
        if number % group == 0:
            prompt = [generator.randrange(5, vocab_size) for _ in range(generator.randint(10, 60))]
        asked.append((prompt, generator.randint(8, longest)))
    return asked


def sample(policy: Policy, asked: Asked) -> list[Completion]:
    finished: list[Completion] = []
    engine = Engine(policy, num_slots=SLOTS, max_length=256)
    run_to_end(
        engine,
        [Request(ids, SamplingParams(max_tokens=n), Account(), finished.append) for ids, n in asked],
    )
    return finished


class _OwnLengths(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._lengths


@torch.inference_mode()
def _generate(policy: Policy, asked: Asked, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Token ids and logprobs per request."""
    own = policy.hf.config._attn_implementation
    policy.hf.set_attn_implementation("sdpa")
    by_prompt_length = sorted(asked, key=lambda request: len(request[0]))
    finished = []
    for start in range(0, len(asked), SLOTS):
        batch = by_prompt_length[start : start + SLOTS]
        width = max(len(ids) for ids, _ in batch)
        prompts = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in batch])
        lengths = torch.tensor([width + count for _, count in batch])
        output = policy.hf.generate(
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
            **options,
        )
        tokens = output.sequences[:, width:]
        logprobs = torch.stack(
            [
                logits.log_softmax(-1).gather(-1, tokens[:, step, None])[:, 0]
                for step, logits in enumerate(output.logits)
            ],
            dim=1,
        )
        finished += [
            (tokens[row, :count].tolist(), logprobs[row, :count].tolist())
            for row, (_, count) in enumerate(batch)
        ]
    policy.hf.set_attn_implementation(own)
    return finished
