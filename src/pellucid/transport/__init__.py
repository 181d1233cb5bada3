"""Bytes between processes: batches from orchestrator to trainer, weights from trainer to engine."""

from pellucid.transport.batch import Batch, decode_batch, encode_batch
from pellucid.transport.sections import Limits
from pellucid.transport.spool import (
    MARKER,
    BatchReceiver,
    BatchSender,
    FilesystemReceiver,
    FilesystemSender,
    MemoryChannel,
    is_stable,
    publish_folder,
    retract_folder,
    retract_steps,
    stable_steps,
)
from pellucid.transport.zmq_receiver import limits_of, open_receiver
from pellucid.transport.zmq_sender import open_sender

__all__ = [
    "MARKER",
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
