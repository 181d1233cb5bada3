"""`[recorded]` of `configs/trainer.toml`: marks a run that another trainer trained and pellucid recorded."""

from pellucid.config.base import Section


class RecordedConfig(Section):
    by: str = ""
    """Name and version of that trainer."""

    no_loss: str = ""
    """Reason why there is no `[trainer.loss]`: the part of that trainer's loss that no built-in loss has."""

    no_sum: str = ""
    """Reason why the loss that it optimised is not the mean of its tokens' losses."""
