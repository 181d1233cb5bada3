"""`[recorded]` of `configs/trainer.toml`: a run that another trainer trained and pellucid only recorded."""

from pellucid.config.base import Section


class RecordedConfig(Section):
    by: str = ""
    """The trainer, and its version."""

    no_loss: str = ""
    """Why there is no `[trainer.loss]`: what of that trainer's loss none of the built-in ones does."""

    no_sum: str = ""
    """Why the loss that it optimised is not the mean of its tokens' losses."""
