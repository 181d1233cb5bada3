"""Reads samples of the older form: one msgpack array of lists, or of packed arrays, per sample.

No transport reads it: batches use the wire format alone. It serves tests, and the conversion of recorded
samples (`TokenTable.from_samples`, then `transport.encode_batch`).

    [prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs, completion_temperatures,
     env_name, teacher_logprobs, advantage, reward, completion_temperature, multimodal tensors,
     routed_experts, mm_token_type_ids, training_mode, then eight packed arrays that replace the lists]

Logprobs are doubles there and float32 here. The completion counts as sampled; multimodal tensors stay opaque.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.data.packed import PackedArray
from pellucid.data.sample import TrainingSample
from pellucid.errors import DataError


class _ListSample(msgspec.Struct, array_like=True):
    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    completion_temperatures: list[float]
    env_name: str
    teacher_logprobs: list[float] | None = None
    advantage: float | None = None
    reward: float | None = None
    completion_temperature: float | None = None
    mm_tensors: msgspec.Raw = msgspec.Raw(b"\xc0")
    routed_experts: PackedArray | None = None
    mm_token_type_ids: list[int] | None = None
    training_mode: str = "rl"
    packed_prompt_ids: PackedArray | None = None
    packed_prompt_mask: PackedArray | None = None
    packed_completion_ids: PackedArray | None = None
    packed_completion_mask: PackedArray | None = None
    packed_completion_logprobs: PackedArray | None = None
    packed_completion_temperatures: PackedArray | None = None
    packed_teacher_logprobs: PackedArray | None = None
    packed_mm_token_type_ids: PackedArray | None = None


def read_list_payload(payload: bytes) -> TrainingSample:
    """Decodes one sample of the older form."""
    try:
        old = msgspec.msgpack.decode(payload, type=_ListSample)
    except msgspec.DecodeError as error:
        raise DataError(f"not a sample of the older list form: {error}") from error
    prompt_ids = _values(old.packed_prompt_ids, old.prompt_ids)
    completion_ids = _values(old.packed_completion_ids, old.completion_ids)
    masks = (
        _values(old.packed_prompt_mask, old.prompt_mask),
        _values(old.packed_completion_mask, old.completion_mask),
    )
    temperatures = _values(old.packed_completion_temperatures, old.completion_temperatures)
    return TrainingSample.build(
        token_ids=[*prompt_ids, *completion_ids],
        loss_mask=np.concatenate([np.asarray(mask, np.bool_) for mask in masks]),
        sampled=np.arange(len(prompt_ids) + len(completion_ids)) >= len(prompt_ids),
        inference_logprobs=_values(old.packed_completion_logprobs, old.completion_logprobs),
        policy_versions=np.zeros(len(completion_ids), np.int32),
        temperatures=temperatures if len(temperatures) else None,
        temperature=old.completion_temperature,
        teacher_logprobs=_values(old.packed_teacher_logprobs, old.teacher_logprobs),
        routed_experts=_values(old.routed_experts, None),
        mm_token_types=_values(old.packed_mm_token_type_ids, old.mm_token_type_ids),
        mm_tensors=None if bytes(old.mm_tensors) == b"\xc0" else bytes(old.mm_tensors),
        env_name=old.env_name,
        advantage=old.advantage,
        reward=old.reward,
        training_mode=old.training_mode,
    )


def _values(packed: PackedArray | None, plain: Sequence[Any] | None) -> Any:
    """Returns the packed form if there is one, else the plain one."""
    found: Sequence[Any] | NDArray[Any] | None = plain if packed is None else packed.array()
    return found
