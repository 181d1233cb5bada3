"""Takes a run to where its newest checkpoint was."""

import logging

import torch

from pellucid.checkpoint import read_progress
from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_state
from pellucid.trainer.run import Run
from pellucid.transport import stable_steps

logger = logging.getLogger(__name__)


def restore(run: Run) -> None:
    """Takes a new run to where its newest checkpoint was, bit by bit; without one it starts at step 0."""
    steps = run.ranks.share(lambda: stable_steps(run.output_dir / "checkpoints"))
    if steps:
        folder = run.output_dir / "checkpoints" / f"step_{steps[-1]}"
        progress = read_progress(folder)
        read_state(run.trained.module, run.optimizer.adamw, folder / STATE, run.ranks.group)
        torch.set_rng_state(torch.frombuffer(bytearray(progress.random_state), dtype=torch.uint8))
        run.go_on_from(progress)
    run.withdraw_versions()
    if run.exporter is not None:
        run.exporter.forget_from(run.start)
        if run.ranks.is_main:
            run.exporter.forget_ranks_from(run.ranks.num_ranks, run.start)
    logger.info("resumed at step %d", run.start)
