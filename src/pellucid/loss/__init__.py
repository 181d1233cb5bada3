"""Losses: columns and logprobs in, per-token loss and decisions out. Pure torch.

A loss never sums, divides or differentiates: the framework does, with one denominator. Metrics, ledger
and export read the record that a loss returns and never re-derive it.
"""

from pellucid.loss.functions import TokenLoss, dppo_loss, loss_for, opd_loss, sft_loss
from pellucid.loss.record import LossInputs, LossRecord, Ratios, sequence_weights

__all__ = [
    "LossInputs",
    "LossRecord",
    "Ratios",
    "TokenLoss",
    "dppo_loss",
    "loss_for",
    "opd_loss",
    "sequence_weights",
    "sft_loss",
]
