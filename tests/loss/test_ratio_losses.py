"""ppo_clip, cispo, gspo, icepop and tis on tokens computed by hand, and against their definitions."""

import math

import pytest
import torch
from pydantic import TypeAdapter

from pellucid.config import LossConfig
from pellucid.loss import LossInputs, LossRecord, Ratios, loss_for
from tolerance import near

SAMPLED = [0.5, 0.5, 0.5, 0.5, 0.5]
TRAINER = [0.6, 0.9, 0.1, 0.9, 0.1]
RATIO = [1.2, 1.8, 0.2, 1.8, 0.2]
ADVANTAGES = [1.0, 2.0, 2.0, -1.0, -1.0]


def inputs(lengths=(5,), mask=(True,) * 5) -> LossInputs:
    logprobs = torch.tensor(TRAINER).log().requires_grad_()
    sampled = torch.tensor(SAMPLED).log()
    return LossInputs(
        logprobs,
        sampled,
        torch.tensor(ADVANTAGES),
        torch.tensor(mask),
        None,
        Ratios.of(logprobs, sampled),
        list(lengths),
    )


def record_of(given: LossInputs, **config) -> LossRecord:
    return loss_for(TypeAdapter(LossConfig).validate_python(config))["rl"](given)


def gradient_of(given: LossInputs, record: LossRecord) -> list[float]:
    return torch.autograd.grad(record.token_loss.sum(), given.trainer_logprobs)[0].tolist()


def test_ppo_clip() -> None:
    """
    r            1.2     1.8          0.2     1.8     0.2
    A            1       2            2      −1      −1
    clipped      no      1.5 (high)   no      no      0.5 (low)
    loss        −1.2    −3           −0.4     1.8     0.5
    d/d log π   −1.2     0           −0.4     1.8     0
    """
    given = inputs()
    record = record_of(given, type="ppo_clip", clip_low=0.5, clip_high=0.5)
    assert record.token_loss.tolist() == pytest.approx([-1.2, -3.0, -0.4, 1.8, 0.5])
    assert record.is_masked.tolist() == [False, True, False, False, True]
    assert record.is_masked_high.tolist() == [False, True, False, False, False]
    assert record.is_masked_low.tolist() == [False, False, False, False, True]
    assert gradient_of(given, record) == pytest.approx([-1.2, 0.0, -0.4, 1.8, 0.0])


def test_cispo_weighs_by_the_clipped_ratio_and_masks_nothing() -> None:
    given = inputs()
    record = record_of(given, type="cispo", clip_low=0.5, clip_high=0.5)
    weights = [1.2, 1.5, 0.5, 1.5, 0.5]
    pairs = zip(weights, ADVANTAGES, TRAINER, strict=True)
    assert record.token_loss.tolist() == pytest.approx([-w * a * math.log(p) for w, a, p in pairs])
    assert (record.is_masked, record.is_masked_high, record.is_masked_low) == (None, None, None)
    expected = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert gradient_of(given, record) == pytest.approx(expected)


def test_tis_caps_the_weights_from_above_alone() -> None:
    given = inputs()
    record = record_of(given, type="tis", max_ratio=1.5)
    assert record.is_masked is None
    expected = [-w * a for w, a in zip([1.2, 1.5, 0.2, 1.5, 0.2], ADVANTAGES, strict=True)]
    assert gradient_of(given, record) == pytest.approx(expected)


def test_icepop_masks_ratios_out_of_bounds_whatever_the_advantage() -> None:
    given = inputs()
    record = record_of(given, type="icepop", min_ratio=0.5, max_ratio=1.5)
    assert record.token_loss.tolist() == pytest.approx([-1.2, 0.0, 0.0, 0.0, 0.0])
    assert record.is_masked_high.tolist() == [False, True, False, True, False]
    assert record.is_masked_low.tolist() == [False, False, True, False, True]
    assert gradient_of(given, record) == pytest.approx([-1.2, 0.0, 0.0, 0.0, 0.0])


def test_gspo_has_one_ratio_per_sequence() -> None:
    """Sequences of 2 and 3; the first token of each does not train.

    second: s = exp(mean(log 1.8, log 0.2)) = 0.6; with A = −1 that is below 1 − 0.3: both are masked low.
    """
    given = inputs(lengths=(2, 3), mask=(False, True, False, True, True))
    record = record_of(given, type="gspo", clip_low=0.3, clip_high=1.0)
    assert record.token_loss.tolist() == pytest.approx([0.0, -3.6, 0.0, 0.7, 0.7])
    assert record.is_masked_low.tolist() == [False, False, False, True, True]
    assert gradient_of(given, record) == pytest.approx([0.0, -3.6, 0.0, 0.0, 0.0])


def test_the_gradient_of_gspo_is_that_of_its_definition() -> None:
    """−s·A with s differentiated through all tokens = the mean over tokens of what each carries."""
    mask = (False, True, False, True, True)
    given = inputs(lengths=(2, 3), mask=mask)
    record = record_of(given, type="gspo", clip_low=1.0, clip_high=10.0)
    ours = gradient_of(given, record)
    logprobs = torch.tensor(TRAINER).log().requires_grad_()
    log_ratio = logprobs - torch.tensor(SAMPLED).log()
    second = (log_ratio[3:].sum() / 2).exp()
    (-log_ratio[1].exp() * 2.0 - second * -1.0).backward()
    assert ours[1] == pytest.approx(logprobs.grad[1].item())
    # A mean over the sequence's two tokens halves each one's share.
    assert [value / 2 for value in ours[3:]] == pytest.approx(logprobs.grad[3:].tolist())


@pytest.mark.parametrize("kind", ["ppo_clip", "cispo", "gspo", "icepop", "tis", "dppo"])
def test_the_kl_term_is_the_same_everywhere(kind) -> None:
    with_kl, without = inputs(), inputs()
    more = record_of(with_kl, type=kind, kl_tau=0.5).token_loss
    less = record_of(without, type=kind, kl_tau=0.0).token_loss
    expected = [0.5 * math.log(ratio) ** 2 for ratio in RATIO]
    assert more - less == near(expected, terms=8, scale=more.abs().max().item())


@pytest.mark.parametrize("kind", ["ppo_clip", "cispo", "gspo", "icepop", "tis", "dppo"])
def test_nothing_outside_the_mask_reaches_the_gradient(kind) -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    sampled = torch.tensor([-1e30, -1.0, -1.0])
    mask = torch.tensor([False, True, True])
    given = LossInputs(logprobs, sampled, torch.ones(3), mask, None, Ratios.of(logprobs, sampled), [1, 2])
    record = record_of(given, type=kind)
    assert gradient_of(given, record) == [0.0, -1.0, -1.0]
    assert record.token_loss[0] == 0


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "icepop"])
def test_a_masked_token_with_a_huge_ratio_does_not_make_the_gradient_nan(kind) -> None:
    logprobs = torch.tensor([-1.0, -0.1], requires_grad=True)
    sampled = torch.tensor([-1.0, -200.0])
    given = LossInputs(
        logprobs,
        sampled,
        torch.ones(2),
        torch.tensor([False, True]),
        None,
        Ratios.of(logprobs, sampled),
        [1, 1],
    )
    record = record_of(given, type=kind)
    assert record.is_masked.tolist() == [False, True]
    assert gradient_of(given, record) == [0.0, 0.0]
