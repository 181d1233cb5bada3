"""The bounds allow what rounding does, in any order of the additions, and nothing else."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.loss.record import Ratios
from pellucid.model import Policy, load_policy, packed_layout
from tolerance import bound, chain, eps, gradient_chain, mismatch_kl_bound, near, near_logprobs

NUM_TERMS = 4096


@pytest.fixture(scope="module")
def terms() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, NUM_TERMS).astype(np.float32)


def test_the_bound_is_made_of_its_three_factors() -> None:
    assert eps() == 2**-23 and eps(torch.bfloat16) == 2**-7 and eps(np.float64) == 2**-52
    assert bound(10.0, 9) == 2 * 3 * 2**-23 * 10.0
    assert near(5.0, terms=1).bound == 2 * 2**-23 * 5.0
    assert near([1.0, -8.0], terms=1).bound == 2 * 2**-23 * 8.0
    assert near([1.0, -8.0], terms=1, each=True).bound.tolist() == [2 * 2**-23, 2 * 2**-23 * 8.0]


def test_numbers_lists_arrays_and_tensors_compare_from_either_side() -> None:
    expected = near([1.0, 2.0], terms=1)
    for found in ([1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1.0, 2.0], requires_grad=True)):
        assert found == expected
        assert expected == found
    assert {"loss": near(1.5, terms=1)} == {"loss": 1.5}
    assert expected != [1.0, 2.0, 3.0] and expected != [1.0, 2.00001]
    assert torch.tensor([1.0, 2.00001]) != expected and np.array([1.0, 2.00001]) != expected
    assert [math.nan, -math.inf, 1.0] == near([math.nan, -math.inf, 1.0], terms=1)
    assert [math.nan, 1.0] != near([-math.inf, 1.0], terms=1)
    assert [math.nan, 1.0] != near([2.0, 1.0], terms=1)


def test_a_refusal_names_the_place_the_difference_and_the_bound() -> None:
    expected = near([1.0, 2.0], terms=1)
    assert expected != [1.0, 2.5]
    assert repr(expected) == "[1. 2.] ± 4.77e-07; off by 0.5 at (1,), allowed 4.77e-07"


def test_sums_in_any_order_lie_within_the_bound(terms) -> None:
    partial_sums = terms.astype(np.float64).cumsum()
    expected, scale = partial_sums[-1], np.abs(partial_sums).max()
    one_by_one = np.float32(0)
    for term in terms:
        one_by_one += term
    blocks = np.float32(0)
    for block in terms.reshape(-1, 8).sum(0):
        blocks += block
    for found in (one_by_one, blocks, terms[::-1].sum(), np.sort(terms).sum()):
        assert found == near(expected, terms=NUM_TERMS, scale=scale)


PLANTED_IN_SUMS: dict[str, Callable[[np.ndarray], float]] = {
    "the last term is dropped": lambda terms: terms[:-1].sum(),
    "one term is counted twice": lambda terms: terms.sum() + terms[17],
    "one sign is wrong": lambda terms: terms.sum() - 2 * terms[17],
    "half precision": lambda terms: terms.astype(np.float16).sum(dtype=np.float16),
    "terms rounded to bfloat16": lambda terms: float(torch.from_numpy(terms).bfloat16().float().sum()),
    "the mean of one term less": lambda terms: terms.sum() * NUM_TERMS / (NUM_TERMS - 1),
}


@pytest.mark.parametrize("planted", PLANTED_IN_SUMS)
def test_a_wrong_sum_is_refused(planted, terms) -> None:
    partial_sums = terms.astype(np.float64).cumsum()
    expected, scale = partial_sums[-1], np.abs(partial_sums).max()
    assert PLANTED_IN_SUMS[planted](terms) != near(expected, terms=NUM_TERMS, scale=scale)


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return load_policy(ModelConfig(name=str(tiny_model)))


IDS = torch.randint(5, 101, (12,), generator=torch.Generator().manual_seed(0))


def logprobs(policy: Policy, ids=IDS, lengths=(12,), positions=None, temperature=1.0) -> torch.Tensor:
    places = torch.cat([torch.arange(length) for length in lengths]) if positions is None else positions
    return policy(ids, places, torch.full((len(ids),), temperature), packed_layout(list(lengths))).logprobs


def test_a_chain_counts_what_every_matrix_attention_and_softmax_adds_up(policy) -> None:
    config = policy.hf.config
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    layer = 3 * hidden + heads + 2 * hidden + config.intermediate_size
    assert chain(policy, 12) == 2 * (layer + 12) + hidden + 101
    assert gradient_chain(policy, 12) == 2 * chain(policy, 12) + 12


def test_the_same_model_in_float64_lies_within_the_bound(policy) -> None:
    exact = logprobs(copy.deepcopy(policy).double())
    assert logprobs(policy) == near_logprobs(exact, policy)


def _half(policy: Policy) -> torch.Tensor:
    return logprobs(copy.deepcopy(policy).bfloat16())


def _one_weight_off(policy: Policy) -> torch.Tensor:
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        next(changed.layers[0].parameters())[0] += 0.01
    return logprobs(changed)


PLANTED_IN_MODELS: dict[str, Callable[[Policy], torch.Tensor]] = {
    "bfloat16": _half,
    "one row of one matrix moved by 0.01": _one_weight_off,
    "positions with gaps": lambda policy: logprobs(policy, positions=torch.arange(12) ** 2 // 11),
    "a temperature of 1.001": lambda policy: logprobs(policy, temperature=1.001),
    "two sequences as one": lambda policy: logprobs(policy, lengths=(6, 6)),
    "another first token": lambda policy: logprobs(policy, torch.cat([torch.tensor([6]), IDS[1:]])),
}


@pytest.mark.parametrize("planted", PLANTED_IN_MODELS)
def test_a_wrong_forward_is_refused(planted, policy) -> None:
    assert PLANTED_IN_MODELS[planted](policy) != near_logprobs(logprobs(policy), policy)


def test_the_kl_of_rounding_is_within_its_bound_and_that_of_a_temperature_is_not(policy) -> None:
    expected = near_logprobs(logprobs(policy), policy)
    allowed = mismatch_kl_bound(float(expected.bound))
    exact = logprobs(copy.deepcopy(policy).double())
    assert Ratios.of(logprobs(policy), exact).mismatch_kl.abs().max() <= allowed
    assert Ratios.of(logprobs(policy, temperature=1.01), logprobs(policy)).mismatch_kl.max() > allowed
