"""Packed forward and backward on the demo's model: our attention plan against HF's own packed SDPA."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pellucid.bench.result import Result, fastest_s
from pellucid.config import ModelConfig
from pellucid.model import PackedAttention, Policy, load_policy
from pellucid.model.attention import ATTENTION
from pellucid.model.tiny import make_tiny_model

SHAPES = {
    "10 sequences": [150, 300, 220, 180, 250, 90, 310, 200, 148, 200],
    "64 sequences": [32] * 64,
    "2 sequences": [1024, 1024],
}


def run() -> list[Result]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        policy = load_policy(ModelConfig(name=folder, dtype="float32"))
        return [_compare(policy, name, lengths) for name, lengths in SHAPES.items()]


def _compare(policy: Policy, name: str, lengths: list[int]) -> Result:
    token_ids = torch.randint(5, policy.vocab_size, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def ours() -> None:
        _train(policy, policy.hidden(token_ids, positions, PackedAttention(lengths)), token_ids)

    def theirs() -> None:
        output = policy.hf.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
        _train(policy, output.last_hidden_state, token_ids)

    our_s = fastest_s(ours)
    policy.hf.set_attn_implementation("sdpa")
    their_s = fastest_s(theirs)
    policy.hf.set_attn_implementation(ATTENTION)
    tokens = sum(lengths)
    return Result(f"attention, {name}", tokens / our_s, tokens / their_s, "tok/s", "HF packed SDPA")


def _train(policy: Policy, hidden: Tensor, token_ids: Tensor) -> None:
    logprobs = policy.logits(hidden)[0, :-1].log_softmax(-1)
    logprobs.gather(-1, token_ids[0, 1:, None]).mean().backward()
    policy.zero_grad(set_to_none=True)
