"""The trainer's end of the ZMQ transport: one inbox for all runs, and a receiver for each.

The inbox fetches one batch of each run at a time, in chunks (`zmq_link`), decodes and judges it, writes
it to the run's spool and only then says `stored`. What is refused is counted and logged with its sender;
nothing that arrives can stop the inbox. Offers of a run are left unanswered until the trainer has said which
step it waits for: a resumed one may need batches again.

A batch belongs to the connection that it comes from. Another one may go on with it if it offers the same
bytes, and may begin another batch of that run once the first is silent or gone.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from pellucid.errors import PayloadError, TransportError
from pellucid.transport.decode import decode_batch
from pellucid.transport.spool import Spool
from pellucid.transport.wire import PREAMBLE, Batch, Limits, batch_refused, checksum
from pellucid.transport.zmq_link import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    TO_RECEIVER,
    Chunk,
    KeyPair,
    Offer,
    Patience,
    Refused,
    Stored,
    Taken,
    ToSender,
    Transfer,
    WakePipe,
    Want,
    open_socket,
)

logger = logging.getLogger(__name__)

_GATE = "inproc://zeromq.zap.01"
"""Where ZMQ asks who may connect."""

_MAX_QUEUED_MESSAGES = 8
_WAIT_S = 0.2


class Inbox:
    def __init__(
        self,
        address: str,
        spools: Mapping[str, Spool],
        *,
        hwm: int,
        limits: Limits,
        keys: KeyPair | None = None,
        allowed_keys: Set[bytes] = frozenset(),
        patience: Patience | None = None,
    ) -> None:
        """`spools` by run id. With `keys`, only holders of `allowed_keys` are let in."""
        self.num_rejected = 0
        self.failure: OSError | None = None
        """Why nothing more can be stored."""

        self.stored = threading.Condition()
        """Notified when a batch was stored."""

        self._spools = spools
        self._hwm = hwm
        self._limits = limits
        self._allowed_keys = allowed_keys
        self._patience = patience or Patience()
        self._transfers: dict[str, Transfer] = {}
        """The batch of each run that is on its way."""

        self._peers: dict[str, bytes] = {}
        self._expected: dict[str, int] = {}
        self._advanced_runs: deque[str] = deque()
        self._closing = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = self._context.socket(zmq.REP)
        self._socket = self._listen(address, keys)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bell = WakePipe()
        self._thread = threading.Thread(target=self._run, name="batch inbox", daemon=True)
        self._thread.start()

    def expect(self, run_id: str, step: int) -> None:
        """Notes that the trainer waits for this step; the inbox tells the run's orchestrator."""
        self._expected[run_id] = step
        self._advanced_runs.append(run_id)
        self._bell.ring()

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
        every_ms = round(1000 * self._patience.dead_after_s / 4)
        while not self._closing:
            ready = dict(poller.poll(every_ms if self._transfers else None))
            if self._gate in ready:
                self._let_in(self._gate.recv_multipart())
            if self._bell.fileno() in ready:
                self._bell.silence()
                self._tell_taken()
            if self._socket in ready:
                self._read()
            self._wake_stalled()

    def _let_in(self, request: list[bytes]) -> None:
        version, request_id, _, peer, _, mechanism, *credentials = request
        is_known = mechanism == b"CURVE" and z85.encode(credentials[0]) in self._allowed_keys
        if not is_known:
            self._reject(f"tcp://{peer.decode(errors='replace')}", 0, "a key that is not in transport.keys")
        status = [b"200", b"OK"] if is_known else [b"400", b"unknown key"]
        self._gate.send_multipart([version, request_id, *status, b"", b""])

    def _tell_taken(self) -> None:
        while self._advanced_runs:
            run_id = self._advanced_runs.popleft()
            if (transfer := self._transfers.get(run_id)) and transfer.offer.step < self._expected[run_id]:
                del self._transfers[run_id]
            if (peer := self._peers.get(run_id)) is not None:
                self._say(peer, Taken(run_id, self._expected[run_id]))

    def _read(self) -> None:
        peer, *frames = self._socket.recv_multipart(copy=False)
        sender = _address_of(peer)
        try:
            self._hear(peer.bytes, [frame.buffer for frame in frames], sender)
        except PayloadError as error:
            self._reject(error.sender, error.position, error.reason)
        except OSError as error:
            self.failure = error
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
        if len(frames) != (1 if isinstance(message, Offer) else 2):
            raise PayloadError(sender, 0, f"{len(frames)} frames in a message of another number")
        if message.run_id not in self._spools:
            self._turn_down(peer, message, sender, f"run {message.run_id!r} is not trained here")
        if isinstance(message, Offer):
            self._answer(peer, message, sender)
        else:
            self._receive(peer, message, frames[1], sender)

    def _answer(self, peer: bytes, offer: Offer, sender: str) -> None:
        if offer.protocol != PROTOCOL:
            self._turn_down(
                peer, offer, sender, f"protocol {offer.protocol}; this pellucid speaks {PROTOCOL}"
            )
        if not PREAMBLE.size <= offer.num_bytes <= self._limits.max_bytes:
            limit = f"at most {self._limits.max_bytes} are taken (transport.max_batch_bytes)"
            self._turn_down(peer, offer, sender, f"an offer of {offer.num_bytes} bytes; {limit}")
        self._peers[offer.run_id] = peer
        next_step = self._expected.get(offer.run_id)
        if next_step is None:
            return
        spool = self._spools[offer.run_id]
        if offer.step < next_step:
            self._say(peer, Taken(offer.run_id, next_step))
        elif spool.checksum(offer.step) == offer.checksum:
            self._say(peer, Stored(offer.run_id, offer.step))
        else:
            self._fetch(peer, offer, is_due=offer.step == next_step or spool.num_waiting() < self._hwm)

    def _fetch(self, peer: bytes, offer: Offer, *, is_due: bool) -> None:
        """Starts to fetch a batch, or continues one, unless another batch of the run is being fetched."""
        transfer, now_s = self._transfers.get(offer.run_id), time.monotonic()
        if transfer is not None and transfer.offer == offer:
            if transfer.peer == peer:
                return
            logger.info(
                "the batch of step %d of run %r goes on at byte %d of %d, over a new connection",
                *(offer.step, offer.run_id, transfer.num_received, offer.num_bytes),
            )
            transfer.go_on(peer, now_s)
        elif is_due and (transfer is None or self._may_replace(transfer, peer, offer)):
            self._transfers[offer.run_id] = transfer = Transfer(offer, peer, self._patience, now_s)
        else:
            return
        self._ask(transfer)

    def _may_replace(self, transfer: Transfer, peer: bytes, offer: Offer) -> bool:
        """Whether who sends it has another batch for the step now, or is silent, or gone."""
        if transfer.peer == peer:
            return offer.step == transfer.offer.step
        known = Taken(offer.run_id, self._expected[offer.run_id])  # says nothing new: is it there to hear it?
        return transfer.has_stalled or transfer.peer is None or not self._say(transfer.peer, known)

    def _ask(self, transfer: Transfer) -> None:
        offer = transfer.offer
        for start, num_bytes in transfer.asks(time.monotonic()):
            assert transfer.peer is not None
            if not self._say(transfer.peer, Want(offer.run_id, offer.step, offer.checksum, start, num_bytes)):
                transfer.go_on(None, time.monotonic())
                return

    def _wake_stalled(self) -> None:
        now_s = time.monotonic()
        for transfer in self._transfers.values():
            if transfer.is_stalled(now_s):
                logger.warning(
                    "nothing of the batch of step %d of run %r has come for %g s (%d of %d bytes are here); "
                    "the rest is asked for again",
                    *(transfer.offer.step, transfer.offer.run_id, self._patience.dead_after_s),
                    *(transfer.num_received, transfer.offer.num_bytes),
                )
                transfer.has_stalled = True
                transfer.go_on(transfer.peer, now_s)
                self._ask(transfer)

    def _receive(self, peer: bytes, chunk: Chunk, data: memoryview, sender: str) -> None:
        transfer = self._transfers.get(chunk.run_id)
        if transfer is None or (transfer.offer.step, transfer.offer.checksum) != (chunk.step, chunk.checksum):
            raise PayloadError(sender, 0, f"a part of a batch of step {chunk.step} that nobody asked for")
        if transfer.peer != peer or not transfer.take(chunk.start, data, time.monotonic()):
            logger.debug("%s: %d bytes from %d on were not asked for now", sender, len(data), chunk.start)
        elif transfer.is_complete:
            del self._transfers[chunk.run_id]
            self._store(peer, transfer.offer, transfer.payload(), sender)
        else:
            self._ask(transfer)

    def _turn_down(self, peer: bytes, message: Offer | Chunk, sender: str, reason: str) -> None:
        self._say(peer, Refused(message.run_id, message.step, 0, reason, is_final=True))
        raise PayloadError(sender, 0, reason)

    def _store(self, peer: bytes, offer: Offer, payload: memoryview, sender: str) -> None:
        try:
            batch = decode_batch(payload, sender=sender, limits=self._limits)
            if (batch.run_id, batch.step) != (offer.run_id, offer.step):
                raise PayloadError(
                    sender, 24, f"step {batch.step} of run {batch.run_id!r}; announced was {offer.step}"
                )
        except PayloadError as error:
            is_as_sent = checksum(payload[PREAMBLE.size :]) == offer.checksum
            self._say(
                peer, Refused(offer.run_id, offer.step, error.position, str(error), is_final=is_as_sent)
            )
            raise
        self._spools[offer.run_id].store(offer.step, payload)
        self._say(peer, Stored(offer.run_id, offer.step))
        with self.stored:
            self.stored.notify_all()

    def _reject(self, sender: str, position: int, reason: str) -> None:
        logger.error("refused: %s", PayloadError(sender, position, reason))
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


class ZmqReceiver:
    """The batches of one run, out of an inbox."""

    def __init__(self, inbox: Inbox, run_id: str, spool: Spool) -> None:
        self._inbox = inbox
        self._run_id = run_id
        self._spool = spool
        self._num_damaged = 0
        self._expected = -1

    @property
    def num_rejected(self) -> int:
        return self._inbox.num_rejected + self._num_damaged

    def poll(self, step: int) -> Batch | None:
        self._expect(step)
        if not self._spool.has(step):
            if self._inbox.failure is not None:
                raise self._inbox.failure
            return None
        try:
            batch = self._spool.take(step)
        except PayloadError as error:
            self._num_damaged += 1
            logger.error("refused the stored batch of step %d: %s", step, error)
            raise
        self._expect(step + 1)
        return batch

    def receive(self, step: int) -> Batch:
        """Waits for the batch; raises if a stored one is bad, since its sender has forgotten it."""
        while True:
            try:
                if (batch := self.poll(step)) is not None:
                    return batch
            except PayloadError as error:
                raise batch_refused(step, str(error)) from error
            with self._inbox.stored:
                self._inbox.stored.wait_for(lambda: self._spool.has(step), _WAIT_S)

    def _expect(self, step: int) -> None:
        """Calls `Inbox.expect` once per step: each call sends a message to the run's orchestrator."""
        if self._expected != step:
            self._expected = step
            self._inbox.expect(self._run_id, step)

    def release_before(self, step: int) -> None:
        self._spool.release_before(step)

    def close(self) -> None:
        self._inbox.close()


def _address_of(frame: zmq.Frame) -> str:
    try:
        return f"tcp://{frame['Peer-Address']}"
    except (zmq.ZMQError, KeyError):
        return "somebody"
