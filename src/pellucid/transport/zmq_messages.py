"""The messages between the two ends of the ZMQ transport: small msgpack arrays, checked on arrival.

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

The sender repeats its offers until a batch is asked for or stored, and then until it is taken; a lost
connection, a lost message or a restarted end heals by itself. The receiver decides how much is on its way,
and where to go on after a connection was lost. Nothing is stored twice: a batch is known by its checksum,
and a chunk by the batch and the byte that it starts at.
"""

import msgspec

PROTOCOL = 2
MAX_MESSAGE_BYTES = 4096


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


class Want(_Message, frozen=True):
    checksum: int
    start: int
    num_bytes: int


class Stored(_Message, frozen=True):
    """The batch is intact and on the receiver's disk."""


class Taken(_Message, frozen=True):
    """Everything before `step` is with the trainer."""


class Refused(_Message, frozen=True):
    position: int
    reason: str
    is_final: bool
    """False if another attempt may help: it was damaged on the way."""


ToReceiver = Offer | Chunk
ToSender = Want | Stored | Taken | Refused

_to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)


def encode(message: ToReceiver | ToSender) -> bytes:
    return msgspec.msgpack.encode(message)


def for_receiver(data: bytes | memoryview) -> ToReceiver:
    """Raises msgspec.DecodeError for anything else."""
    return _to_receiver.decode(data)


def for_sender(data: bytes | memoryview) -> ToSender:
    """Raises msgspec.DecodeError for anything else."""
    return _to_sender.decode(data)
