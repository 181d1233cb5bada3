"""The link of the ZMQ transport, as both ends see it: messages, keys, sockets, and a batch on its way.

    orchestrator (DEALER)                        trainer (ROUTER)
        offer 7: 31 MB                ───────>
                                      <───────   want 7: 16 K from byte 0     it is small enough
                                      <───────   want 7: 16 K from byte 16 K  a few at a time
        chunk 7 from byte 0           ───────>
                                      <───────   want 7: 32 K from byte 64 K  it came quickly: larger ones
        …                                        decoded, judged, written to the run folder
                                      <───────   stored 7                     the payload may be forgotten
                                      <───────   taken: next is 8             one less waits
        offer 8 …                     <───────   refused 8, byte 40: reason

        missing?                      ───────>   started again, it asks where to go on
                                      <───────   missing 9: all before it are stored or trained

Messages are small msgpack arrays, checked on arrival. The sender repeats its offers until a batch is asked
for or stored, and then until it is taken; a lost connection, a lost message or a restarted end heals by
itself. The receiver decides how much is on its way, and where to go on after a connection was lost. Nothing
is stored twice: a batch is known by its checksum, and a chunk by the batch and the byte that it starts at.

Batches that leave the machine are encrypted by CurveZMQ, with the key pairs that `pellucid keys DIR` makes:

    trainer.secret        the trainer's machine only          trainer.public        both machines
    orchestrator.secret   the orchestrator's machine only     orchestrator.public   both machines

The trainer lets in who holds the secret of another public key of its folder.
"""

import os
import socket
import stat
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pellucid.config import ZmqTransportConfig
from pellucid.config.tools import KeysSettings
from pellucid.data.files import read_whole
from pellucid.errors import ConfigError, DataError

PROTOCOL = 4
MAX_MESSAGE_BYTES = 4096

_PARTS = ("trainer", "orchestrator")
_KEY_LENGTH = 40
_MAX_FILE_BYTES = 4096
_HEARTBEATS = 4
"""Heartbeats per `dead_after_s`; a link counts as dead once none was answered for that long."""


class _Message(msgspec.Struct, array_like=True, frozen=True, tag=str.lower):
    run_id: str
    step: int


class Offer(_Message, frozen=True):
    num_bytes: int
    checksum: int
    protocol: int = PROTOCOL


class Chunk(_Message, frozen=True):
    """A frame with the bytes from `start` on follows."""

    checksum: int
    """Checksum of the batch."""

    start: int


class AskMissing(_Message, frozen=True):
    """The sender was started again. `step`: 0."""

    sender: int
    """Random, the same in all questions of a sender: its first one is told from one that arrives late."""

    protocol: int = PROTOCOL


class Want(_Message, frozen=True):
    checksum: int
    start: int
    num_bytes: int


class Stored(_Message, frozen=True):
    """The batch is intact and on the receiver's disk."""


class Taken(_Message, frozen=True):
    """Everything before `step` is with the trainer."""


class Missing(_Message, frozen=True):
    """The first step from that which the trainer waits for on whose batch is not stored; none after it is."""


class Refused(_Message, frozen=True):
    position: int
    reason: str
    is_final: bool
    """False if another attempt may help: it was damaged on the way."""


ToReceiver = Offer | Chunk | AskMissing
ToSender = Want | Stored | Taken | Missing | Refused

TO_RECEIVER: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
TO_SENDER: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes


def run_keys(settings: KeysSettings) -> None:
    make_keys(settings.folder)
    print(
        f"keys are in {settings.folder}; set transport.keys to it. On two machines, give each the .public "
        "files and its own .secret, and never the other's."
    )


def make_keys(folder: Path) -> None:
    """Writes a key pair for each part; existing keys are never replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / f"{part}.{kind}" for part in _PARTS for kind in ("secret", "public")):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another folder, or delete the old keys first")
    for part in _PARTS:
        public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
        _write_key(folder / f"{part}.secret", f'secret = "{secret}"\n', 0o600)
        _write_key(folder / f"{part}.public", f'public = "{public}"\n', 0o644)


def _write_key(path: Path, text: str, mode: int) -> None:
    """Creates the file with its final permissions: nobody can read a secret before it is protected."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def own_keys(folder: Path, part: str) -> KeyPair:
    path = folder / f"{part}.secret"
    secret = _read_key(path, "secret")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"transport.keys: {path} can be read by others; protect it: chmod 600 {path}")
    return KeyPair(zmq.curve_public(secret), secret)


def trainer_key(folder: Path) -> bytes:
    return _read_key(folder / "trainer.public", "public")


def allowed_keys(folder: Path) -> frozenset[bytes]:
    """Reads all public keys in the folder but the trainer's."""
    return frozenset(_read_key(path, "public") for path in folder.glob("*.public") if path.stem != "trainer")


def _read_key(path: Path, kind: str) -> bytes:
    try:
        key = tomllib.loads(read_whole(path, _MAX_FILE_BYTES).decode("ascii"))[kind]
        if not isinstance(key, str) or len(key) != _KEY_LENGTH:
            raise ValueError(f"a key has {_KEY_LENGTH} characters")
    except (OSError, DataError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"transport.keys: {path} holds no {kind} key ({error}); make the folder with "
            f"`pellucid keys {path.parent}`"
        ) from error
    return key.encode("ascii")


def batch_address(config: ZmqTransportConfig) -> str:
    """Returns where the trainer listens: `tcp://127.0.0.1:5555`, `tcp://[::1]:5555`."""
    if config.port == 0:
        raise ConfigError(
            "transport.port = 0 does not say where the trainer is; set the port that it listens on, or start "
            "all parts with `pellucid rl`"
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"tcp://{host}:{config.port}"


def open_socket(
    context: "zmq.Context[Any]", kind: int, address: str, max_bytes: int, dead_after_s: float
) -> "zmq.Socket[Any]":
    """Makes a socket. ZMQ ends a connection on a frame above `max_bytes`, unread, and after silence."""
    made: zmq.Socket[Any] = context.socket(kind)
    made.linger = 0
    made.ipv6 = "[" in address
    made.maxmsgsize = max_bytes
    made.heartbeat_ivl = round(1000 * dead_after_s / _HEARTBEATS)
    made.heartbeat_timeout = round(1000 * dead_after_s)
    made.reconnect_ivl = 50
    made.reconnect_ivl_max = 1_000
    return made


class WakePipe:
    """A pair of sockets by which any thread wakes the one that polls them."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        return self._near.fileno()

    def ring(self) -> None:
        with suppress(BlockingIOError):  # full: it is ringing already
            self._far.send(b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            self._near.recv(4096)

    def close(self) -> None:
        self._near.close()
        self._far.close()


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a link may be silent, and how much may be on its way.

    A link on which a chunk of `min_chunk_bytes` takes less than `dead_after_s` delivers whatever it is given.
    """

    dead_after_s: float = 20.0
    """Without a chunk, an answer or a heartbeat."""

    min_chunk_bytes: int = 16 << 10
    max_chunk_bytes: int = 16 << 20
