"""What a step did, seen from three sides: metrics, ledger, export. All read the loss's own record."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from pellucid.data import TokenTable
from pellucid.export import TokenExporter
from pellucid.ledger import Flow, Journal, State
from pellucid.loss import LossInputs, LossRecord
from pellucid.model import TokenOutput
from pellucid.packing import MicroBatch, PackedBatch
from pellucid.trainer.loss_stats import LossStats, observe_loss

_Account = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LossResult:
    loss: torch.Tensor
    """The micro batch's share of the step's loss, to be differentiated."""

    inputs: LossInputs
    record: LossRecord
    denominator: int


class StepObserver:
    """One optimizer step. Nothing is read back from the device before `report`."""

    def __init__(
        self, step: int, table: TokenTable, packed: PackedBatch, exporter: TokenExporter | None
    ) -> None:
        self._step = step
        self._table = table
        self._packed = packed
        self._exporter = exporter
        self.stats = LossStats(sorted({str(env) for env in table["env_name"]}))
        self._codes = {env: code for code, env in enumerate(self.stats.environments)}

    def add(self, micro_step: int, micro_batch: MicroBatch, output: TokenOutput, result: LossResult) -> None:
        self.stats.add_loss(result.loss.detach())
        env = self._env_codes(micro_batch.table).to(output.logprobs.device)
        observe_loss(self.stats, result.inputs, result.record, output.entropy, env)
        if self._exporter is not None:
            self._exporter.add(
                micro_batch.table,
                observed_values(output, result.record),
                step=self._step,
                micro_step=micro_step,
                denominator=result.denominator,
            )

    def _env_codes(self, table: TokenTable) -> torch.Tensor:
        codes = np.array([self._codes[str(env)] for env in table["env_name"]], np.int64)
        return torch.from_numpy(np.repeat(codes, table.lengths))

    def report(self) -> dict[str, float]:
        """The optimised loss, its statistics, and the accounting of what was really packed."""
        tables = [micro_batch.table for micro_batch in self._packed.micro_batches]
        return {
            "loss": self.stats.loss(),
            **self.stats.report(),
            "tokens": sum(table.num_tokens for table in tables),
            "loss_tokens": self._packed.num_trainable,
            "samples": sum(micro_batch.sample_count for micro_batch in self._packed.micro_batches),
            "micro_batches": len(tables),
            "max_micro_batch_tokens": max(table.num_tokens for table in tables),
            "padding_tokens": sum(_num_padding(table) for table in tables),
            "truncated_tokens": self._packed.truncated_tokens,
        }

    def write_ledger(self, journal: Journal) -> None:
        masked = self.stats.count("is_masked")
        received = _sampled_by_account(self._table)
        packed = TokenTable.concat([micro_batch.table for micro_batch in self._packed.micro_batches])
        computed = _sampled_by_account(packed)
        trainable = _count_by_account(packed, packed["loss_mask"] & packed["sampled"])
        everything = _count_by_account(packed, np.ones(packed.num_tokens, np.bool_))
        for account in received:
            run, env = account
            journal.count(run, env, Flow.RECEIVED, received[account])
            journal.count(run, env, State.TRUNCATED, received[account] - computed[account])
            journal.count(run, env, State.UNTRAINABLE, computed[account] - trainable[account])
            journal.count(run, env, State.MASKED, masked.get(env, 0))
            journal.count(run, env, State.TRAINED, trainable[account] - masked.get(env, 0))
            journal.count(run, env, Flow.CONTEXT, everything[account] - computed[account])
            journal.count(run, env, Flow.COMPUTED, everything[account])
        journal.flush(self._step)


def observed_values(output: TokenOutput, record: LossRecord) -> dict[str, torch.Tensor | None]:
    ratios = record.ratios
    return {
        "trainer_logprobs": output.logprobs,
        "entropy": output.entropy,
        "mismatch_kl": ratios.mismatch_kl if ratios else None,
        "log_importance_ratio": ratios.log_importance_ratio if ratios else None,
        "importance_ratio": ratios.importance_ratio if ratios else None,
        "prob_delta": ratios.prob_delta if ratios else None,
        "is_masked": record.is_masked,
        "is_masked_high": record.is_masked_high,
        "is_masked_low": record.is_masked_low,
        "token_loss": record.token_loss,
    }


def _num_padding(table: TokenTable) -> int:
    return int(table.lengths[table["env_name"] == ""].sum())


def _sampled_by_account(table: TokenTable) -> Counter[_Account]:
    return _count_by_account(table, table["sampled"])


def _count_by_account(table: TokenTable, mask: np.ndarray) -> Counter[_Account]:
    """Tokens under a mask, per (run, environment)."""
    per_sequence = np.diff(np.concatenate([[0], np.cumsum(mask)])[table.token_offsets])
    counts: Counter[_Account] = Counter()
    for run, env, tokens in zip(table["run_id"], table["env_name"], per_sequence, strict=True):
        if env:
            counts[str(run), str(env)] += int(tokens)
    return counts
