"""Packing: lengths -> bins -> micro batches. Pure and deterministic, so that every rank plans alike."""

from pellucid.packing.micro_batch import Counts, Kind, MicroBatch, PackedBatch, pack_batch
from pellucid.packing.plan import Cost, MicroStep, Sequences, plan

__all__ = [
    "Cost",
    "Counts",
    "Kind",
    "MicroBatch",
    "MicroStep",
    "PackedBatch",
    "Sequences",
    "pack_batch",
    "plan",
]
