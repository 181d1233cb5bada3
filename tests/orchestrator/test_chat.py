from typing import Any

import pytest

from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.model.tiny import CHATML, character_tokenizer

PLAIN = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def tokenizer(template: str | None, eos_token: str | None) -> Any:
    made = character_tokenizer(template)
    made.eos_token = eos_token
    return made


@pytest.mark.parametrize(
    ("template", "eos_token", "ends"),
    [
        (CHATML, "<|im_end|>", ["<|im_end|>"]),
        (CHATML, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (CHATML, None, ["<|im_end|>"]),
        (PLAIN, "<|endoftext|>", ["<|endoftext|>"]),
        (None, "<|endoftext|>", ["<|endoftext|>"]),
        (None, None, []),
        ("{{ raise_exception('one message only') }}", "<|endoftext|>", ["<|endoftext|>"]),
        ("<|im_start|>no reply here", "<|endoftext|>", ["<|endoftext|>"]),
    ],
)
def test_a_turn_ends_with_the_tokenizers_token_or_the_templates(
    template: str | None, eos_token: str | None, ends: list[str]
) -> None:
    made = tokenizer(template, eos_token)
    assert end_of_turn_ids(made) == made.convert_tokens_to_ids(ends)
