"""Families that stand for a mechanism, as the trainer computes them, against HF's eager forward."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.model import Policy, load_policy, packed_layout, shared_layout
from tolerance import bound, gradient_chain, near, near_logprobs

sys.path.insert(0, str(Path(__file__).parent))
import families

WAYS = {
    "mistral": "packed",  # a window in every layer
    "gemma3_text": "packed",  # windows in some layers, q/k norms, scaled embeddings
    "gpt_oss": "packed",  # sinks, windows, experts
    "gemma2": "packed",  # soft caps of scores and logits
    "cohere2": "packed",  # scaled logits, parallel blocks, layers without positions
    "deepseek_v3": "packed",  # latent attention
    "qwen3_next": "rows",  # gated delta nets beside attention
    "jamba": "rows",  # state spaces between layers with attention
    "lfm2": "rows",  # convolutions
}
PROMPT, OWN, OTHER = 24, (5, 17, 9), 31
"""Two or three windows long; own tokens of the members of a group, and a sequence beside it."""


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    prompt, other, *own = (
        torch.randint(5, families.VOCABULARY, (length,), generator=generator)
        for length in (PROMPT, OTHER, *OWN)
    )
    return [*(torch.cat([prompt, each]) for each in own), other]


def gradients_of(logprobs: list[Tensor], model: Any) -> dict[str, Tensor]:
    """Of a sum in which every token has a weight of its own."""
    generator = torch.Generator().manual_seed(6)
    total = sum((each * torch.randn(len(each), generator=generator)).sum() for each in logprobs)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    zeros = (torch.zeros_like(each) for each in parameters.values())
    pairs = zip(found, zeros, strict=True)
    return dict(zip(parameters, (zero if each is None else each for each, zero in pairs), strict=True))


def alone(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def computed(policy: Policy, rows: list[Tensor], *, share: bool) -> list[Tensor]:
    lengths, ids = [len(row) for row in rows], torch.cat(rows)
    groups = ["g"] * len(OWN) + [""]
    layout = shared_layout(lengths, ids.numpy(), groups) if share else packed_layout(lengths)
    assert not share or len(layout.computed) < len(ids)
    positions = torch.cat([torch.arange(length) for length in lengths])
    output = policy(ids, positions, torch.ones(len(ids)), layout)
    return [part[1:] for part in output.logprobs.split(lengths)]


@pytest.mark.parametrize("name", WAYS)
def test_values_and_gradients_are_those_of_each_sequence_alone(name, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    families.make(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    policy = load_policy(ModelConfig(name=str(tmp_path)), trainable=True, max_length=families.CONTEXT)
    assert policy.way == WAYS[name]
    rows = sequences()
    expected = [alone(model, row) for row in rows]
    gradients = gradients_of(expected, model)
    scale = max(float(each.abs().max()) for each in gradients.values())
    for share in (False, True):
        found = computed(policy, rows, share=share)
        for own, other in zip(found, expected, strict=True):
            assert own == near_logprobs(other.detach(), policy)
        own_gradients = gradients_of(found, policy.hf)
        assert own_gradients.keys() == gradients.keys()
        within = bound(scale, gradient_chain(policy, sum(map(len, rows))))
        if name == "qwen3_next":  # solves triangular systems, whose condition multiplies rounding
            within *= 10
        for key, gradient in gradients.items():
            assert own_gradients[key] == near(gradient, within=within), key
