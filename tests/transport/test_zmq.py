"""The ZMQ transport against peers that lose, lie or are strangers."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.msgpack import encode
from pydantic import TypeAdapter, ValidationError

from pellucid.config import TransportConfig, ZmqTransportConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.errors import ConfigError, TransportError
from pellucid.guard import is_loopback
from pellucid.transport import Batch, Limits, encode_batch, open_receiver, open_sender, stable_steps
from pellucid.transport.batch import declared_checksum as checksum_of
from pellucid.transport.spool import Spool
from pellucid.transport.zmq_link import (
    TO_RECEIVER,
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
    Want,
    allowed_keys,
    make_keys,
    own_keys,
    trainer_key,
)
from pellucid.transport.zmq_receiver import ZmqReceiver
from pellucid.transport.zmq_sender import ZmqSender

PATIENCE_MS = 20_000
LIMITS = Limits(max_bytes=100_000)


def payload(step: int = 0) -> bytes:
    sample = TrainingSample.from_turn([5, 6], [9, step], [-0.1, -0.7], env_name="a")
    return encode_batch(Batch("run", step, TokenTable.from_samples([sample])))


def open_inbox(folder, **options) -> ZmqReceiver:
    return ZmqReceiver("tcp://127.0.0.1:*", folder, "run", hwm=2, limits=LIMITS, **options)


@pytest.fixture
def inbox(tmp_path):
    with closing(open_inbox(tmp_path)) as made:
        yield made


@contextmanager
def stranger(address: str, **keys):
    """A plain socket that can say anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for name, key in keys.items():
            setattr(socket, f"curve_{name}", key)
        socket.connect(address)
        yield socket


def wanted(data: bytes, step: int = 0) -> Want:
    """All of a small batch."""
    return Want("run", step, checksum_of(data), 0, len(data))


def chunk_of(data: bytes, step: int = 0) -> list[bytes]:
    return [encode(Chunk("run", step, checksum_of(data), 0)), data]


def answer(socket, timeout_ms: int = PATIENCE_MS):
    assert socket.poll(timeout_ms), "no answer"
    return TO_SENDER.decode(socket.recv())


def wait_until(condition) -> None:
    for _ in range(PATIENCE_MS // 10):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def test_the_conversation(inbox, tmp_path) -> None:
    data = payload()
    offer = Offer("run", 0, len(data), checksum_of(data))
    with stranger(inbox.address) as peer:
        peer.send(encode(offer))
        assert not peer.poll(100), "nobody waits for a step yet"
        inbox.expect(0)
        peer.send(encode(offer))
        assert [answer(peer), answer(peer)] == [Taken("run", 0), wanted(data)]
        peer.send_multipart(chunk_of(data))
        assert answer(peer) == Stored("run", 0)
        peer.send(encode(offer))
        assert answer(peer) == Stored("run", 0)
        assert inbox.receive(0).step == 0
        wait_until(lambda: answer(peer) == Taken("run", 1))
        peer.send(encode(offer))
        assert answer(peer) == Taken("run", 1)


def test_an_orchestrator_that_is_started_again_learns_which_batch_is_missing(inbox, tmp_path) -> None:
    """What its predecessor was sending, or stored beyond the missing batch, is forgotten."""
    for step in (3, 4, 6):
        Spool(tmp_path).store(step, payload(step))
    data = payload(5)
    with (
        stranger(inbox.address) as predecessor,
        closing(ZmqSender(inbox.address, "run", hwm=2, max_bytes=100_000, close_within_s=0)) as sender,
    ):
        assert sender.missing_batch() is None, "nobody waits for a step yet"
        inbox.expect(3)
        wait_until(lambda: sender.missing_batch() == 5)
        inbox.expect(5)
        predecessor.send(encode(Offer("run", 5, len(data), checksum_of(data))))
        assert answer(predecessor) == wanted(data, 5)
        with stranger(inbox.address) as successor:
            successor.send(encode(AskMissing("run", 0, 1)))
            assert answer(successor) == Missing("run", 5)
        predecessor.send_multipart(chunk_of(data, 5))
        wait_until(lambda: inbox.num_rejected == 1)
    assert stable_steps(tmp_path / "batches") == [3, 4]


def test_a_trainer_with_nothing_left_answers_an_orchestrator_that_goes_on(inbox, tmp_path) -> None:
    inbox.expect(7)  # and no batch is ever asked for
    inbox.finish_answering(0.01)
    with (
        closing(ZmqSender(inbox.address, "run", hwm=2, max_bytes=100_000, close_within_s=0)) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        answering = pool.submit(inbox.finish_answering, PATIENCE_MS / 1000, quiet_s=0.3)
        wait_until(lambda: sender.missing_batch() == 7)
        answering.result(PATIENCE_MS / 1000)


def test_a_trainer_to_which_batches_were_offered_waits_for_no_question(inbox, tmp_path) -> None:
    inbox.expect(0)
    data = payload()
    with stranger(inbox.address) as peer:
        peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
        assert answer(peer) == wanted(data)
        started = time.monotonic()
        inbox.finish_answering(PATIENCE_MS / 1000)
        assert time.monotonic() - started < PATIENCE_MS / 1000


def test_a_question_that_arrives_late_ends_no_transfer(inbox, tmp_path) -> None:
    inbox.expect(5)
    data = payload(5)
    with stranger(inbox.address) as before, stranger(inbox.address) as peer:
        before.send(encode(AskMissing("run", 0, 1)))
        assert answer(before) == Missing("run", 5)
        peer.send(encode(Offer("run", 5, len(data), checksum_of(data))))
        assert answer(peer) == wanted(data, 5)
        before.send(encode(AskMissing("run", 0, 1)))
        assert answer(before) == Missing("run", 5)
        peer.send_multipart(chunk_of(data, 5))
        assert answer(peer) == Stored("run", 5)
    assert inbox.num_rejected == 0


def test_a_trainer_of_another_run_is_asked_once_which_batch_is_missing(inbox, tmp_path) -> None:
    inbox.expect(0)
    with closing(ZmqSender(inbox.address, "other", hwm=2, max_bytes=100_000, close_within_s=0)) as sender:

        def is_refused() -> bool:
            with suppress(TransportError):
                assert sender.missing_batch() is None
                return False
            return True

        wait_until(is_refused)
        time.sleep(0.1)  # a loop would ask hundreds of times
        assert inbox.num_rejected == 1
        with pytest.raises(
            TransportError, match=r"which batch is missing: run 'other' is not trained here; both ends need"
        ):
            sender.missing_batch()
        with suppress(TransportError):
            sender.close()


def test_a_chunk_that_got_lost_is_asked_for_again(tmp_path, caplog) -> None:
    data = payload()
    patience = Patience(dead_after_s=0.3)
    with closing(open_inbox(tmp_path, patience=patience)) as inbox:
        inbox.expect(0)
        with stranger(inbox.address) as peer:
            for _ in range(3):
                peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
                assert answer(peer) == wanted(data)
                peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
                assert not peer.poll(100), "it was asked for just now"
                time.sleep(0.4)
            peer.send_multipart(chunk_of(data))
            wait_until(lambda: answer(peer) == Stored("run", 0))
    assert f"goes on at byte 0 of {len(data)}, since nothing of it has come for 0.3 s" in caplog.text


def test_a_sender_that_only_offers_keeps_nobody_out(tmp_path) -> None:
    data = payload()
    with (
        closing(open_inbox(tmp_path, patience=Patience(dead_after_s=0.3))) as inbox,
        stranger(inbox.address) as idle,
        stranger(inbox.address) as peer,
    ):
        inbox.expect(0)
        never_sent = encode(Offer("run", 0, 500, 1))
        idle.send(never_sent)
        assert isinstance(answer(idle), Want)
        time.sleep(0.4)
        idle.send(never_sent)
        assert isinstance(answer(idle), Want), "asked for again"
        peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
        assert answer(peer) == wanted(data)
        peer.send_multipart(chunk_of(data))
        assert answer(peer) == Stored("run", 0)


def test_another_batch_of_the_same_step_replaces_the_first(inbox, tmp_path) -> None:
    """A resumed orchestrator may have sampled anew."""
    inbox.expect(0)
    other = encode_batch(
        Batch("run", 0, TokenTable.from_samples([TrainingSample.from_turn([1], [2], [-1.0], env_name="b")]))
    )
    with stranger(inbox.address) as peer:
        for data in (payload(), other):
            peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
            assert answer(peer) == wanted(data)
            peer.send_multipart(chunk_of(data))
            assert answer(peer) == Stored("run", 0)
    assert Spool(tmp_path).read(0).table["token_ids"].tolist() == [1, 2]


def test_a_full_spool_takes_only_what_the_trainer_waits_for(inbox) -> None:
    inbox.expect(0)
    with stranger(inbox.address) as peer:
        for step in (1, 2):
            data = payload(step)
            peer.send(encode(Offer("run", step, len(data), checksum_of(data))))
            assert answer(peer) == wanted(data, step)
            peer.send_multipart(chunk_of(data, step))
            assert answer(peer) == Stored("run", step)
        for step in (3, 0):
            data = payload(step)
            peer.send(encode(Offer("run", step, len(data), checksum_of(data))))
        assert answer(peer) == wanted(data)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"noise"], "not a message of this protocol"),
        ([b""], "not a message of this protocol"),
        ([bytes(5000)], "too long"),
        ([encode(Stored("run", 0))], "not a message of this protocol"),
        ([encode(Chunk("run", 0, 1, 0)), payload()], "nobody asked for"),
        ([encode(Chunk("run", 0, 1, 0))], "1 frames"),
        ([encode(Offer("run", 0, 100, 1)), b"x"], "2 frames"),
        ([encode(Offer("stray", 0, 100, 1))], "run 'stray' is not trained here"),
        ([encode(Offer("run", 0, 100_001, 1))], "an offer of 100001 bytes; at most 100000 are taken"),
        ([encode(Offer("run", 0, 1 << 60, 1))], "at most 100000 are taken"),
        ([encode(Offer("run", 0, -1, 1))], "an offer of -1 bytes"),
        ([encode(Offer("run", 0, 100, 1, 99))], "protocol 99; this pellucid speaks 4"),
    ],
)
def test_whatever_a_stranger_says_is_refused_and_counted(inbox, frames, reason, caplog) -> None:
    inbox.expect(0)
    with stranger(inbox.address) as peer:
        peer.send_multipart(frames)
        wait_until(lambda: inbox.num_rejected == 1)
        assert "payload from tcp://127.0.0.1" in caplog.text and reason in caplog.text
        data = payload()
        peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
        wait_until(lambda: isinstance(answer(peer), Want))


def test_a_frame_beyond_the_limit_ends_the_connection_and_nothing_else(inbox) -> None:
    inbox.expect(0)
    data = payload()
    with stranger(inbox.address) as peer, stranger(inbox.address) as other:
        peer.send(bytes(200_000))
        other.send(encode(Offer("run", 0, len(data), checksum_of(data))))
        assert answer(other) == wanted(data)


def test_noise_does_not_stop_the_inbox(inbox) -> None:
    generator = np.random.default_rng(0)
    inbox.expect(0)
    good = [encode(Offer("run", 0, 500, 1)), encode(Chunk("run", 0, 1, 0)), payload()]
    with stranger(inbox.address) as peer:
        for _ in range(500):
            frames = [bytearray(good[index]) for index in generator.integers(0, 3, generator.integers(1, 4))]
            for frame in frames:
                frame[generator.integers(len(frame))] ^= 1 << generator.integers(8)
            peer.send_multipart(frames)
            while peer.poll(0):
                peer.recv()
        data = payload()
        peer.send(encode(Offer("run", 0, len(data), checksum_of(data))))
        wait_until(lambda: answer(peer) == wanted(data))
    assert inbox.num_rejected > 300


@contextmanager
def fake_trainer():
    """A trainer that answers as a test wants it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


def hear(socket):
    assert socket.poll(PATIENCE_MS), "nothing was said"
    peer, head, *rest = socket.recv_multipart()
    return peer, TO_RECEIVER.decode(head), rest


def test_the_sender_repeats_until_it_is_heard() -> None:
    data = payload()
    with fake_trainer() as (trainer, address):
        sender = ZmqSender(address, "run", hwm=2, max_bytes=100_000)
        sender.send(0, data)
        _, first, _ = hear(trainer)
        peer, again, _ = hear(trainer)
        assert first == again == Offer("run", 0, len(data), checksum_of(data))
        for start, stop in ((0, 100), (100, 300), (100, len(data))):  # it may be asked for twice
            want = Want("run", 0, checksum_of(data), start, stop - start)
            trainer.send_multipart([peer, encode(Want("run", 0, 99, 0, 100))])  # of a batch that nobody sends
            trainer.send_multipart([peer, encode(want)])
            while isinstance((said := hear(trainer))[1], Offer):
                pass
            assert said[1:] == (Chunk("run", 0, checksum_of(data), start), [data[start:stop]])
        assert not trainer.poll(500), "nothing is offered while a batch is fetched"
        trainer.send_multipart([peer, b"noise"])
        trainer.send_multipart([peer, encode(Stored("run", 0))])
        sender.close()


def test_a_batch_that_the_trainer_lost_after_storing_it_is_an_error() -> None:
    with fake_trainer() as (trainer, address):
        sender = ZmqSender(address, "run", hwm=2, max_bytes=100_000)
        sender.send(0, payload())
        peer, _, _ = hear(trainer)
        trainer.send_multipart([peer, encode(Stored("run", 0))])
        trainer.send_multipart([peer, encode(wanted(payload()))])
        with pytest.raises(TransportError, match="lost the batch of step 0 after storing it"):
            while True:
                sender.check()
        with pytest.raises(TransportError, match="lost the batch"):
            sender.close()


def test_closing_tells_what_never_arrived() -> None:
    with fake_trainer() as (_, address):
        sender = ZmqSender(address, "run", hwm=2, max_bytes=100_000, close_within_s=0.1)
        sender.send(3, payload(3))
        with pytest.raises(TransportError, match=r"did not store the batch of step 3 within 0.1 s"):
            sender.close()


def test_only_holders_of_a_known_key_are_let_in(tmp_path, caplog) -> None:
    make_keys(tmp_path / "keys")
    keys, server = own_keys(tmp_path / "keys", "orchestrator"), trainer_key(tmp_path / "keys")
    inbox = open_inbox(
        tmp_path, keys=own_keys(tmp_path / "keys", "trainer"), allowed_keys=allowed_keys(tmp_path / "keys")
    )
    data = payload()
    offer = encode(Offer("run", 0, len(data), checksum_of(data)))
    with closing(inbox):
        inbox.expect(0)
        foreign = KeyPair(*zmq.curve_keypair())
        with (
            stranger(inbox.address) as without,
            stranger(
                inbox.address, serverkey=server, publickey=foreign.public, secretkey=foreign.secret
            ) as other,
        ):
            for peer in (without, other):
                with suppress(zmq.Again):  # it was shut out already
                    peer.send(offer, zmq.NOBLOCK)
            wait_until(lambda: inbox.num_rejected >= 1)
            assert not without.poll(200) and not other.poll(0)
        assert "payload from tcp://127.0.0.1, byte 0: a key that is not in transport.keys" in caplog.text
        sender = ZmqSender(inbox.address, "run", hwm=2, max_bytes=100_000, keys=keys, trainer_key=server)
        sender.send(0, data)
        assert inbox.receive(0).step == 0
        sender.close()


@pytest.mark.parametrize("has_keys", [True, False])
def test_an_orchestrator_that_is_not_let_in_is_told(tmp_path, has_keys) -> None:
    make_keys(tmp_path / "keys")
    own, server = own_keys(tmp_path / "keys", "trainer"), trainer_key(tmp_path / "keys")
    with closing(open_inbox(tmp_path, keys=own)) as inbox:
        keys = KeyPair(*zmq.curve_keypair()) if has_keys else None
        sender = ZmqSender(inbox.address, "run", hwm=2, max_bytes=9999, keys=keys, trainer_key=server)
        with pytest.raises(TransportError, match="does not let this orchestrator in"):
            sender.send(0, payload())  # if it knows already
            sender.close()
        with suppress(TransportError):
            sender.close()


def settings(**values) -> ZmqTransportConfig:
    return TypeAdapter(TransportConfig).validate_python({"type": "zmq", **values})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True)],
        *[("0.0.0.0", False), ("10.0.0.5", False), ("trainer-host", False), ("::", False)],
    ],
)
def test_beyond_loopback_keys_are_needed(host, expected, tmp_path) -> None:
    assert is_loopback(host) is expected
    assert settings(host=host, keys=tmp_path).keys == tmp_path
    if expected:
        assert settings(host=host).keys is None
    else:
        with pytest.raises(ValidationError, match=f"transport.host = {host} .* transport.keys is not set"):
            settings(host=host)


def test_the_defaults_stay_on_this_machine() -> None:
    assert (settings().host, settings().hwm) == ("127.0.0.1", 8)


def test_opened_as_configured(tmp_path) -> None:
    make_keys(tmp_path / "keys")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    config = settings(port=port, keys=tmp_path / "keys", hwm=3)
    receiver = open_receiver(config, tmp_path, "run", vocab_size=8)
    sender = open_sender(config, tmp_path, "run")
    with pytest.raises(TransportError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        open_receiver(config, tmp_path, "run")
    try:
        receiver.expect(0)
        sender.send(0, payload())
        with pytest.raises(TransportError, match="holds 9; the vocabulary has 8 tokens"):
            sender.close()
        assert receiver.num_rejected == 1
    finally:
        receiver.close()
    with pytest.raises(ConfigError, match="transport.port = 0 does not say where the trainer is"):
        open_sender(settings(), tmp_path, "run")


def test_messages_that_lack_a_field_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        TO_RECEIVER.decode(encode(["offer", "run", 1]))
    refused = Refused("run", 3, 40, "why", True)
    assert TO_SENDER.decode(encode(refused)) == refused
