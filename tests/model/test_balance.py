"""The balancing loss of experts: by hand, against transformers' own, and added up over parts of a step."""

import sys
import warnings
from collections import deque
from math import log
from types import SimpleNamespace

import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.errors import ModelError
from pellucid.model import Policy, load_policy, packed_layout, shared_layout
from pellucid.model.balance import ExpertBalance, count_experts, predicting
from tests.model import families
from tolerance import gradient_chain, near


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([[log(each) for each in row] for row in probabilities])


def balance_of(num_routers: int, top_k: int) -> ExpertBalance:
    """One whose routers are asked by the test itself."""
    balance = ExpertBalance.__new__(ExpertBalance)
    balance.num_routers, balance.top_k, balance._draws = num_routers, top_k, deque()
    return balance


def test_the_loss_by_hand() -> None:
    """Three tokens, two routers, four experts, one each; the last token predicts nothing.

    Router 0 sends tokens to experts 0 and 0, router 1 to 1 and 2: f = (2, 1, 1, 0) / 4. Mean probabilities
    are P = (0.4, 0.2, 0.3, 0.1), so the loss is 4 · (2 · 0.4 + 0.2 + 0.3) / 4 = 1.3.
    """
    balance = balance_of(2, 1)
    logits = {
        0: logits_of([0.7, 0.1, 0.1, 0.1], [0.6, 0.1, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]),
        1: logits_of([0.2, 0.5, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]),
    }
    weights = torch.tensor([1.0, 1.0, 0.0])
    counts = balance.count(logits, weights)
    assert counts.tolist() == [2.0, 1.0, 1.0, 0.0]
    with balance.step(counts, num_tokens=2):
        assert balance.share(logits, weights) == near(1.3, terms=16)
        # Two micro batches of one token each add up to it.
        parts = [balance.share({n: each[[t]] for n, each in logits.items()}, weights[[t]]) for t in (0, 1)]
    assert sum(parts) == near(1.3, terms=16)


def test_equally_busy_experts_have_the_least_loss_and_no_gradient() -> None:
    balance = balance_of(1, 2)
    logits = logits_of([0.4, 0.4, 0.1, 0.1], [0.1, 0.1, 0.4, 0.4]).requires_grad_()
    counts = balance.count({0: logits}, torch.ones(2))
    with balance.step(counts, num_tokens=2):
        share = balance.share({0: logits}, torch.ones(2))
    assert share == near(2.0, terms=8)
    share.backward()
    assert logits.grad == near(torch.zeros(2, 4), scale=1.0, terms=8)


def test_recorded_experts_are_counted_by_weight_and_unknown_ones_not() -> None:
    chosen = torch.tensor([[[0, 2], [1, 2]], [[-1, -1], [-1, -1]], [[3, 0], [3, 1]]], dtype=torch.int16)
    assert count_experts(chosen, torch.tensor([2.0, 5.0, 1.0]), 4).tolist() == [3.0, 3.0, 4.0, 2.0]


def test_a_token_counts_as_often_as_it_predicts_a_trainable_one() -> None:
    """Two members of a group share `6 7 8`; their first own tokens, and one more of the first, train."""
    ids = torch.tensor([6, 7, 8, 9, 10, 6, 7, 8, 5, 11])
    trainable = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1, 0], dtype=torch.bool)
    shared = shared_layout([5, 5], ids.numpy(), ["g", "g"], loss_mask=trainable.numpy())
    assert shared.computed.tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert predicting(shared, trainable).tolist() == [0, 0, 2, 1, 0, 0, 0]
    alone = packed_layout([5, 5], trainable.numpy())
    assert predicting(alone, trainable).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 0]
    slices = [shared.slice(SimpleNamespace(rank=rank, size=2)) for rank in (0, 1)]
    assert [predicting(each, trainable).tolist() for each in slices] == [[0, 0, 2, 1], [0, 0, 0, 0]]


LENGTHS = [9, 6]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "jamba", "jetmoe"])
def test_value_and_gradient_are_those_of_transformers(family, tmp_path) -> None:
    """Of tokens that predict one: all but the last of each sequence, each through HF's forward alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        families.make(family).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path)), trainable=True)
    policy.balance_experts()
    ids = torch.randint(5, families.VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    trainable = (positions > 0).to(torch.bool)
    arguments = ids, positions, torch.ones(len(ids)), packed_layout(LENGTHS), None, None, trainable
    counts = policy.count_experts(*arguments)
    assert policy(*arguments).balance is None  # of a validation, say
    with policy.balance.step(counts, int(trainable.sum())):
        found = policy(*arguments).balance
    found.backward()

    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    options = {"output_router_logits": True, "use_cache": False}
    rows = [hf(input_ids=row[None, :-1], **options).router_logits for row in ids.split(LENGTHS)]
    together = tuple(torch.cat([each.flatten(0, -2) for each in layer]) for layer in zip(*rows, strict=True))
    formula = sys.modules[type(hf).__module__].load_balancing_loss_func
    expected = formula(together, together[0].shape[-1], policy.balance.top_k)
    expected.backward()
    terms = gradient_chain(policy, len(ids))
    assert found == near(expected, terms=terms)
    gradients = {name: each.grad for name, each in hf.named_parameters() if each.grad is not None}
    scale = max(float(each.abs().max()) for each in gradients.values())
    assert scale > 1e-3
    for name, parameter in policy.hf.named_parameters():
        if name in gradients:
            assert parameter.grad == near(gradients[name], terms=terms, scale=scale), name


def test_a_model_that_transformers_cannot_balance_is_refused(tiny_model) -> None:
    policy: Policy = load_policy(ModelConfig(name=str(tiny_model)))
    with pytest.raises(ModelError, match="router_aux_loss_coef is set, but transformers has no balancing"):
        policy.balance_experts()


def test_a_balancing_loss_by_another_formula_is_refused() -> None:
    """Doge's experts are products of two sets of keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = families.make("doge with experts")
    with pytest.raises(
        ModelError, match="the balancing loss of DogeForCausalLM is another than that of Qwen3-M"
    ):
        ExpertBalance(model)
