"""Which tokens of an example have a loss, under templates and tokenizers of several kinds."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pellucid.data.tokenizer import CHATML
from pellucid.errors import DataError, ModelError
from pellucid.model.tiny import character_tokenizer
from pellucid.trainer.sft_tokens import ExampleTokenizer

USER = {"role": "user", "content": "a?"}
REPLY = {"role": "assistant", "content": "b"}
CHAT = [
    {"role": "system", "content": "be brief"},
    USER,
    REPLY,
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "dd"},
]

# Once another user turn follows, what a reply says before "|" is left out, as reasoning is by some templates.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] if loop.last else message['content'].split('|')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] if loop.last else message['content'].split('|')[-1] }}<|im_end|>"
    "{% endgeneration %}\n{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML


def tokenizer(template=CHATML):
    return character_tokenizer(template)


def tokenize(record, tokens=None):
    return ExampleTokenizer(tokens or tokenizer()).tokenize(record)


def text_of(example, tokens=None) -> str:
    return (tokens or tokenizer()).decode(example.token_ids)


def trained_text(example, tokens=None) -> str:
    chosen = [token for token, mask in zip(example.token_ids, example.loss_mask, strict=True) if mask]
    return (tokens or tokenizer()).decode(chosen)


def test_the_loss_covers_assistant_turns_and_their_end() -> None:
    example = tokenize({"messages": CHAT})
    assert trained_text(example) == "b<|im_end|>dd<|im_end|>"
    assert text_of(example) == tokenizer().apply_chat_template(CHAT, tokenize=False)


def test_the_tokens_before_a_reply_are_those_that_inference_sends() -> None:
    example = tokenize({"messages": CHAT})
    prompt = tokenizer().apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer().encode(prompt, add_special_tokens=False)
    first = example.loss_mask.index(True)
    assert example.token_ids[:first] == prompt_ids


def test_who_speaks_is_recorded() -> None:
    example = tokenize({"messages": CHAT})
    ids = example.token_ids
    spans = [(role, tokenizer().decode(ids[start:stop])) for role, start, stop in example.role_spans]
    assert spans == [
        (message["role"], f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n")
        for message in CHAT
    ]


def test_a_template_may_refuse_a_beginning() -> None:
    """The loss does not need it; who speaks does, and is left open."""
    strict = tokenizer(STRICT.replace("messages[0]['role'] == 'system'", "messages | length == 1"))
    example = tokenize({"messages": CHAT}, strict)
    assert trained_text(example) == "b<|im_end|>dd<|im_end|>"
    assert example.role_spans == []


def test_prompt_and_completion_as_texts() -> None:
    example = tokenize({"prompt": "ab", "completion": "cd"})
    assert (text_of(example), trained_text(example)) == ("abcd<|im_end|>", "cd<|im_end|>")
    again = tokenize({"prompt": "ab", "completion": "cd<|im_end|>"})
    assert again.token_ids == example.token_ids
    assert trained_text(tokenize({"prompt": "ab<|im_end|>", "completion": ""})) == "<|im_end|>"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": CHAT[:4], "completion": CHAT[4:]},
        {"prompt": CHAT[:4], "completion": "dd"},
    ],
)
def test_prompt_and_completion_as_messages(record) -> None:
    """Only the completion has a loss, even if the prompt has assistant turns."""
    example = tokenize(record)
    assert trained_text(example) == "dd<|im_end|>"
    assert example.token_ids == tokenize({"messages": CHAT}).token_ids


def test_a_prompt_as_text_is_a_user_turn() -> None:
    example = tokenize({"prompt": "a?", "completion": [REPLY]})
    assert example.token_ids == tokenize({"messages": [USER, REPLY]}).token_ids


def test_messages_win_over_a_prompt_beside_them() -> None:
    example = tokenize({"prompt": "a?", "messages": [USER, REPLY]})
    assert trained_text(example) == "b<|im_end|>"


def test_a_template_without_an_end_of_turn_trains_the_whole_reply() -> None:
    endless = tokenizer(ENDLESS)
    assert trained_text(tokenize({"messages": [USER, REPLY]}, endless), endless) == "b\n"


def test_a_template_that_rewrites_earlier_turns_is_refused_and_the_remedy_works() -> None:
    forgetful = tokenizer(FORGETFUL)
    thought = {"role": "assistant", "content": "hm|b"}
    messages = [USER, thought, USER, thought]
    with pytest.raises(DataError, match="renders turn 1 differently once others follow.*make an example of"):
        tokenize({"messages": messages}, forgetful)
    first = tokenize({"prompt": messages[:1], "completion": messages[1:2]}, forgetful)
    second = tokenize({"prompt": messages[:3], "completion": messages[3:]}, forgetful)
    assert trained_text(first) == trained_text(second) == "hm|b<|im_end|>"
    assert text_of(second).count("hm|") == 1


def test_a_template_that_marks_replies_decides() -> None:
    marked = tokenizer(MARKED)
    thought = {"role": "assistant", "content": "hm|b"}
    messages = [USER, thought, USER, thought]
    example = tokenize({"messages": messages}, marked)
    assert trained_text(example) == "b<|im_end|>hm|b<|im_end|>"
    assert text_of(example) == marked.apply_chat_template(messages, tokenize=False)
    # A turn that is rendered otherwise once others follow has no end that could be told.
    assert example.role_spans == []
    last = tokenize({"prompt": messages[:3], "completion": messages[3:]}, marked)
    assert trained_text(last) == "hm|b<|im_end|>"


def merging_tokenizer():
    """Line ends that follow each other are one token."""
    vocabulary = {"\n": 0, "\n\n": 1, "a": 2, "b": 3, "U": 4, "A": 5, "<end>": 6, "?": 7}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="?")
    fast.chat_template = (
        "{% for m in messages %}{{ 'A' if m['role'] == 'assistant' else 'U' }}\n{{ m['content'] }}<end>"
        "{% endfor %}{% if add_generation_prompt %}A\n{% endif %}"
    )
    return fast


def test_a_reply_is_not_merged_into_the_prompt() -> None:
    tokens = merging_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    example = tokenize({"messages": messages}, tokens)
    pieces = tokens.convert_ids_to_tokens(example.token_ids)
    assert pieces == ["U", "\n", "a", "<end>", "A", "\n", "\n", "b", "<end>"]
    assert example.loss_mask == [False] * 6 + [True] * 3
    assert example.role_spans == [("user", 0, 4), ("assistant", 4, 9)]


def spacing_tokenizer():
    """Begins every text with a space, as SentencePiece does."""
    words = ["▁", "▁a", "a", "b", "▁b", "\n", "U", "▁U", ":", "A", "▁A", "<end>", "?"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
            pre_tokenizers.Split(Regex(r"▁?[aAbU]|[\s\S]"), "isolated"),
        ]
    )
    core.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="?")
    fast.chat_template = (
        "{% for m in messages %}{{ 'A' if m['role'] == 'assistant' else 'U' }}:{{ m['content'] }}<end>"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    return fast


def test_a_reply_gets_no_space_that_the_text_does_not_have() -> None:
    tokens = spacing_tokenizer()
    assert tokens.tokenize("b") == ["▁b"]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    example = tokenize({"messages": messages}, tokens)
    pieces = tokens.convert_ids_to_tokens(example.token_ids)
    assert pieces == ["▁U", ":", "a", "<end>", "A", ":", "b", "<end>"]
    assert example.loss_mask == [False] * 6 + [True] * 2
    assert tokens.convert_ids_to_tokens(tokenize({"prompt": "a", "completion": "b"}, tokens).token_ids) == [
        "▁a",
        "b",
        "<end>",
    ]


def test_tool_calls_need_no_content_and_null_is_absent() -> None:
    template = CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% for call in message.tool_calls %}<{{ call.name }}>{% endfor %}",
    ).replace(
        "{% for message in messages %}",
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for message in messages %}",
    )
    tokens = tokenizer(template)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}], "name": None}
    example = tokenize({"messages": [USER, call], "tools": [{"name": "clock"}]}, tokens)
    assert trained_text(example) == "<clock><|im_end|>"
    assert text_of(example).startswith("[clock]<|im_start|>user")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"^expected `messages`, or `prompt` and `completion`; got \['text'\]$"),
        ({"prompt": "", "completion": "x"}, "^`prompt` is empty, and nothing predicts the first token"),
        ({"prompt": "x", "completion": 3}, "^`completion` is 3; expected a text or a list of messages$"),
        ({"messages": "hi"}, "^`messages` is 'hi'; expected a list of messages$"),
        ({"messages": []}, r"^`messages` is \[\]; expected a list of messages$"),
        ({"messages": ["hi"]}, r"^`messages\[0\]` is 'hi'; expected an object with `role` and `content`$"),
        (
            {"messages": [USER, {"role": "bot", "content": "x"}]},
            r"^`messages\[1\].role` is 'bot'; expected system, developer, user, assistant, tool$",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"^`messages\[0\].content` is \[\{'type': 'image'\}\]; expected text$",
        ),
        ({"messages": [USER]}, "^`messages` has no assistant turn, so there is nothing to train on; remove"),
        ({"prompt": [USER, REPLY], "completion": [USER]}, "^`completion` has no assistant turn"),
        ({"messages": [REPLY]}, "^`messages` begins with an assistant turn; put what it answers before it$"),
    ],
)
def test_what_cannot_be_trained_on_says_why(record, message) -> None:
    with pytest.raises(DataError, match=message):
        tokenize(record)


def test_what_the_template_refuses_is_said() -> None:
    with pytest.raises(DataError, match="^the chat template refuses it: no system turn$"):
        tokenize({"messages": CHAT}, tokenizer(STRICT))


def test_a_chat_needs_a_template_and_texts_do_not() -> None:
    plain = tokenizer(None)
    with pytest.raises(ModelError, match="has no chat template; .* `prompt` and `completion` as texts"):
        tokenize({"messages": [USER, REPLY]}, plain)
    assert trained_text(tokenize({"prompt": "a", "completion": "b"}, plain)) == "b<|im_end|>"


class Slow:
    """A tokenizer that does not say which text a token stands for."""

    is_fast = False

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __call__(self, text, *, return_offsets_mapping, **options):
        assert not return_offsets_mapping
        return self._inner(text, **options)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_slow_tokenizer_trains_the_same_and_leaves_the_roles_open(template) -> None:
    slow, fast = (
        tokenize({"messages": CHAT}, kind(tokenizer(template))) for kind in (Slow, lambda each: each)
    )
    assert (slow.token_ids, slow.loss_mask) == (fast.token_ids, fast.loss_mask)
    assert (slow.role_spans, len(fast.role_spans)) == ([], 5)


def test_without_an_end_of_text_an_empty_completion_is_refused() -> None:
    plain = tokenizer(None)
    plain.eos_token = None
    assert trained_text(tokenize({"prompt": "a", "completion": "b"}, plain)) == "b"
    with pytest.raises(DataError, match="^`completion` is empty, and the tokenizer has no end of text"):
        tokenize({"prompt": "a", "completion": ""}, plain)
