"""Token losses and their derivatives with respect to log π, written out by hand in float64.

π  probability under the trainer's weights      A  advantage
μ  probability under the weights that sampled   ℓ = log π − log μ,  r = exp ℓ

Every function takes one value per token and treats tokens that are not trainable as absent. Settings come as
a mapping with the names of `[trainer.loss]`.

    two tokens, ℓ = 0 and A = +1, −1, kl_tau = 0    loss −1, +1    derivative −1, +1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    def sequence_mean(self, values: Numbers) -> Numbers:
        sums, counts = np.bincount(self.sequence, values), np.bincount(self.sequence)
        means: Numbers = sums[self.sequence] / counts[self.sequence]
        return means


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
    own = OPD if mode == "opd" else settings
    chosen = np.flatnonzero(trainable)
    log_pi = np.asarray(log_pi, np.float64)[chosen]
    gap = np.zeros(len(chosen))
    if teacher is not None:
        spoken = np.asarray(teacher, np.float64)[chosen]
        gap = np.where(np.isnan(spoken), 0.0, spoken - log_pi)
    tokens = _Tokens(
        log_pi,
        np.asarray(log_mu, np.float64)[chosen],
        np.asarray(advantages, np.float64)[chosen],
        gap,
        np.repeat(np.arange(len(lengths)), lengths)[chosen],
    )
    with np.errstate(over="ignore", invalid="ignore"):
        found = _LOSSES[kind](tokens, own)
        if kind != "sft" and (kl_tau := float(own["kl_tau"])):
            penalty, slope = kl_tau * tokens.log_ratio**2, 2 * kl_tau * tokens.log_ratio
            found = _Verdict(found.loss + penalty, found.slope + slope, found.high, found.low, found.masked)
    return found.spread(chosen, len(trainable), _margin(kind, own, tokens))


@dataclass(frozen=True)
class _Verdict:
    """Losses of trainable tokens alone."""

    loss: Numbers
    slope: Numbers
    high: Flags | None = None
    low: Flags | None = None
    masked: Flags | None = None

    def spread(self, chosen: NDArray[np.intp], num_tokens: int, margin: Numbers | None) -> TokenLosses:
        """Puts every value where its token is; all other tokens get 0 or False."""

        def place(values: NDArray[Any]) -> NDArray[Any]:
            placed = np.zeros(num_tokens, values.dtype)
            placed[chosen] = values
            return placed

        def place_if(values: NDArray[Any] | None) -> Any:
            return None if values is None else place(values)

        far = None
        if margin is not None:
            far = np.full(num_tokens, np.inf)
            far[chosen] = margin
        return TokenLosses(
            place(self.loss),
            place(self.slope),
            place_if(self.high),
            place_if(self.low),
            place_if(self.masked),
            far,
        )


def _dppo(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    """−keep · (adv_tau·A + teacher_tau·gap) · r, masked by π − μ on the side of A."""
    delta = np.exp(tokens.log_pi) - np.exp(tokens.log_mu)
    rises = (tokens.advantage > 0) & (delta > settings["dppo_mask_high"])
    falls = (tokens.advantage <= 0) & (delta < -settings["dppo_mask_low"])
    masked = rises | falls
    signal = settings["adv_tau"] * tokens.advantage + settings["teacher_tau"] * tokens.teacher_gap
    gain = np.where(masked, 0.0, signal * np.exp(tokens.log_ratio))
    return _Verdict(-gain, -gain, rises, falls & (tokens.advantage < 0), masked)


def _ppo_clip(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    return _surrogate(tokens, np.exp(tokens.log_ratio), settings)


def _gspo(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    """One ratio per sequence; the mean over its tokens of their slopes is the derivative of that ratio."""
    return _surrogate(tokens, np.exp(tokens.sequence_mean(tokens.log_ratio)), settings)


def _surrogate(tokens: _Tokens, ratio: Numbers, settings: Mapping[str, Any]) -> _Verdict:
    """−min(s·A, clip(s)·A): flat where the clipped term is the smaller one."""
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    free, clipped = ratio * tokens.advantage, np.clip(ratio, low, high) * tokens.advantage
    is_high = (tokens.advantage > 0) & (ratio > high)
    is_low = (tokens.advantage < 0) & (ratio < low)
    slope = np.where(is_high | is_low, 0.0, -free)
    return _Verdict(-np.minimum(free, clipped), slope, is_high, is_low, is_high | is_low)


def _cispo(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    ratio = np.exp(tokens.log_ratio)
    weight = np.clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"]) * tokens.advantage
    return _Verdict(-weight * tokens.log_pi, -weight)


def _tis(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    weight = np.minimum(np.exp(tokens.log_ratio), settings["max_ratio"]) * tokens.advantage
    return _Verdict(-weight * tokens.log_pi, -weight)


def _icepop(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    ratio = np.exp(tokens.log_ratio)
    high, low = ratio > settings["max_ratio"], ratio < settings["min_ratio"]
    gain = np.where(high | low, 0.0, ratio * tokens.advantage)
    return _Verdict(-gain, -gain, high, low, high | low)


def _sft(tokens: _Tokens, settings: Mapping[str, Any]) -> _Verdict:
    return _Verdict(-tokens.log_pi, -np.ones_like(tokens.log_pi))


_LOSSES: Mapping[str, Callable[[_Tokens, Mapping[str, Any]], _Verdict]] = {
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


def _margin(kind: str, settings: Mapping[str, Any], tokens: _Tokens) -> Numbers | None:
    """The distance of the quantity that decides from the bounds that it is held to."""
    if kind == "dppo":
        delta = np.exp(tokens.log_pi) - np.exp(tokens.log_mu)
        bounds = [settings["dppo_mask_high"], -settings["dppo_mask_low"]]
    elif kind in ("ppo_clip", "gspo"):
        mean = tokens.sequence_mean(tokens.log_ratio) if kind == "gspo" else tokens.log_ratio
        delta = np.exp(mean)
        bounds = [1 + settings["clip_high"], 1 - settings["clip_low"]]
    elif kind == "icepop":
        delta = np.exp(tokens.log_ratio)
        bounds = [settings["max_ratio"], settings["min_ratio"]]
    else:
        return None
    nearest: Numbers = np.min([np.abs(delta - bound) for bound in bounds], axis=0)
    return nearest


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
        key = (
            None if mode != "rl" or reduction == "token" else row if reduction == "sequence" else group or row
        )
        keys.append(key)
        if key is not None and number:
            units[key] = units.get(key, 0) + number
    total = sum(units.values())
    return [1.0 if key is None or not units.get(key) else total / len(units) / units[key] for key in keys]
