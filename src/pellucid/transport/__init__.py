"""Bytes between processes: batches from orchestrator to trainer, weights from trainer to engine."""

from pellucid.data.files import step_folders
from pellucid.transport.channel import Batch, BatchReceiver, BatchSender
from pellucid.transport.codec import UNLIMITED, Limits, decode_batch, encode_batch
from pellucid.transport.filesystem import FilesystemReceiver, FilesystemSender
from pellucid.transport.memory import MemoryChannel
from pellucid.transport.open import limits_of, open_receiver, open_sender
from pellucid.transport.stable import (
    MARKER,
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
    "step_folders",
]
