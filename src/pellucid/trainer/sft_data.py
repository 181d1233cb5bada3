"""A JSONL data set as training samples: the loss covers what the assistant says, end of turn included."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pellucid.data import TrainingMode, TrainingSample
from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.errors import DataError

ENV_NAME = "sft"


def read_dataset(path: Path, tokenizer: Any) -> list[TrainingSample]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"data.path = {str(path)!r} cannot be read: {error.strerror}") from error
    samples = [
        _sample(line, tokenizer, where=f"{path}:{number}", example_id=str(number))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not samples:
        raise DataError(f"data.path = {str(path)!r} holds no examples")
    return samples


def shuffled_forever(samples: Sequence[TrainingSample], seed: int) -> Iterator[TrainingSample]:
    """Epoch after epoch, each in its own order."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(samples, len(samples))


def _sample(line: bytes, tokenizer: Any, *, where: str, example_id: str) -> TrainingSample:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    token_ids, loss_mask = _tokens(record, tokenizer, where)
    try:
        return TrainingSample.build(
            token_ids=token_ids,
            loss_mask=loss_mask,
            sampled=np.zeros(len(token_ids), np.bool_),
            inference_logprobs=[],
            policy_versions=[],
            env_name=ENV_NAME,
            example_id=example_id,
            sample_id=example_id,
            training_mode=TrainingMode.SFT.value,
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _tokens(record: Mapping[str, Any], tokenizer: Any, where: str) -> tuple[list[int], list[bool]]:
    if "messages" in record:
        return _chat_tokens(record["messages"], tokenizer, where)
    if "prompt" in record and "completion" in record:
        prompt = tokenizer.encode(record["prompt"])
        completion = tokenizer.encode(record["completion"], add_special_tokens=False)
        completion += end_of_turn_ids(tokenizer)
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)
    raise DataError(f"{where}: expected `messages`, or `prompt` and `completion`; got {sorted(record)}")


def _chat_tokens(
    messages: Sequence[Mapping[str, str]], tokenizer: Any, where: str
) -> tuple[list[int], list[bool]]:
    """Renders the chat turn by turn, so that the mask falls on the template's own boundaries."""
    token_ids: list[int] = _render(tokenizer, messages, generation=False)
    loss_mask = [False] * len(token_ids)
    ends = set(end_of_turn_ids(tokenizer))
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], generation=True)
        start = len(before)
        upto = _render(tokenizer, messages[: index + 1], generation=False)
        if token_ids[: len(upto)] != upto or upto[:start] != before:
            raise DataError(
                f"{where}: turn {index} does not begin where the chat template's generation prompt ends, so "
                "its tokens cannot be told apart; use a template that renders turn by turn"
            )
        closing = [position for position in range(start, len(upto)) if upto[position] in ends]
        stop = closing[-1] + 1 if closing else len(upto)
        loss_mask[start:stop] = [True] * (stop - start)
    return token_ids, loss_mask


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, generation: bool) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generation, tokenize=False)
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids
