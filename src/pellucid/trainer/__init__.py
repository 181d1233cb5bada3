"""The trainer: packing, forward, loss, backward, export, weights out."""

from pellucid.trainer.entry import run_trainer, train_on_dataset

__all__ = ["run_trainer", "train_on_dataset"]
