import json

import pytest

from pellucid.errors import DataError
from pellucid.model.tiny import character_tokenizer
from pellucid.trainer.sft_data import read_dataset, shuffled_forever


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def dataset(tmp_path, tokenizer, *records):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records)
    )
    return read_dataset(path, tokenizer)


def trained_text(sample, tokenizer) -> str:
    ids, mask = sample.arrays["token_ids"].array(), sample.arrays["loss_mask"].array()
    return tokenizer.decode(ids[mask])


def test_the_loss_covers_assistant_turns_and_their_end(tmp_path, tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"},
        {"role": "assistant", "content": "dd"},
    ]
    (sample,) = dataset(tmp_path, tokenizer, {"messages": messages})
    assert trained_text(sample, tokenizer) == "b<|im_end|>dd<|im_end|>"


def test_prompt_and_completion(tmp_path, tokenizer) -> None:
    (sample,) = dataset(tmp_path, tokenizer, {"prompt": "ab", "completion": "cd"})
    assert tokenizer.decode(sample.arrays["token_ids"].array()) == "abcd<|im_end|>"
    assert trained_text(sample, tokenizer) == "cd<|im_end|>"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{oops", r"data.jsonl:1: not JSON"),
        ("[1]", r"data.jsonl:1: expected an object, got list"),
        ({"text": "x"}, r"expected `messages`, or `prompt` and `completion`; got \['text'\]"),
        ({"prompt": "", "completion": "x"}, "marks its first token trainable"),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, record, message) -> None:
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, tokenizer, record)


def test_missing_and_empty_files(tmp_path, tokenizer) -> None:
    with pytest.raises(DataError, match="data.path = .* cannot be read: No such file"):
        read_dataset(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(DataError, match="holds no examples"):
        dataset(tmp_path, tokenizer)


def test_every_epoch_has_every_example_once_in_its_own_order() -> None:
    stream = shuffled_forever(list(range(10)), seed=1)  # type: ignore[arg-type]
    first, second = ([next(stream) for _ in range(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
