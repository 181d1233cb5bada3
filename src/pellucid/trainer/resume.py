"""Takes a run to where its newest checkpoint was."""

import logging

import torch

from pellucid.checkpoint import Progress, newest_intact, take_back
from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_state
from pellucid.trainer.run import Run

logger = logging.getLogger(__name__)


def restore(run: Run) -> None:
    """Takes a new run to where its newest intact checkpoint was, bit by bit; without one it starts at step 0.

    Books, weights and exports are taken back to there, whoever else of the run goes on.
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
    """In the main process, for all of them: no other has written anything yet."""
    progress = newest_intact(run.output_dir)
    if run.publishes:
        take_back(run.output_dir, progress)
    return progress
