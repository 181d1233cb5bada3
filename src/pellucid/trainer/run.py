"""The parts of one training run, wired together: what the loop calls."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.config import TrainerConfig
from pellucid.errors import DataError
from pellucid.export import TokenExporter
from pellucid.ledger import Journal
from pellucid.loss import LossInputs, TokenLoss
from pellucid.metrics import Sink, Stopwatch
from pellucid.model import Policy, TokenOutput
from pellucid.packing import pack_batch
from pellucid.trainer.batches import BatchSource
from pellucid.trainer.observer import StepObserver
from pellucid.trainer.optimizer import Optimizer
from pellucid.trainer.step import LoadedMicroBatch, LossResult, StepBatch
from pellucid.transport import publish_folder
from pellucid.transport.weights import publish_weights

_TOTALS = ("tokens", "loss_tokens", "samples", "truncated_tokens")
"""Counts that are also reported as running totals."""


@dataclass
class Run:
    config: TrainerConfig
    output_dir: Path
    max_steps: int
    policy: Policy
    tokenizer: Any
    losses: dict[str, TokenLoss]
    optimizer: Optimizer
    batches: BatchSource
    sinks: list[Sink]
    journal: Journal | None
    """None for sft: nothing was sampled, so there is nothing to account for."""

    exporter: TokenExporter | None
    publishes: bool
    """Whether an engine follows this run's weights."""

    def __post_init__(self) -> None:
        self._watch = Stopwatch()
        self._totals: Counter[str] = Counter()

    def steps(self) -> range:
        return range(self.max_steps)

    def next_batch(self, step: int) -> StepBatch:
        with self._watch("wait"):
            table = self.batches.next(step)
        if table.num_sequences == 0:
            raise DataError(f"the batch of step {step} is empty; an orchestrator never sends one")
        seq_len = self.config.model.seq_len
        packed = pack_batch(table, seq_len=seq_len, max_tokens=self.config.micro_batch_max_tokens or seq_len)
        return StepBatch(step, table, packed, self.config.share_prompts, self.policy.device)

    def observer(self, batch: StepBatch) -> StepObserver:
        return StepObserver(batch, self.exporter)

    def forward(self, micro_batch: LoadedMicroBatch) -> TokenOutput:
        tokens = micro_batch.tokens
        output: TokenOutput = self.policy(
            tokens["token_ids"], tokens.positions, tokens["temperatures"], micro_batch.layout
        )
        return output

    def loss(self, micro_batch: LoadedMicroBatch, output: TokenOutput, denominator: int) -> LossResult:
        inputs = LossInputs.of(micro_batch.tokens, output.logprobs)
        record = self.losses[micro_batch.packed.training_mode](inputs)
        return LossResult(record.token_loss.sum() / denominator, inputs, record)

    def publish(self, step: int) -> None:
        """Step n makes policy version n + 1."""
        if self.publishes:
            with self._watch("publish"):
                publish_weights(self.policy.hf, self.output_dir, step + 1, keep=self.config.keep_weights)

    def finish(self, step: int, observer: StepObserver, grad_norm: float) -> None:
        """Books, export and metrics of a trained step."""
        with self._watch("observe"):
            report = observer.report()
            if self.journal is not None:
                observer.write_ledger(self.journal)
            if self.exporter is not None:
                self.exporter.finish(step)
                self.exporter.mark_stable(step)
                report["export/skipped_sequences"] = self.exporter.num_skipped
            self.batches.release(step)
        self._totals.update({f"total/{name}": report[name] for name in _TOTALS})
        report |= {"grad_norm": grad_norm, "lr": self.optimizer.last_lr, **self._totals}
        report |= self._times(report)
        for sink in self.sinks:
            sink.log(step, report)

    def _times(self, report: Mapping[str, float]) -> dict[str, float]:
        times = self._watch.lap()
        step_s = times["time/step_s"]
        return {
            **times,
            "time/train_s": step_s - times["time/wait_s"],
            "throughput/tokens_per_s": report["tokens"] / step_s,
            "throughput/computed_tokens_per_s": report["computed_tokens"] / step_s,
        }

    def save_model(self) -> None:
        """The result: a folder that `AutoModelForCausalLM.from_pretrained` loads."""

        def write(folder: Path) -> None:
            self.policy.hf.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

        publish_folder(self.output_dir / "model", write)

    def close_books(self) -> None:
        """Only a run that came to its end: the journal of any other stays open."""
        if self.journal is not None:
            self.journal.close(self.max_steps)

    def close(self) -> None:
        if self.exporter is not None:
            self.exporter.close()
        for sink in self.sinks:
            sink.close()
