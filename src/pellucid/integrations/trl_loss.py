"""Maps TRL's GRPO settings to a built-in loss, and names the settings that no built-in loss covers.

loss_type               ours                          its mean
dapo (TRL's default)    ppo_clip                      over tokens, if a generation batch is one step
grpo                    ppo_clip                      over sequences
bnpo                    ppo_clip                      over tokens, if the step is one micro batch
dr_grpo, luspo          ppo_clip                      neither: the sum is not compared
cispo                   cispo without a lower bound   as dapo
any but cispo, with importance_sampling_level = "sequence": gspo
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pellucid.config import CispoLossConfig, GspoLossConfig, LossConfig, PpoClipLossConfig, Reduction

_CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")


@dataclass(frozen=True, slots=True)
class Translation:
    loss: LossConfig | None
    """None: each token's loss is computed otherwise, for the reason in `no_loss`."""

    no_loss: str = ""
    no_sum: str = ""
    """Why the optimised loss is not the mean of these token losses; empty if it is."""


def translate(settings: Any, *, num_processes: int, has_aux_loss: bool) -> Translation:
    """`settings` are a `GRPOConfig`."""
    if reason := next(_other_tokens(settings), ""):
        return Translation(None, no_loss=f"TRL was run with {reason}")
    reason = next(_other_mean(settings, num_processes, has_aux_loss), "")
    return Translation(_loss(settings), no_sum=f"TRL was run with {reason}" if reason else "")


def _loss(settings: Any) -> LossConfig:
    low = settings.epsilon
    high = low if settings.epsilon_high is None else settings.epsilon_high
    reduction: Reduction = "sequence" if settings.loss_type == "grpo" else "token"
    if settings.loss_type == "cispo":
        return CispoLossConfig(type="cispo", clip_low=1.0, clip_high=high - 1)
    low = min(low, 1.0)  # a ratio is never below 0
    if settings.importance_sampling_level == "sequence":
        return GspoLossConfig(type="gspo", clip_low=low, clip_high=high, reduction=reduction)
    return PpoClipLossConfig(type="ppo_clip", clip_low=low, clip_high=high, reduction=reduction)


def _other_tokens(settings: Any) -> Iterator[str]:
    """Yields the settings by which TRL's loss of a token differs from the built-in one."""
    kind, high = settings.loss_type, settings.epsilon_high
    if kind not in (*_CLIPPED, "cispo"):
        yield f"loss_type = {kind!r}, which is none of the built-in losses"
    if kind == "cispo" and settings.importance_sampling_level == "sequence":
        yield "loss_type = 'cispo' and one ratio per sequence"
    if kind == "cispo" and (settings.epsilon if high is None else high) < 1:
        yield f"loss_type = 'cispo' and epsilon_high = {high}, which bounds the weights below 1"
    if settings.beta:
        yield f"beta = {settings.beta}: a KL to the reference model"
    if settings.delta is not None and kind in _CLIPPED:
        yield f"delta = {settings.delta}: a second bound of the ratio"
    if settings.top_entropy_quantile < 1:
        yield f"top_entropy_quantile = {settings.top_entropy_quantile}: tokens of low entropy have no loss"
    if settings.off_policy_mask_threshold is not None:
        yield f"off_policy_mask_threshold = {settings.off_policy_mask_threshold}"
    if settings.use_vllm and settings.vllm_importance_sampling_correction:
        yield "vllm_importance_sampling_correction: a weight for the difference from vLLM's logprobs"


def _other_mean(settings: Any, num_processes: int, has_aux_loss: bool) -> Iterator[str]:
    kind, num_micro_batches = settings.loss_type, settings.gradient_accumulation_steps
    if kind == "dr_grpo":
        yield "loss_type = 'dr_grpo', which divides by the longest possible completions"
    if kind == "luspo":
        yield "loss_type = 'luspo', which adds up the tokens of a sequence"
    if kind == "bnpo" and num_micro_batches * num_processes > 1:
        yield "loss_type = 'bnpo', which takes the mean of the micro batches' means"
    if kind in ("dapo", "cispo") and settings.steps_per_generation != num_micro_batches:
        yield (
            f"loss_type = {kind!r} and steps_per_generation = {settings.steps_per_generation}, which divides "
            "by the mean number of tokens over the steps of a generation batch"
        )
    if kind == "grpo" and settings.mask_truncated_completions:
        yield "mask_truncated_completions, which counts sequences without a loss in the mean"
    if settings.entropy_coef or settings.use_adaptive_entropy:
        yield "an entropy bonus beside the losses of the tokens"
    if has_aux_loss:
        yield "a load-balancing loss beside the losses of the tokens"
