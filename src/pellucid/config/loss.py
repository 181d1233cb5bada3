"""`[trainer.loss]`: the loss of rl samples."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pellucid.config.base import ImportPath, Section

Reduction = Literal["token", "sequence", "group"]


class _Loss(Section):
    reduction: Reduction = "token"
    """Unit of the step's mean, each with the same weight: every trainable token, every sequence whatever its
    length, or every group whatever its size. The mean is over the whole batch, so that packing and ranks
    cannot change it. `gspo` has `sequence` by default."""


class _RatioLoss(_Loss):
    kl_tau: float = Field(default=0.0, ge=0)
    """Weight of the squared log-ratio, over every trainable token; `dppo` has 1e-3 by default."""


class PpoClipLossConfig(_RatioLoss):
    """PPO's clipped surrogate: −min(r·A, clip(r)·A)."""

    type: Literal["ppo_clip"]
    """Selects PPO's clipped surrogate."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """With a negative advantage a token has no gradient once its ratio is below 1 − this. `gspo` has 3e-4
    by default, of the sequence's ratio; `cispo` bounds its weights by it, and has 1 by default."""

    clip_high: float = Field(default=0.2, ge=0)
    """With a positive advantage a token has no gradient once its ratio is above 1 + this. `gspo` has 4e-4
    by default, of the sequence's ratio; `cispo` bounds its weights by it, and has 4 by default."""


class CispoLossConfig(_RatioLoss):
    """CISPO: −stopgrad(clip(r))·A·log π. Every token keeps a gradient, however far off its ratio is."""

    type: Literal["cispo"]
    """Selects CISPO."""

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Importance weights are at least 1 − this; 1: no lower bound."""

    clip_high: float = Field(default=4.0, ge=0)
    """Importance weights are at most 1 + this."""


class GspoLossConfig(_RatioLoss):
    """GSPO: the clipped surrogate with one ratio per sequence, the geometric mean over its tokens."""

    type: Literal["gspo"]
    """Selects GSPO."""

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """With a negative advantage a token has no gradient once its sequence's ratio is below 1 − this."""

    clip_high: float = Field(default=4e-4, ge=0)
    """With a positive advantage a token has no gradient once its sequence's ratio is above 1 + this."""

    reduction: Reduction = "sequence"
    """Unit of the step's mean, each with the same weight: every trainable token, every sequence whatever its
    length (that is GSPO as published), or every group whatever its size."""


class IcepopLossConfig(_RatioLoss):
    """IcePop: −keep·r·A; a token whose ratio is out of bounds has no gradient, whatever its advantage."""

    type: Literal["icepop"]
    """Selects IcePop."""

    min_ratio: float = Field(default=0.5, ge=0, le=1)
    """A token with a lower ratio is masked."""

    max_ratio: float = Field(default=5.0, ge=1)
    """A token with a higher ratio is masked."""


class TisLossConfig(_RatioLoss):
    """Truncated importance sampling: −stopgrad(min(r, cap))·A·log π."""

    type: Literal["tis"]
    """Selects truncated importance sampling."""

    max_ratio: float = Field(default=2.0, gt=0)
    """Importance weights are at most this."""


class DppoLossConfig(_Loss):
    """DPPO + KL: the policy gradient with a trust region on the change of probability."""

    type: Literal["dppo"] = "dppo"
    """`dppo`: DPPO + KL, the default rl loss; `ppo_clip`, `cispo`, `gspo`, `icepop`, `tis`: see
    docs/losses.md; `custom`: a function of your own."""

    dppo_mask_low: float = Field(default=0.2, ge=0)
    """A token with advantage ≤ 0 is masked once its probability fell by more than this."""

    dppo_mask_high: float = Field(default=0.2, ge=0)
    """A token with advantage > 0 is masked once its probability rose by more than this."""

    adv_tau: float = 1.0
    """Weight of the advantage."""

    teacher_tau: float = 0.0
    """Weight of (teacher logprob − trainer logprob) where a sample has teacher logprobs."""

    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio, over every trainable token."""


class CustomLossConfig(_Loss):
    """A loss of your own; see docs/write-a-loss.md."""

    type: Literal["custom"]
    """Selects the custom loss."""

    import_path: ImportPath
    """`package.module:function`, called as `function(inputs, **kwargs) -> LossRecord`."""

    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments for the function."""


# The default comes last: `--help` describes `type` as the last variant does.
LossConfig = Annotated[
    CustomLossConfig
    | PpoClipLossConfig
    | CispoLossConfig
    | GspoLossConfig
    | IcepopLossConfig
    | TisLossConfig
    | DppoLossConfig,
    Field(discriminator="type"),
]
