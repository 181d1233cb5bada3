"""The trainer's end of the ZMQ transport; `zmq_link` shows the conversation.

A thread fetches one batch at a time, in chunks, decodes and judges it, writes it to the spool and only then
says `stored`. What is refused is counted and logged with its sender; nothing that arrives can stop the
thread. Offers are left unanswered until the trainer has said which step it waits for: a resumed one may need
batches again.

A batch belongs to the connection that it comes from. Another one may go on with it if it offers the same
bytes, and may begin another batch once the first is silent or gone. The receiver has no clock of its own: a
sender that is asked for nothing more offers its batch again, and then the rest is asked for.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from pellucid.config import TransportConfig, ZmqTransportConfig
from pellucid.data.images import ImageShape
from pellucid.data.rules import Experts
from pellucid.errors import PayloadError, TransportError
from pellucid.transport.batch import PREAMBLE, SEALED_FROM, Batch, batch_refused, checksum, decode_batch
from pellucid.transport.sections import Limits
from pellucid.transport.spool import BatchReceiver, FilesystemReceiver
from pellucid.transport.zmq_link import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    TO_RECEIVER,
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
    allowed_keys,
    batch_address,
    open_socket,
    own_keys,
)

logger = logging.getLogger(__name__)

_GATE = "inproc://zeromq.zap.01"
"""Where ZMQ asks who may connect."""

_MAX_QUEUED_MESSAGES = 8
_MAX_CHUNKS = 4
"""Chunks that are on their way at once."""

_MAX_KNOWN_SENDERS = 64
_QUIET_S = 5.0
"""Without a question: whoever asked has got the answer."""

_WAIT_S = 0.2


class Transfer:
    """A batch on its way in, and the chunks to ask for next. The clock is passed in.

        0          received         asked                    num_bytes
        |──────────────|── 32 K ──|── 32 K ──|                |

    - Chunks grow while they come quickly and shrink when they come slowly, so that a fast link is kept busy,
      and heartbeats on a slow one never wait long behind them.
    - Memory is taken for bytes that arrived, never for those that were offered.
    - Whatever happens to a connection, what was received stays; the rest is asked for again.
    """

    def __init__(self, offer: Offer, peer: bytes, patience: Patience, now_s: float) -> None:
        self.offer = offer
        self.data = bytearray()
        self.has_stalled = False
        """Whether nothing came for too long, and nothing has come since: it was only asked for again."""

        self._patience = patience
        self._asked: deque[tuple[int, int, float]] = deque()
        """Start, bytes and time of each chunk that was asked for."""

        self.go_on(peer, now_s)

    def go_on(self, peer: bytes | None, now_s: float) -> None:
        """Nothing is on its way any more: the rest is asked for again, in small chunks at first."""
        self.peer = peer
        """Connection that sends it; None while the sender cannot be reached."""

        self._asked.clear()
        self._chunk_bytes = self._patience.min_chunk_bytes
        self._heard_s = now_s

    def asks(self, now_s: float) -> list[tuple[int, int]]:
        """Returns (start, bytes) of each chunk to ask for now, and notes that it was asked for."""
        start = len(self.data) + sum(num_bytes for _, num_bytes, _ in self._asked)
        found = []
        while len(self._asked) < _MAX_CHUNKS and start < self.offer.num_bytes:
            num_bytes = min(self._chunk_bytes, self.offer.num_bytes - start)
            self._asked.append((start, num_bytes, now_s))
            found.append((start, num_bytes))
            start += num_bytes
        return found

    def take(self, start: int, chunk: memoryview, now_s: float) -> bool:
        """Whether it is the next that was asked for; one that came before, or too early, changes nothing."""
        if not self._asked or (start, len(chunk)) != self._asked[0][:2]:
            return False
        took_s = now_s - self._asked.popleft()[2]
        self.data += chunk
        self._heard_s, self.has_stalled = now_s, False
        if took_s < self._patience.dead_after_s / 80:
            self._chunk_bytes = min(2 * self._chunk_bytes, self._patience.max_chunk_bytes)
        elif took_s > self._patience.dead_after_s / 10:
            self._chunk_bytes = max(self._chunk_bytes // 2, self._patience.min_chunk_bytes)
        return True

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing has come for too long from whoever sends it."""
        return self.peer is None or now_s - self._heard_s > self._patience.dead_after_s


class ZmqReceiver(FilesystemReceiver):
    """Takes batches out of the spool as `FilesystemReceiver` does; a thread puts them there."""

    def __init__(
        self,
        address: str,
        run_dir: Path,
        run_id: str,
        *,
        hwm: int,
        limits: Limits,
        keys: KeyPair | None = None,
        allowed_keys: Set[bytes] = frozenset(),
        patience: Patience | None = None,
    ) -> None:
        """With `keys`, only holders of `allowed_keys` are let in."""
        super().__init__(run_dir, limits=limits)
        self._run_id = run_id
        self._hwm = hwm
        self._limits = limits
        self._allowed_keys = allowed_keys
        self._patience = patience or Patience()
        self._failure: OSError | None = None
        """Why nothing more can be stored."""

        self._stored = threading.Condition()
        """Notified when a batch was stored."""

        self._transfer: Transfer | None = None
        self._peer: bytes | None = None
        """Connection that the last offer came from."""

        self._asked: deque[int] = deque(maxlen=_MAX_KNOWN_SENDERS)
        """Senders that have asked which batch is missing."""

        self._asked_s: float | None = None
        """When the last question was answered."""

        self._expected: int | None = None
        self._closing = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = self._context.socket(zmq.REP)
        self._socket = self._listen(address, keys)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bell = WakePipe()
        self._thread = threading.Thread(target=self._run, name="batch receiver", daemon=True)
        self._thread.start()

    def poll(self, step: int) -> Batch | None:
        self.expect(step)
        batch = super().poll(step)
        if batch is not None:
            self.expect(step + 1)
        elif self._failure is not None:
            raise self._failure
        return batch

    def receive(self, step: int) -> Batch:
        """Waits for the batch; raises if a stored one is bad, since its sender has forgotten it."""
        while True:
            try:
                if (batch := self.poll(step)) is not None:
                    return batch
            except PayloadError as error:
                raise batch_refused(step, str(error)) from error
            with self._stored:
                self._stored.wait_for(lambda: self._spool.has(step), _WAIT_S)

    def expect(self, step: int) -> None:
        """Notes that the trainer waits for this step, and has the orchestrator told, once."""
        if self._expected != step:
            self._expected = step
            self._bell.ring()

    def finish_answering(self, within_s: float, quiet_s: float = _QUIET_S) -> None:
        """Waits until an orchestrator has offered a batch, or asked which is missing and is quiet since."""
        until_s = time.monotonic() + within_s
        while self._asked_s is not None or self._peer is None:
            end_s = until_s if self._asked_s is None else self._asked_s + quiet_s
            if (left_s := end_s - time.monotonic()) <= 0:
                return
            time.sleep(min(left_s, _WAIT_S))

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._context.destroy(linger=0)
        self._bell.close()

    def _listen(self, address: str, keys: KeyPair | None) -> "zmq.Socket[Any]":
        largest = min(self._limits.max_bytes, self._patience.max_chunk_bytes) + MAX_MESSAGE_BYTES
        socket = open_socket(self._context, zmq.ROUTER, address, largest, self._patience.dead_after_s)
        socket.rcvhwm = _MAX_QUEUED_MESSAGES
        socket.router_mandatory = True  # who is gone is told from who is there
        if keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.zap_domain = b"pellucid"
            self._gate.bind(_GATE)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(
                f"cannot listen on {address} ({error.strerror}); choose another transport.host or "
                "transport.port"
            ) from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._gate, self._bell):
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._gate in ready:
                self._let_in(self._gate.recv_multipart())
            if self._bell.fileno() in ready:
                self._bell.silence()
                self._tell_taken()
            if self._socket in ready:
                self._read()

    def _let_in(self, request: list[bytes]) -> None:
        version, request_id, _, peer, _, mechanism, *credentials = request
        is_known = mechanism == b"CURVE" and z85.encode(credentials[0]) in self._allowed_keys
        if not is_known:
            sender = f"tcp://{peer.decode(errors='replace')}"
            self._reject(PayloadError(sender, 0, "a key that is not in transport.keys"))
        status = [b"200", b"OK"] if is_known else [b"400", b"unknown key"]
        self._gate.send_multipart([version, request_id, *status, b"", b""])

    def _tell_taken(self) -> None:
        if self._expected is None:
            return
        if self._transfer is not None and self._transfer.offer.step < self._expected:
            self._transfer = None
        if self._peer is not None:
            self._say(self._peer, Taken(self._run_id, self._expected))

    def _read(self) -> None:
        peer, *frames = self._socket.recv_multipart(copy=False)
        sender = _address_of(peer)
        try:
            self._hear(peer.bytes, [frame.buffer for frame in frames], sender)
        except PayloadError as error:
            self._reject(error)
        except OSError as error:
            self._failure = error
        except Exception:
            # A mistake of ours, but the trainer has to outlive whatever somebody sends.
            self.num_rejected += 1
            logger.exception("what %s sent could not be judged", sender)

    def _hear(self, peer: bytes, frames: list[memoryview], sender: str) -> None:
        if not frames or len(frames[0]) > MAX_MESSAGE_BYTES:
            raise PayloadError(sender, 0, "no message, or one that is too long")
        try:
            message = TO_RECEIVER.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PayloadError(sender, 0, f"not a message of this protocol: {error}") from error
        sender = f"{sender}, run {message.run_id!r}"
        if len(frames) != (2 if isinstance(message, Chunk) else 1):
            raise PayloadError(sender, 0, f"{len(frames)} frames in a message of another number")
        if reason := self._objection(message):
            self._say(peer, Refused(message.run_id, message.step, 0, reason, is_final=True))
            raise PayloadError(sender, 0, reason)
        if isinstance(message, AskMissing):
            self._tell_missing(peer, message.sender)
        elif isinstance(message, Offer):
            self._answer(peer, message)
        else:
            self._receive(peer, message, frames[1], sender)

    def _objection(self, message: ToReceiver) -> str | None:
        """Returns why a message can never lead to a batch; None if it can."""
        if message.run_id != self._run_id:
            return f"run {message.run_id!r} is not trained here"
        if isinstance(message, Chunk):
            return None
        if message.protocol != PROTOCOL:
            return f"protocol {message.protocol}; this pellucid speaks {PROTOCOL}"
        if isinstance(message, AskMissing):
            return None
        if not PREAMBLE.size <= message.num_bytes <= self._limits.max_bytes:
            return f"an offer of {self._limits.too_large(message.num_bytes)}"
        return None

    def _tell_missing(self, peer: bytes, sender: int) -> None:
        """Tells an orchestrator that was started again where to go on.

        At its first question, what its predecessor was sending, and what it stored beyond a batch that is
        missing, is forgotten: it comes anew, and may be other samples. By a later one, which a slow network
        may deliver at any time, it may be sending itself.
        """
        if (step := self._expected) is None:
            return
        while self._spool.checksum(step) is not None:
            step += 1
        if sender not in self._asked:
            self._asked.append(sender)
            self._transfer = None
            self._spool.forget_from(step)
        if self._say(peer, Missing(self._run_id, step)):
            self._asked_s = time.monotonic()

    def _answer(self, peer: bytes, offer: Offer) -> None:
        self._peer, next_step = peer, self._expected
        if next_step is None:
            return
        if offer.step < next_step:
            self._say(peer, Taken(self._run_id, next_step))
        elif self._spool.checksum(offer.step) == offer.checksum:
            self._say(peer, Stored(self._run_id, offer.step))
        else:
            self._fetch(peer, offer, is_due=offer.step == next_step or self._spool.num_waiting() < self._hwm)

    def _fetch(self, peer: bytes, offer: Offer, *, is_due: bool) -> None:
        """Starts to fetch a batch, or continues one, unless another is being fetched."""
        transfer, now_s = self._transfer, time.monotonic()
        if transfer is not None and transfer.offer == offer:
            if transfer.peer != peer:
                why = "over a new connection"
            elif transfer.is_silent(now_s):
                why = f"since nothing of it has come for {self._patience.dead_after_s:g} s"
                transfer.has_stalled = True
            else:
                return
            logger.warning(
                "the batch of step %d of run %r goes on at byte %d of %d, %s",
                *(offer.step, offer.run_id, len(transfer.data), offer.num_bytes, why),
            )
            transfer.go_on(peer, now_s)
        elif is_due and (transfer is None or self._may_replace(transfer, peer)):
            self._transfer = transfer = Transfer(offer, peer, self._patience, now_s)
        else:
            return
        self._ask(transfer)

    def _may_replace(self, transfer: Transfer, peer: bytes) -> bool:
        """Whether who sends it offers another batch now, or is silent, or gone."""
        is_silent = transfer.has_stalled or transfer.is_silent(time.monotonic())
        if is_silent or transfer.peer in (peer, None):
            return True
        assert transfer.peer is not None and self._expected is not None
        # The message says nothing new: is it there to hear it?
        return not self._say(transfer.peer, Taken(self._run_id, self._expected))

    def _ask(self, transfer: Transfer) -> None:
        offer = transfer.offer
        for start, num_bytes in transfer.asks(time.monotonic()):
            assert transfer.peer is not None
            if not self._say(transfer.peer, Want(offer.run_id, offer.step, offer.checksum, start, num_bytes)):
                transfer.go_on(None, time.monotonic())
                return

    def _receive(self, peer: bytes, chunk: Chunk, data: memoryview, sender: str) -> None:
        transfer = self._transfer
        if transfer is None or (transfer.offer.step, transfer.offer.checksum) != (chunk.step, chunk.checksum):
            raise PayloadError(sender, 0, f"a part of a batch of step {chunk.step} that nobody asked for")
        if transfer.peer != peer or not transfer.take(chunk.start, data, time.monotonic()):
            logger.debug("%s: %d bytes from %d on were not asked for now", sender, len(data), chunk.start)
        elif len(transfer.data) == transfer.offer.num_bytes:
            self._transfer = None
            self._store(peer, transfer.offer, memoryview(transfer.data), sender)
        else:
            self._ask(transfer)

    def _store(self, peer: bytes, offer: Offer, payload: memoryview, sender: str) -> None:
        try:
            batch = decode_batch(payload, sender=sender, limits=self._limits)
            if (batch.run_id, batch.step) != (offer.run_id, offer.step):
                found = f"step {batch.step} of run {batch.run_id!r}"
                raise PayloadError(sender, PREAMBLE.size, f"{found}; announced was {offer.step}")
        except PayloadError as error:
            is_as_sent = checksum(payload[SEALED_FROM:]) == offer.checksum
            self._say(
                peer, Refused(offer.run_id, offer.step, error.position, str(error), is_final=is_as_sent)
            )
            raise
        self._spool.store(offer.step, payload, batch if offer.step == self._expected else None)
        self._say(peer, Stored(offer.run_id, offer.step))
        with self._stored:
            self._stored.notify_all()

    def _reject(self, error: PayloadError) -> None:
        logger.error("refused: %s", error)
        self.num_rejected += 1  # last: whoever sees the count finds the reason in the log

    def _say(self, peer: bytes, message: ToSender) -> bool:
        """Sends a message; False if the peer is gone or its queue is full: it will ask again."""
        try:
            self._socket.send_multipart([peer, msgspec.msgpack.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True


def _address_of(frame: zmq.Frame) -> str:
    try:
        return f"tcp://{frame['Peer-Address']}"
    except (zmq.ZMQError, KeyError):
        return "somebody"


def limits_of(
    config: TransportConfig,
    *,
    vocab_size: int | None = None,
    experts: Experts | None = None,
    images: ImageShape | None = None,
) -> Limits:
    """Returns the receiver's limits. Bytes bound the tokens: each takes one, unless it is shared.

    `images`: how the model turns images into tokens; None: it takes text alone.
    """
    return Limits(
        config.max_batch_bytes,
        max_tokens=config.max_batch_bytes,
        vocab_size=vocab_size,
        text_only=images is None,
        images=images,
        experts=experts,
    )


def open_receiver(
    config: TransportConfig,
    run_dir: Path,
    run_id: str,
    *,
    vocab_size: int | None = None,
    experts: Experts | None = None,
    images: ImageShape | None = None,
) -> BatchReceiver:
    """`vocab_size`: a batch with a token id beyond it is refused; `experts`: one without these experts;
    `images`: see `limits_of`."""
    limits = limits_of(config, vocab_size=vocab_size, experts=experts, images=images)
    if not isinstance(config, ZmqTransportConfig):
        return FilesystemReceiver(run_dir, limits=limits)
    return ZmqReceiver(
        batch_address(config),
        run_dir,
        run_id,
        hwm=config.hwm,
        limits=limits,
        keys=own_keys(config.keys, "trainer") if config.keys else None,
        allowed_keys=allowed_keys(config.keys) if config.keys else frozenset(),
    )
