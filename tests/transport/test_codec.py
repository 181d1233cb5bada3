"""Bytes <-> batch: lossless, without copying, prompts once, and nothing hostile gets through."""

import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz_codec import check_slowly, differing_column, fuzz, make_batches, sealed, with_header
from benchmarks.workload import long_sample
from pellucid.data import COLUMNS, TokenTable, TrainingSample
from pellucid.data.rows import BitRows, SpanRows
from pellucid.errors import PayloadError
from pellucid.transport import Batch, Limits, decode_batch, encode_batch
from pellucid.transport.batch import PREAMBLE, assemble
from pellucid.transport.sections import EncodedSection, Form, SectionHead, encode_table, squeeze


def batch(step=3) -> Batch:
    samples = [
        TrainingSample.from_turn(
            [5, 6],
            [9, 8, 7],
            [-0.1, -0.7, -1e-8],
            env_name="a",
            advantage=0.5,
            role_spans=[("user", 0, 2)],
            policy_versions=[1, 1, 2],
        ),
        TrainingSample.from_turn([5], [3], [-0.25], env_name="üü", teacher_logprobs=[-1.0, -2.0]),
    ]
    return Batch("run", step, TokenTable.from_samples(samples))


def offset_of(payload: bytes, name: str) -> int:
    """Where the bytes of a section start, found without our decoder."""
    end = PREAMBLE.size + int.from_bytes(payload[24:32], "little")
    start = end + -end % 8
    for section in msgspec.msgpack.decode(payload[PREAMBLE.size : end])["sections"]:
        if section["name"] == name:
            return start
        size = sum(section["planes"]) if "planes" in section else section["num_bytes"]
        start += size + -size % 8
    raise AssertionError(f"no section {name}")


def said(payload: bytes, section: str | None, /, **values: object) -> bytes:
    """The payload with other values in its header, or in what the header says of a section."""

    def change(header: dict) -> None:
        found = [each for each in header["sections"] if each["name"] == section]
        place = header if section is None else found[0]
        place.update(values)

    return with_header(payload, change)


def patched(payload: bytes, position: int, code: str, value: float) -> bytes:
    changed = bytearray(payload)
    struct.pack_into(code, changed, position, value)
    return sealed(bytes(changed))


def assert_same(left: Batch, right: Batch) -> None:
    assert (left.run_id, left.step) == (right.run_id, right.step)
    assert list(left.table.columns) == list(right.table.columns)
    assert differing_column(left.table, right.table) is None


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("index", range(6))
def test_decoding_gives_back_every_column_to_the_bit(index, compression) -> None:
    sent = make_batches(np.random.default_rng(index))[index]
    received = decode_batch(encode_batch(sent, compression=compression), sender="test")
    assert_same(sent, received)
    check_slowly(received)
    assert received.table.num_trainable == sent.table.num_trainable


legal = st.floats(-44, 0, width=32)


@st.composite
def batches(draw) -> Batch:
    ids = st.integers(0, 2**32 - 1)
    prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=70), min_size=1, max_size=2))
    samples = []
    for index in range(draw(st.integers(1, 5))):
        logprobs = draw(st.lists(legal, max_size=70))
        size = len(logprobs)
        columns = {"group_id": draw(st.sampled_from(["", "g"])), "rollout_id": f"r{index}"}
        if draw(st.booleans()):
            columns["advantages"] = draw(st.lists(legal, min_size=size, max_size=size))
        if draw(st.booleans()):
            columns["mm_tensors"] = draw(st.binary(max_size=20))
        samples.append(
            TrainingSample.from_turn(
                draw(st.sampled_from(prompts)),
                draw(st.lists(ids, min_size=size, max_size=size)),
                logprobs,
                completion_mask=draw(st.lists(st.booleans(), min_size=size, max_size=size)),
                policy_versions=draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size)),
                env_name=draw(st.sampled_from(["a", "b"])),
                **columns,
            )
        )
    return Batch(draw(st.text(max_size=9)), draw(st.integers(0, 2**60)), TokenTable.from_samples(samples))


@settings(deadline=None)
@given(batches(), st.sampled_from(["none", "zstd"]))
def test_any_batch_survives(sent, compression) -> None:
    assert_same(sent, decode_batch(encode_batch(sent, compression=compression), sender="test"))


def test_raw_columns_are_views_of_the_payload() -> None:
    payload = np.frombuffer(encode_batch(batch()), np.uint8)
    table = decode_batch(payload.data, sender="test").table
    for name in ("token_ids", "inference_logprobs"):
        assert np.shares_memory(table[name], payload), name


def test_decoding_takes_next_to_no_memory() -> None:
    sample = TrainingSample.from_turn([1], np.arange(300_000), -np.ones(300_000), env_name="a")
    payload = encode_batch(Batch("run", 0, TokenTable.from_samples([sample])))
    assert len(payload) > 2_400_000
    tracemalloc.start()
    try:
        decoded = decode_batch(payload, sender="test")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert decoded.table.num_trainable == 300_000


def member(prompt, completion, group="g", **columns) -> TrainingSample:
    return TrainingSample.from_turn(
        prompt, completion, -np.ones(len(completion)), env_name="a", group_id=group, **columns
    )


def test_a_groups_prompt_is_stored_once() -> None:
    prompt = np.arange(5000)
    members = [member(prompt, [index, index]) for index in range(8)]
    table = TokenTable.from_samples(members)
    payload = encode_batch(Batch("run", 0, table))
    assert len(payload) < 4 * 5000 + 3500
    received = decode_batch(payload, sender="test").table
    assert received["token_ids"].tolist() == table["token_ids"].tolist()
    assert received.select([5])["token_ids"].tolist() == [*range(5000), 5, 5]
    again = encode_batch(Batch("run", 0, received))
    assert again == payload


def test_only_equal_prompts_of_one_group_are_shared() -> None:
    members = [
        member([1, 2, 3], [9]),
        member([1, 2, 4], [9]),
        member([1, 2], [9]),
        member([1, 2, 3], [8], group="h"),
        member([1, 2, 3], [7]),
    ]
    payload = encode_batch(Batch("run", 0, TokenTable.from_samples(members)))
    shared = np.frombuffer(payload, "<u4", count=10, offset=offset_of(payload, ".shared"))
    assert shared.reshape(-1, 2).tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [0, 3]]
    received = decode_batch(payload, sender="test").table
    assert received["token_ids"].tolist() == [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 9, 1, 2, 3, 8, 1, 2, 3, 7]


def test_a_column_that_differs_within_the_group_is_stored_whole() -> None:
    """Teacher logprobs of a prompt may differ in their last digit; then they are kept as they are."""
    members = [member([1, 2], [9], teacher_logprobs=[last, -1.0, -1.0]) for last in (-0.5, -0.25)]
    received = decode_batch(
        encode_batch(Batch("run", 0, TokenTable.from_samples(members))), sender="test"
    ).table
    assert received["teacher_logprobs"].tolist() == [-0.5, -1.0, -1.0, -0.25, -1.0, -1.0]


def test_masks_travel_as_spans_or_as_bits() -> None:
    long = member(np.arange(200), np.arange(300))
    spotted = member([1], np.arange(300), completion_mask=np.arange(300) % 3 == 0)
    for samples, form in (([long], SpanRows), ([long, spotted], BitRows)):
        table = TokenTable.from_samples(samples)
        received = decode_batch(encode_batch(Batch("run", 0, table)), sender="test").table
        assert type(received.columns["loss_mask"]) is type(received.columns["sampled"]) is form
        assert received["loss_mask"].tolist() == table["loss_mask"].tolist()


def test_the_30k_sample_on_the_wire() -> None:
    assert len(encode_batch(Batch("run", 0, TokenTable.from_samples([long_sample()])))) <= 184_000


@pytest.mark.parametrize(
    ("damage", "position", "message"),
    [
        (lambda payload: b"", 0, "ends here; the preamble alone has 32 bytes"),
        (lambda payload: payload[:10], 10, "ends here; the preamble alone has 32 bytes"),
        (lambda payload: b"XXXX" + payload[4:], 0, "starts with b'XXXX'"),
        (
            lambda payload: payload[:4] + b"\x63" + payload[5:],
            4,
            "format version 99; this pellucid reads 3",
        ),
        (lambda payload: payload[:-8], 16, "says it has .* bytes, but .* arrived"),
        (lambda payload: payload + b"x", 16, "says it has .* bytes, but .* arrived"),
        (lambda payload: payload[:-9] + bytes([payload[-9] ^ 1]) + payload[-8:], 8, "checksum"),
    ],
)
def test_damage_is_refused_with_sender_position_and_reason(damage, position, message) -> None:
    with pytest.raises(PayloadError, match=f"payload from somebody, byte {position}: {message}") as caught:
        decode_batch(damage(encode_batch(batch())), sender="somebody")
    assert (caught.value.sender, caught.value.position) == ("somebody", position)


PAYLOAD = encode_batch(batch())
LONG = encode_batch(Batch("run", 0, TokenTable.from_samples([member(np.arange(100), np.arange(100))])))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (said(PAYLOAD, None, step=-1), r"byte 32: header: .*>= 0.* - at `\$.step`"),
        (said(PAYLOAD, None, step="3"), r"byte 32: header: Expected `int`, got `str` - at `\$.step`"),
        (said(PAYLOAD, None, num_tokens=1 << 40), "byte 32: 1099511627776 tokens; at most"),
        (said(PAYLOAD, None, num_sampled=5), "sampled: 4 tokens; the header says 5"),
        (said(PAYLOAD, None, num_trainable=5), "loss_mask: 4 tokens; the header says 5"),
        (said(PAYLOAD, None, num_sequences=0), "byte 32: 0 sequences"),
        (said(PAYLOAD, None, num_sequences=1 << 31), "byte 32: 2147483648 sequences; 1 to 1048576"),
        (said(PAYLOAD, None, num_sequences=1 << 19), ".lengths: 8 bytes; expected 2097152"),
        (said(PAYLOAD, None, sections=[]), "sections end at"),
        (said(PAYLOAD, None, sections=7), "header: Expected `array`, got `int`"),
        (said(PAYLOAD, None, more=1), "header: Object contains unknown field `more`"),
        (said(PAYLOAD, None, run_id="x" * 70_000), "byte 24: a header of 7.... bytes is too long"),
        (patched(PAYLOAD, 24, "<Q", 1 << 60), "byte 24: a header of .* reaches beyond the end"),
        (patched(PAYLOAD, 24, "<Q", 3), "byte 32: header: Input data was truncated"),
        (said(PAYLOAD, "token_ids", name="Aoken_ids"), "section 'Aoken_ids' is not known"),
        (said(PAYLOAD, "token_ids", name="env_name"), "env_name: form values does not go with it"),
        (
            with_header(PAYLOAD, lambda header: header["sections"].append(header["sections"][0])),
            ".lengths: is there twice",
        ),
        (
            with_header(PAYLOAD, lambda header: header["sections"][1].update(name=".shared")),
            "lacks the section token_ids",
        ),
        (said(PAYLOAD, "token_ids", form="x"), r"Invalid enum value 'x' - at `\$.sections\[1\].form`"),
        (said(PAYLOAD, "token_ids", form="runs"), "token_ids: form runs does not go with it"),
        (said(PAYLOAD, "token_ids", form="tails"), "token_ids: needs the section .shared"),
        (said(PAYLOAD, "token_ids", dtype="float32"), "dtype float32 does not go with it"),
        (said(PAYLOAD, "token_ids", dtype="object"), "Invalid enum value 'object'"),
        (said(PAYLOAD, "token_ids", dims=[2]), "dimensions .* do not go with it"),
        (said(PAYLOAD, "token_ids", num_bytes=1 << 60), "token_ids: 1152921504606846976 bytes reach beyond"),
        (said(PAYLOAD, "token_ids", planes=[28]), "token_ids: 1 planes; expected 4"),
        (said(PAYLOAD, "token_ids", planes=[7, 7, 7, 1 << 50]), "token_ids: .* bytes reach beyond the end"),
        (said(PAYLOAD, "token_ids", planes=[8, 8, 8, 4]), "not a zstd frame|a zstd frame says"),
        (patched(PAYLOAD, offset_of(PAYLOAD, ".lengths"), "<I", 0), ".lengths: sequence 0 has no tokens"),
        (patched(PAYLOAD, offset_of(PAYLOAD, ".lengths"), "<I", 9), ".lengths: 11 tokens; the header says 7"),
        (patched(PAYLOAD, offset_of(PAYLOAD, "loss_mask"), "<B", 255), "bits behind the end"),
        (patched(PAYLOAD, offset_of(PAYLOAD, "loss_mask"), "<B", 0b1101), "the first token trainable"),
        (patched(PAYLOAD, offset_of(PAYLOAD, "loss_mask"), "<B", 0b1110), "marks token 1 trainable"),
        (patched(PAYLOAD, offset_of(PAYLOAD, "loss_mask"), "<B", 0), "1 tokens; the header says 4"),
        (patched(PAYLOAD, offset_of(PAYLOAD, "inference_logprobs"), "<f", np.nan), "of token 2 is nan"),
        (
            patched(PAYLOAD, offset_of(PAYLOAD, "env_name"), "<I", 2),
            "code 2, but there are 2 distinct values",
        ),
        (patched(PAYLOAD, offset_of(PAYLOAD, "env_name") + 8, "<B", 0xDD), "more distinct values than"),
        (patched(PAYLOAD, offset_of(PAYLOAD, "env_name") + 8, "<B", 0xC1), "is not what it should be"),
        (
            patched(PAYLOAD, offset_of(PAYLOAD, "env_name") + 9, "<B", 0xA0),
            "is not what it should be|is empty",
        ),
        (patched(LONG, offset_of(LONG, "sampled"), "<I", 1 << 31), "bytes; expected"),
        (patched(LONG, offset_of(LONG, "sampled") + 4, "<I", 101), "a span of 100 at 101"),
        (patched(LONG, offset_of(LONG, "sampled") + 8, "<I", 0), "a span of 0 at 100"),
        (patched(LONG, offset_of(LONG, "policy_versions") + 8, "<I", 99), "hold 99 values; expected 100"),
    ],
)
def test_hostile_payloads_with_a_right_checksum_are_refused(payload, message) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_batch(payload, sender="somebody")


@pytest.mark.parametrize(
    "payload",
    [
        said(PAYLOAD, None, **{"key\n\x1b[2J": 1}),
        said(PAYLOAD, None, **{"key\n" * 9_000: 1}),
        said(PAYLOAD, "token_ids", name="\x1b\n" * 9_000),
        said(PAYLOAD, "token_ids", form="\U0001f600" * 9_000),
        said(PAYLOAD, "token_ids", dims=[1] * 9_000),
    ],
)
def test_a_reason_that_quotes_the_payload_is_one_short_printable_line(payload) -> None:
    with pytest.raises(PayloadError) as error:
        decode_batch(payload, sender="somebody")
    assert error.value.reason.isprintable() and len(error.value.reason) <= 800


SHARED = encode_batch(
    Batch("run", 0, TokenTable.from_samples([member([1, 2, 3], [9]), member([1, 2, 3], [8])]))
)


def test_shared_prompts_have_two_numbers() -> None:
    for dims in ([0], [1], [2, 2], [1 << 31]):
        with pytest.raises(PayloadError, match=".shared: dimensions .* do not go with it"):
            decode_batch(said(SHARED, ".shared", dims=dims), sender="somebody")
    with pytest.raises(PayloadError, match=".shared: 15 bytes; expected 16"):
        decode_batch(said(SHARED, ".shared", num_bytes=15), sender="somebody")


@pytest.mark.parametrize(("owner", "length"), [(1, 3), (0, 0), (0, 5), (2, 3), (0, 1 << 31)])
def test_prompts_that_nobody_has_are_refused(owner, length) -> None:
    position = offset_of(SHARED, ".shared") + 8
    payload = patched(patched(SHARED, position, "<I", owner), position + 4, "<I", length)
    with pytest.raises(PayloadError, match="sequence 1 says that its first|bytes; expected"):
        decode_batch(payload, sender="somebody")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_bytes=500), "byte 0: .* bytes; at most 500 are taken"),
        (Limits(max_tokens=6), "byte 32: 7 tokens; at most 6 are taken"),
        (Limits(max_sequences=1), "byte 32: 2 sequences; 1 to 1 are taken"),
        (Limits(vocab_size=9), "token_ids: holds 9; the vocabulary has 9 tokens"),
        (Limits(max_text_bytes=1), "env_name: a text of 2; at most 1 are taken"),
    ],
)
def test_limits(limits, message) -> None:
    assert decode_batch(PAYLOAD, sender="test", limits=Limits(vocab_size=10)).table.num_tokens == 7
    with pytest.raises(PayloadError, match=message):
        decode_batch(PAYLOAD, sender="test", limits=limits)


def zstd_payload() -> bytes:
    sample = member([1], np.zeros(100_000, np.uint32))
    return encode_batch(Batch("run", 0, TokenTable.from_samples([sample])), compression="zstd")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: said(p, "token_ids", num_bytes=1 << 32), id="section"),
        pytest.param(lambda p: patched(p, offset_of(p, "token_ids") + 6, "<H", 65535), id="frame"),
        pytest.param(lambda p: said(p, "token_ids", planes=[1 << 40] * 4), id="plane"),
    ],
)
def test_what_claims_to_inflate_to_more_is_refused_before_memory_is_taken(change) -> None:
    payload = change(zstd_payload())
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            decode_batch(payload, sender="somebody")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_zstd_makes_ids_and_exponents_smaller() -> None:
    generator = np.random.default_rng(0)
    ids, logprobs = generator.zipf(1.3, 20_000) % 50_000, -generator.exponential(0.4, 20_000)
    sample = TrainingSample.from_turn([1], ids, logprobs, env_name="a")
    sent = Batch("run", 0, TokenTable.from_samples([sample]))
    plain, small = encode_batch(sent), encode_batch(sent, compression="zstd")
    assert len(small) < 0.7 * len(plain)
    assert_same(sent, decode_batch(small, sender="test"))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([PAYLOAD, LONG, SHARED]))
def test_no_changed_byte_goes_unnoticed(data, payload) -> None:
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    if bytes(changed) != payload:
        with pytest.raises(PayloadError):
            decode_batch(bytes(changed), sender="test")


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([PAYLOAD, LONG, SHARED]),
    st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from("BHIQ"), st.integers(0, 2**64 - 1)), min_size=1, max_size=3
    ),
)
def test_whatever_is_written_anywhere_is_refused_or_obeys_the_rules(payload, writes) -> None:
    changed = bytearray(payload)
    for place, code, value in writes:
        size = struct.calcsize(code)
        position = int(place * (len(payload) - size))
        struct.pack_into("<" + code, changed, position, value % (1 << 8 * size))
    try:
        found = decode_batch(sealed(bytes(changed)), sender="test", limits=Limits(vocab_size=1000))
    except PayloadError:
        return
    check_slowly(found)


@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_noise_is_refused(noise) -> None:
    for payload in (noise, PAYLOAD[:32] + noise, sealed(PAYLOAD[:32] + noise)):
        with pytest.raises(PayloadError):
            decode_batch(payload, sender="test")


def text_payload(name: str, value: bytes, num_rows: int = 2) -> bytes:
    """A batch whose sequences all have this value, which is there once, as its sender packed it."""
    table = TokenTable.from_samples([TrainingSample.from_turn([1], [2], [-1.0], env_name="a")] * num_rows)
    chunks = [np.zeros(num_rows, "<u4"), b"\x91" + value]
    section = EncodedSection(SectionHead(name, Form.CODES, 4 * num_rows + len(chunks[1])), chunks)
    return assemble(Batch("run", 0, table), [squeeze(each) for each in [*encode_table(table), section]])


def test_many_role_spans_are_taken_and_too_many_are_counted_before_they_are_made() -> None:
    spans = [("tool", start, start + 1) for start in range(3000)]
    sample = TrainingSample.from_turn([1], np.arange(3000), -np.ones(3000), env_name="a", role_spans=spans)
    sent = Batch("run", 0, TokenTable.from_samples([sample]))
    assert_same(sent, decode_batch(encode_batch(sent), sender="test"))
    bomb = text_payload("role_spans", b"\xdd" + struct.pack(">I", 5 << 20) + b"\x93\xa0\x00\x00" * (5 << 20))
    assert len(bomb) < 30_000
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match="10485760 spans; at most 4194304 are taken"):
            decode_batch(bomb, sender="somebody")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_text_that_every_sequence_has_counts_for_each_of_them() -> None:
    text = b"\xda" + struct.pack(">H", 10_000) + b"x" * 10_000
    payload = text_payload("example_id", text, num_rows=200)
    assert decode_batch(payload, sender="test").table["example_id"][7] == "x" * 10_000
    with pytest.raises(PayloadError, match="2000000 bytes; at most 1000000 are taken .* as the text of all"):
        decode_batch(payload, sender="somebody", limits=Limits(max_bytes=1_000_000))


def test_the_samples_of_a_batch_are_its_runs() -> None:
    table = TokenTable.from_samples([member([1], [2], run_id="another")])
    decode_batch(encode_batch(Batch("another", 0, table)), sender="test")
    decode_batch(encode_batch(Batch("", 0, table)), sender="test")
    with pytest.raises(
        PayloadError, match="sequence 0: run_id is 'another', another run than the batch's, 'run'"
    ):
        decode_batch(encode_batch(Batch("run", 0, table)), sender="test")


def test_what_the_model_cannot_train_on_is_refused_before_it_is_delivered() -> None:
    rich = encode_batch(make_batches(np.random.default_rng(0))[2])
    decode_batch(rich, sender="test", limits=Limits(experts=(2, 2, 4)))
    for limits, message in (
        (Limits(text_only=True), "mm_tensors holds multimodal tensors, and the model computes text alone"),
        (Limits(experts=(2, 4, 4)), "routed_experts has 2 layers × 2 experts per token; the model has 2 × 4"),
        (Limits(experts=(2, 2, 3)), "routed_experts holds 3; the model has 3 experts"),
    ):
        with pytest.raises(PayloadError, match=message):
            decode_batch(rich, sender="test", limits=limits)
    with pytest.raises(PayloadError, match="sequence 0: routed_experts is missing"):
        decode_batch(PAYLOAD, sender="test", limits=Limits(experts=(2, 2, 4)))


def test_mutated_payloads() -> None:
    """What `python -m benchmarks.fuzz_codec` does, for two seconds."""
    outcomes = fuzz(3000, seed=1)
    assert outcomes["refused"] > 2000 and outcomes["taken"] > 100


def test_every_column_is_known_to_the_format() -> None:
    rich = make_batches(np.random.default_rng(0))[2].table
    left_out = {"temperature", "example_id", "sample_id", "run_id", "stop_reason", "training_mode", "reward"}
    assert set(COLUMNS) - set(rich.columns) == left_out
