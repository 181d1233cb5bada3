"""The parts of one training run, wired together: what the loop calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.config import TrainerConfig
from pellucid.data.tensors import TokenTensors, to_tensors
from pellucid.errors import DataError
from pellucid.export import TokenExporter
from pellucid.ledger import Journal
from pellucid.loss import LossInputs, TokenLoss
from pellucid.metrics import Sink, Stopwatch
from pellucid.model import Policy, TokenOutput
from pellucid.packing import MicroBatch, PackedBatch, pack_batch
from pellucid.trainer.batches import BatchSource
from pellucid.trainer.observer import LossResult, StepObserver
from pellucid.trainer.optimizer import Optimizer
from pellucid.transport import publish_folder
from pellucid.transport.weights import publish_weights


@dataclass(frozen=True, slots=True)
class LoadedMicroBatch:
    packed: MicroBatch
    tokens: TokenTensors


@dataclass(frozen=True)
class StepBatch:
    packed: PackedBatch
    policy: Policy

    @property
    def denominator(self) -> int:
        return max(1, self.packed.num_trainable)

    @property
    def micro_batches(self) -> Iterable[LoadedMicroBatch]:
        """Each is inflated to tensors when its turn comes."""
        for micro_batch in self.packed.micro_batches:
            yield LoadedMicroBatch(micro_batch, to_tensors(micro_batch.table, self.policy.device))


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
        self._observer: StepObserver | None = None

    def steps(self) -> range:
        return range(self.max_steps)

    def next_batch(self, step: int) -> StepBatch:
        with self._watch("wait"):
            table = self.batches.next(step)
        if table.num_sequences == 0:
            raise DataError(f"the batch of step {step} is empty; an orchestrator never sends one")
        seq_len = self.config.model.seq_len
        packed = pack_batch(table, seq_len=seq_len, max_tokens=self.config.micro_batch_max_tokens or seq_len)
        self._observer = StepObserver(step, table, packed, self.exporter)
        return StepBatch(packed, self.policy)

    def forward(self, micro_batch: LoadedMicroBatch) -> TokenOutput:
        tokens = micro_batch.tokens
        output: TokenOutput = self.policy(
            tokens["token_ids"], tokens.positions, tokens.lengths, tokens["temperatures"]
        )
        return output

    def loss(self, micro_batch: LoadedMicroBatch, output: TokenOutput, denominator: int) -> LossResult:
        inputs = LossInputs.of(micro_batch.tokens, output.logprobs)
        record = self.losses[micro_batch.packed.training_mode](inputs)
        return LossResult(record.token_loss.sum() / denominator, inputs, record, denominator)

    def observe(
        self,
        step: int,
        micro_step: int,
        micro_batch: LoadedMicroBatch,
        output: TokenOutput,
        result: LossResult,
    ) -> None:
        assert self._observer is not None
        with self._watch("observe"):
            self._observer.add(micro_step, micro_batch.packed, output, result)

    def publish(self, step: int) -> None:
        """Step n makes policy version n + 1."""
        if self.publishes:
            with self._watch("publish"):
                publish_weights(self.policy.hf, self.output_dir, step + 1, keep=self.config.keep_weights)

    def finish(self, step: int, grad_norm: float) -> None:
        assert self._observer is not None
        lr = self.optimizer.last_lr
        with self._watch("observe"):
            report = self._observer.report()
            if self.journal is not None:
                self._observer.write_ledger(self.journal)
            if self.exporter is not None:
                self.exporter.finish(step)
                self.exporter.mark_stable(step)
            self.batches.release(step)
        times = self._watch.lap()
        report |= {"grad_norm": grad_norm, "lr": lr, **times}
        report["time/train_s"] = times["time/step_s"] - times["time/wait_s"]
        report["throughput/tokens_per_s"] = report["tokens"] / times["time/step_s"]
        for sink in self.sinks:
            sink.log(step, report)

    def save_model(self) -> None:
        """The result: a folder that `AutoModelForCausalLM.from_pretrained` loads."""

        def write(folder: Path) -> None:
            self.policy.hf.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

        publish_folder(self.output_dir / "model", write)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close(self.max_steps)
        if self.exporter is not None:
            self.exporter.close()
        for sink in self.sinks:
            sink.close()
