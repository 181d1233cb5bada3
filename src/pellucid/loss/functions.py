"""The built-in losses, each a few lines that read like the formula."""

from collections.abc import Callable

import torch
from torch import Tensor

from pellucid.config import CustomLossConfig, DppoLossConfig, LossConfig
from pellucid.config.imports import load_attribute
from pellucid.errors import DataError
from pellucid.loss.record import LossInputs, LossRecord

TokenLoss = Callable[[LossInputs], LossRecord]

_OPD = DppoLossConfig(adv_tau=0.0, teacher_tau=1.0)
"""opd's own trust region and KL; `trainer.loss` does not touch it."""


def dppo_loss(inputs: LossInputs, config: DppoLossConfig) -> LossRecord:
    """DPPO + KL: −keep · (adv_tau·A + teacher_tau·(log teacher − log π)) · r + m·kl_tau·ℓ²."""
    delta, advantages, trainable = inputs.ratios.prob_delta, inputs.advantages, inputs.loss_mask
    too_high = delta > config.dppo_mask_high
    too_low = delta < -config.dppo_mask_low
    is_masked = trainable & torch.where(advantages > 0, too_high, too_low)
    signal = config.adv_tau * advantages + config.teacher_tau * _teacher_gap(inputs)
    kept = inputs.log_ratio(trainable & ~is_masked)
    policy_gradient = torch.where(trainable & ~is_masked, signal * kept.exp(), 0.0)
    token_loss = config.kl_tau * inputs.log_ratio(trainable).square() - policy_gradient
    return LossRecord(
        token_loss=token_loss,
        ratios=inputs.ratios,
        is_masked=is_masked,
        is_masked_high=is_masked & (advantages > 0),
        is_masked_low=is_masked & (advantages < 0),
    )


def opd_loss(inputs: LossInputs) -> LossRecord:
    """On-policy distillation: A is log teacher − log π; the sample's own advantage picks the mask's side."""
    teacher = inputs.teacher_logprobs
    if teacher is None or bool((teacher.isnan() & inputs.loss_mask).any()):
        raise DataError(
            "opd samples need teacher_logprobs on every trainable token; set orchestrator.teacher"
        )
    return dppo_loss(inputs, _OPD)


def sft_loss(inputs: LossInputs) -> LossRecord:
    """−log π on trainable tokens; ratios and masks have no meaning here."""
    return LossRecord(torch.where(inputs.loss_mask, -inputs.trainer_logprobs, 0.0), ratios=None)


def _teacher_gap(inputs: LossInputs) -> Tensor:
    """stopgrad(log teacher − log π), 0 where there is no teacher logprob."""
    if inputs.teacher_logprobs is None:
        return torch.zeros_like(inputs.inference_logprobs)
    return (inputs.teacher_logprobs - inputs.trainer_logprobs.detach()).nan_to_num(nan=0.0)


def loss_for(config: LossConfig) -> dict[str, TokenLoss]:
    """The loss of each training mode; `trainer.loss` decides rl's alone."""
    return {"rl": _rl_loss(config), "opd": opd_loss, "sft": sft_loss}


def _rl_loss(config: LossConfig) -> TokenLoss:
    if isinstance(config, CustomLossConfig):
        return _custom_loss(config)
    return lambda inputs: dppo_loss(inputs, config)


def _custom_loss(config: CustomLossConfig) -> TokenLoss:
    function = load_attribute(config.import_path, "trainer.loss.import_path")

    def loss(inputs: LossInputs) -> LossRecord:
        record = function(inputs, **config.kwargs)
        if not isinstance(record, LossRecord) or record.token_loss.shape != inputs.trainer_logprobs.shape:
            raise DataError(
                f"{config.import_path} must return a LossRecord with one token_loss per token "
                f"({inputs.trainer_logprobs.shape[0]}); see docs/write-a-loss.md"
            )
        return record.within(inputs)

    return loss
