"""Holds the logged learning rate to the oracle, and logged off-policy levels to the export."""

import numpy as np

from pellucid.checks.oracle import learning_rate
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.data import NOT_OURS
from pellucid.export.batch import ColumnBatch, Values


def expected_rate(run: RecordedRun, step: int) -> float | None:
    """Computes the learning rate of a step from its settings; None where they are not known."""
    max_steps = run.max_steps
    if run.is_foreign or max_steps is None:
        return None
    optim, scheduler = run.trainer.optim, run.trainer.scheduler
    return learning_rate(
        step,
        peak=optim.lr,
        kind=scheduler.type,
        warmup_steps=scheduler.warmup_steps,
        max_steps=max_steps,
    )


def levels_of(step: ColumnBatch, number: int) -> Values:
    """Computes the off-policy level of each token: NaN where the policy did not sample it."""
    versions = step.columns["policy_versions"].astype(np.float64)
    is_ours = step.columns["sampled"].astype(bool) & (versions != NOT_OURS)
    return np.where(is_ours, number - versions, np.nan)
