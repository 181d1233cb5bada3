"""What the two ends of the ZMQ transport say to each other: small msgpack arrays, checked on arrival.

    orchestrator (DEALER)                        trainer (ROUTER)
        offer 7: 31 MB, not sent yet  ───────>
                                      <───────   want 7, attempt 1    it is not stored, and small enough
        delivery 7, payload           ───────>   decoded, judged, written to the run folder
                                      <───────   stored 7             the payload may be forgotten
                                      <───────   taken: next is 8     the trainer has it; one less waits
        offer 8 …                     <───────   refused 8, byte 40: reason

The sender repeats its offers until a batch is stored, and then until it is taken, so that a lost
connection, a lost message or a restarted end heals by itself. An offer says how often the batch was sent;
messages of one connection arrive in order, so a receiver that still lacks a batch that was sent knows that
it got lost, and asks for another attempt. Nothing is stored twice: a batch is known by its checksum.
"""

import msgspec

PROTOCOL = 1
MAX_MESSAGE_BYTES = 4096


class _Message(msgspec.Struct, array_like=True, frozen=True, tag=str.lower):
    run_id: str
    step: int


class Offer(_Message, frozen=True):
    num_bytes: int
    checksum: int
    num_sent: int
    protocol: int = PROTOCOL


class Delivery(_Message, frozen=True):
    """A frame with the payload follows."""


class Want(_Message, frozen=True):
    attempt: int


class Stored(_Message, frozen=True):
    """On disk, and good."""


class Taken(_Message, frozen=True):
    """Everything before `step` is with the trainer."""


class Refused(_Message, frozen=True):
    position: int
    reason: str
    is_final: bool
    """False if another attempt may help: it was damaged on the way."""


ToReceiver = Offer | Delivery
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
