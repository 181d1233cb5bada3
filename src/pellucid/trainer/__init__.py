"""The trainer: packing, forward, loss, backward, export, weights out.

Here are the entries of `pellucid trainer` and `pellucid sft`: they build a run from its configuration and
train it.
"""

import logging
from contextlib import ExitStack, closing
from functools import partial

from pellucid.config import SFTConfig, TrainerRunConfig
from pellucid.data.tokenizer import load_tokenizer
from pellucid.ending import say_failure
from pellucid.metrics import Sink
from pellucid.trainer.batches import (
    BatchSource,
    DatasetBatches,
    FakeBatches,
    NoBatches,
    OrchestratorBatches,
    Stopped,
    open_batches,
)
from pellucid.trainer.build import build_run, open_journal
from pellucid.trainer.loop import train
from pellucid.trainer.many import join_trainer, serve_runs
from pellucid.trainer.observer import LogSink
from pellucid.trainer.parallel import Ranks, joined
from pellucid.trainer.run import Run
from pellucid.trainer.sft import SFTData, Validation
from pellucid.transport import Batch

logger = logging.getLogger(__name__)


def run_trainer(config: TrainerRunConfig) -> None:
    """Trains on the batches that an orchestrator sends, or on fake ones.

    With `trainer.many_runs` it trains all runs that join; with `trainer.join` such a trainer trains this run.
    """
    config.weights.check_address()
    if config.trainer.join is not None:
        join_trainer(config)
        return
    with joined(config.trainer) as ranks:
        run_with(config, ranks)


def run_with(config: TrainerRunConfig, ranks: Ranks) -> None:
    """Trains as `run_trainer` does, in the process group that `ranks` stands for."""
    if config.trainer.many_runs is not None:
        serve_runs(config, ranks)
        return
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
            batches = OrchestratorBatches(stack.enter_context(closing(open_batches(config))))
        journal = open_journal(config, ranks)
        _train(config, build_run(config, batches, journal, [LogSink()], ranks, publishes=True))


def train_on_dataset(
    config: SFTConfig, data: SFTData | None, sinks: list[Sink], ranks: Ranks | None = None
) -> None:
    """Trains on a data set, and measures the loss on its validation examples.

    Only the main process has `data`; the other processes receive their batches from it.
    """
    batches = DatasetBatches(data.train, config.data.batch_size, config.seed) if data else NoBatches()
    run = build_run(config, batches, None, sinks, ranks)
    if config.data.validation is not None:
        batches_of_main = [Batch("", 0, table) for table in data.validation_tables()] if data else []
        indices = range(run.ranks.share(lambda: len(batches_of_main)))
        # One message per table: a validation set may be large.
        shared = (run.ranks.share(partial(batches_of_main.__getitem__, index)) for index in indices)
        run.validation = Validation(
            run.policy,
            run.forward,
            [run.pack(0, batch.table) for batch in shared],
            interval=config.data.validation.interval,
            max_steps=config.max_steps,
            gather=run.ranks.gather,
        )
    _train(config, run)


def _train(config: TrainerRunConfig, run: Run) -> None:
    # Signals are handled until all is closed: the launcher stops a failed trainer while it closes its files.
    with run.stop.listening(run.say_stopping), closing(run):
        try:
            run.begin(config)
            train(run)
            run.finish_answering()
            run.finish_offering()
        except Exception as error:
            say_failure(error)
            raise
        except Stopped as stopped:
            logger.warning("%s: stopping after a checkpoint", stopped)
            run.save_checkpoint()
            run.finish_checkpoint()
            raise SystemExit(128 + stopped.signal) from None
