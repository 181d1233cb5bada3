"""The older form of a sample stays readable, to the byte."""

import msgspec
import numpy as np
import pytest

from pellucid.data import TrainingSample, read_list_payload
from pellucid.errors import DataError


def packed_hex(case, name) -> str:
    return case["outputs"]["packed"].get(f"packed_{name}", {}).get("data_hex", "")


@pytest.mark.golden("compact")
@pytest.mark.parametrize("form", ["legacy", "compact"])
def test_golden_payloads(case, form) -> None:
    payload = case["outputs"][f"wire_{form}_hex"]
    if payload is None:
        assert case["outputs"]["wire_legacy_bytes"] == len(payload_of_30k())
        return
    sample = read_list_payload(bytes.fromhex(payload))
    inputs = case["inputs"]
    num_prompt = len(inputs["prompt_ids"])
    arrays = {name: array.array() for name, array in sample.arrays.items()}
    assert arrays["token_ids"].tobytes().hex() == packed_hex(case, "prompt_ids") + packed_hex(
        case, "completion_ids"
    )
    assert arrays["inference_logprobs"].tobytes().hex() == packed_hex(case, "completion_logprobs")
    assert arrays["loss_mask"].tolist() == inputs["prompt_mask"] + inputs["completion_mask"]
    assert arrays["sampled"].tolist() == [index >= num_prompt for index in range(sample.length)]
    for name, old in (("teacher_logprobs", "teacher_logprobs"), ("mm_token_type_ids", "mm_token_type_ids")):
        expected = packed_hex(case, old)
        assert (arrays[name].tobytes().hex() if name in arrays else "") == expected
    assert sample.values == {
        name: value
        for name, value in {
            "env_name": inputs["env_name"],
            "advantage": inputs.get("advantage"),
            "reward": inputs.get("reward"),
            "temperature": inputs["completion_temperature"],
            "training_mode": inputs["training_mode"],
        }.items()
        if value is not None
    }


IDS_30K = (list(range(100_000, 115_000)), list(range(120_000, 135_000)))
LOGPROBS_30K = [-0.1 - i * 1e-6 for i in range(15_000)]


def payload_of_30k() -> bytes:
    prompt, completion = IDS_30K
    masks = [False] * 15_000, [True] * 15_000
    values = ["synthetic-env", None, 1.0, 1.0, 1.0, None, None, None, "rl", *[None] * 8]
    return msgspec.msgpack.encode([prompt, masks[0], completion, masks[1], LOGPROBS_30K, [], *values])


def test_the_30k_sample_is_what_the_constructor_makes_of_the_same_lists() -> None:
    assert read_list_payload(payload_of_30k()) == TrainingSample.from_turn(
        *IDS_30K,
        LOGPROBS_30K,
        env_name="synthetic-env",
        advantage=1.0,
        reward=1.0,
        temperature=1.0,
        training_mode="rl",
    )


def test_per_token_temperatures_and_experts_are_read() -> None:
    experts = [np.arange(12, dtype=np.uint8).tobytes(), [3, 2, 2], "uint8"]
    values = ["a", None, None, None, None, {"pixel_values": b"xyz"}, experts, None, "rl"]
    payload = msgspec.msgpack.encode([[1, 2], [False, False], [3], [True], [-0.5], [0.6], *values])
    sample = read_list_payload(payload)
    assert sample.arrays["temperatures"].array().tolist() == [np.float32(0.6)]
    assert sample.arrays["routed_experts"].array()[2].tolist() == [[8, 9], [10, 11]]
    assert msgspec.msgpack.decode(sample.values["mm_tensors"]) == {"pixel_values": b"xyz"}


@pytest.mark.parametrize("payload", [b"", b"\x90", b"\xdc\x00\x17\x94", msgspec.msgpack.encode([["x"]] * 9)])
def test_anything_else_is_refused(payload) -> None:
    with pytest.raises(DataError, match="not a sample of the older list form"):
        read_list_payload(payload)
