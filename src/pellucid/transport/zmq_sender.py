"""The orchestrator's end of the ZMQ transport; `zmq_messages` shows the conversation."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from pellucid.errors import TransportError
from pellucid.transport.channel import check_size, refusal
from pellucid.transport.keys import KeyPair
from pellucid.transport.wire import PREAMBLE
from pellucid.transport.zmq_messages import (
    MAX_MESSAGE_BYTES,
    Delivery,
    Offer,
    Refused,
    Stored,
    Taken,
    ToReceiver,
    ToSender,
    Want,
    encode,
    for_sender,
)
from pellucid.transport.zmq_socket import Bell, open_socket

logger = logging.getLogger(__name__)

_OFFER_EVERY_S = 0.2
_MAX_ATTEMPTS = 3
_CLOSE_WITHIN_S = 60.0
_SHUT_OUT = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(slots=True)
class _Outgoing:
    """A batch that the trainer has not taken yet."""

    payload: bytes | None
    """None once it is stored."""

    num_bytes: int
    checksum: int
    num_sent: int = 0


class ZmqSender:
    """`send` queues; a thread offers, delivers and repeats."""

    def __init__(
        self,
        address: str,
        run_id: str,
        *,
        hwm: int,
        max_bytes: int,
        keys: KeyPair | None = None,
        trainer_key: bytes | None = None,
        close_within_s: float = _CLOSE_WITHIN_S,
    ) -> None:
        self._address = address
        self._run_id = run_id
        self._hwm = hwm
        self._max_bytes = max_bytes
        self._close_within_s = close_within_s
        self._outgoing: dict[int, _Outgoing] = {}
        self._changed = threading.Condition()
        self._failure: TransportError | None = None
        self._closing = False
        self._bell = Bell()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, address, MAX_MESSAGE_BYTES)
        self._socket.immediate = True  # nothing is queued for a connection that is not there
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_serverkey = trainer_key
        self._doorbell = self._socket.get_monitor_socket(_SHUT_OUT)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="batch sender", daemon=True)
        self._thread.start()

    def send(self, step: int, payload: bytes) -> None:
        check_size(step, payload, self._max_bytes)
        checksum = int(PREAMBLE.unpack_from(payload)[3])
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._has_room(step))
            self._raise_failure()
            self._outgoing[step] = _Outgoing(payload, len(payload), checksum)
        self._bell.ring()

    def check(self) -> None:
        with self._changed:
            self._raise_failure()

    def close(self) -> None:
        if self._closing:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or not self._unstored(), timeout=self._close_within_s
            )
            unstored = self._unstored()
            self._closing = True
        self._bell.ring()
        self._thread.join()
        self._context.destroy(linger=0)
        self._bell.close()
        self._raise_failure()
        if unstored:
            raise TransportError(
                f"the trainer at {self._address} did not store the batch of step "
                f"{', '.join(map(str, unstored))} within {self._close_within_s:g} s; is it running, and do "
                "transport.host and transport.port lead to it?"
            )

    def _has_room(self, step: int) -> bool:
        return step in self._outgoing or len(self._outgoing) < self._hwm

    def _unstored(self) -> list[int]:
        return [step for step, batch in self._outgoing.items() if batch.payload is not None]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # whoever sends next is told
            logger.exception("the batch sender died")
            self._fail(TransportError(f"the batch sender died: {type(error).__name__}: {error}"))

    def _talk(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._doorbell, zmq.POLLIN)
        due_s = 0.0
        while not self._closing:
            timeout_ms = max(0, round(1000 * (due_s - time.monotonic()))) if self._outgoing else None
            ready = dict(poller.poll(timeout_ms))
            if self._bell.fileno() in ready:
                self._bell.silence()
                due_s = 0.0
            if self._doorbell in ready:
                self._doorbell.recv_multipart()
                self._fail(
                    TransportError(
                        f"the trainer at {self._address} does not let this orchestrator in; the folders "
                        "transport.keys of both have to hold the public key of the other"
                    )
                )
            if self._socket in ready:
                self._read()
            if time.monotonic() >= due_s:
                self._offer()
                due_s = time.monotonic() + _OFFER_EVERY_S

    def _offer(self) -> None:
        """All that is not stored; else the oldest that is not taken, to hear of it."""
        with self._changed:
            if self._failure is not None:
                return
            steps = self._unstored() or sorted(self._outgoing)[:1]
            batches = [(step, self._outgoing[step]) for step in steps]
        for step, batch in batches:
            self._say(Offer(self._run_id, step, batch.num_bytes, batch.checksum, batch.num_sent))

    def _read(self) -> None:
        while True:
            try:
                data, *_ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = for_sender(data)
            except msgspec.DecodeError as error:
                logger.warning("the trainer at %s said something unknown: %s", self._address, error)
                continue
            if message.run_id == self._run_id:
                self._hear(message)

    def _hear(self, message: ToSender) -> None:
        match message:
            case Want():
                self._deliver(message)
            case Stored():
                with self._changed:
                    if (batch := self._outgoing.get(message.step)) is not None:
                        batch.payload = None
                    self._changed.notify_all()
            case Taken():
                with self._changed:
                    for step in [step for step in self._outgoing if step < message.step]:
                        del self._outgoing[step]
                    self._changed.notify_all()
            case Refused():
                self._note_refusal(message)

    def _deliver(self, want: Want) -> None:
        batch = self._outgoing.get(want.step)
        if batch is None or want.attempt != batch.num_sent + 1:
            return  # an answer to an earlier offer
        if batch.payload is None:
            lost = f"the trainer at {self._address} lost the batch of step {want.step} after storing it"
            self._fail(TransportError(f"{lost}; go on with --resume, which samples the step anew"))
        elif self._say(Delivery(self._run_id, want.step), batch.payload):
            batch.num_sent += 1

    def _note_refusal(self, refused: Refused) -> None:
        batch = self._outgoing.get(refused.step)
        if batch is None:
            return
        logger.warning("the trainer refused the batch of step %d: %s", refused.step, refused.reason)
        if refused.is_final or batch.num_sent >= _MAX_ATTEMPTS:
            self._fail(refusal(refused.step, refused.reason))

    def _say(self, message: ToReceiver, payload: bytes | None = None) -> bool:
        """False if nobody is there to hear it."""
        frames = [encode(message)] if payload is None else [encode(message), payload]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None)
        except zmq.Again:
            return False
        return True

    def _fail(self, failure: TransportError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
