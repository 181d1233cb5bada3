"""docs/fine-tune.md: its examples tokenise, its settings parse, and its error is the one that is raised."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from pellucid.config import SFTConfig
from pellucid.errors import DataError
from pellucid.model.tiny import character_tokenizer
from pellucid.trainer.sft import Row, read_samples
from pellucid.trainer.sft_tokens import ExampleTokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tune.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_examples() -> None:
    tokenizer = character_tokenizer()
    trained = []
    for block in blocks("json"):
        example = ExampleTokenizer(tokenizer).tokenize(json.loads(block))
        chosen = zip(example.token_ids, example.loss_mask, strict=True)
        trained.append(tokenizer.decode([token for token, mask in chosen if mask]))
    assert trained == ["cba<|im_end|>", "cba<|im_end|>", " Paris.<|im_end|>"]


def test_the_marked_tokens_are_the_trained_ones() -> None:
    (text, marks) = re.search(r"^(<\|im_start\|>.*)\n( *\^+)$", PAGE, re.MULTILINE).groups()
    assert text[marks.index("^") : len(marks)] == "cba<|im_end|>"
    rendered = character_tokenizer().apply_chat_template(
        json.loads(blocks("json")[0])["messages"], tokenize=False
    )
    assert text == rendered.replace("\n", "⏎")


def test_the_settings() -> None:
    configs = [
        SFTConfig.model_validate({"model": {"name": "m"}, **tomllib.loads(block)}) for block in blocks("toml")
    ]
    assert len(configs) == 4
    assert [config.data.validation is not None for config in configs] == [False, True, True, True]


def test_the_error() -> None:
    (shown,) = re.findall(r"^error: (.*)$", PAGE, re.MULTILINE)
    row = Row("train.jsonl:812", "812", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(DataError) as caught:
        read_samples([row], character_tokenizer())
    assert str(caught.value) == shown
