"""Checkpoints of the trainer. `checkpoint.files` does not import torch: the launcher reads them, too."""

from pellucid.checkpoint.files import (
    Progress,
    newest_intact,
    publish_checkpoint,
    read_progress,
    take_back,
)

__all__ = ["Progress", "newest_intact", "publish_checkpoint", "read_progress", "take_back"]
