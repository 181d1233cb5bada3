"""Products by oneDNN against float64; where they are used, and what may be done with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pellucid.model import linear as module
from pellucid.model.linear import linear, speed_up
from tolerance import near

WIDTH, OUT = 96, 160
LARGE = (704, 645)
"""Numbers of tokens from which on oneDNN multiplies: a multiple of its rows, and one that is padded."""


def inputs(num_tokens: int):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, num_tokens, WIDTH), (OUT, WIDTH), (OUT,)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("num_tokens", LARGE)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_float64(num_tokens, has_bias) -> None:
    states, weight, bias = inputs(num_tokens)
    given = [states, weight, bias][: 2 + has_bias]
    exact = [each.detach().double().requires_grad_() for each in given]
    expected, found = functional.linear(*exact), linear(*given)
    assert "_Product" in str(found.grad_fn.next_functions)
    assert found.shape == (1, num_tokens, OUT)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream.double())
    found.backward(upstream)
    assert found.detach() == near(
        expected.detach(), terms=WIDTH + 1, scale=float(expected.detach().abs().max())
    )
    for mine, theirs, terms in zip(given, exact, (OUT, num_tokens, num_tokens), strict=False):
        assert mine.grad == near(theirs.grad, terms=terms, scale=float(theirs.grad.abs().max()))


def test_a_small_product_is_torchs_own() -> None:
    states, weight, bias = inputs(module._LEAST // (WIDTH * OUT))
    assert torch.equal(linear(states, weight, bias), functional.linear(states, weight, bias))
    assert "_Product" not in str(linear(states, weight, bias).grad_fn)


def test_a_product_in_bfloat16_is_torchs_own() -> None:
    states, weight, bias = (each.detach().bfloat16() for each in inputs(704))
    assert torch.equal(linear(states, weight, bias), functional.linear(states, weight, bias))


@pytest.mark.parametrize("num_tokens", LARGE)
def test_a_model_may_change_the_product_in_place(num_tokens) -> None:
    states, weight, bias = inputs(num_tokens)
    linear(states, weight, bias).mul_(2).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 2 * num_tokens))


def test_layers_of_a_model_use_it_and_a_frozen_weight_has_no_gradient() -> None:
    states, _, _ = inputs(645)
    model = nn.Sequential(nn.Linear(WIDTH, OUT), nn.ReLU(), nn.Linear(OUT, WIDTH, bias=False))
    names = list(model.state_dict())
    expected = model(states)
    speed_up(model)
    model[0].weight.requires_grad_(False)
    found = model(states)
    assert found.detach() == near(
        expected.detach(), terms=WIDTH + OUT, scale=float(expected.detach().abs().max())
    )
    found.sum().backward()
    assert list(model.state_dict()) == names
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None and states.grad is not None
