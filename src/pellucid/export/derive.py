"""Columns that follow from others, for files that leave them out.

    log_importance_ratio ℓ = log π − log μ     importance_ratio r = exp ℓ     mismatch_kl r − ℓ − 1
    prob_delta π − μ                           rewards, position_ids: from the sequence

They are what the loss computed up to float32 rounding. Samples of sft have no ratios: null.
"""

from collections.abc import Callable, Mapping

import numpy as np

from pellucid.data import TrainingMode
from pellucid.export.batch import ColumnBatch, Values
from pellucid.export.schema import FIELDS


def derive(batch: ColumnBatch, name: str) -> Values:
    return _FORMULAS[name](batch)


def sources(name: str) -> tuple[str, ...]:
    """Returns the fields that have to be read to derive this one."""
    return _SOURCES[name]


def _positions(batch: ColumnBatch) -> Values:
    return (np.arange(batch.num_tokens) - np.repeat(batch.offsets[:-1], batch.lengths)).astype(np.int32)


def _rewards(batch: ColumnBatch) -> Values:
    return batch.spread("reward")


def _log_ratio(batch: ColumnBatch) -> Values:
    return _not_sft(batch, batch.columns["trainer_logprobs"] - batch.columns["inference_logprobs"])


def _ratio(batch: ColumnBatch) -> Values:
    with np.errstate(over="ignore"):
        ratio: Values = np.exp(_log_ratio(batch))
    return ratio


def _kl(batch: ColumnBatch) -> Values:
    log_ratio = _log_ratio(batch)
    with np.errstate(over="ignore"):
        kl: Values = np.expm1(log_ratio) - log_ratio
    return kl


def _delta(batch: ColumnBatch) -> Values:
    trainer, inference = (np.exp(batch.columns[name]) for name in _LOGPROBS)
    return _not_sft(batch, trainer - inference)


def _not_sft(batch: ColumnBatch, values: Values) -> Values:
    if "training_mode" in batch.columns:
        values[batch.spread("training_mode") == TrainingMode.SFT.value] = np.nan
    return values


_LOGPROBS = ("trainer_logprobs", "inference_logprobs")
_FORMULAS: Mapping[str, Callable[[ColumnBatch], Values]] = {
    "position_ids": _positions,
    "rewards": _rewards,
    "log_importance_ratio": _log_ratio,
    "importance_ratio": _ratio,
    "mismatch_kl": _kl,
    "prob_delta": _delta,
}
_SOURCES: Mapping[str, tuple[str, ...]] = {
    "position_ids": (),
    "rewards": ("reward",),
    **dict.fromkeys(
        ("log_importance_ratio", "importance_ratio", "mismatch_kl", "prob_delta"),
        (*_LOGPROBS, "training_mode"),
    ),
}
assert set(_FORMULAS) == {field.name for field in FIELDS if field.derivable}
