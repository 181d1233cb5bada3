"""Bytes between processes: batches from orchestrator to trainer, weights from trainer to engine."""

from pellucid.transport.batch import UNLIMITED, Batch, decode_batch, encode_batch
from pellucid.transport.channel import (
    BatchReceiver,
    BatchSender,
    MemoryChannel,
    limits_of,
    open_receiver,
    open_sender,
)
from pellucid.transport.sections import Limits
from pellucid.transport.spool import (
    MARKER,
    FilesystemReceiver,
    FilesystemSender,
    is_stable,
    publish_folder,
    retract_folder,
    retract_steps,
    stable_steps,
)

__all__ = [
    "MARKER",
    "UNLIMITED",
    "Batch",
    "BatchReceiver",
    "BatchSender",
    "FilesystemReceiver",
    "FilesystemSender",
    "Limits",
    "MemoryChannel",
    "decode_batch",
    "encode_batch",
    "is_stable",
    "limits_of",
    "open_receiver",
    "open_sender",
    "publish_folder",
    "retract_folder",
    "retract_steps",
    "stable_steps",
]
