import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pellucid.data.tokenizer import CHATML, end_of_turn_ids
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator.chat import ChatTemplate

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


def word_pieces(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **settings: Any) -> Any:
    """`##` joins, as in BERT; adds its own tokens, cuts and cleans up, unless told not to."""
    words = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "##c", ".", ",", "n't", "<|im_start|>"]
    backend = Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.enable_truncation(3)
    made = kind(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]", **settings)
    made.chat_template = PLAIN
    return made


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *arguments: Any, **options: Any) -> str:
        return super()._decode(*arguments, **options).upper()


TOKENIZERS = [
    character_tokenizer(),
    word_pieces(clean_up_tokenization_spaces=False),
    word_pieces(clean_up_tokenization_spaces=True),
    word_pieces(Shouting, clean_up_tokenization_spaces=False),
]


@pytest.mark.parametrize("made", TOKENIZERS, ids=["characters", "pieces", "cleaned-up", "shouting"])
@given(data=st.data())
def test_text_and_tokens_are_those_of_the_tokenizer(made: Any, data: st.DataObject) -> None:
    """Also where its backend is asked directly."""
    chat = ChatTemplate(made)
    ids = data.draw(st.lists(st.integers(0, len(made) - 1), max_size=30))
    assert chat.decode(ids) == made.decode(ids, skip_special_tokens=True)
    text = data.draw(st.text("ab c.,é[CLS]<|im_start|>\n", max_size=30))
    expected = made.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    prompt = chat.prompt([{"role": "user", "content": text}])
    assert prompt.token_ids == made.encode(expected, add_special_tokens=False)


def test_the_backend_is_asked_only_where_it_is_all_there_is() -> None:
    assert [ChatTemplate(made)._backend is not None for made in TOKENIZERS] == [True, True, False, False]


ADDS_A_SYSTEM_MESSAGE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe good<|im_end|>\n{% endif %}" + CHATML
)


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (ADDS_A_SYSTEM_MESSAGE, ["user"], ["system", "user"]),
        (ADDS_A_SYSTEM_MESSAGE, ["user", "assistant", "user"], ["system", "user", "assistant", "user"]),
        (ADDS_A_SYSTEM_MESSAGE, ["system", "user"], ["system", "user"]),
        (CHATML, ["user"], ["user"]),
        ("<|endoftext|>" + CHATML, ["user"], ["user"]),  # what opens every text is no system message
        (PLAIN, ["user"], ["user"]),
        (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}" + CHATML,
            ["user"],
            ["user"],
        ),
    ],
)
def test_a_system_message_of_the_template_is_a_block_of_its_own(template, roles, expected) -> None:
    chat = ChatTemplate(tokenizer(template, "<|im_end|>"))
    rendered = chat.prompt([{"role": role, "content": f"text {place}"} for place, role in enumerate(roles)])
    assert [role for role, _ in rendered.stops] == expected
    starts = [0, *(stop for _, stop in rendered.stops)]
    for start, (role, stop) in zip(starts, rendered.stops, strict=False):
        block = chat.tokenizer.decode(rendered.token_ids[start:stop])
        assert block.count(role) == 1 and ("be good" in block) == (role == "system" and roles[0] != "system")


def test_tools_of_their_own_for_every_example_are_not_remembered_for_ever() -> None:
    """Remembered for ever, the lists of 100,000 examples took 1.5 GB."""
    chat = ChatTemplate(character_tokenizer())
    user = [{"role": "user", "content": "hi"}]
    tracemalloc.start()
    try:
        for number in range(300):
            chat.prompt(user, [{"name": f"f{number}", "description": "x" * 20_000}])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100 * 20_000
