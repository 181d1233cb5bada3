"""What `pellucid trainer` and `pellucid sft` call: builds a run from its configuration and trains."""

import logging
import os
from collections.abc import Mapping

import torch

from pellucid.config import SFTConfig, TrainerRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.export import TokenExporter
from pellucid.ledger import Journal, Stage
from pellucid.loss import loss_for
from pellucid.metrics import Sink, open_sinks
from pellucid.model import load_policy
from pellucid.model.load import check_tokenizer
from pellucid.trainer.batches import BatchSource, DatasetBatches, OrchestratorBatches
from pellucid.trainer.loop import train
from pellucid.trainer.optimizer import Optimizer
from pellucid.trainer.run import Run
from pellucid.trainer.sft_data import read_dataset, shuffled_forever
from pellucid.transport import open_receiver

logger = logging.getLogger(__name__)


class LogSink:
    """One line per step in the trainer's log."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        logger.info(
            "step %d  loss %.4g  grad norm %.3g  tokens %d  %.0f tok/s",
            step,
            values["loss"],
            values["grad_norm"],
            values["tokens"],
            values["throughput/tokens_per_s"],
        )

    def close(self) -> None:
        """Nothing to close."""


def run_trainer(config: TrainerRunConfig) -> None:
    """Trains on the batches that an orchestrator sends."""
    batches = OrchestratorBatches(open_receiver(config.transport, config.output_dir))
    journal = Journal(config.output_dir / "ledger" / "trainer.jsonl", Stage.TRAINER)
    _train(config, batches, journal, [LogSink()])


def train_on_dataset(config: SFTConfig, sinks: list[Sink]) -> None:
    """Trains on a data set."""
    samples = read_dataset(config.data.path, load_tokenizer(config.model.name))
    batches = DatasetBatches(shuffled_forever(samples, config.seed), config.data.batch_size)
    _train(config, batches, None, sinks)


def _train(
    config: TrainerRunConfig, batches: BatchSource, journal: Journal | None, sinks: list[Sink]
) -> None:
    run = build_run(config, batches, journal, sinks)
    try:
        train(run)
        run.close_books()
    finally:
        run.close()


def build_run(
    config: TrainerRunConfig, batches: BatchSource, journal: Journal | None, sinks: list[Sink]
) -> Run:
    settings = config.trainer
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    torch.manual_seed(config.seed)
    policy = load_policy(config.model, trainable=True)
    tokenizer = load_tokenizer(config.model.name)
    check_tokenizer(policy, tokenizer, config.model.name)
    export = settings.experimental.token_export
    return Run(
        config=settings,
        output_dir=config.output_dir,
        max_steps=config.max_steps,
        policy=policy,
        tokenizer=tokenizer,
        losses=loss_for(settings.loss),
        optimizer=Optimizer(policy, settings.optim, settings.scheduler, max_steps=config.max_steps),
        batches=batches,
        sinks=[*open_sinks(config, "trainer"), *sinks],
        journal=journal,
        exporter=TokenExporter(config.output_dir, path=export.path) if export else None,
        publishes=journal is not None,
    )
