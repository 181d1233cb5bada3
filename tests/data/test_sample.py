import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pellucid.data import PackedArray, TrainingSample
from pellucid.data.columns import Encoding
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
        ({"env_name": ""}, "empty env_name"),
        ({"token_ids": []}, "no tokens"),
        ({"loss_mask": [True, False, True]}, "marks its first token trainable"),
        ({"loss_mask": [False, True, True]}, "marks token 1 trainable, but it was not sampled"),
        (
            {"inference_logprobs": [-0.5, -0.1]},
            "inference_logprobs has 2 entries; expected 1, one per sampled token",
        ),
        ({"loss_mask": [False, True]}, "loss_mask has 2 entries; expected 3, one per token"),
        ({"inference_logprobs": [float("nan")]}, "logprob is not finite"),
        ({"training_mode": "ppo"}, "training_mode 'ppo'; known: rl, opd, sft"),
        ({"temperature": 0.0}, "temperature 0.0; training needs it above 0"),
        ({"tokens": [1]}, r"unknown columns \['tokens'\]"),
        ({"policy_versions": None}, "lacks policy_versions"),
        ({"token_ids": [1, 2, -3]}, "token_ids"),
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


def test_masks_are_bit_packed_and_versions_run_length() -> None:
    assert PackedArray.pack([True, True, False, True]) == PackedArray(b"\x0b", (4,), "bool")
    runs = PackedArray.pack(np.array([7, 7, 7, 8], np.int32), Encoding.RUNS)
    assert runs.dtype == "runs:int32"
    assert np.frombuffer(runs.data, np.int32).tolist() == [7, 8, 3, 1]


@given(hnp.arrays(st.sampled_from([np.uint32, np.int32, np.float32, np.bool_]), st.integers(0, 40)))
def test_packing_is_lossless(array) -> None:
    for encoding in (Encoding.RAW, Encoding.RUNS):
        if encoding is Encoding.RUNS and array.dtype != np.int32:
            continue
        unpacked = PackedArray.pack(array, encoding).array()
        assert unpacked.dtype == array.dtype
        np.testing.assert_array_equal(unpacked, array)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (PackedArray(b"\0" * 7, (2,), "uint32"), "has 7 bytes; needs 8"),
        (PackedArray(b"\0", (9,), "bool"), "has 1 bytes; needs 2"),
        (PackedArray(b"", (0,), "object"), "dtype 'object'"),
        (PackedArray(b"\0" * 9, (1,), "runs:int32"), "not a whole number of runs"),
        (PackedArray(b"\1\0\0\0\5\0\0\0", (4,), "runs:int32"), "holds 5 values"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(packed, message) -> None:
    with pytest.raises(DataError, match=message):
        packed.array()
