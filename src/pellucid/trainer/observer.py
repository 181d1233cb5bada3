"""Records a step in metrics, ledger and export; all three read the loss's own record.

Each rank observes the tokens that it trains. Metrics know how they combine; the books of all ranks add up.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data.tensors import read_together, to_device
from pellucid.export import TokenExporter
from pellucid.ledger import Flow, Journal, State
from pellucid.loss import LossInputs, LossRecord
from pellucid.metrics import Max, Mean, MetricSet, Moments, Sum
from pellucid.model import TokenOutput
from pellucid.trainer.alarms import Bools, Floats, StepWatch
from pellucid.trainer.step import LoadedMicroBatch, LossResult, StepBatch

logger = logging.getLogger(__name__)

_Account = tuple[str, str]
"""(run, environment)."""

_PADDING = ""
"""Environment that padding is booked under."""

_BOOKED = ("packed", "computed", "sampled", "trainable", "received")

COUNTED = (
    "tokens",
    "computed_tokens",
    "trained_tokens",
    "loss_tokens",
    "padding_tokens",
    "truncated_tokens",
    "samples",
    "oversized_samples",
    "micro_batches",
)
"""Counts of a step that are also reported for this rank alone, and as running totals."""


class StepObserver:
    """Observes one optimizer step, whether it is trained at once or in several parts.

    Statistics stay on the device until `read` copies all of them together; an export copies each micro batch.
    """

    def __init__(self, batch: StepBatch, exporter: TokenExporter | None) -> None:
        self.batch, self._exporter = batch, exporter
        owners = set(zip(batch.table["run_id"], batch.table["env_name"], strict=True))
        self._accounts: list[_Account] = sorted({*owners, *((run, _PADDING) for run, _ in owners)})
        self._numbers = {account: number for number, account in enumerate(self._accounts)}
        self._books = {name: np.zeros(len(self._accounts), np.int64) for name in _BOOKED}
        self._counts: Counter[str] = Counter()
        self._max_micro_batch_tokens = 0
        self.num_pairs = 0
        """Pairs of a token and one that it attends to, on this rank."""

        self._stats = LossStats([env for _, env in self._accounts])
        self.finite = FiniteWatch()
        self.alarms = StepWatch(batch.table, batch.step)
        """Sums over this rank's tokens, which the alarms of the run judge."""

        self.is_skipped = False
        """Whether the trainable tokens of this step are booked as skipped: they move no weights."""

    def add(self, micro_batch: LoadedMicroBatch, output: TokenOutput, result: LossResult) -> None:
        run, table = micro_batch.packed.kind.run_id, micro_batch.table
        numbers = [self._numbers[run, env] for env in table["env_name"]]
        account = np.repeat(np.array(numbers, np.int64), table.lengths)
        sampled, loss_mask = table["sampled"], table["loss_mask"]
        self._count(micro_batch, account, sampled, loss_mask)
        # In float64, so that it equals the sum of the exported losses even where they cancel out.
        self._stats.add_total(
            "loss", result.record.token_loss.detach().sum(dtype=torch.float64) / self.batch.denominator
        )
        if output.balance is not None:
            self._stats.add_total("router_balance_loss", output.balance.detach().double())
        (on_device,) = to_device([account], output.logprobs.device)
        observe_loss(self._stats, result.inputs, result.record, output.entropy, on_device)
        self.finite.add(micro_batch, result)
        self.alarms.add(micro_batch.packed, sampled, loss_mask, output, result.record)
        if output.replaced is not None:
            self._stats.add("router_replace_rate", output.replaced, result.inputs.loss_mask, on_device)
        if self._exporter is not None:
            self._exporter.add(
                micro_batch.table,
                observed_values(output, result.record),
                step=self.batch.step,
                micro_step=micro_batch.index,
                denominator=self.batch.denominator,
            )

    def _count(
        self, micro_batch: LoadedMicroBatch, account: NDArray[np.int64], sampled: Bools, loss_mask: Bools
    ) -> None:
        table, is_computed = micro_batch.table, micro_batch.is_computed
        self._counts.update(asdict(micro_batch.packed.counts))
        self._counts.update(micro_batches=1, computed_tokens=int(is_computed.sum()))
        self.num_pairs += micro_batch.layout.num_pairs
        self._max_micro_batch_tokens = max(self._max_micro_batch_tokens, table.num_tokens)
        masks = {
            "packed": np.ones(table.num_tokens, np.bool_),
            "computed": is_computed,
            "sampled": sampled,
            "trainable": sampled & loss_mask,
        }
        for name, mask in masks.items():
            self._books[name] += np.bincount(account[mask], minlength=len(self._accounts))
        of_sequences = account[np.cumsum(table.lengths)[: len(micro_batch.packed.received)] - 1]
        np.add.at(self._books["received"], of_sequences, micro_batch.packed.received)
        if filled := micro_batch.num_filled:
            self._counts.update(tokens=filled, padding_tokens=filled, computed_tokens=filled)
            for name in ("packed", "computed"):
                self._books[name][self._numbers[micro_batch.packed.kind.run_id, _PADDING]] += filled

    def complete(self) -> None:
        """Tells the export that the step is complete: it writes the rest while the weights are updated."""
        if self._exporter is not None:
            self._exporter.complete(self.batch.step)

    def read(self, grad_norm: Tensor) -> float:
        """Reads the step's statistics and the norm of its gradient: the host waits for the device once."""
        parts: tuple[LossStats | FiniteWatch | StepWatch, ...] = (self._stats, self.finite, self.alarms)
        tensors = [part.tensors() for part in parts]
        *arrays, norm = read_together([*chain.from_iterable(tensors), grad_norm])
        found = iter(arrays)
        for part, some in zip(parts, tensors, strict=True):
            part.take(list(islice(found, len(some))))
        return float(norm)

    def metrics(self) -> MetricSet:
        """Returns this rank's metrics: its share of the loss, statistics, and counts of packed tokens."""
        metrics = self._stats.metrics()
        for name, total in {"loss": 0.0, **self._stats.totals()}.items():
            metrics.add(name, Sum(total))
        num_masked = sum(self._stats.count("is_masked"))
        num_trained = 0 if self.is_skipped else self._counts["loss_tokens"] - num_masked
        counts = {**self._counts, "trained_tokens": num_trained}
        for name in COUNTED:
            metrics.add(name, Sum(counts[name]))
        metrics.add("max_micro_batch_tokens", Max(self._max_micro_batch_tokens))
        metrics.add("micro_batch_max_tokens", Max(self.batch.packed.max_tokens))
        return metrics

    def report(self, ranks: Sequence[MetricSet]) -> dict[str, float]:
        """Combines the metrics of all ranks, and adds the counts of this rank as `local/…`."""
        report = MetricSet.combined(ranks).report()
        for scope in ("all", *dict.fromkeys(env for _, env in self._accounts)):
            kl, entropy = report.get(f"mismatch_kl/{scope}/mean"), report.get(f"entropy/{scope}/mean")
            if kl is not None and entropy:
                report[f"kl_ent_ratio/{scope}"] = kl / entropy
        local = ranks[self.batch.rank].report()
        return report | {f"local/{name}": local[name] for name in (*COUNTED, "max_micro_batch_tokens")}

    def write_ledger(self, journal: Journal) -> None:
        """Books this rank's tokens in the ledger; `received` counts sampled tokens before truncation."""
        masked = self._stats.count("is_masked")
        for number, (run, env) in enumerate(self._accounts):
            packed, computed, sampled, trainable, received = (
                int(self._books[name][number]) for name in _BOOKED
            )
            padding = packed if env == _PADDING else 0
            skipped = trainable if self.is_skipped else 0
            num_masked = 0 if self.is_skipped else masked[number]
            journal.count(run, env, Flow.RECEIVED, received)
            journal.count(run, env, State.TRUNCATED, received - sampled)
            journal.count(run, env, State.UNTRAINABLE, sampled - trainable)
            journal.count(run, env, State.SKIPPED, skipped)
            journal.count(run, env, State.MASKED, num_masked)
            journal.count(run, env, State.TRAINED, trainable - skipped - num_masked)
            journal.count(run, env, Flow.CONTEXT, packed - sampled - padding)
            journal.count(run, env, Flow.PADDING, padding)
            journal.count(run, env, Flow.COMPUTED, computed)
            journal.count(run, env, Flow.SAVED, packed - computed)
        journal.flush(self.batch.step)


def observed_values(output: TokenOutput, record: LossRecord) -> dict[str, torch.Tensor | None]:
    return {"trainer_logprobs": output.logprobs, "entropy": output.entropy, **record.columns()}


_MOMENTS = ("entropy", "mismatch_kl")
"""Metrics that have a standard deviation and a maximum."""


class LossStats:
    """Sums of (weight, value, value², maximum) per metric and account, on the device, read back once.

    All are over trainable tokens and weighted by tokens, so that the result does not depend on how the step
    was cut into micro batches. An account has an environment.
    """

    def __init__(self, environments: Sequence[str]) -> None:
        self.environments = environments
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._read: tuple[dict[str, Floats], dict[str, Floats], dict[str, float]] | None = None
        """Sums, maxima and totals in host memory, once they are read."""

    def add_total(self, name: str, value: Tensor) -> None:
        """Adds a micro batch's share of a number that the whole step has once."""
        self._totals[name] = self._totals[name] + value if name in self._totals else value

    def add(self, name: str, values: Tensor, mask: Tensor, account: Tensor) -> None:
        num_accounts = len(self.environments)
        chosen = torch.where(mask, values, values.new_zeros(())).double()
        rows = torch.stack([mask.double(), chosen, chosen.square()])
        sums = rows.new_zeros(3, num_accounts).index_add(1, account, rows)
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        if name in _MOMENTS:
            lowest = rows.new_full((num_accounts,), -torch.inf)
            maxima = lowest.scatter_reduce(0, account, torch.where(mask, values.double(), lowest[0]), "amax")
            self._maxima[name] = torch.maximum(self._maxima[name], maxima) if name in self._maxima else maxima

    def tensors(self) -> list[Tensor]:
        """Returns what `take` wants in host memory."""
        return [*self._sums.values(), *self._maxima.values(), *self._totals.values()]

    def take(self, arrays: Sequence[Floats]) -> None:
        found = iter(arrays)
        sums, maxima = (
            dict(zip(each, islice(found, len(each)), strict=True)) for each in (self._sums, self._maxima)
        )
        totals = dict(zip(self._totals, map(float, found), strict=True))
        self._read = sums, maxima, totals

    def _numbers(self) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, float]]:
        if self._read is None:
            self.take(read_together(self.tensors()))
        assert self._read is not None
        return self._read

    def totals(self) -> dict[str, float]:
        return self._numbers()[2]

    def count(self, name: str) -> list[int]:
        """Counts per account the tokens for which a yes/no metric is true."""
        if name not in self._sums:
            return [0] * len(self.environments)
        return [round(total) for total in self._numbers()[0][name][1].tolist()]

    def metrics(self) -> MetricSet:
        metrics = MetricSet()
        all_sums, all_maxima, _ = self._numbers()
        for name, sums in all_sums.items():
            maxima = all_maxima.get(name)
            for number, (env, (weight, total, squares)) in enumerate(
                zip(self.environments, sums.T.tolist(), strict=True)
            ):
                for scope in ("all", env):
                    value: Mean | Moments = Mean(total, weight)
                    if maxima is not None:
                        value = Moments.of(weight, total, squares, float(maxima[number]))
                    metrics.add(f"{name}/{scope}", value)
        return metrics


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


class FiniteWatch:
    """Finds the first token of a step whose loss is not finite."""

    def __init__(self) -> None:
        self._found: Sequence[Floats] = []
        self._first: list[torch.Tensor] = []
        """Row per micro batch: whether it has a bad token, its index, loss, logprobs and advantage."""

        self._sequences: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        """Lengths, environments and rollouts of the sequences, per micro batch."""

    def add(self, micro_batch: LoadedMicroBatch, result: LossResult) -> None:
        losses, inputs = result.record.token_loss.detach(), result.inputs
        is_bad = ~losses.isfinite()
        token = is_bad.int().argmax().view(1)
        numbers = (losses, inputs.trainer_logprobs.detach(), inputs.inference_logprobs, inputs.advantages)
        # `each[token]` would synchronise with the device.
        found = [is_bad.any().view(1), token, *(each.index_select(0, token) for each in numbers)]
        self._first.append(torch.cat([each.double() for each in found]))
        table = micro_batch.table
        self._sequences.append((table.lengths, table["env_name"], table["rollout_id"]))

    def tensors(self) -> list[Tensor]:
        """Returns what `take` wants in host memory."""
        return self._first

    def take(self, arrays: Sequence[Floats]) -> None:
        self._found = arrays

    def cause(self) -> str | None:
        """Describes the first bad token and its numbers, once they are read; None if all are finite."""
        found = (row.tolist() for row in self._found)
        for (is_bad, index, *numbers), (lengths, envs, rollouts) in zip(found, self._sequences, strict=True):
            if is_bad:
                row = int((lengths.cumsum() > index).argmax())
                token = int(index) - int(lengths[:row].sum())
                loss, trainer, inference, advantage = numbers
                whose = (
                    f"rollout {rollouts[row]!r}" if rollouts[row] else f"sequence {row} of its micro batch"
                )
                return (
                    f"the loss of token {token} of {whose}, environment {envs[row]!r}, is {loss:g} (trainer "
                    f"logprob {trainer:g}, inference logprob {inference:g}, advantage {advantage:g})"
                )
        return None


class LogSink:
    def __init__(self, run: str = "") -> None:
        """Takes `run`, which every line of a trainer that serves several runs names."""
        self._run = run and f"{run}: "

    def log(self, step: int, values: Mapping[str, float]) -> None:
        logger.info(
            "%sstep %d  loss %.4g  grad norm %.3g  %d tokens, %d with loss, %d padding in %d micro batches  "
            "%.0f tok/s",
            self._run,
            step,
            *(values[name] for name in ("loss", "grad_norm", "tokens", "loss_tokens", "padding_tokens")),
            values["micro_batches"],
            values["throughput/tokens_per_s"],
        )

    def close(self) -> None:
        """Does nothing: the log stays open."""
