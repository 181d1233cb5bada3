"""One training run: its parts, wired together, and the methods that the loop calls."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from pellucid.checkpoint import STATE, Progress, newest_intact, take_back
from pellucid.checkpoint.state import read_state
from pellucid.config import SFTConfig, TrainerConfig, TrainerRunConfig
from pellucid.data import TokenTable
from pellucid.data.rules import check_expert_weights, check_experts, check_images, check_text
from pellucid.data.spans import SpanLog
from pellucid.data.tensors import TokenTensors, generators_of
from pellucid.ending import DISK_SILENCE_S, SILENCE_S, SINK_SILENCE_S, say, working
from pellucid.errors import DataError
from pellucid.export import TokenExporter
from pellucid.ledger import Journal, Stage, sum_entries
from pellucid.ledger.journal import journals_of
from pellucid.ledger.settings import changed_settings, record_settings
from pellucid.loss import LossInputs, TokenLoss
from pellucid.metrics import Max, Sink, Stopwatch, Sum
from pellucid.model import Layout, TokenOutput
from pellucid.packing import pack_batch
from pellucid.trainer.alarms import TrainerAlarms
from pellucid.trainer.batches import BatchSource, StopRequest
from pellucid.trainer.observer import COUNTED, StepObserver
from pellucid.trainer.optimizer import Optimizer, TrainedWeights, Update, cause_of, too_many_skips
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.saver import (
    CheckpointSaver,
    WeightsPublisher,
    restore_random_state,
    take_random_state,
)
from pellucid.trainer.sft import Validation
from pellucid.trainer.step import (
    LoadedMicroBatch,
    LossResult,
    ModelShape,
    StepBatch,
    forward_inputs,
    loss_weights,
    peak_flops,
    peak_memory_gib,
)
from pellucid.transport import Batch, is_stable, publish_folder
from pellucid.transport.weights import WeightsCopy, weights_folder

if TYPE_CHECKING:  # a web server, which few runs need
    from pellucid.transport.weights_offer import WeightsOffer
    from pellucid.transport.weights_store import StoredOffer

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0
_SKIPPED, _LOST = "export/skipped_sequences", "export/lost_sequences"


@dataclass
class Run:
    config: TrainerConfig
    output_dir: Path
    max_steps: int
    trained: TrainedWeights
    losses: dict[str, TokenLoss]
    optimizer: Optimizer
    batches: BatchSource
    sinks: list[Sink]
    journal: Journal | None
    """None for sft: nothing was sampled, so there is nothing to account for."""

    exporter: TokenExporter | None
    publishes: bool
    """Whether an engine follows this run's weights."""

    publishes_deltas: bool = False
    """Whether versions come with their difference from the one before; see `weights.deltas`."""

    validation: Validation | None = None
    spans: SpanLog | None = None
    """None in all processes but the main one."""

    ranks: Ranks = field(default_factory=Ranks)
    stop: StopRequest = field(default_factory=StopRequest)
    offer: "WeightsOffer | StoredOffer | None" = None
    """Listener or store from which servers read the weights, once `begin` has restored them; only in the main
    process."""

    def __post_init__(self) -> None:
        self.start = self._num_trained = self._num_saved = 0
        self.policy = self.trained.policy
        self.step_s = 0.0
        """Duration of the last step in seconds."""
        self._totals: Counter[str] = Counter()
        self._watch = Stopwatch(self.spans)
        self._shape = ModelShape.of(self.policy)
        self._cost = self._shape.cost()
        self._skips: list[str] = []
        """Causes of the steps that were skipped in a row, up to the last one."""
        self._saver = CheckpointSaver(self.output_dir, self.config.ckpt, self.ranks)
        self._publisher = WeightsPublisher(
            self.output_dir,
            keep=self.config.keep_weights,
            spans=self.spans,
            deltas=self.publishes_deltas,
            **({} if self.offer is None else {"is_read": self.offer.leases.holds}),
        )
        # Runs that share a model reduce every micro batch: of one that is evicted, no gradient may be left.
        is_alone = self.config.join is None
        self._reduces_once = is_alone and self.ranks.reduces_once(self.config.model, self.trained.module)
        self._publish_dtype = self.ranks.publish_dtype(self.config)
        self._copy: WeightsCopy | None = None
        """Weights that are on their way to the host: the next update must not come before them."""
        self._alarms = TrainerAlarms(
            self.output_dir,
            publishes=self.publishes,
            lr=self.config.optim.lr,
            frozen=[name for name, each in self.trained.module.named_parameters() if not each.requires_grad],
        )

    def begin(self, config: TrainerRunConfig) -> None:
        """Checks the settings, restores the run if it is resumed, and records that they hold from here on.

        Raises ConfigError in every process, before anything is restored, if `config` changes what a resumed
        run must keep.
        """
        part = "sft" if isinstance(config, SFTConfig) else "trainer"
        self.ranks.share(lambda: changed_settings(config, part))
        if config.resume:
            self.restore()
        if self.ranks.is_main:
            self.batches.expect(self.start)
        changes = self.ranks.share(lambda: record_settings(config, part, self.start))
        if self.ranks.is_main:
            for change in changes:
                logger.info(change.line(self.start))
        if self.offer is not None:
            self.offer.start()

    def restore(self) -> None:
        """Restores the newest intact checkpoint, bit by bit; without one the run starts at step 0.

        Later entries of books, published weights and exports are removed. The policy version that the run
        starts from is published again if it is missing.
        """
        progress = self.ranks.share(self._take_back)
        if progress is not None:
            state = self.output_dir / "checkpoints" / f"step_{progress.step}" / STATE
            read_state(self.trained.module, self.optimizer.adamw, state, self.ranks.group)
            restore_random_state(generators_of(self.policy.device), progress, self.ranks.process)
            self.start = self._num_trained = self._num_saved = progress.step
            self._totals = Counter(progress.totals)
            self.optimizer.num_steps = progress.step
        folder = weights_folder(self.output_dir, self.start)
        if self.publishes and self.start > 0 and not self.ranks.share(lambda: is_stable(folder)):
            self.publish(self.start - 1)
            self.finish_publishing()
        if self.exporter is not None:
            self.exporter.forget_from(self.start)
            if self.ranks.is_main:  # other ranks count from 0, so that the sum is right
                self.exporter.num_skipped, self.exporter.num_lost = (
                    self._totals[_SKIPPED],
                    self._totals[_LOST],
                )
                self.exporter.forget_ranks_from(self.ranks.num_ranks, self.start)
        logger.info("resumed at step %d", self.start)

    def _take_back(self) -> Progress | None:
        """Picks the checkpoint and removes later books and weights; called in the main process alone."""
        progress = newest_intact(self.output_dir)
        if self.publishes:
            take_back(self.output_dir, progress)
        return progress

    def steps(self) -> Iterator[int]:
        if self.validation is not None and self.start == 0:
            with self.timed("validate", 0):
                self.validation.begin()
        for step in range(self.start, self.max_steps):
            with self._profiled(step):
                yield step

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        """Writes `profiles/step_N.rank_R.json` for chrome://tracing or Perfetto, if the config wants it."""
        wanted = self.config.profile
        if wanted is None or not self.ranks.keeps_books or step not in wanted.steps:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        path = self.output_dir / "profiles" / f"step_{step}.rank_{self.ranks.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link would be followed
        profile.export_chrome_trace(str(path))

    def next_batch(self, step: int) -> StepBatch:
        """Waits for the batch of a step, and packs it.

        On a stop request every process raises `Stopped` here, all of them before the same step.
        """
        with self.timed("wait", step):
            batch = self.ranks.share(lambda: self._receive(step))
        return self.pack(step, batch.table)

    def _receive(self, step: int) -> Batch:
        with self.stop.interruptible():
            # Whoever sends the batch may be waiting for these weights, and would wait forever if they fail.
            if self.publishes and not self.batches.is_there(step):
                self._publisher.settle()
            batch = self.batches.next(step)
        self.check(step, batch.table)
        return batch

    def check(self, step: int, table: TokenTable) -> None:
        """Raises DataError if the model cannot train on these samples."""
        if table.num_sequences == 0:
            raise DataError(f"the batch of step {step} is empty; an orchestrator never sends one")
        if self.policy.images is None:
            check_text(table.columns)
        else:
            check_images(table.columns, self.policy.images)
        if self.policy.replay is not None:
            shape = self.policy.replay.shape
            check_experts(table.columns, shape.experts)
            if shape.has_weights:
                check_expert_weights(table.columns, shape.experts)

    def pack(self, step: int, table: TokenTable) -> StepBatch:
        with self.timed("pack", step):
            packed = pack_batch(
                table,
                seq_len=self.config.model.seq_len,
                max_tokens=self.config.max_tokens,
                num_ranks=self.ranks.num_ranks,
                pad_to_multiple_of=self.config.pad_to_multiple_of,
                share_prompts=self.config.share_prompts,
                in_rows=self.policy.way == "rows",
                cost=self._cost,
            )
        return StepBatch(
            step,
            packed,
            self.policy.device,
            self.ranks.rank,
            loss_weights(packed, self.config.loss.reduction),
            self.ranks.context,
        )

    def part(self, batch: StepBatch, start: int, stop: int, num_before: int) -> StepBatch:
        """Packs samples `start` to `stop` of a batch; weights and denominator are those of the whole."""
        part = self.pack(batch.step, batch.table.select(np.arange(start, stop)))
        weights = None if batch.weights is None else batch.weights[start:stop]
        is_last = stop == batch.table.num_sequences
        return replace(part, weights=weights, whole=batch, num_before=num_before, is_last=is_last)

    def timed(self, phase: str, step: int) -> AbstractContextManager[None]:
        """Context manager: time spent inside is logged as `time/PHASE_s`, and as a span of the step."""
        return self._watch(phase, step)

    def observer(self, batch: StepBatch) -> StepObserver:
        return StepObserver(batch, self.exporter)

    @contextmanager
    def balanced(self, batches: Sequence[StepBatch]) -> Iterator[None]:
        """Context manager: forwards inside give their shares of the step's balancing loss, if it has one.

        `batches` are what this process trains of the step. It first counts how busy each expert is in the
        whole step, all ranks together; without router replay that takes a forward of each micro batch.
        """
        if (balance := self.policy.balance) is None or balance.is_begun:
            yield
            return
        counts = torch.zeros((), device=self.policy.device)
        for batch in batches:
            for micro_batch in batch.micro_batches:
                self.trained.activate()
                inputs = forward_inputs(micro_batch.tokens, micro_batch.layout)
                counts = counts + self.policy.count_experts(*inputs, micro_batch.tokens["loss_mask"])
        with balance.step(self.ranks.add_up(counts), batches[0].denominator):
            yield

    def forward(self, micro_batch: LoadedMicroBatch) -> TokenOutput:
        if self._reduces_once and isinstance(self.policy, FSDPModule):
            self.policy.set_requires_gradient_sync(micro_batch.is_last)
        self.trained.activate()
        inputs = forward_inputs(micro_batch.tokens, micro_batch.layout)
        trainable = micro_batch.tokens["loss_mask"]
        output: TokenOutput = self.policy(*inputs, trainable, micro_batch.images)
        return output

    def predict(self, tokens: TokenTensors, layout: Layout) -> TokenOutput:
        self.trained.activate()
        output: TokenOutput = self.policy(*forward_inputs(tokens, layout))
        return output

    def loss(self, micro_batch: LoadedMicroBatch, output: TokenOutput, denominator: int) -> LossResult:
        inputs = LossInputs.of(micro_batch.tokens, output.logprobs)
        record = self.losses[micro_batch.packed.kind.training_mode](inputs).weighted(micro_batch.weights)
        loss = record.token_loss.sum() / denominator
        if output.balance is not None:
            loss = loss + self.config.model.router_aux_loss_coef * output.balance
        return LossResult(loss, inputs, record)

    def update(self, observer: StepObserver) -> Update:
        """Moves the weights by the gradient of a step, or skips it if its loss or gradient is not finite.

        All processes decide alike: they gather each other's bad tokens, and the norm is over all gradients.
        """
        with self.timed("optimizer", observer.batch.step):
            norm = self.optimizer.norm()
            grad_norm = observer.read(norm)
            tokens: list[str | None] = self.ranks.gather(observer.finite.cause())
            if self._copy is not None:
                self._copy.hold_back()
                self._copy = None
            update = self.optimizer.step(norm, grad_norm, is_finite=not any(tokens))
        if not update.is_skipped:
            self._skips.clear()
            return update
        observer.is_skipped = True
        self._skips.append(cause_of(update, tokens, self.ranks.gather_all(update.parameter)))
        if self.ranks.is_main:
            logger.warning(
                "step %d of %s is skipped: %s", observer.batch.step, self.output_dir, self._skips[-1]
            )
        return update

    def publish(self, step: int) -> None:
        """Publishes the weights after step n as policy version n + 1.

        Copies them, and writes the copy while the next step is trained.
        """
        if not self.publishes:
            return
        with self.timed("publish", step):
            self.finish_publishing()  # before the copy: the host has memory for one
            dtype = self._publish_dtype
            self._copy = None
            # All raise if the main process has no memory: no other must wait for it in a gather.
            self._copy = self.ranks.alike(lambda: self.trained.room(dtype) if self.ranks.is_main else None)
            if self._copy is not None:
                self._publisher.publish(step + 1, self.trained.take(self._copy))
            else:
                self.trained.offer(dtype)

    def finish_publishing(self, *, wait: bool = True) -> None:
        """Raises in every process if the last weights cannot be published; `wait`s until they are."""
        self.ranks.share(lambda: self._publisher.settle(wait=wait))

    def finish(self, step: int, observer: StepObserver, update: Update) -> None:
        """Writes books, export and metrics of a step, and a checkpoint when one is due.

        Raises DataError once too many steps in a row were skipped, after a checkpoint.
        """
        with self.timed("observe", step):
            if self.journal is not None:
                observer.write_ledger(self.journal)
            if self.exporter is not None:
                self.exporter.finish(step)
            rank_metrics = observer.metrics()
            rank_metrics.add("memory/peak_gib", Max(peak_memory_gib(self.policy.device)))
            if self.exporter is not None:
                rank_metrics.add(_SKIPPED, Sum(self.exporter.num_skipped))
                rank_metrics.add(_LOST, Sum(self.exporter.num_lost))
            ranks = self.ranks.gather((rank_metrics, observer.num_pairs, observer.alarms.sums()))
            metrics, num_pairs, alarm_sums = zip(*ranks, strict=True)
            report = observer.report(metrics)
            if self.exporter is not None:
                num_lost = self._totals[_LOST]
                for name in (_SKIPPED, _LOST):
                    self._totals[name] = int(report[name])
                # Every rank has written its export before the gather, and this step lost no sequence.
                if self.ranks.is_main and self._totals[_LOST] == num_lost:
                    self.exporter.mark_stable(step)
        if self.validation is not None:
            with self.timed("validate", step):
                report |= self.validation.report(step)
        report |= {"grad_norm": update.grad_norm, "lr": update.lr, "skipped_steps": int(update.is_skipped)}
        for name in (*COUNTED, *(f"local/{name}" for name in COUNTED), "skipped_steps"):
            self._totals[f"total/{name}"] += int(report[name])
        report |= self._totals
        if self.ranks.is_main:
            table = observer.batch.table
            report |= self._alarms.judge(
                step, table, alarm_sums, update.looks, lr=update.lr, is_skipped=update.is_skipped
            )
        report |= self._times(report, sum(num_pairs))
        if self.spans is not None:
            self.spans.flush()
        for sink in self.sinks:
            sink.log(step, report)
        self._num_trained = step + 1
        self.finish_publishing(wait=False)
        self.finish_checkpoint(wait=False)
        if self._num_trained % self.config.ckpt.interval == 0 or self._num_trained == self.max_steps:
            self.save_checkpoint()
        if len(self._skips) >= self.config.max_skipped_steps:
            self.save_checkpoint()
            self.finish_checkpoint()
            raise too_many_skips(step, self._skips, self.output_dir, is_exported=self.exporter is not None)

    def save_checkpoint(self) -> None:
        """Writes a checkpoint of the steps trained so far, unless it exists; releases batches it covers."""
        self.finish_publishing()
        if self._num_trained == self._num_saved:
            return
        if self.journal is not None:
            self.journal.sync()
        booked = self.ranks.gather(self.journal.totals() if self.journal is not None else [])
        random_states = self.ranks.gather_all(take_random_state(generators_of(self.policy.device)))
        progress = Progress(
            step=self._num_trained,
            totals=dict(self._totals),
            random_state=random_states[0][0],
            ledger=sum_entries(chain.from_iterable(booked)),
            random_states=random_states,
        )
        with self.timed("checkpoint", self._num_trained - 1):
            self.finish_checkpoint()
            self._saver.save(progress, self.trained.module, self.optimizer.adamw)
            self.finish_checkpoint(wait=False)
        self._num_saved = self._num_trained

    def finish_checkpoint(self, *, wait: bool = True) -> None:
        """Releases the batches that a checkpoint covers once it is complete; `wait`s until it is."""
        needed_from = self._saver.settle(wait=wait)
        if needed_from is not None and self.ranks.is_main:
            self.batches.release_before(needed_from)

    def _times(self, report: Mapping[str, float], num_pairs: int) -> dict[str, float]:
        times = self._watch.lap()
        self.step_s = times["time/step_s"]
        step_s = self.step_s - times.get("time/validate_s", 0.0)
        wait_s = times.get("time/wait_s", 0.0)
        num_computed = report["computed_tokens"] - report["padding_tokens"]
        flops_per_s = self._shape.flops(num_computed, num_pairs) / step_s
        peak = peak_flops(self.policy.device)
        return {
            **times,
            **({} if peak is None else {"throughput/mfu": flops_per_s / (peak * self.ranks.num_processes)}),
            "time/train_s": step_s - wait_s,
            "throughput/model_tflops_per_s": flops_per_s / 1e12,
            "throughput/tokens_per_s": (report["tokens"] - report["padding_tokens"]) / step_s,
            "throughput/computed_tokens_per_s": report["computed_tokens"] / step_s,
            "throughput/trained_tokens_per_s": report["trained_tokens"] / step_s,
            "throughput/padding_tokens_per_s": report["padding_tokens"] / step_s,
        }

    def save_model(self) -> None:
        """Writes `model/`, which `AutoModelForCausalLM.from_pretrained` loads, and releases all batches."""
        self.finish_publishing()
        self.finish_checkpoint()
        model = self.output_dir / "model"
        lost = f"{model}, which --resume writes"
        writing = working("writing the model", at_stake=lost, silence_s=DISK_SILENCE_S)
        with writing, self.timed("checkpoint", self.max_steps - 1):
            if self.ranks.is_main:
                self.batches.release_before(self.max_steps)
                publish_folder(model, self.trained.save)
            else:
                self.trained.offer()

    def close_books(self) -> None:
        """Closes the journal of a run that has trained all its steps; other journals stay open."""
        if self.journal is not None:
            self.journal.close(self.max_steps)

    def say_stopping(self) -> None:
        """Tells the launcher that the trainer finishes the current step before it stops."""
        say_finishing(f"step {self._num_trained}", self.step_s)

    def finish_offering(self) -> None:
        """Waits until nobody asks for weights any more: an evaluation of the last version may still begin."""
        if self.offer is not None:
            waiting = working("offering its last weights to whoever asks", silence_s=SINK_SILENCE_S)
            with waiting, self.stop.interruptible():
                self.offer.wait_until_quiet()

    def finish_answering(self) -> None:
        """Waits until an orchestrator elsewhere that is resumed too knows that all steps are trained."""
        orchestrators = journals_of(self.output_dir / "ledger", Stage.ORCHESTRATOR)
        if self.ranks.is_main and not any(path.exists() for path in orchestrators):
            waiting = working("answering an orchestrator that goes on", silence_s=SINK_SILENCE_S)
            with waiting, self.stop.interruptible():
                self.batches.finish_answering(_ANSWER_S)

    def close(self) -> None:
        self._publisher.close()
        if self.offer is not None:
            self.offer.close()
        self._saver.close()
        if self.exporter is not None:
            with working("closing its token export", silence_s=DISK_SILENCE_S):
                self.exporter.close()
        with working("closing its metrics", silence_s=SINK_SILENCE_S):
            if self.spans is not None:
                self.spans.flush()
            for sink in self.sinks:
                sink.close()


def say_finishing(what: str, step_s: float) -> None:
    """Tells the launcher that the trainer stops after `what`, in up to twice the time of the last step."""
    say(
        f"finishing {what}",
        at_stake="the steps since the last checkpoint, which are trained again",
        silence_s=SILENCE_S + 2 * step_s,
    )
