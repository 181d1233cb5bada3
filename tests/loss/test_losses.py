"""The rl loss on four tokens computed by hand, and what a custom loss must return."""

import math

import pytest
import torch

from pellucid.config import CustomLossConfig, DppoLossConfig
from pellucid.errors import ConfigError, DataError
from pellucid.loss import LossInputs, LossRecord, Ratios, dppo_loss, loss_for
from tolerance import near


def inputs(trainer, inference, advantages, mask) -> LossInputs:
    logprobs = torch.tensor([math.log(p) for p in trainer], requires_grad=True)
    sampled = torch.tensor([math.log(p) for p in inference])
    return given_logprobs(logprobs, sampled, advantages, mask)


def given_logprobs(logprobs, sampled, advantages, mask, lengths=None) -> LossInputs:
    return LossInputs(
        logprobs,
        sampled,
        torch.as_tensor(advantages),
        torch.tensor(mask),
        None,
        Ratios.of(logprobs, sampled),
        lengths or [len(logprobs)],
    )


def test_four_tokens_by_hand() -> None:
    """
    token           0      1            2               3
    π               0.5    0.6          0.9             0.1
    μ               0.5    0.5          0.5             0.5
    A               1      2            1               -1
    trainable       no     yes          yes             yes
    π − μ           0      0.1          0.4 > 0.2       −0.4 < −0.2
    masked          no     no           high            low
    token loss      0      −2 · 1.2     0               0            (kl_tau = 0)
    """
    config = DppoLossConfig(kl_tau=0.0)
    record = dppo_loss(
        inputs([0.5, 0.6, 0.9, 0.1], [0.5] * 4, [1.0, 2.0, 1.0, -1.0], [False, True, True, True]), config
    )
    assert record.token_loss.tolist() == pytest.approx([0.0, -2.4, 0.0, 0.0])
    assert record.is_masked.tolist() == [False, False, True, True]
    assert record.is_masked_high.tolist() == [False, False, True, False]
    assert record.is_masked_low.tolist() == [False, False, False, True]


def test_the_kl_term_covers_masked_tokens_too() -> None:
    record = dppo_loss(inputs([0.5, 0.9], [0.5, 0.5], [0.0, 1.0], [False, True]), DppoLossConfig(kl_tau=0.5))
    assert record.token_loss.tolist() == pytest.approx([0.0, 0.5 * math.log(1.8) ** 2])


def test_nothing_outside_the_mask_can_overflow_into_the_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampled = torch.tensor([-1e30, -1.0])
    given = given_logprobs(logprobs, sampled, [1.0, 1.0], [False, True])
    dppo_loss(given, DppoLossConfig()).token_loss.sum().backward()
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_a_masked_token_with_a_huge_ratio_does_not_make_the_loss_nan() -> None:
    logprobs = torch.tensor([-1.0, -0.1], requires_grad=True)
    sampled = torch.tensor([-1.0, -100.0])
    given = given_logprobs(logprobs, sampled, [1.0, 1.0], [False, True])
    record = dppo_loss(given, DppoLossConfig(kl_tau=0.5))
    record.token_loss.sum().backward()
    assert record.is_masked.tolist() == [False, True]
    assert record.token_loss[1] == near(0.5 * 99.9**2, terms=8)
    assert logprobs.grad[1] == near(99.9, terms=8)


def test_mismatch_kl_keeps_its_digits_for_small_differences() -> None:
    ratios = Ratios.of(torch.tensor([-1.0 + 1e-4]), torch.tensor([-1.0]))
    log_ratio = float(torch.tensor([-1.0 + 1e-4]) - torch.tensor([-1.0]))
    exact = math.expm1(log_ratio) - log_ratio
    assert ratios.mismatch_kl.item() == near(exact, terms=2, scale=abs(log_ratio))


def negative_logprob(given: LossInputs, scale: float) -> LossRecord:
    return LossRecord(-scale * given.trainer_logprobs, None, is_masked=torch.ones(2, dtype=torch.bool))


def wrong_shape(given: LossInputs) -> LossRecord:
    return LossRecord(given.trainer_logprobs.sum(), given.ratios)


def test_a_custom_loss_gets_its_kwargs(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_losses", sys.modules[__name__])
    config = CustomLossConfig(type="custom", import_path="my_losses:negative_logprob", kwargs={"scale": 2.0})
    record = loss_for(config)["rl"](inputs([0.5, 0.25], [0.5, 0.5], [1.0, 1.0], [False, True]))
    assert record.token_loss.tolist() == pytest.approx([0.0, 2 * math.log(4)])
    # Outside the mask nothing counts, and the ratios are the framework's.
    assert record.is_masked.tolist() == [False, True]
    assert record.ratios is not None


def test_a_custom_loss_that_sums_is_refused(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_losses", sys.modules[__name__])
    config = CustomLossConfig(type="custom", import_path="my_losses:wrong_shape")
    with pytest.raises(DataError, match="must return a LossRecord with one token_loss per token \\(2\\)"):
        loss_for(config)["rl"](inputs([0.5, 0.25], [0.5, 0.5], [1.0, 1.0], [False, True]))


def test_a_custom_loss_that_is_not_there_names_the_key() -> None:
    with pytest.raises(ConfigError, match="trainer.loss.import_path = 'no.such:thing' cannot be imported"):
        loss_for(CustomLossConfig(type="custom", import_path="no.such:thing"))
