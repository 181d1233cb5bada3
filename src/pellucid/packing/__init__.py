"""Packing: lengths -> bins -> micro batches. Pure and deterministic, so that every rank plans alike."""

from pellucid.packing.cost import Cost
from pellucid.packing.micro_batch import Counts, Kind, MicroBatch, PackedBatch, pack_batch
from pellucid.packing.plan import MicroStep, Sequences, plan

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
