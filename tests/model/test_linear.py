"""Products by oneDNN against float64; where they are used, and what may be done with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pellucid.config import ModelConfig
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import linear as module
from pellucid.model import load_policy, packed_layout
from pellucid.model.linear import linear, speed_up
from tolerance import near, near_logprobs

WIDTH, OUT = 96, 160
LARGE = (704, 645)
"""Numbers of tokens from which on oneDNN multiplies: a multiple of its rows, and one that is padded."""

NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@pytest.fixture
def chosen(monkeypatch) -> None:
    """oneDNN multiplies, whichever CPU this is."""
    monkeypatch.setattr(module, "is_onednn_faster", lambda: True)


def inputs(num_tokens: int):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, num_tokens, WIDTH), (OUT, WIDTH), (OUT,)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def calls(work) -> bool:
    """Returns whether oneDNN computes a product of float32."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return any(event.key == "mkldnn::_linear_pointwise" for event in profile.key_averages())


@NEEDS_ONEDNN
@pytest.mark.parametrize("num_tokens", LARGE)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_float64(chosen, num_tokens, has_bias) -> None:
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


@NEEDS_ONEDNN
@pytest.mark.parametrize("shape", [(290, WIDTH), (3, 290, WIDTH)])
@torch.inference_mode()
def test_products_without_gradient_are_those_of_the_weight_as_it_is_now(chosen, shape) -> None:
    layer, states = nn.Linear(WIDTH, OUT), torch.randn(shape)
    speed_up(layer)
    assert calls(lambda: layer(states))
    for _ in range(2):
        exact = functional.linear(states.double(), layer.weight.double(), layer.bias.double())
        assert layer(states) == near(exact, terms=WIDTH + 1, scale=float(exact.abs().max()))
        layer.weight.mul_(-2)
        layer.weight[3] = 7
    every_other = torch.randn(290, 2 * WIDTH)[:, ::2]
    exact = functional.linear(every_other.double(), layer.weight.double(), layer.bias.double())
    assert layer(every_other) == near(exact, terms=WIDTH + 1, scale=float(exact.abs().max()))


@NEEDS_ONEDNN
@pytest.mark.parametrize(("is_trained", "num_rows"), [(False, 656), (True, 704)])
def test_products_of_like_numbers_of_tokens_have_one_number_of_rows(chosen, is_trained, num_rows) -> None:
    with (
        torch.set_grad_enabled(is_trained),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile,
    ):
        for num_tokens in (645, 650, 656):
            assert linear(*inputs(num_tokens)).shape == (1, num_tokens, OUT)
    shapes = [
        event.input_shapes[0] for event in profile.events() if event.name == "mkldnn::_linear_pointwise"
    ]
    assert shapes == [[num_rows, WIDTH]] * 3


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_small_product_is_torchs_own(chosen, is_trained) -> None:
    least = module._LEAST_TRAINED if is_trained else module._LEAST
    states, weight, bias = inputs(least // (WIDTH * OUT))
    with torch.set_grad_enabled(is_trained):
        assert not calls(lambda: linear(states, weight, bias))
        assert torch.equal(linear(states, weight, bias), functional.linear(states, weight, bias))


def test_a_product_in_another_dtype_is_torchs_own(chosen) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        states, weight, bias = (each.detach().to(dtype) for each in inputs(704))
        assert torch.equal(linear(states, weight, bias), functional.linear(states, weight, bias))


@pytest.mark.parametrize(
    ("about", "is_faster"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512f", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx2 avx512f", False),
        (None, False),
    ],
)
def test_onednn_multiplies_on_cpus_of_amd_with_avx_512(tmp_path, monkeypatch, about, is_faster) -> None:
    monkeypatch.setattr(module, "CPU", tmp_path / "cpuinfo")
    if about is not None:
        module.CPU.write_text(about)
    assert module.is_onednn_faster.__wrapped__() is (is_faster and torch.backends.mkldnn.is_available())


@NEEDS_ONEDNN
@pytest.mark.parametrize("num_tokens", LARGE)
def test_a_model_may_change_the_product_in_place(chosen, num_tokens) -> None:
    states, weight, bias = inputs(num_tokens)
    linear(states, weight, bias).mul_(2).sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, 2 * num_tokens))


@NEEDS_ONEDNN
def test_layers_of_a_model_use_it_and_a_frozen_weight_has_no_gradient(chosen) -> None:
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


@NEEDS_ONEDNN
def test_an_engine_that_multiplies_by_onednn_gives_the_trainers_logprobs(
    chosen, tiny_model, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_LEAST", 0)
    finished: list = []
    engine = Engine(load_policy(ModelConfig(name=str(tiny_model))), num_slots=4, max_length=80)
    prompts = [[5 + index] * (7 * index + 1) for index in range(6)]
    requests = [
        Request(
            prompt,
            SamplingParams(max_tokens=20, seed=index),
            Account("run", "env"),
            lambda completion, prompt=prompt: finished.append((prompt, completion)),
        )
        for index, prompt in enumerate(prompts)
    ]
    assert calls(lambda: run_to_end(engine, requests))
    assert len(finished) == len(prompts)
    trainer = load_policy(ModelConfig(name=str(tiny_model)))
    for prompt, completion in finished:
        ids = torch.tensor([*prompt, *completion.token_ids])
        output = trainer(ids, torch.arange(len(ids)), torch.ones(len(ids)), packed_layout([len(ids)]))
        expected = output.logprobs[len(prompt) :].detach()
        assert completion.logprobs == near_logprobs(expected, trainer, 80)
