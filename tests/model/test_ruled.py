"""Windows, soft caps and sinks: every path against the matrix of who sees whom, in float64."""

import pytest
import torch
from torch import Tensor

from pellucid.checks.rehearsal import rehearsing
from pellucid.model.attention import PackedAttention, Rule, SharedAttention
from pellucid.model.ruled import attend_ruled
from pellucid.model.segments import Family, segments_of
from tolerance import eps, near

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
FAMILIES = {
    "packed": [Family(0, [150]), Family(0, [1]), Family(0, [40])],
    "shared": [Family(0, [3]), Family(50, [90, 1, 20]), Family(12, [30, 2])],
}
SINKS = torch.linspace(-1.0, 2.0, HEADS)
RULES = {
    "window": Rule(window=7),
    "window as long as blocks": Rule(window=33),
    "window of one": Rule(window=1),
    "sinks": Rule(sinks=SINKS),
    "soft cap": Rule(softcap=0.7),
    "all": Rule(window=7, softcap=0.7, sinks=SINKS),
    "window and sinks": Rule(window=33, sinks=SINKS),
}


def inputs(families, dtype=torch.float32) -> list[Tensor]:
    size = sum(family.num_tokens for family in families)
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(1, heads, size, WIDTH, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def exactly(families, rule: Rule, *given: Tensor) -> Tensor:
    """Attends by one dense matrix: of (family, member, place in its sequence) of each token."""
    query, key, value = given
    tokens = []
    for number, family in enumerate(families):
        tokens += [(number, -1, place) for place in range(family.prefix)]
        for member, own in enumerate(family.own):
            tokens += [(number, member, family.prefix + place) for place in range(own)]
    of_family, member, place = torch.tensor(tokens).T
    is_before = place[None] <= place[:, None]
    is_kin = (member[None] == -1) | (member[None] == member[:, None])
    sees = (of_family[None] == of_family[:, None]) & is_before & is_kin
    if rule.window is not None:
        sees &= place[None] > place[:, None] - rule.window
    repeats = HEADS // KEY_HEADS
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * WIDTH**-0.5
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    weights = scores.exp() * sees
    total = weights.sum(-1, keepdim=True)
    if rule.sinks is not None:
        total = total + rule.sinks.exp()[:, None, None]
    return weights / total @ value.repeat_interleave(repeats, 1)


def gradients_of(output: Tensor, rule: Rule, given: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    wanted = [*given, *([] if rule.sinks is None else [rule.sinks])]
    return list(torch.autograd.grad((output * weights.to(output)).sum(), wanted))


def with_sinks(rule: Rule, dtype: torch.dtype) -> Rule:
    return rule if rule.sinks is None else rule._replace(sinks=rule.sinks.to(dtype).requires_grad_())


@pytest.mark.parametrize("families", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_the_matrix(name, families) -> None:
    rule, given = with_sinks(RULES[name], torch.float32), inputs(families)
    exact_rule = with_sinks(RULES[name], torch.float64)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = exactly(families, exact_rule, *exact)
    found = SharedAttention(families).attend(0, *given, None, rule)
    size = expected.shape[2]
    assert found == near(expected, terms=size + WIDTH, scale=given[2].abs().max())
    expected_gradients = gradients_of(expected, exact_rule, exact)
    scale = max(gradient.abs().max() for gradient in expected_gradients)
    for ours, theirs in zip(gradients_of(found, rule, given), expected_gradients, strict=True):
        assert ours == near(theirs, terms=2 * (size + WIDTH) + HEADS * size, scale=scale)


@pytest.mark.parametrize("name", ["window", "sinks", "window and sinks"])
def test_flash_attention_has_windows_and_sinks(name) -> None:
    """On a pretend GPU; its kernel is given in the rehearsal, where the device has none."""
    families = FAMILIES["shared"]
    rule, given = with_sinks(RULES[name], torch.bfloat16), inputs(families, torch.bfloat16)
    exact_rule = with_sinks(RULES[name], torch.float64)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = exactly(families, exact_rule, *exact)
    expected_gradients = gradients_of(expected, exact_rule, exact)
    with rehearsing() as rehearsal:
        moved = [each.detach().to(rehearsal.device).requires_grad_() for each in given]
        if rule.sinks is not None:
            rule = rule._replace(sinks=rule.sinks.detach().to(rehearsal.device).requires_grad_())
        found = SharedAttention(families).attend(0, *moved, None, rule)
        gradients = gradients_of(found, rule, moved)
        assert found.cpu() == near(expected, within=2 * eps(torch.bfloat16) * expected.abs().max())
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert ours.cpu() == near(theirs, within=4 * eps(torch.bfloat16) * theirs.abs().max())


def test_a_window_that_hides_nothing_changes_nothing() -> None:
    """Bit by bit, so that a model with a long window stays on the fast path."""
    given = inputs(FAMILIES["packed"])
    plan = PackedAttention([150, 1, 40])
    assert torch.equal(plan.attend(0, *given, None, Rule(window=150)), plan.attend(0, *given, None, Rule()))
    assert not torch.equal(
        plan.attend(0, *given, None, Rule(window=149)), plan.attend(0, *given, None, Rule())
    )


def test_work_under_a_window_grows_with_the_window(monkeypatch) -> None:
    """Counts pairs of queries and keys that are computed."""
    num_pairs = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counting(q, k, v, **options):
        num_pairs.append(q.shape[:-3].numel() * q.shape[-2] * k.shape[-2])
        return kernel(q, k, v, **options)

    monkeypatch.setattr("pellucid.model.ruled.scaled_dot_product_attention", counting)
    totals = []
    for length in (2048, 4096):
        num_pairs.clear()
        given = torch.randn(3, 1, 1, length, 8)
        attend_ruled(*given, segments_of([Family(0, [length])]), None, window=256)
        assert len(num_pairs) <= 3
        totals.append(sum(num_pairs))
    assert totals[1] - totals[0] <= 2048 * 256 * 1.3
