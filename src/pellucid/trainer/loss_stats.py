"""Statistics of a step per environment, summed on the device and read back once.

Everything here is over trainable tokens and weighted by tokens, so that the result does not depend on how
the step was cut into micro batches.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pellucid.loss import LossInputs, LossRecord
from pellucid.metrics import Mean, Metric, MetricSet, Moments

_MOMENTS = ("entropy", "mismatch_kl")


class LossStats:
    """Sums of (weight, value, value², maximum) per metric and account; an account has an environment."""

    def __init__(self, environments: Sequence[str]) -> None:
        self.environments = list(environments)
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._loss: Tensor | None = None

    def add_loss(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def add(self, name: str, values: Tensor, mask: Tensor, account: Tensor) -> None:
        num_accounts = len(self.environments)
        chosen = torch.where(mask, values, values.new_zeros(())).double()
        rows = torch.stack([mask.double(), chosen, chosen.square()])
        sums = rows.new_zeros(3, num_accounts).index_add(1, account, rows)
        lowest = rows.new_full((num_accounts,), -torch.inf)
        maxima = lowest.scatter_reduce(0, account, torch.where(mask, values.double(), lowest[0]), "amax")
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        self._maxima[name] = torch.maximum(self._maxima[name], maxima) if name in self._maxima else maxima

    def loss(self) -> float:
        return 0.0 if self._loss is None else float(self._loss)

    def count(self, name: str) -> list[int]:
        """Counts per account the tokens for which a yes/no metric is true."""
        if name not in self._sums:
            return [0] * len(self.environments)
        held: list[int] = self._sums[name][1].round().long().tolist()
        return held

    def metrics(self) -> MetricSet:
        metrics = MetricSet()
        for name, sums in self._sums.items():
            columns = zip(self.environments, sums.T.tolist(), self._maxima[name].tolist(), strict=True)
            for env, (weight, total, squares), maximum in columns:
                for scope in ("all", env):
                    metrics.add(f"{name}/{scope}", _metric(name, weight, total, squares, maximum))
        return metrics


def kl_ent_ratios(report: Mapping[str, float], environments: Iterable[str]) -> dict[str, float]:
    """Divides the mean mismatch KL by the mean entropy, per environment and over all."""
    ratios = {}
    for scope in ("all", *environments):
        kl, entropy = report.get(f"mismatch_kl/{scope}/mean"), report.get(f"entropy/{scope}/mean")
        if kl is not None and entropy:
            ratios[f"kl_ent_ratio/{scope}"] = kl / entropy
    return ratios


def _metric(name: str, weight: float, total: float, squares: float, maximum: float) -> Metric:
    if name in _MOMENTS:
        return Moments.of(weight, total, squares, maximum)
    return Mean(total, weight)


def observe_loss(
    stats: LossStats, inputs: LossInputs, record: LossRecord, entropy: Tensor, account: Tensor
) -> None:
    """Adds one micro batch; `account` holds the index of each token's account."""
    trainable = inputs.loss_mask
    stats.add("entropy", entropy, trainable, account)
    if record.ratios is None:
        stats.add("nll", -inputs.trainer_logprobs.detach(), trainable, account)
        return
    kl = record.ratios.mismatch_kl
    stats.add("mismatch_kl", kl, trainable, account)
    if inputs.teacher_logprobs is not None:
        gap = inputs.teacher_logprobs - inputs.trainer_logprobs.detach()
        stats.add("teacher_kl", gap, trainable & ~gap.isnan(), account)
    if record.is_masked is None:
        return
    masked = trainable & record.is_masked
    stats.add("is_masked", masked.float(), trainable, account)
    stats.add("masked_mismatch_kl", kl, masked, account)
    stats.add("unmasked_mismatch_kl", kl, trainable & ~masked, account)
    stats.add("masked_advantage_positive", (inputs.advantages > 0).float(), masked, account)
    stats.add("masked_advantage_negative", (inputs.advantages < 0).float(), masked, account)
    for name, side in (("is_masked_high", record.is_masked_high), ("is_masked_low", record.is_masked_low)):
        if side is not None:
            stats.add(name, side.float(), trainable, account)
