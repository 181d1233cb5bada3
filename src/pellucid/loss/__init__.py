"""Losses: columns and logprobs in, per-token loss and decisions out. Pure torch.

A loss never sums, divides or differentiates: the framework does, with one denominator. Metrics, ledger
and export read the record that a loss returns and never re-derive it.
"""

from pellucid.loss.functions import (
    TokenLoss,
    cispo_loss,
    dppo_loss,
    gspo_loss,
    icepop_loss,
    loss_for,
    opd_loss,
    ppo_clip_loss,
    sft_loss,
    tis_loss,
)
from pellucid.loss.record import LossInputs, LossRecord, Ratios, sequence_weights

__all__ = [
    "LossInputs",
    "LossRecord",
    "Ratios",
    "TokenLoss",
    "cispo_loss",
    "dppo_loss",
    "gspo_loss",
    "icepop_loss",
    "loss_for",
    "opd_loss",
    "ppo_clip_loss",
    "sequence_weights",
    "sft_loss",
    "tis_loss",
]
