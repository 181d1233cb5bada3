"""Packed forward and backward: our attention plan against HF's own packed SDPA, same weights and tokens."""

import torch
from torch import Tensor

from benchmarks.result import Result, fastest_each_s
from benchmarks.shapes import made_policy
from pellucid.model import PackedAttention, Policy
from pellucid.model.attention import ATTENTION

TEN = [150, 300, 220, 180, 250, 90, 310, 200, 148, 200]
CASES = [("tiny", TEN), ("tiny", [32] * 64), ("tiny", [1024, 1024]), ("135M", TEN)]


def run() -> list[Result]:
    torch.set_num_threads(1)
    return [_compare(model, lengths) for model, lengths in CASES]


def _compare(model: str, lengths: list[int]) -> Result:
    tokens = sum(lengths)
    repeats = 6 if model == "tiny" else 2
    with made_policy(model) as policy:
        token_ids = torch.randint(5, policy.vocab_size, (1, tokens))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]

        def ours() -> None:
            policy.hf.set_attn_implementation(ATTENTION)
            _train(policy, policy.hidden(token_ids, positions, PackedAttention(lengths)), token_ids)

        def theirs() -> None:
            policy.hf.set_attn_implementation("sdpa")
            output = policy.hf.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
            _train(policy, output.last_hidden_state, token_ids)

        our_s, their_s = fastest_each_s([ours, theirs], repeats)
    name = f"attention, {model}, {len(lengths)} sequences"
    return Result(name, tokens / our_s, tokens / their_s, "tok/s", "HF packed SDPA")


def _train(policy: Policy, hidden: Tensor, token_ids: Tensor) -> None:
    logprobs = policy.logits(hidden)[0, :-1].log_softmax(-1)
    logprobs.gather(-1, token_ids[0, 1:, None]).mean().backward()
    policy.zero_grad(set_to_none=True)
