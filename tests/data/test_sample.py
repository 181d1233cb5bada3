import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks.transport import size_in_process
from benchmarks.workload import long_sample
from pellucid.data import COLUMNS, Axis, PackedArray, TrainingSample
from pellucid.data.schema import Encoding
from pellucid.errors import DataError

VALID = {
    "token_ids": [1, 2, 3],
    "loss_mask": [False, False, True],
    "sampled": [False, False, True],
    "inference_logprobs": [-0.5],
    "policy_versions": [4],
    "env_name": "a",
}


def test_lists_and_arrays_give_the_same_sample() -> None:
    as_arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in VALID.items()}
    assert TrainingSample.build(**VALID) == TrainingSample.build(**as_arrays)


def test_counts_need_no_inflation() -> None:
    sample = TrainingSample.from_turn(
        [1, 2], [3, 4, 5], [-1.0] * 3, completion_mask=[True, False, True], env_name="a"
    )
    assert (sample.length, sample.num_sampled, sample.num_trainable) == (5, 3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_name": ""}, "env_name is empty"),
        ({"env_name": 3}, "env_name is 3: Expected `str`"),
        ({"token_ids": []}, "no tokens"),
        ({"loss_mask": [True, False, True]}, "loss_mask marks the first token trainable"),
        ({"loss_mask": [False, True, True]}, "marks token 1 trainable, but it was not sampled"),
        (
            {"inference_logprobs": [-0.5, -0.1]},
            "inference_logprobs has 2 entries; expected 1, one per sampled token",
        ),
        ({"loss_mask": [False, True]}, "loss_mask has 2 entries; expected 3, one per token"),
        (
            {"inference_logprobs": [float("nan")]},
            "inference_logprobs of token 2 is nan; .* logprob is not finite",
        ),
        ({"training_mode": "ppo"}, "training_mode is 'ppo'; known: rl, opd, sft"),
        ({"temperature": 0.0}, "temperature is 0; training needs numbers above 0"),
        ({"temperature": float("nan")}, "temperature is nan; training needs numbers above 0"),
        ({"temperatures": [-1.0]}, "temperatures is -1; training needs numbers above 0"),
        ({"advantage": float("inf")}, "advantage is inf; a number is needed"),
        ({"advantages": [float("nan")]}, "advantages of token 2 is nan"),
        ({"reward": "high"}, "reward is 'high': Expected `float`"),
        ({"role_spans": [["user", 0]]}, "role_spans .* length 3"),
        ({"tokens": [1]}, r"unknown columns \['tokens'\]"),
        ({"policy_versions": None}, "lacks policy_versions"),
        ({"token_ids": [1, 2, -3]}, "token_ids: -3 … 2 does not fit uint32"),
        ({"token_ids": np.array([1, 2, -3])}, "token_ids: -3 … 2 does not fit uint32"),
        ({"token_ids": [1, 2, 2**32]}, "token_ids: 1 … 4294967296 does not fit uint32"),
        ({"token_ids": [1.0, 2.5, 3.0]}, "token_ids: holds float64; expected uint32"),
        ({"loss_mask": [0, 0, 2]}, "loss_mask: holds int64; expected bool"),
        ({"routed_experts": [1, 2, 3]}, r"routed_experts has shape \(3,\); expected 3 dimensions"),
    ],
)
def test_bad_samples_are_refused_with_the_reason(changes, message) -> None:
    with pytest.raises(DataError, match=message):
        TrainingSample.build(**{**VALID, **changes})


def test_sft_samples_may_train_on_what_nobody_sampled() -> None:
    sample = TrainingSample.build(
        token_ids=[1, 2],
        loss_mask=[False, True],
        sampled=[False, False],
        inference_logprobs=[],
        policy_versions=[],
        env_name="sft",
        training_mode="sft",
    )
    assert (sample.num_sampled, sample.num_trainable) == (0, 1)


def test_a_sample_is_small_and_stays_packed() -> None:
    """15,000 + 15,000 tokens: ids and logprobs are 180,000 bytes, and everything else is next to nothing."""
    sample = long_sample()
    assert {name: len(array.data) for name, array in sample.arrays.items()} == {
        "token_ids": 120_000,
        "loss_mask": 8,
        "sampled": 8,
        "inference_logprobs": 60_000,
        "policy_versions": 8,
    }
    assert 180_000 < size_in_process(sample) <= 185_000


def test_a_sample_with_every_column() -> None:
    experts = np.arange(18).reshape(3, 3, 2)
    size = {Axis.TOKENS: 3, Axis.SAMPLED: 1, Axis.SEQUENCES: 1}
    filled = {
        name: column.filled(size[column.stored]) for name, column in COLUMNS.items() if column.per_token
    }
    given = dict(
        temperatures=[0.7],
        advantages=[0.25],
        teacher_logprobs=[-1.0, -2.0, -3.0],
        routed_experts=experts,
        expert_weights=experts / np.float32(32),
        mm_token_type_ids=[0, 1, 1],
        mm_tensors=b"opaque",
        temperature=0.9,
        advantage=1.5,
        reward=0.5,
        training_mode="opd",
        example_id="e",
        group_id="g",
        rollout_id="r",
        sample_id="r-0",
        run_id="run",
        stop_reason="stop",
        role_spans=[("user", 0, 2), ("assistant", 2, 3)],
    )
    sample = TrainingSample.build(**(filled | VALID | given))
    assert {*sample.arrays, *sample.values} == set(COLUMNS)
    assert sample.arrays["routed_experts"].dtype == "uint8"
    np.testing.assert_array_equal(sample.arrays["routed_experts"].array(), experts)


@pytest.mark.parametrize("values", [np.zeros(2), np.zeros(2, np.int8), np.zeros(2, ">i4"), [2 + 1j], ["a"]])
def test_what_could_not_be_read_back_is_not_packed(values) -> None:
    with pytest.raises(
        DataError, match=r"an array of \S+ cannot be packed; convert it to one of bool, uint8"
    ):
        PackedArray.pack(values)


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (np.zeros((2, 2), np.bool_), Encoding.RAW),
        (np.zeros((2, 2), np.int32), Encoding.RUNS),
        (np.int32(7), Encoding.RAW),
    ],
)
def test_shapes_that_would_be_lost_are_not_packed(values, encoding) -> None:
    with pytest.raises(DataError, match=r"an array of shape \(.*\) cannot be packed"):
        PackedArray.pack(values, encoding)


def test_experts_beyond_255_take_two_bytes() -> None:
    sample = TrainingSample.build(**VALID, routed_experts=np.full((3, 2, 1), 300))
    assert sample.arrays["routed_experts"].dtype == "int16"
    assert sample.arrays["routed_experts"].array().tolist() == [[[300], [300]]] * 3


def test_masks_are_spans_or_bits_and_versions_run_length() -> None:
    long = PackedArray.pack(np.arange(1000) >= 600)
    assert long.dtype == "spans"
    assert np.frombuffer(long.data, np.uint32).tolist() == [600, 400]
    assert PackedArray.pack([True, True, False, True]) == PackedArray(b"\x0b", (4,), "bool")
    runs = PackedArray.pack(np.array([7, 7, 7, 8], np.int32), Encoding.RUNS)
    assert runs.dtype == "runs:int32"
    assert np.frombuffer(runs.data, np.int32).tolist() == [7, 3, 8, 1]
    assert PackedArray.pack(np.array([7, 8], np.int32), Encoding.RUNS).dtype == "int32"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=12))
def test_counting_trues_needs_no_inflation(runs) -> None:
    mask = np.repeat([value for value, _ in runs], [count for _, count in runs]).astype(np.bool_)
    packed = PackedArray.pack(mask)
    assert packed.num_true() == mask.sum()
    np.testing.assert_array_equal(packed.array(), mask)


@given(hnp.arrays(st.sampled_from([np.uint32, np.int32, np.uint8, np.float32, np.bool_]), st.integers(0, 40)))
def test_packing_is_lossless(array) -> None:
    for encoding in (Encoding.RAW, Encoding.RUNS):
        unpacked = PackedArray.pack(array, encoding).array()
        assert unpacked.dtype == array.dtype
        np.testing.assert_array_equal(unpacked, array)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (PackedArray(b"\0" * 7, (2,), "uint32"), "has 7 bytes; needs 8"),
        (PackedArray(b"\0", (9,), "bool"), "has 1 bytes; needs 2"),
        (PackedArray(b"", (0,), "object"), "dtype 'object'"),
        (PackedArray(b"\0" * 9, (1,), "runs:int32"), "has 9 bytes; needs a multiple of 8"),
        (PackedArray(b"\1\0\0\0\5\0\0\0", (4,), "runs:int32"), "holds 5 values"),
        (PackedArray(b"\1\0\0\0\5\0\0\0", (5,), "spans"), "a span of 5 at 1"),
        (PackedArray(b"\1\0\0\0\0\0\0\0", (5,), "spans"), "a span of 0 at 1"),
        (PackedArray(b"\0\0\0\0\2\0\0\0\2\0\0\0\1\0\0\0", (5,), "spans"), "a span of 1 at 2"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(packed, message) -> None:
    with pytest.raises(DataError, match=message):
        packed.array()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=8), st.integers(0, 30))
def test_spans_pack_like_the_mask_they_paint(gaps_and_lengths: list[tuple[int, int]], rest: int) -> None:
    spans, position = [], 0
    for gap, length in gaps_and_lengths:  # a gap of 0: two spans touch
        spans.append((position + gap, length))
        position += gap + length
    mask = np.zeros(position + rest, np.bool_)
    for start, length in spans:
        mask[start : start + length] = True
    assert PackedArray.of_spans(spans, len(mask)) == PackedArray.pack(mask)


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 5)), max_size=8))
def test_runs_pack_like_the_values_they_repeat(runs: list[tuple[int, int]]) -> None:
    values = np.repeat(np.array([v for v, _ in runs], np.int32), [n for _, n in runs])
    assert PackedArray.of_runs(runs, np.int32) == PackedArray.pack(values, Encoding.RUNS)


def test_samples_that_are_built_together_equal_those_built_alone() -> None:
    others = [VALID, {**VALID, "env_name": "b", "advantage": 0.5}, {**VALID, "token_ids": [7, 8, 9]}]
    assert TrainingSample.build_all(others) == [TrainingSample.build(**columns) for columns in others]
    assert TrainingSample.build_all([]) == []
    with pytest.raises(DataError, match="logprob is not finite"):
        TrainingSample.build_all([VALID, {**VALID, "inference_logprobs": [float("nan")]}])
