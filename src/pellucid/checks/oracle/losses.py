"""Token losses and their derivatives with respect to log π, written out by hand in float64.

π  probability under the trainer's weights      A  advantage
μ  probability under the weights that sampled   ℓ = log π − log μ,  r = exp ℓ

Every function takes one value per token and treats tokens that are not trainable as absent. Settings come as
a mapping with the names of `[trainer.loss]`.

    two tokens, ℓ = 0 and A = +1, −1, kl_tau = 0    loss −1, +1    derivative −1, +1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

OPD = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 0.0, "teacher_tau": 1.0, "kl_tau": 1e-3}
"""On-policy distillation has its own settings; `[trainer.loss]` does not touch them."""


@dataclass(frozen=True)
class TokenLosses:
    """The verdict of a loss on each token."""

    loss: Numbers
    slope: Numbers
    """∂ loss / ∂ log π; 0 where a token is not trainable."""

    is_masked_high: Flags | None = None
    is_masked_low: Flags | None = None
    is_masked: Flags | None = None
    """Outside of the trust region; None for a loss that masks nothing."""

    margin: Numbers | None = None
    """The distance of each token from the nearest bound of the trust region: a computation in float32 may
    decide otherwise where rounding exceeds it."""


@dataclass(frozen=True)
class _Tokens:
    """The inputs of a loss; trainable tokens alone."""

    log_pi: Numbers
    log_mu: Numbers
    advantage: Numbers
    teacher_gap: Numbers
    """log teacher − log π, 0 where the teacher said nothing."""

    sequence: NDArray[np.int64]

    @property
    def log_ratio(self) -> Numbers:
        return self.log_pi - self.log_mu

    @property
    def ratio(self) -> Numbers:
        ratios: Numbers = np.exp(self.log_ratio)
        return ratios


def ratios_of(log_pi: Numbers, log_mu: Numbers) -> dict[str, Numbers]:
    """The exported columns that follow from two logprobs, by name."""
    log_ratio = np.asarray(log_pi, np.float64) - np.asarray(log_mu, np.float64)
    with np.errstate(over="ignore"):
        return {
            "log_importance_ratio": log_ratio,
            "importance_ratio": np.exp(log_ratio),
            "mismatch_kl": np.expm1(log_ratio) - log_ratio,
            "prob_delta": np.exp(log_pi) - np.exp(log_mu),
        }


def token_losses(
    mode: str,
    settings: Mapping[str, Any],
    *,
    log_pi: Numbers,
    log_mu: Numbers,
    advantages: Numbers,
    trainable: Flags,
    lengths: Sequence[int],
    teacher: Numbers | None = None,
) -> TokenLosses:
    """Computes the loss of each token of sequences with these `lengths`.

    `mode` is that of the samples (`rl`, `opd`, `sft`); `settings["type"]` names the loss of `rl`.
    """
    kind = {"opd": "dppo", "sft": "sft"}.get(mode) or str(settings["type"])
    settings = OPD if mode == "opd" else settings
    chosen = np.flatnonzero(trainable)
    log_pi, log_mu, advantages = (
        np.asarray(values, np.float64)[chosen] for values in (log_pi, log_mu, advantages)
    )
    gap = np.zeros(len(chosen))
    if teacher is not None:
        spoken = np.asarray(teacher, np.float64)[chosen]
        gap = np.where(np.isnan(spoken), 0.0, spoken - log_pi)
    sequence = np.repeat(np.arange(len(lengths)), lengths)[chosen]
    tokens = _Tokens(log_pi, log_mu, advantages, gap, sequence)
    with np.errstate(over="ignore", invalid="ignore"):
        found = _LOSSES[kind](tokens, settings)
        if kind != "sft" and (kl_tau := float(settings["kl_tau"])):
            penalty, slope = kl_tau * tokens.log_ratio**2, 2 * kl_tau * tokens.log_ratio
            found = replace(found, loss=found.loss + penalty, slope=found.slope + slope)
    spread: dict[str, NDArray[Any]] = {}
    for name in (field.name for field in fields(found)):
        if (values := getattr(found, name)) is not None:
            spread[name] = np.full(len(trainable), np.inf if name == "margin" else 0, values.dtype)
            spread[name][chosen] = values
    return TokenLosses(**spread)


def _nearest(values: Numbers, *bounds: float) -> Numbers:
    """The distance of each value from the nearest bound."""
    distances: Numbers = np.min([np.abs(values - bound) for bound in bounds], axis=0)
    return distances


def _dppo(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    """−keep · (adv_tau·A + teacher_tau·gap) · r, masked by π − μ on the side of A."""
    low, high = -settings["dppo_mask_low"], settings["dppo_mask_high"]
    delta = np.exp(tokens.log_pi) - np.exp(tokens.log_mu)
    rises = (tokens.advantage > 0) & (delta > high)
    falls = (tokens.advantage <= 0) & (delta < low)
    masked = rises | falls
    signal = settings["adv_tau"] * tokens.advantage + settings["teacher_tau"] * tokens.teacher_gap
    gain = np.where(masked, 0.0, signal * tokens.ratio)
    is_low = falls & (tokens.advantage < 0)
    return TokenLosses(-gain, -gain, rises, is_low, masked, _nearest(delta, low, high))


def _ppo_clip(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    return _surrogate(tokens, tokens.ratio, settings)


def _gspo(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    """One ratio per sequence; the mean over its tokens of their slopes is the derivative of that ratio."""
    sums, counts = np.bincount(tokens.sequence, tokens.log_ratio), np.bincount(tokens.sequence)
    return _surrogate(tokens, np.exp(sums[tokens.sequence] / counts[tokens.sequence]), settings)


def _surrogate(tokens: _Tokens, ratio: Numbers, settings: Mapping[str, Any]) -> TokenLosses:
    """−min(s·A, clip(s)·A): flat where the clipped term is the smaller one."""
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    free, clipped = ratio * tokens.advantage, np.clip(ratio, low, high) * tokens.advantage
    is_high = (tokens.advantage > 0) & (ratio > high)
    is_low = (tokens.advantage < 0) & (ratio < low)
    masked = is_high | is_low
    slope = np.where(masked, 0.0, -free)
    return TokenLosses(-np.minimum(free, clipped), slope, is_high, is_low, masked, _nearest(ratio, low, high))


def _cispo(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    weight = np.clip(tokens.ratio, 1 - settings["clip_low"], 1 + settings["clip_high"]) * tokens.advantage
    return TokenLosses(-weight * tokens.log_pi, -weight)


def _tis(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    weight = np.minimum(tokens.ratio, settings["max_ratio"]) * tokens.advantage
    return TokenLosses(-weight * tokens.log_pi, -weight)


def _icepop(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    low, high = settings["min_ratio"], settings["max_ratio"]
    is_high, is_low = tokens.ratio > high, tokens.ratio < low
    gain = np.where(is_high | is_low, 0.0, tokens.ratio * tokens.advantage)
    margin = _nearest(tokens.ratio, low, high)
    return TokenLosses(-gain, -gain, is_high, is_low, is_high | is_low, margin)


def _sft(tokens: _Tokens, settings: Mapping[str, Any]) -> TokenLosses:
    return TokenLosses(-tokens.log_pi, -np.ones_like(tokens.log_pi))


_LOSSES: Mapping[str, Callable[[_Tokens, Mapping[str, Any]], TokenLosses]] = {
    "dppo": _dppo,
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "tis": _tis,
    "icepop": _icepop,
    "sft": _sft,
}

KNOWN = frozenset(_LOSSES) - {"sft"}
"""Values of `trainer.loss.type` that this module has a formula for; a custom loss is not among them."""


def loss_weights_of(
    reduction: str, num_trainable: Sequence[int], groups: Sequence[str], modes: Sequence[str]
) -> list[float]:
    """Computes the factor on the token losses of each sequence of a step.

    The step's loss is always Σ factor · token loss ÷ trainable tokens. A mean over sequences (or groups)
    gives each of them one share of the trainable tokens of all rl samples: 1 and 3 tokens, 2 sequences ->
    factors 4/2/1 = 2 and 4/2/3 = 2/3. A sequence without a group is a group of its own; other modes than rl
    are always averaged over tokens.
    """
    units: dict[object, int] = {}
    keys: list[object] = []
    for row, (number, group, mode) in enumerate(zip(num_trainable, groups, modes, strict=True)):
        key: object = row if reduction == "sequence" else group or row
        keys.append(None if mode != "rl" or reduction == "token" else key)
        if keys[-1] is not None and number:
            units[key] = units.get(key, 0) + number
    total = sum(units.values())
    return [1.0 if key is None or not units.get(key) else total / len(units) / units[key] for key in keys]
