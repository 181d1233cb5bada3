"""The orchestrator's end of the ZMQ transport; `zmq_link` shows the conversation."""

import logging
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from pellucid.config import TransportConfig, ZmqTransportConfig
from pellucid.errors import TransportError
from pellucid.transport.batch import batch_refused, check_size, declared_checksum
from pellucid.transport.spool import BatchSender, FilesystemSender
from pellucid.transport.zmq_link import (
    MAX_MESSAGE_BYTES,
    TO_SENDER,
    AskMissing,
    Chunk,
    KeyPair,
    Missing,
    Offer,
    Patience,
    Refused,
    Stored,
    Taken,
    ToReceiver,
    ToSender,
    WakePipe,
    Want,
    batch_address,
    open_socket,
    own_keys,
    trainer_key,
)

logger = logging.getLogger(__name__)

_OFFER_EVERY_S = 0.2
_MAX_ATTEMPTS = 3
_CLOSE_WITHIN_S = 60.0
_LOG_EVERY_S = 10.0
_SHUT_OUT = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(slots=True)
class _Outgoing:
    """A batch that the trainer has not taken yet."""

    payload: bytes | None
    """None once it is stored."""

    num_bytes: int
    checksum: int
    num_refused: int = 0
    asked_s: float = 0.0
    """When the trainer first asked for it; 0 if it has not."""

    logged_s: float = 0.0
    """When the log last said how far it is."""

    num_asked: int = 0
    """Bytes that the trainer has asked for so far."""


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
        patience: Patience | None = None,
    ) -> None:
        """`close_within_s`: how long closing waits without any progress."""
        self._address = address
        self._run_id = run_id
        self._hwm = hwm
        self._max_bytes = max_bytes
        self._close_within_s = close_within_s
        self._dead_after_s = (patience or Patience()).dead_after_s
        self._outgoing: dict[int, _Outgoing] = {}
        self._asked_step: int | None = None
        """The batch that the trainer is fetching; nothing is offered meanwhile."""

        self._heard_s = time.monotonic()
        """When the trainer last asked for something, or stored or took it."""

        self._due_s = 0.0
        """When to offer next."""

        self._number = secrets.randbits(63)
        self._asks_missing = False
        self._missing: int | None = None
        self._changed = threading.Condition()
        self._failure: TransportError | None = None
        self._closing = False
        self._bell = WakePipe()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.DEALER, address, MAX_MESSAGE_BYTES, self._dead_after_s)
        self._socket.immediate = True  # nothing is queued for a connection that is not there
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_serverkey = trainer_key
        self._doorbell = self._socket.get_monitor_socket(_SHUT_OUT | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="batch sender", daemon=True)
        self._thread.start()

    def send(self, step: int, payload: bytes) -> None:
        check_size(step, payload, self._max_bytes)
        checksum = declared_checksum(payload) or 0
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or step in self._outgoing or len(self._outgoing) < self._hwm
            )
            self.check()
            self._outgoing[step] = _Outgoing(payload, len(payload), checksum)
        self._bell.ring()

    def missing_batch(self) -> int | None:
        """Asks the trainer for the first step whose batch it has not stored; None until it has answered.

        Raises TransportError if it refuses to answer.
        """
        with self._changed:
            self.check()
            if self._missing is not None or self._asks_missing:
                return self._missing
            self._asks_missing = True
        self._bell.ring()
        return None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        if self._closing:
            return
        with self._changed:
            since_s = time.monotonic()
            while self._failure is None and self._unstored():
                left_s = max(since_s, self._heard_s) + self._close_within_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            unstored = self._unstored()
            self._closing = True
        self._bell.ring()
        self._thread.join()
        self._context.destroy(linger=0)
        self._bell.close()
        self.check()
        if unstored:
            raise TransportError(
                f"the trainer at {self._address} did not store the batch of step "
                f"{', '.join(map(str, unstored))} within {self._close_within_s:g} s; is it running, and do "
                "transport.host and transport.port lead to it?"
            )

    def _unstored(self) -> list[int]:
        return [step for step, batch in self._outgoing.items() if batch.payload is not None]

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
        while not self._closing:
            due_ms = max(0, round(1000 * (self._due_s - time.monotonic())))
            timeout_ms = due_ms if self._outgoing or self._asks_missing else None
            ready = dict(poller.poll(timeout_ms))
            if self._bell.fileno() in ready:
                self._bell.silence()
                if self._asked_step is None:
                    self._due_s = 0.0
            if self._socket in ready:
                self._read()
            if self._doorbell in ready:
                self._answer_door(parse_monitor_message(self._doorbell.recv_multipart())["event"])
            if time.monotonic() >= self._due_s:
                self._give_up_waiting(f"has asked for nothing more for {self._dead_after_s:g} s")
                self._offer()
                self._due_s = time.monotonic() + _OFFER_EVERY_S

    def _answer_door(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._give_up_waiting("cannot be reached any more")
            return
        self._fail(
            TransportError(
                f"the trainer at {self._address} does not let this orchestrator in; the folders "
                "transport.keys of both have to hold the public key of the other"
            )
        )

    def _give_up_waiting(self, why: str) -> None:
        """Offers the batch that was being fetched again; bytes that arrived need not be sent again."""
        step = self._asked_step
        if step is not None and (batch := self._outgoing.get(step)) is not None:
            logger.warning(
                "the trainer at %s %s; it had asked for %d of %d bytes of step %d, which is offered again",
                *(self._address, why, batch.num_asked, batch.num_bytes, step),
            )
        self._offer_now()

    def _offer_now(self) -> None:
        self._asked_step = None
        self._due_s = 0.0

    def _offer(self) -> None:
        """Offers the oldest batch that is not stored, or else the oldest not taken, to learn its state."""
        if self._asks_missing:
            self._say(AskMissing(self._run_id, 0, self._number))
        with self._changed:
            if self._failure is not None or not self._outgoing:
                return
            step = min(self._unstored() or self._outgoing)
            batch = self._outgoing[step]
        self._say(Offer(self._run_id, step, batch.num_bytes, batch.checksum))

    def _read(self) -> None:
        while True:
            try:
                data, *_ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = TO_SENDER.decode(data)
            except msgspec.DecodeError as error:
                logger.warning("the trainer at %s said something unknown: %s", self._address, error)
                continue
            if message.run_id == self._run_id:
                self._hear(message)

    def _hear(self, message: ToSender) -> None:
        match message:
            case Want():
                self._heard_s = time.monotonic()
                self._deliver(message)
            case Stored() | Taken():
                self._forget(message)
            case Missing():
                with self._changed:
                    self._missing, self._asks_missing = message.step, False
            case Refused():
                self._note_refusal(message)
                self._offer_now()

    def _forget(self, message: Stored | Taken) -> None:
        """Forgets the payload of a stored batch, and all that was taken."""
        with self._changed:
            if isinstance(message, Taken):
                self._outgoing = {step: each for step, each in self._outgoing.items() if step >= message.step}
            elif (batch := self._outgoing.get(message.step)) is not None and batch.payload is not None:
                batch.payload = None
                if batch.logged_s > batch.asked_s:
                    logger.info("the batch of step %d is with the trainer", message.step)
            self._heard_s = time.monotonic()
            self._changed.notify_all()
        if isinstance(message, Stored):
            self._offer_now()

    def _deliver(self, want: Want) -> None:
        batch = self._outgoing.get(want.step)
        if batch is None or want.checksum != batch.checksum:
            return  # of a batch that is not sent any more
        if batch.payload is None:
            lost = f"the trainer at {self._address} lost the batch of step {want.step} after storing it"
            self._fail(TransportError(f"{lost}; go on with --resume, which samples the step anew"))
            return
        stop = min(want.start + want.num_bytes, batch.num_bytes)
        part = memoryview(batch.payload)[want.start : stop]
        if self._say(Chunk(self._run_id, want.step, want.checksum, want.start), part):
            batch.num_asked = stop
            self._asked_step = want.step
            self._due_s = self._heard_s + self._dead_after_s
            self._log_progress(want.step, batch)

    def _log_progress(self, step: int, batch: _Outgoing) -> None:
        """Logs every now and then how much of a slow batch the trainer has asked for."""
        if not batch.asked_s:
            batch.asked_s = batch.logged_s = self._heard_s
        if self._heard_s - batch.logged_s >= _LOG_EVERY_S:
            batch.logged_s = self._heard_s
            logger.info(
                "the batch of step %d is on its way: %d of %d bytes in %.0f s",
                *(step, batch.num_asked, batch.num_bytes, batch.logged_s - batch.asked_s),
            )

    def _note_refusal(self, refused: Refused) -> None:
        batch = self._outgoing.get(refused.step)
        if batch is None:
            self._note_refused_question(refused.reason)
            return
        batch.num_refused += 1
        logger.warning(
            "the trainer refused the batch of step %d (attempt %d): %s",
            *(refused.step, batch.num_refused, refused.reason),
        )
        if refused.is_final or batch.num_refused >= _MAX_ATTEMPTS:
            self._fail(batch_refused(refused.step, refused.reason))

    def _note_refused_question(self, reason: str) -> None:
        with self._changed:
            if not self._asks_missing:
                return
            self._asks_missing = False
            self._fail(
                TransportError(
                    f"the trainer at {self._address} does not tell which batch is missing: {reason}; both "
                    "ends need one run name and one version of pellucid"
                )
            )

    def _say(self, message: ToReceiver, part: memoryview | None = None) -> bool:
        """False if nobody is there to hear it."""
        frames: list[bytes | memoryview] = [msgspec.msgpack.encode(message)]
        if part is not None:
            frames.append(part)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=part is None)
        except zmq.Again:
            return False
        return True

    def _fail(self, failure: TransportError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


def open_sender(config: TransportConfig, run_dir: Path, run_id: str) -> BatchSender:
    if not isinstance(config, ZmqTransportConfig):
        return FilesystemSender(run_dir, hwm=config.hwm, max_bytes=config.max_batch_bytes)
    return ZmqSender(
        batch_address(config),
        run_id,
        hwm=config.hwm,
        max_bytes=config.max_batch_bytes,
        keys=own_keys(config.keys, "orchestrator") if config.keys else None,
        trainer_key=trainer_key(config.keys) if config.keys else None,
    )
