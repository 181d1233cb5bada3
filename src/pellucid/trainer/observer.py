"""What a step did, seen from three sides: metrics, ledger, export. All read the loss's own record."""

from collections import Counter

import numpy as np
import torch

from pellucid.data import TokenTable
from pellucid.export import TokenExporter
from pellucid.ledger import Flow, Journal, State
from pellucid.loss import LossRecord
from pellucid.model import TokenOutput
from pellucid.trainer.loss_stats import LossStats, observe_loss
from pellucid.trainer.step import LoadedMicroBatch, LossResult, StepBatch

_Account = tuple[str, str]


class StepObserver:
    """One optimizer step. Statistics stay on the device until `report`; an export reads each micro batch."""

    def __init__(self, batch: StepBatch, exporter: TokenExporter | None) -> None:
        self._batch = batch
        self._exporter = exporter
        self._num_saved: Counter[_Account] = Counter()
        self.stats = LossStats(sorted({str(env) for env in batch.table["env_name"]}))
        self._codes = {env: code for code, env in enumerate(self.stats.environments)}

    def add(self, micro_batch: LoadedMicroBatch, output: TokenOutput, result: LossResult) -> None:
        self.stats.add_loss(result.loss.detach())
        self._num_saved += _count_by_account(micro_batch.table, ~micro_batch.is_computed)
        env = self._env_codes(micro_batch.table).to(output.logprobs.device)
        observe_loss(self.stats, result.inputs, result.record, output.entropy, env)
        if self._exporter is not None:
            self._exporter.add(
                micro_batch.table,
                observed_values(output, result.record),
                step=self._batch.step,
                micro_step=micro_batch.index,
                denominator=self._batch.denominator,
            )

    def _env_codes(self, table: TokenTable) -> torch.Tensor:
        codes = np.array([self._codes[str(env)] for env in table["env_name"]], np.int64)
        return torch.from_numpy(np.repeat(codes, table.lengths))

    def report(self) -> dict[str, float]:
        """The optimised loss, its statistics, and the accounting of what was really packed."""
        packed = self._batch.packed
        tables = [micro_batch.table for micro_batch in packed.micro_batches]
        num_tokens = sum(table.num_tokens for table in tables)
        return {
            "loss": self.stats.loss(),
            **self.stats.report(),
            "tokens": num_tokens,
            "computed_tokens": num_tokens - self._num_saved.total(),
            "loss_tokens": packed.num_trainable,
            "samples": sum(micro_batch.sample_count for micro_batch in packed.micro_batches),
            "micro_batches": len(tables),
            "max_micro_batch_tokens": max(table.num_tokens for table in tables),
            "micro_batch_max_tokens": packed.max_tokens,
            "padding_tokens": sum(_num_padding(table) for table in tables),
            "truncated_tokens": packed.truncated_tokens,
        }

    def write_ledger(self, journal: Journal) -> None:
        masked = self.stats.count("is_masked")
        packed = TokenTable.concat([micro_batch.table for micro_batch in self._batch.packed.micro_batches])
        received = _count_by_account(self._batch.table, self._batch.table["sampled"])
        kept = _count_by_account(packed, packed["sampled"])
        trainable = _count_by_account(packed, packed["loss_mask"] & packed["sampled"])
        everything = _count_by_account(packed, np.ones(packed.num_tokens, np.bool_))
        for account in received:
            run, env = account
            journal.count(run, env, Flow.RECEIVED, received[account])
            journal.count(run, env, State.TRUNCATED, received[account] - kept[account])
            journal.count(run, env, State.UNTRAINABLE, kept[account] - trainable[account])
            journal.count(run, env, State.MASKED, masked.get(env, 0))
            journal.count(run, env, State.TRAINED, trainable[account] - masked.get(env, 0))
            journal.count(run, env, Flow.CONTEXT, everything[account] - kept[account])
            journal.count(run, env, Flow.COMPUTED, everything[account] - self._num_saved[account])
            journal.count(run, env, Flow.SAVED, self._num_saved[account])
        journal.flush(self._batch.step)


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


def _count_by_account(table: TokenTable, mask: np.ndarray) -> Counter[_Account]:
    """Tokens under a mask, per (run, environment)."""
    per_sequence = np.diff(np.concatenate([[0], np.cumsum(mask)])[table.token_offsets])
    counts: Counter[_Account] = Counter()
    for run, env, tokens in zip(table["run_id"], table["env_name"], per_sequence, strict=True):
        if env:
            counts[str(run), str(env)] += int(tokens)
    return counts
