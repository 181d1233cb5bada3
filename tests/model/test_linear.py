"""Products by oneDNN are those of `nn.Linear`, follow its weights, and leave gradients to torch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from pellucid.config import ModelConfig
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import linear as module
from pellucid.model import load_policy, packed_layout
from pellucid.model.linear import multiply_by_onednn
from tolerance import near, near_logprobs

INPUTS, OUTPUTS = 96, 80
LARGE = -(-(1 << 21) // (INPUTS * OUTPUTS))
"""Tokens whose product is large enough."""


def made(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype)
    multiply_by_onednn(layer)
    return layer


def calls(work) -> bool:
    """Returns whether oneDNN computes a product of float32."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return any(event.key == "mkldnn::_linear_pointwise" for event in profile.key_averages())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(LARGE, INPUTS), (3, LARGE, INPUTS)])
@torch.inference_mode()
def test_products_are_those_of_the_weight_as_it_is_now(bias, shape) -> None:
    layer, states = made(bias=bias), torch.randn(shape)
    assert layer(states) == near(linear(states, layer.weight, layer.bias), terms=INPUTS, scale=4)
    layer.weight.mul_(-2)
    layer.weight[3] = 7
    assert layer(states) == near(linear(states, layer.weight, layer.bias), terms=INPUTS, scale=64)
    every_other = torch.randn(LARGE, 2 * INPUTS)[:, ::2]
    assert layer(every_other) == near(linear(every_other, layer.weight, layer.bias), terms=INPUTS, scale=64)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "is_onednn"),
    [(LARGE, torch.float32, True), (LARGE - 1, torch.float32, False), (LARGE, torch.float64, False)],
)
@torch.inference_mode()
def test_only_large_products_in_float32_go_to_onednn(num_tokens, dtype, is_onednn) -> None:
    layer, states = made(dtype=dtype), torch.randn(num_tokens, INPUTS, dtype=dtype)
    assert calls(lambda: layer(states)) is is_onednn
    if not is_onednn:
        assert torch.equal(layer(states), linear(states, layer.weight, layer.bias))


def test_gradients_are_those_of_torch() -> None:
    layer, states = made(), torch.randn(LARGE, INPUTS)
    layer(states).sum().backward()
    assert layer.weight.grad == near(states.sum(0).expand(OUTPUTS, -1), terms=LARGE, scale=4 * LARGE**0.5)


def test_an_engine_that_multiplies_by_onednn_gives_the_trainers_logprobs(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LEAST", 0)
    finished: list = []
    engine = Engine(load_policy(ModelConfig(name=str(tiny_model))), num_slots=4, max_length=80)
    prompts = [[5 + index] * (7 * index + 1) for index in range(6)]
    assert calls(
        lambda: run_to_end(
            engine,
            [
                Request(
                    prompt,
                    SamplingParams(max_tokens=20, seed=index),
                    Account("run", "env"),
                    lambda completion, prompt=prompt: finished.append((prompt, completion)),
                )
                for index, prompt in enumerate(prompts)
            ],
        )
    )
    assert len(finished) == len(prompts)
    trainer = load_policy(ModelConfig(name=str(tiny_model)))
    for prompt, completion in finished:
        ids = torch.tensor([*prompt, *completion.token_ids])
        output = trainer(ids, torch.arange(len(ids)), torch.ones(len(ids)), packed_layout([len(ids)]))
        expected = output.logprobs[len(prompt) :].detach()
        assert completion.logprobs == near_logprobs(expected, trainer, 80)
