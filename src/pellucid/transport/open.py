"""The channel that `[transport]` asks for."""

from pathlib import Path

from pellucid.config import TransportConfig
from pellucid.transport.channel import BatchReceiver, BatchSender
from pellucid.transport.filesystem import FilesystemReceiver, FilesystemSender


def open_sender(config: TransportConfig, run_dir: Path) -> BatchSender:
    return {"filesystem": FilesystemSender}[config.type](run_dir)


def open_receiver(config: TransportConfig, run_dir: Path) -> BatchReceiver:
    return {"filesystem": FilesystemReceiver}[config.type](run_dir)
