"""One trainable token sequence of a rollout, byte-backed from the moment it is built.

TrainingSample.from_turn([5, 6], [9, 8], [-0.1, -0.7], env_name="reverse-text", advantage=0.5)

token_ids            5     6     9     8
sampled              .     .     x     x
loss_mask            .     .     x     x      the first token of a sequence is never trainable
inference_logprobs               -0.1  -0.7   stored for sampled tokens only
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pellucid.data.columns import COLUMNS, Stored
from pellucid.data.packed import PackedArray
from pellucid.errors import DataError


class TrainingMode(StrEnum):
    RL = "rl"
    OPD = "opd"
    SFT = "sft"


@dataclass(frozen=True, slots=True)
class TrainingSample:
    length: int
    num_sampled: int
    num_trainable: int
    arrays: Mapping[str, PackedArray]
    values: Mapping[str, Any]

    @classmethod
    def build(cls, **columns: Any) -> "TrainingSample":
        """From whole sequences, as lists or arrays; columns and their storage are those of `COLUMNS`."""
        unknown = sorted(columns.keys() - COLUMNS.keys())
        if unknown:
            raise DataError(f"sample has unknown columns {unknown}; known: {sorted(COLUMNS)}")
        present = {name: value for name, value in columns.items() if value is not None}
        missing = [name for name, column in COLUMNS.items() if column.required and name not in present]
        if missing:
            raise DataError(f"sample lacks {', '.join(missing)}")
        arrays = {
            name: _as_array(name, value)
            for name, value in present.items()
            if COLUMNS[name].stored is not Stored.SEQUENCES
        }
        values = {name: value for name, value in present.items() if COLUMNS[name].stored is Stored.SEQUENCES}
        _check_lengths(arrays)
        _check_rules(arrays, values)
        return cls(
            length=len(arrays["token_ids"]),
            num_sampled=int(arrays["sampled"].sum()),
            num_trainable=int(arrays["loss_mask"].sum()),
            arrays={name: PackedArray.pack(array, COLUMNS[name].encoding) for name, array in arrays.items()},
            values=values,
        )

    @classmethod
    def from_turn(
        cls,
        prompt_ids: Sequence[int] | NDArray[Any],
        completion_ids: Sequence[int] | NDArray[Any],
        completion_logprobs: ArrayLike,
        *,
        policy_versions: ArrayLike = 0,
        completion_mask: ArrayLike = True,
        **columns: Any,
    ) -> "TrainingSample":
        """From one prompt and its completion; every completion token was sampled."""
        num_prompt, num_completion = len(prompt_ids), len(completion_ids)
        sampled = np.arange(num_prompt + num_completion) >= num_prompt
        loss_mask = sampled.copy()
        loss_mask[num_prompt:] = completion_mask
        return cls.build(
            token_ids=np.concatenate(
                [np.asarray(prompt_ids, np.uint32), np.asarray(completion_ids, np.uint32)]
            ),
            loss_mask=loss_mask,
            sampled=sampled,
            inference_logprobs=completion_logprobs,
            policy_versions=np.broadcast_to(np.asarray(policy_versions, np.int32), (num_completion,)),
            **columns,
        )


def _as_array(name: str, value: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(value, dtype=COLUMNS[name].dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"sample column {name}: {error}") from error


def _check_lengths(arrays: Mapping[str, NDArray[Any]]) -> None:
    for name in ("token_ids", "sampled"):
        if arrays[name].ndim != 1:
            raise DataError(f"sample column {name} has shape {arrays[name].shape}; expected one dimension")
    num_tokens = len(arrays["token_ids"])
    if num_tokens == 0:
        raise DataError("sample has no tokens")
    needed = {Stored.TOKENS: num_tokens, Stored.SAMPLED: int(arrays["sampled"].sum())}
    for name, array in arrays.items():
        stored = COLUMNS[name].stored
        if len(array) != needed[stored]:
            raise DataError(
                f"sample column {name} has {len(array)} entries; expected {needed[stored]}, one per "
                f"{'token' if stored is Stored.TOKENS else 'sampled token'}"
            )


def _check_rules(arrays: Mapping[str, NDArray[Any]], values: Mapping[str, Any]) -> None:
    if not values["env_name"]:
        raise DataError("sample has an empty env_name")
    mode = values.get("training_mode", TrainingMode.RL)
    if mode not in set(TrainingMode):
        raise DataError(f"sample has training_mode {mode!r}; known: {', '.join(TrainingMode)}")
    loss_mask, sampled = arrays["loss_mask"], arrays["sampled"]
    if loss_mask[0]:
        raise DataError(
            "sample marks its first token trainable; nothing predicts that token: unset loss_mask[0]"
        )
    if mode != TrainingMode.SFT and (stray := np.flatnonzero(loss_mask & ~sampled)).size:
        raise DataError(
            f"sample marks token {stray[0]} trainable, but it was not sampled; {mode} needs its logprob"
        )
    trained_logprobs = arrays["inference_logprobs"][loss_mask[sampled]]
    if not np.isfinite(trained_logprobs).all():
        raise DataError("sample has a trainable token whose inference logprob is not finite")
    temperature = values.get("temperature", 1.0)
    if not temperature > 0:
        raise DataError(f"sample has temperature {temperature}; training needs it above 0")
