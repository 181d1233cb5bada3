"""The channel that `[transport]` asks for."""

from pathlib import Path

from pellucid.config import TransportConfig, ZmqTransportConfig
from pellucid.data.rules import Experts
from pellucid.errors import ConfigError
from pellucid.transport.channel import BatchReceiver, BatchSender
from pellucid.transport.filesystem import FilesystemReceiver, FilesystemSender
from pellucid.transport.keys import allowed_keys, own_keys, trainer_key
from pellucid.transport.spool import Spool
from pellucid.transport.wire import Limits
from pellucid.transport.zmq_receiver import Inbox, ZmqReceiver
from pellucid.transport.zmq_sender import ZmqSender
from pellucid.transport.zmq_socket import tcp_address


def limits_of(
    config: TransportConfig, *, vocab_size: int | None = None, experts: Experts | None = None
) -> Limits:
    """Returns the receiver's limits. Bytes bound the tokens: each takes one, unless it is shared."""
    return Limits(
        config.max_batch_bytes,
        max_tokens=config.max_batch_bytes,
        vocab_size=vocab_size,
        text_only=True,
        experts=experts,
    )


def open_sender(config: TransportConfig, run_dir: Path, run_id: str) -> BatchSender:
    if not isinstance(config, ZmqTransportConfig):
        return FilesystemSender(run_dir, hwm=config.hwm, max_bytes=config.max_batch_bytes)
    return ZmqSender(
        _address(config),
        run_id,
        hwm=config.hwm,
        max_bytes=config.max_batch_bytes,
        keys=own_keys(config.keys, "orchestrator") if config.keys else None,
        trainer_key=trainer_key(config.keys) if config.keys else None,
    )


def open_receiver(
    config: TransportConfig,
    run_dir: Path,
    run_id: str,
    *,
    vocab_size: int | None = None,
    experts: Experts | None = None,
) -> BatchReceiver:
    """`vocab_size`: a batch with a token id beyond it is refused; `experts`: one without these experts."""
    limits = limits_of(config, vocab_size=vocab_size, experts=experts)
    if not isinstance(config, ZmqTransportConfig):
        return FilesystemReceiver(run_dir, limits=limits)
    spool = Spool(run_dir, limits)
    inbox = Inbox(
        _address(config),
        {run_id: spool},
        hwm=config.hwm,
        limits=limits,
        keys=own_keys(config.keys, "trainer") if config.keys else None,
        allowed_keys=allowed_keys(config.keys) if config.keys else frozenset(),
    )
    return ZmqReceiver(inbox, run_id, spool)


def _address(config: ZmqTransportConfig) -> str:
    if config.port == 0:
        raise ConfigError(
            "transport.port = 0 does not say where the trainer is; set the port that it listens on, or start "
            "all parts with `pellucid rl`"
        )
    return tcp_address(config.host, config.port)
