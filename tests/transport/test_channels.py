"""One protocol, several channels: order per run, back-pressure, restarts, slow joiners, refusals, replay."""

import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fuzz_codec import differing_column
from pellucid.data import TokenTable, TrainingSample
from pellucid.errors import PayloadError, TransportError
from pellucid.transport import (
    Batch,
    FilesystemReceiver,
    FilesystemSender,
    Limits,
    MemoryChannel,
    encode_batch,
)
from pellucid.transport.spool import Spool, first_missing_batch, is_stable, publish_folder, stable_steps
from pellucid.transport.zmq_receiver import ZmqReceiver
from pellucid.transport.zmq_sender import ZmqSender

PATIENCE_S = 20.0
"""Only ever waited for when a test fails."""


def batch(step: int, run_id: str = "run") -> Batch:
    sample = TrainingSample.from_turn([5, 6], [9, 8, step], [-0.1, -0.7, -1e-8], env_name="a", run_id=run_id)
    return Batch(run_id, step, TokenTable.from_samples([sample]))


def payload(step: int, run_id: str = "run") -> bytes:
    return encode_batch(batch(step, run_id))


def assert_same(received: Batch, expected: Batch) -> None:
    assert (received.run_id, received.step) == (expected.run_id, expected.step)
    assert differing_column(received.table, expected.table) is None


class Filesystem:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder

    def sender(self, run_id: str = "run", hwm: int = 8):
        return FilesystemSender(self.folder / run_id, hwm=hwm, max_bytes=100_000)

    def receiver(self, run_id: str = "run"):
        return FilesystemReceiver(self.folder / run_id, limits=Limits(max_bytes=100_000, vocab_size=1000))


class Zmq:
    """A trainer behind one port for each of two runs, which a restarted trainer takes again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._receivers: dict[str, ZmqReceiver] = {}
        self._addresses = {"run": "tcp://127.0.0.1:*", "other": "tcp://127.0.0.1:*"}
        self._addresses = {run_id: self.receiver(run_id).address for run_id in self._addresses}
        self.stop_trainer()

    def sender(self, run_id: str = "run", hwm: int = 8):
        address = self._addresses[run_id]
        sender = ZmqSender(address, run_id, hwm=hwm, max_bytes=100_000, close_within_s=PATIENCE_S)
        self._stack.callback(close_quietly, sender)
        return sender

    def receiver(self, run_id: str = "run"):
        if run_id not in self._receivers:
            limits = Limits(max_bytes=100_000, vocab_size=1000)
            self._receivers[run_id] = ZmqReceiver(
                self._addresses[run_id], self.folder / run_id, run_id, hwm=8, limits=limits
            )
        return self._receivers[run_id]

    def stop_trainer(self) -> None:
        while self._receivers:
            self._receivers.popitem()[1].close()


def close_quietly(sender) -> None:
    with suppress(TransportError):  # of a sender whose batch was refused, which the test has seen
        sender.close()


@pytest.fixture(params=[Filesystem, Zmq], ids=["filesystem", "zmq"])
def link(request, tmp_path):
    with ExitStack() as stack:
        made = request.param(tmp_path, stack)
        yield made
    if isinstance(made, Zmq):
        made.stop_trainer()


def in_background(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def watch(sender) -> None:
    """As an orchestrator does, only more often."""
    for _ in range(round(PATIENCE_S / 0.01)):
        sender.check()
        time.sleep(0.01)


def wait_until(condition) -> None:
    for _ in range(round(PATIENCE_S / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def restart_trainer(link) -> None:
    if isinstance(link, Zmq):
        link.stop_trainer()


def test_batches_arrive_in_order_whatever_the_order_of_sending(link) -> None:
    sender, receiver = link.sender(), link.receiver()
    for step in (1, 0, 2):
        sender.send(step, payload(step))
    for step in range(3):
        assert_same(receiver.receive(step), batch(step))
        receiver.release_before(step)
    sender.close()
    assert receiver.num_rejected == 0


def test_two_runs_do_not_mix(link) -> None:
    senders = {run_id: link.sender(run_id) for run_id in ("run", "other")}
    receivers = {run_id: link.receiver(run_id) for run_id in senders}
    for step in range(3):
        for run_id, sender in senders.items():
            sender.send(step, payload(step, run_id))
    for run_id in ("other", "run"):
        for step in range(3):
            assert_same(receivers[run_id].receive(step), batch(step, run_id))


def test_a_trainer_that_starts_late_misses_nothing(link) -> None:
    sender = link.sender()
    for step in range(2):
        sender.send(step, payload(step))
    receiver = link.receiver()
    for step in range(2):
        assert_same(receiver.receive(step), batch(step))


def test_an_orchestrator_that_starts_late_is_waited_for(link) -> None:
    receiver, received = link.receiver(), []
    waiting = in_background(lambda: received.append(receiver.receive(0)))
    link.sender().send(0, payload(0))
    join(waiting)
    assert_same(received[0], batch(0))


def test_sending_waits_while_too_many_batches_wait(link) -> None:
    sender, receiver = link.sender(hwm=2), link.receiver()
    sent: list[int] = []
    third_is_sent = threading.Event()

    def send_all() -> None:
        for step in range(4):
            sender.send(step, payload(step))
            sent.append(step)
            if step == 2:
                third_is_sent.set()

    thread = in_background(send_all)
    assert not third_is_sent.wait(0.3)
    assert sent == [0, 1]
    assert_same(receiver.receive(0), batch(0))
    assert third_is_sent.wait(PATIENCE_S)
    for step in (1, 2, 3):
        assert_same(receiver.receive(step), batch(step))
    join(thread)


def test_a_batch_can_be_received_again_until_it_is_released(link) -> None:
    """A trainer that died trains from its last checkpoint on, out of the batches that it had."""
    sender, receiver = link.sender(), link.receiver()
    for step in range(3):
        sender.send(step, payload(step))
        assert_same(receiver.receive(step), batch(step))
    sender.close()
    receiver.release_before(1)
    restart_trainer(link)
    resumed = link.receiver()
    for step in (1, 2):
        assert_same(resumed.receive(step), batch(step))
    resumed.release_before(3)
    assert stable_steps(link.folder / "run" / "batches") == []


def test_a_restarted_trainer_gets_what_the_first_one_did_not_store(link) -> None:
    sender, receiver = link.sender(), link.receiver()
    sender.send(0, payload(0))
    receiver.receive(0)
    restart_trainer(link)
    for step in (1, 2):
        sender.send(step, payload(step))
    resumed = link.receiver()
    for step in range(3):
        assert_same(resumed.receive(step), batch(step))


def test_a_restarted_orchestrator_goes_on(link) -> None:
    first, receiver = link.sender(), link.receiver()
    first.send(0, payload(0))
    assert_same(receiver.receive(0), batch(0))
    first.close()
    second = link.sender()
    second.send(1, payload(1))
    assert_same(receiver.receive(1), batch(1))
    second.close()


def changed(position: int) -> bytes:
    """The batch of step 0 with a bit flipped, as a disk or a sender that lies might make it."""
    damaged = bytearray(payload(0))
    damaged[position] ^= 4
    return bytes(damaged)


BAD = {
    "truncated": (payload(0)[:-8], "says it has"),
    "bit-flipped": (changed(-20), "checksum"),
    "of another version": (changed(4), "format version 7; this pellucid reads 3"),
    "of another step": (payload(7), "step 7"),
    "of unknown tokens": (
        encode_batch(
            Batch(
                "run",
                0,
                TokenTable.from_samples(
                    [TrainingSample.from_turn([5], [2000], [-1.0], env_name="a", run_id="run")]
                ),
            )
        ),
        "the vocabulary has 1000 tokens",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_batches_are_refused_counted_and_told_and_a_good_one_is_waited_for(link, kind, caplog) -> None:
    bad, reason = BAD[kind]
    sender, receiver, received = link.sender(), link.receiver(), []
    waiting = in_background(lambda: received.append(receiver.receive(0)))
    sender.send(0, bad)
    with pytest.raises(TransportError, match=f"the trainer refused the batch of step 0: .*{reason}"):
        watch(sender)
    wait_until(lambda: receiver.num_rejected >= 1 and reason in caplog.text)
    assert not received
    link.sender().send(0, payload(0))
    join(waiting)
    assert_same(received[0], batch(0))


def test_a_batch_that_is_too_large_is_refused_where_it_was_made(link) -> None:
    with pytest.raises(TransportError, match=r"100001 bytes; transport.max_batch_bytes = 100000"):
        link.sender().send(0, bytes(100_001))


def test_files_are_whole(link) -> None:
    """Whoever looks at the folder sees a batch completely or not at all."""
    sender, receiver = link.sender(), link.receiver()
    folder = link.folder / "run" / "batches"
    seen: list[bytes] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.extend((folder / f"step_{step}" / "batch.bin").read_bytes() for step in stable_steps(folder))

    looking = in_background(look)
    for step in range(5):
        sender.send(step, payload(step))
        receiver.receive(step)
    done.set()
    join(looking)
    assert set(seen) <= {payload(step) for step in range(5)}


def test_memory_is_a_channel_too() -> None:
    channel = MemoryChannel()
    for step in range(3):
        channel.send(step, payload(step))
    for step in range(3):
        assert_same(channel.receive(step), batch(step))
    channel.send(3, b"noise")
    channel.send(3, payload(3))
    assert_same(channel.receive(3), batch(3))
    assert channel.num_rejected == 1
    with pytest.raises(TransportError, match="refused a batch"):
        channel.check()


def test_the_first_batch_that_cannot_be_received_again(tmp_path, caplog) -> None:
    for step in (3, 4, 5, 7):
        FilesystemSender(tmp_path).send(step, payload(step))
    assert first_missing_batch(tmp_path, 3, 5) == 5
    assert first_missing_batch(tmp_path, 3, 8) == 6
    damaged = tmp_path / "batches" / "step_4" / "batch.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert first_missing_batch(tmp_path, 3, 8) == 4
    assert "the batch of step 4 cannot be trained again" in caplog.text
    size = len(payload(3))
    assert first_missing_batch(tmp_path, 3, 4, Limits(max_bytes=size)) == 4
    assert first_missing_batch(tmp_path, 3, 4, Limits(max_bytes=size - 1)) == 3
    assert f"{size} bytes; at most {size - 1} are taken (transport.max_batch_bytes)" in caplog.text


def test_a_refused_batch_is_kept_aside_with_the_reason(tmp_path) -> None:
    sender, receiver = FilesystemSender(tmp_path), FilesystemReceiver(tmp_path)
    sender.send(0, b"noise")
    received: list[Batch] = []
    waiting = in_background(lambda: received.append(receiver.receive(0)))
    with pytest.raises(TransportError):
        watch(sender)
    aside = tmp_path / "batches" / "refused_step_0"
    assert (aside / "batch.bin").read_bytes() == b"noise"
    assert "byte 5: ends here" in (aside / "reason.txt").read_text()
    sender.send(0, payload(0))
    join(waiting)
    sender.check()  # what is sent again is judged anew
    assert not aside.exists()


def test_a_batch_that_is_refused_again_for_the_same_reason_is_told_again(tmp_path) -> None:
    """Whoever goes on with the run sends a step anew, and what comes of that may be just as bad."""
    receiver = FilesystemReceiver(tmp_path)
    for _ in range(3):
        resumed = FilesystemSender(tmp_path)
        resumed.check()
        resumed.send(0, b"noise")
        resumed.check()
        with pytest.raises(PayloadError):
            receiver.poll(0)
        with pytest.raises(TransportError, match="the trainer refused the batch of step 0: .*byte 5: ends"):
            resumed.check()
        Spool(tmp_path).forget_refusals()  # as --resume does


def test_a_batch_on_disk_that_is_refused_before_the_orchestrator_is_there_is_told(tmp_path) -> None:
    """A resumed trainer may be faster than its orchestrator, which would not send that step again."""
    FilesystemSender(tmp_path).send(0, b"noise")
    with pytest.raises(PayloadError):
        FilesystemReceiver(tmp_path).poll(0)
    with pytest.raises(TransportError, match="the trainer refused the batch of step 0"):
        FilesystemSender(tmp_path).check()


def test_over_zmq_a_stored_batch_that_is_bad_ends_the_wait(tmp_path) -> None:
    """Nobody would send it again: its sender was told that it is stored."""
    Spool(tmp_path / "run").store(0, b"noise")
    with ExitStack() as stack:
        link = Zmq(tmp_path, stack)
        stack.callback(link.stop_trainer)
        with pytest.raises(TransportError, match=r"refused the batch of step 0: .*; go on with --resume"):
            link.receiver().receive(0)


def test_an_oversized_file_is_refused_without_being_read(tmp_path) -> None:
    FilesystemSender(tmp_path).send(0, payload(0))
    with (tmp_path / "batches" / "step_0" / "batch.bin").open("r+b") as file:
        file.truncate(1 << 40)  # a sparse terabyte: reading it would fail
    receiver = FilesystemReceiver(tmp_path)
    waiting = in_background(lambda: receiver.receive(0))
    wait_until(lambda: receiver.num_rejected)
    FilesystemSender(tmp_path).send(0, payload(0))
    join(waiting)
    assert receiver.num_rejected == 1


def test_a_folder_appears_whole_or_not_at_all(tmp_path) -> None:
    def fail(folder) -> None:
        (folder / "half").write_text("x")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        publish_folder(tmp_path / "step_1", fail)
    assert list(tmp_path.iterdir()) == []
    publish_folder(tmp_path / "step_1", lambda folder: None)
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_x").mkdir()
    assert is_stable(tmp_path / "step_1")
    assert stable_steps(tmp_path) == [1]


def test_random_restarts_of_both_ends_lose_nothing(tmp_path) -> None:
    """Twenty batches over ZMQ, either end restarted at random in between."""
    generator = np.random.default_rng(3)
    with ExitStack() as stack:
        link = Zmq(tmp_path, stack)
        sender, receiver = link.sender(), link.receiver()
        sent = 0
        for step in range(20):
            while sent < min(20, step + 1 + generator.integers(0, 3)):
                sender.send(sent, payload(sent))
                sent += 1
            if generator.random() < 0.3:
                link.stop_trainer()
                receiver = link.receiver()
            assert_same(receiver.receive(step), batch(step))
            if generator.random() < 0.3:
                sender.close()
                sender = link.sender()
        link.stop_trainer()
