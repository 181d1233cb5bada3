import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.inference.engine import _locate, draw
from tolerance import bound, near


def test_draw_follows_the_distribution() -> None:
    """Inverse CDF on (0.1, 0.2, 0.7): evenly spread uniforms give the exact shares."""
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(1000, 1)
    tokens, logprobs = draw(logits, [1.0] * 1000, [(i + 0.5) / 1000 for i in range(1000)])
    assert Counter(tokens) == {0: 100, 1: 200, 2: 700}
    assert logprobs[0] == pytest.approx(torch.tensor(0.1).log().item())


def test_draw_follows_the_distribution_of_a_large_vocabulary() -> None:
    """Half the mass on one token, the other half spread evenly over the last 500 of 50,000."""
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, 7] = math.log(0.5)
    logits[0, -500:] = math.log(0.001)
    tokens, logprobs = draw(logits.expand(1000, -1), [1.0] * 1000, [(i + 0.5) / 1000 for i in range(1000)])
    assert Counter(tokens) == {7: 500} | {token: 1 for token in range(49_500, 50_000)}
    exact = torch.log_softmax(logits.double(), -1)[0]
    assert logprobs[0] == near(exact[7], terms=501, scale=-math.log(0.001))
    assert logprobs[-1] == near(exact[-1], terms=501, scale=-math.log(0.001))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([2, 101, 256, 257, 1000, 50_257]), st.floats(0.3, 3.0), st.integers(0, 2**32))
def test_draw_is_the_inverse_of_the_distribution_function(vocab_size, temperature, seed) -> None:
    """The token in whose share of [0, 1) the uniform number falls, by a sum over everything in float64."""
    torch.manual_seed(seed)
    logits = 4 * torch.randn(8, vocab_size)
    uniforms = [random.Random(seed + row).random() for row in range(8)]
    tokens, logprobs = draw(logits, [temperature] * 8, uniforms)
    expected = torch.log_softmax(logits.double() / temperature, -1)
    ends = expected.exp().cumsum(-1)
    for row, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        start, end = ends[row, token - 1].item() if token else 0.0, ends[row, token].item()
        # A share is exp(logit − largest), whose exponent is as large as the largest logits in float32.
        largest = (logits[row].abs().max() / temperature).item()
        off = bound(2 * largest, vocab_size) * min(end, 1 - start)
        assert start - off <= uniform <= end + off
        assert logprobs[row] == near(expected[row, token], terms=vocab_size, scale=2 * largest)


@pytest.mark.parametrize("vocab_size", [3, 1000])
def test_draw_never_takes_an_impossible_token(vocab_size) -> None:
    logits = torch.full((4, vocab_size), -torch.inf)
    logits[:, 1] = 0.0
    assert draw(logits, [1.0] * 4, [0.0, 0.5, 0.999999999999, 1 - 2**-53])[0] == [1] * 4


def test_temperature_zero_is_greedy_beside_others_that_are_not() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]]).repeat(2, 1)
    tokens, logprobs = draw(logits, [0.0, 1.0], [0.999, 0.999])
    assert tokens == [1, 2]
    assert logprobs == pytest.approx(torch.log_softmax(logits[0], -1)[1:].tolist())


def test_locate() -> None:
    masses = torch.tensor([[2.0, 0.0, 3.0, 0.0]], dtype=torch.float64).repeat(4, 1)
    index, rest = _locate(masses, torch.tensor([0.0, 1.5, 2.0, 9.0], dtype=torch.float64))
    assert index.tolist() == [0, 0, 2, 2]
    assert rest.tolist() == pytest.approx([0.0, 1.5, 0.0, 3.0])
