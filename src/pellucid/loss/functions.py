"""The built-in losses, each a few lines that read like the formula."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pellucid.config import (
    CispoLossConfig,
    CustomLossConfig,
    DppoLossConfig,
    GspoLossConfig,
    IcepopLossConfig,
    LossConfig,
    PpoClipLossConfig,
    TisLossConfig,
)
from pellucid.config.imports import load_function
from pellucid.errors import DataError
from pellucid.loss.record import LossInputs, LossRecord, only

TokenLoss = Callable[[LossInputs], LossRecord]

_OPD = DppoLossConfig(adv_tau=0.0, teacher_tau=1.0)
"""Trust region and KL of opd; `trainer.loss` does not change them."""


def dppo_loss(inputs: LossInputs, config: DppoLossConfig) -> LossRecord:
    """DPPO + KL: −keep·(adv_tau·A + teacher_tau·(log teacher − log π))·r + kl_tau·ℓ²; a token is out
    where A > 0 and Δ > dppo_mask_high, or A ≤ 0 and Δ < −dppo_mask_low.
    """
    delta, advantages, is_gain = inputs.ratios.prob_delta, inputs.advantages, inputs.advantages > 0
    too_high = inputs.loss_mask & is_gain & (delta > config.dppo_mask_high)
    too_low = inputs.loss_mask & ~is_gain & (delta < -config.dppo_mask_low)
    is_masked = too_high | too_low
    kept = inputs.loss_mask & ~is_masked
    signal = config.adv_tau * advantages
    if inputs.teacher_logprobs is not None:
        signal = signal + config.teacher_tau * _teacher_gap(inputs.teacher_logprobs, inputs.trainer_logprobs)
    policy_gradient = only(kept, signal * inputs.log_ratio(kept).exp())
    token_loss = config.kl_tau * inputs.log_ratio().square() - policy_gradient
    return LossRecord(
        token_loss=token_loss,
        ratios=inputs.ratios,
        is_masked=is_masked,
        is_masked_high=too_high,
        is_masked_low=too_low & (advantages < 0),
    )


def ppo_clip_loss(inputs: LossInputs, config: PpoClipLossConfig) -> LossRecord:
    """PPO clip: −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl_tau·ℓ²."""
    return _clipped(inputs, inputs.ratios.log_importance_ratio, config)


def gspo_loss(inputs: LossInputs, config: GspoLossConfig) -> LossRecord:
    """GSPO: −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) + kl_tau·ℓ², with one ratio for all tokens of a
    sequence: s = exp(mean of ℓ).
    """
    # Each token carries the gradient of its own ℓ; the mean over the sequence is the gradient of s.
    return _clipped(inputs, inputs.mean_per_sequence(inputs.ratios.log_importance_ratio), config)


def _clipped(inputs: LossInputs, log_ratio: Tensor, config: PpoClipLossConfig | GspoLossConfig) -> LossRecord:
    """Computes −min(s·A, clip(s)·A) with s = exp(log_ratio), differentiated through each token's own ℓ."""
    advantages, ratio = inputs.advantages, log_ratio.exp()
    too_high = inputs.loss_mask & (advantages > 0) & (ratio > 1 + config.clip_high)
    too_low = inputs.loss_mask & (advantages < 0) & (ratio < 1 - config.clip_low)
    kept = inputs.loss_mask & ~(too_high | too_low)
    token_log_ratio = inputs.log_ratio(kept)
    moving = only(kept, log_ratio) + token_log_ratio - token_log_ratio.detach()
    bound = torch.where(too_high, 1 + config.clip_high, 1 - config.clip_low)
    surrogate = torch.where(kept, moving.exp(), bound) * advantages
    return _record(inputs, surrogate, config.kl_tau, too_high, too_low)


def cispo_loss(inputs: LossInputs, config: CispoLossConfig) -> LossRecord:
    """CISPO: −stopgrad(clip(r, 1 − clip_low, 1 + clip_high))·A·log π + kl_tau·ℓ²."""
    weights = inputs.ratios.importance_ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return _record(inputs, weights * inputs.advantages * inputs.trainer_logprobs, config.kl_tau)


def tis_loss(inputs: LossInputs, config: TisLossConfig) -> LossRecord:
    """Truncated importance sampling: −stopgrad(min(r, max_ratio))·A·log π + kl_tau·ℓ²."""
    weights = inputs.ratios.importance_ratio.clamp(max=config.max_ratio)
    return _record(inputs, weights * inputs.advantages * inputs.trainer_logprobs, config.kl_tau)


def icepop_loss(inputs: LossInputs, config: IcepopLossConfig) -> LossRecord:
    """IcePop: −keep·r·A + kl_tau·ℓ²; a token is out where r < min_ratio or r > max_ratio."""
    ratio = inputs.ratios.importance_ratio
    too_high = inputs.loss_mask & (ratio > config.max_ratio)
    too_low = inputs.loss_mask & (ratio < config.min_ratio)
    kept = inputs.loss_mask & ~(too_high | too_low)
    gain = only(kept, inputs.log_ratio(kept).exp() * inputs.advantages)
    return _record(inputs, gain, config.kl_tau, too_high, too_low)


def _record(
    inputs: LossInputs,
    gain: Tensor,
    kl_tau: float,
    too_high: Tensor | None = None,
    too_low: Tensor | None = None,
) -> LossRecord:
    """Records the token loss −gain + kl_tau·ℓ² on trainable tokens."""
    penalty = kl_tau * inputs.log_ratio().square()
    return LossRecord(
        token_loss=penalty - only(inputs.loss_mask, gain),
        ratios=inputs.ratios,
        is_masked=None if too_high is None or too_low is None else too_high | too_low,
        is_masked_high=too_high,
        is_masked_low=too_low,
    )


def opd_loss(inputs: LossInputs) -> LossRecord:
    """On-policy distillation: A is log teacher − log π; the sample's own advantage picks the mask's side."""
    teacher = inputs.teacher_logprobs
    # On a GPU the check would wait for it; batches are checked as they are received, too.
    is_on_host = teacher is None or teacher.device.type == "cpu"
    if teacher is None or (is_on_host and bool((teacher.isnan() & inputs.loss_mask).any())):
        raise DataError(
            "opd samples need teacher_logprobs on every trainable token; set orchestrator.teacher"
        )
    return dppo_loss(inputs, _OPD)


def sft_loss(inputs: LossInputs) -> LossRecord:
    """−log π on trainable tokens; ratios and masks have no meaning here."""
    return LossRecord(only(inputs.loss_mask, -inputs.trainer_logprobs), ratios=None)


def _teacher_gap(teacher_logprobs: Tensor, trainer_logprobs: Tensor) -> Tensor:
    """Computes stopgrad(log teacher − log π); 0 where there is no teacher logprob."""
    gap = teacher_logprobs - trainer_logprobs.detach()
    return gap.masked_fill(gap.isnan(), 0.0)


def unknown_loss(inputs: LossInputs) -> LossRecord:
    """Records ratios alone, and NaN as loss, for tokens that another trainer's loss was applied to."""
    return LossRecord(torch.full_like(inputs.trainer_logprobs, torch.nan), ratios=inputs.ratios)


def loss_for(config: LossConfig | None) -> dict[str, TokenLoss]:
    """Returns the loss of each training mode; `config` is that of rl, or None if it is unknown."""
    return {"rl": unknown_loss if config is None else _rl_loss(config), "opd": opd_loss, "sft": sft_loss}


RL_LOSSES: Mapping[str, Callable[[LossInputs, Any], LossRecord]] = {
    "dppo": dppo_loss,
    "ppo_clip": ppo_clip_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "icepop": icepop_loss,
    "tis": tis_loss,
}


def _rl_loss(config: LossConfig) -> TokenLoss:
    if not isinstance(config, CustomLossConfig):
        built_in = RL_LOSSES[config.type]
        return lambda inputs: built_in(inputs, config)
    function = load_function(config.import_path, config.kwargs, "trainer.loss")

    def loss(inputs: LossInputs) -> LossRecord:
        record = function(inputs)
        if not isinstance(record, LossRecord) or record.token_loss.shape != inputs.trainer_logprobs.shape:
            raise DataError(
                f"{config.import_path} must return a LossRecord with one token_loss per token "
                f"({inputs.trainer_logprobs.shape[0]}); see docs/write-a-loss.md"
            )
        return record.within(inputs)

    return loss
