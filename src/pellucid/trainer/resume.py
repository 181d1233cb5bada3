"""Restores a run from its newest checkpoint."""

import logging

import torch

from pellucid.checkpoint import Progress, newest_intact, take_back
from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_state
from pellucid.trainer.run import Run

logger = logging.getLogger(__name__)


def restore(run: Run) -> None:
    """Restores a run from its newest intact checkpoint, bit by bit; without one it starts at step 0.

    Later entries of books, published weights and exports are removed.
    """
    progress = run.ranks.share(lambda: _settle(run))
    if progress is not None:
        folder = run.output_dir / "checkpoints" / f"step_{progress.step}"
        read_state(run.trained.module, run.optimizer.adamw, folder / STATE, run.ranks.group)
        torch.set_rng_state(torch.frombuffer(bytearray(progress.random_state), dtype=torch.uint8))
        run.go_on_from(progress)
    run.publish_start()
    if run.exporter is not None:
        run.exporter.forget_from(run.start)
        if run.ranks.is_main:
            run.exporter.forget_ranks_from(run.ranks.num_ranks, run.start)
    logger.info("resumed at step %d", run.start)


def _settle(run: Run) -> Progress | None:
    """Picks the checkpoint and removes later books and weights; called in the main process alone."""
    progress = newest_intact(run.output_dir)
    if run.publishes:
        take_back(run.output_dir, progress)
    return progress
