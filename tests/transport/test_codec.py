import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import COLUMNS, TokenTable, TrainingSample
from pellucid.errors import PayloadError
from pellucid.transport import (
    Batch,
    FilesystemReceiver,
    FilesystemSender,
    MemoryChannel,
    decode_batch,
    encode_batch,
)
from pellucid.transport.filesystem import first_missing_batch
from pellucid.transport.stable import is_stable, publish_folder, stable_steps


def batch(step=3) -> Batch:
    samples = [
        TrainingSample.from_turn(
            [5, 6],
            [9, 8, 7],
            [-0.1, -0.7, -1e-8],
            env_name="a",
            advantage=0.5,
            role_spans=[["user", 0, 2]],
            policy_versions=[1, 1, 2],
        ),
        TrainingSample.from_turn([5], [3], [-0.25], env_name="ü", teacher_logprobs=[-1.0, -2.0]),
    ]
    return Batch("run", step, TokenTable.from_samples(samples))


def assert_same(left: Batch, right: Batch) -> None:
    assert (left.run_id, left.step) == (right.run_id, right.step)
    assert left.table.lengths.tolist() == right.table.lengths.tolist()
    assert left.table.columns.keys() == right.table.columns.keys()
    for name, array in left.table.columns.items():
        assert right.table.columns[name].dtype == array.dtype
        if COLUMNS[name].dtype is object:
            assert [list(v) if isinstance(v, tuple) else v for v in array.tolist()] == right.table.columns[
                name
            ].tolist()
        else:
            np.testing.assert_array_equal(array, right.table.columns[name])


def test_decoding_gives_back_the_batch() -> None:
    assert_same(batch(), decode_batch(encode_batch(batch()), sender="test"))


def test_raw_columns_are_views_of_the_payload() -> None:
    payload = np.frombuffer(encode_batch(batch()), np.uint8)
    table = decode_batch(payload.data, sender="test").table
    assert np.shares_memory(table["token_ids"], payload)
    assert np.shares_memory(table["inference_logprobs"], payload)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda payload: payload[:10], "10 bytes; the header alone has 18"),
        (lambda payload: b"XXXX" + payload[4:], "starts with b'XXXX'"),
        (lambda payload: payload[:4] + b"\x63\x00" + payload[6:], "format version 99; this pellucid reads 1"),
        (lambda payload: payload[:-1], "the header says"),
        (lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]), "checksum"),
    ],
)
def test_damaged_payloads_are_refused_with_sender_and_reason(damage, message) -> None:
    with pytest.raises(PayloadError, match=f"payload from somebody: .*{message}"):
        decode_batch(damage(encode_batch(batch())), sender="somebody")


@settings(max_examples=300)
@given(st.data())
def test_no_single_changed_byte_goes_unnoticed(data) -> None:
    payload = bytearray(encode_batch(batch()))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PayloadError):
        decode_batch(bytes(payload), sender="test")


@pytest.fixture(params=["filesystem", "memory"])
def channel(request, tmp_path):
    if request.param == "memory":
        both = MemoryChannel()
        return both, both
    return FilesystemSender(tmp_path), FilesystemReceiver(tmp_path)


def test_batches_arrive_in_order(channel) -> None:
    sender, receiver = channel
    for step in range(3):
        sender.send(step, encode_batch(batch(step)))
    for step in range(3):
        assert_same(batch(step), receiver.receive(step))
        receiver.release_before(step)


def test_a_batch_can_be_received_again_until_it_is_released(tmp_path) -> None:
    for step in range(3):
        FilesystemSender(tmp_path).send(step, encode_batch(batch(step)))
    receiver = FilesystemReceiver(tmp_path)
    for _ in range(2):
        assert_same(batch(1), receiver.receive(1))
    receiver.release_before(2)
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step_2"]
    assert_same(batch(2), receiver.receive(2))


def test_the_first_batch_that_cannot_be_received_again(tmp_path, caplog) -> None:
    for step in (3, 4, 5, 7):
        FilesystemSender(tmp_path).send(step, encode_batch(batch(step)))
    assert first_missing_batch(tmp_path, 3, 5) == 5
    assert first_missing_batch(tmp_path, 3, 8) == 6
    damaged = tmp_path / "batches" / "step_4" / "batch.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert first_missing_batch(tmp_path, 3, 8) == 4
    assert "the batch of step 4 cannot be trained again" in caplog.text


def test_a_folder_appears_whole_or_not_at_all(tmp_path) -> None:
    def fail(folder) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_folder(tmp_path / "step_1", fail)
    assert list(tmp_path.iterdir()) == []
    publish_folder(tmp_path / "step_1", lambda folder: None)
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_x").mkdir()
    assert is_stable(tmp_path / "step_1")
    assert stable_steps(tmp_path) == [1]
