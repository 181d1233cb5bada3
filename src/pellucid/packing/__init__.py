"""Packing: lengths -> bins -> micro batches. Pure and deterministic, so that every rank plans alike."""

from pellucid.packing.bins import pack
from pellucid.packing.micro_batch import MicroBatch, PackedBatch, pack_batch

__all__ = ["MicroBatch", "PackedBatch", "pack", "pack_batch"]
