"""What `pellucid trainer` and `pellucid sft` call: builds a run from its configuration and trains."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial

import torch

from pellucid.checkpoint import read_progress
from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_state
from pellucid.config import SFTConfig, TrainerRunConfig
from pellucid.data import TokenTable
from pellucid.data.tokenizer import load_tokenizer
from pellucid.export import TokenExporter
from pellucid.ledger import Journal, Stage
from pellucid.loss import loss_for
from pellucid.metrics import Sink, open_sinks
from pellucid.model import load_policy
from pellucid.model.load import check_tokenizer, vocab_size
from pellucid.trainer.batches import (
    BatchSource,
    DatasetBatches,
    FakeBatches,
    NoBatches,
    OrchestratorBatches,
    share_table,
)
from pellucid.trainer.loop import train
from pellucid.trainer.optimizer import Optimizer
from pellucid.trainer.parallel import joined
from pellucid.trainer.ranks import Ranks
from pellucid.trainer.run import Run
from pellucid.trainer.sft_data import SFTData
from pellucid.trainer.stop import Stopped
from pellucid.trainer.validation import Validation
from pellucid.transport import open_receiver, stable_steps

logger = logging.getLogger(__name__)


class LogSink:
    """One line per step in the trainer's log."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        logger.info(
            "step %d  loss %.4g  grad norm %.3g  %d tokens, %d with loss, %d padding in %d micro batches  "
            "%.0f tok/s",
            step,
            *(values[name] for name in ("loss", "grad_norm", "tokens", "loss_tokens", "padding_tokens")),
            values["micro_batches"],
            values["throughput/tokens_per_s"],
        )

    def close(self) -> None:
        """Nothing to close."""


def run_trainer(config: TrainerRunConfig) -> None:
    """Trains on the batches that an orchestrator sends, or on fake ones."""
    with joined(config.trainer) as ranks:
        run_with(config, ranks)


def run_with(config: TrainerRunConfig, ranks: Ranks) -> None:
    """The same, in processes that have found each other."""
    if (fake := config.trainer.data.fake) is not None:
        fakes = FakeBatches(
            fake.batch_size,
            length=config.trainer.model.seq_len,
            vocab_size=len(load_tokenizer(config.model.name)),
            run_id=config.run_name,
            seed=config.seed,
        )
        _train(config, build_run(config, fakes, None, [LogSink()], ranks))
        return
    with ExitStack() as stack:
        batches: BatchSource = NoBatches()
        if ranks.is_main:
            receiver = open_receiver(
                config.transport, config.output_dir, config.run_name, vocab_size=vocab_size(config.model)
            )
            batches = OrchestratorBatches(stack.enter_context(closing(receiver)))
        journal = open_journal(config, ranks)
        _train(config, build_run(config, batches, journal, [LogSink()], ranks, publishes=True))


def open_journal(config: TrainerRunConfig, ranks: Ranks) -> Journal | None:
    """`trainer.jsonl`, `trainer_1.jsonl`, …: one per rank."""
    if not ranks.keeps_books:
        return None
    name = f"trainer_{ranks.rank}.jsonl" if ranks.rank else "trainer.jsonl"
    return Journal(config.output_dir / "ledger" / name, Stage.TRAINER, resume=config.resume)


def train_on_dataset(
    config: SFTConfig, data: SFTData | None, sinks: list[Sink], ranks: Ranks | None = None
) -> None:
    """Trains on a data set, and measures the loss on the part that is kept for validation.

    Only the main process has the data; the others get from it what they need.
    """
    batches = DatasetBatches(data.train, config.data.batch_size, config.seed) if data else NoBatches()
    run = build_run(config, batches, None, sinks, ranks)
    if config.data.validation is not None:
        run.validation = Validation(
            run.policy,
            run.forward,
            [run.pack(0, table) for table in _validation_tables(data, run.ranks)],
            interval=config.data.validation.interval,
            max_steps=config.max_steps,
            gather=run.ranks.gather,
        )
    _train(config, run)


def _validation_tables(data: SFTData | None, ranks: Ranks) -> Iterator[TokenTable]:
    tables = data.validation_tables() if data else []
    for index in range(ranks.share(lambda: len(tables))):
        yield share_table(ranks, partial(tables.__getitem__, index))


def _train(config: TrainerRunConfig, run: Run) -> None:
    try:
        if config.resume:
            restore(run)
        with run.stop.listening():
            train(run)
        run.close_books()
    except Stopped as stopped:
        logger.warning("%s: stopping after a checkpoint", stopped)
        run.save_checkpoint()
        run.finish_checkpoint()
        raise SystemExit(128 + stopped.signal) from None
    finally:
        run.close()


def restore(run: Run) -> None:
    """Takes a new run to where its newest checkpoint was, bit by bit; without one it starts at step 0."""
    steps = run.ranks.share(lambda: stable_steps(run.output_dir / "checkpoints"))
    if steps:
        folder = run.output_dir / "checkpoints" / f"step_{steps[-1]}"
        progress = read_progress(folder)
        read_state(run.policy, run.optimizer.adamw, folder / STATE, run.ranks.group)
        torch.set_rng_state(torch.frombuffer(bytearray(progress.random_state), dtype=torch.uint8))
        run.go_on_from(progress)
    if run.exporter is not None:
        run.exporter.forget_from(run.start)
        if run.ranks.is_main:
            run.exporter.forget_ranks_from(run.ranks.num_ranks, run.start)
    logger.info("resumed at step %d", run.start)


def build_run(
    config: TrainerRunConfig,
    batches: BatchSource,
    journal: Journal | None,
    sinks: list[Sink],
    ranks: Ranks | None = None,
    *,
    publishes: bool = False,
) -> Run:
    """`sinks` are those of the main process, besides the ones that the configuration asks for."""
    settings, ranks = config.trainer, ranks or Ranks()
    torch.set_num_threads(max(1, (settings.threads or os.cpu_count() or 1) // ranks.num_local))
    torch.manual_seed(config.seed)
    policy = load_policy(config.model, trainable=True)
    tokenizer = load_tokenizer(config.model.name)
    check_tokenizer(policy, tokenizer, config.model.name)
    if settings.enable_router_replay:
        policy.replay_experts()
    if settings.model.activation_checkpointing:
        policy.checkpoint_activations()
    ranks.shard(policy)
    export = settings.experimental.token_export if ranks.keeps_books else None
    return Run(
        config=settings,
        output_dir=config.output_dir,
        max_steps=config.max_steps,
        policy=policy,
        tokenizer=tokenizer,
        losses=loss_for(settings.loss),
        optimizer=Optimizer(policy, settings.optim, settings.scheduler, max_steps=config.max_steps),
        batches=batches,
        sinks=[*open_sinks(config, "trainer"), *sinks] if ranks.is_main else [],
        journal=journal,
        exporter=TokenExporter(config.output_dir, rank=ranks.rank, path=export.path) if export else None,
        publishes=publishes,
        ranks=ranks,
    )
