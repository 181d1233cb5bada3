"""An example of a data set as tokens, with the loss on what the assistant says and on the end of its turn.

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n  ho<|im_end|>  \\n
    |------------------- the prompt -------------------|  |-- loss --|

A reply begins where the chat template's generation prompt ends. It is tokenised separately from the text
before it, so that the prompt's tokens are those that inference sends. If a template marks replies itself
(`{% generation %}`), its marks decide instead.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.errors import DataError, ModelError

Message = Mapping[str, Any]
RoleSpan = tuple[str, int, int]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")

_MARKS_REPLIES = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPACE = "▁"  # how SentencePiece vocabularies write a space


@dataclass(slots=True)
class ExampleTokens:
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    role_spans: list[RoleSpan] = field(default_factory=list)
    """(role, start, stop) in tokens; empty if the tokenizer does not give the text of each token."""

    starts: list[int] = field(default_factory=list)
    """Position in the text where each token starts, in characters; empty if the tokenizer gives none."""


class ExampleTokenizer:
    """Turns examples into tokens; raises DataError for those that it cannot tokenise."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ends = end_of_turn_ids(tokenizer)
        # Some tokenizers begin every text with a space; behind an anchor they do not.
        self._anchor = "\n" if tokenizer.tokenize("a")[0].startswith(_SPACE) else ""
        self._num_anchor = len(tokenizer.encode(self._anchor, add_special_tokens=False))

    def tokenize(self, record: Mapping[str, Any]) -> ExampleTokens:
        """Takes `messages`, or `prompt` and `completion`, each a text or a list of messages."""
        if "messages" in record:
            messages = _messages(record["messages"], "messages")
            return self._chat(messages, "messages", 0, record.get("tools"))
        if "prompt" not in record or "completion" not in record:
            raise DataError(f"expected `messages`, or `prompt` and `completion`; got {sorted(record)}")
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._text(prompt, completion)
        before = _messages(prompt, "prompt", text_role="user")
        after = _messages(completion, "completion", text_role=ASSISTANT)
        return self._chat([*before, *after], "completion", len(before), record.get("tools"))

    def _text(self, prompt: str, completion: str) -> ExampleTokens:
        """Tokenises both texts without a template, and appends the end of text."""
        prompt_ids: list[int] = self._tokenizer.encode(prompt)
        if not prompt_ids:
            raise DataError("`prompt` is empty, and nothing predicts the first token of a text")
        completion_ids, _ = self._encode(completion, len(prompt))
        if completion_ids[-1:] != (end := self._ends[:1]):
            completion_ids += end
        if not completion_ids:
            raise DataError("`completion` is empty, and the tokenizer has no end of text to train on")
        mask = [False] * len(prompt_ids) + [True] * len(completion_ids)
        return ExampleTokens(prompt_ids + completion_ids, mask)

    def _chat(self, messages: list[Message], key: str, first: int, tools: Any) -> ExampleTokens:
        """Tokenises a conversation; replies from message `first` on have a loss."""
        if not any(message["role"] == ASSISTANT for message in messages[first:]):
            raise DataError(f"`{key}` has no assistant turn, so there is nothing to train on; remove the row")
        chat = _Chat(self._tokenizer, messages, tools)
        tokens = self._by_marks(chat, first) if chat.marks_replies else self._by_turns(chat, first)
        if not any(tokens.loss_mask):
            raise DataError(f"the chat template renders nothing of the assistant turns of `{key}`")
        if tokens.starts:
            tokens.role_spans = _role_spans(chat, tokens.starts)
        return tokens

    def _by_turns(self, chat: "_Chat", first: int) -> ExampleTokens:
        tokens = ExampleTokens()
        text = chat.text(len(chat.messages))
        done = 0
        for index in range(first, len(chat.messages)):
            if chat.messages[index]["role"] != ASSISTANT:
                continue
            if index == 0:
                raise DataError("`messages` begins with an assistant turn; put what it answers before it")
            before, upto = chat.text(index, opens_reply=True), chat.text(index + 1)
            if not (text.startswith(upto) and upto.startswith(before) and len(before) >= done):
                raise DataError(
                    f"the chat template renders turn {index} differently once others follow, or not after "
                    "its generation prompt, so its tokens cannot be told apart; make an example of each "
                    "reply, with the turns before it as `prompt` and the reply as `completion`"
                )
            self._add(tokens, text, done, len(before))
            self._add(tokens, text, len(before), len(upto), is_reply=True)
            done = len(upto)
        self._add(tokens, text, done, len(text))
        return tokens

    def _add(
        self, tokens: ExampleTokens, text: str, start: int, stop: int, *, is_reply: bool = False
    ) -> None:
        token_ids, starts = self._encode(text[start:stop], start)
        tokens.token_ids += token_ids
        tokens.loss_mask += self._reply_mask(token_ids) if is_reply else [False] * len(token_ids)
        tokens.starts += starts

    def _reply_mask(self, token_ids: Sequence[int]) -> list[bool]:
        """Masks the tokens of a reply after its end of turn; keeps all of them if there is no end of turn."""
        ends = [position for position, token_id in enumerate(token_ids) if token_id in self._ends]
        last = ends[-1] if ends else len(token_ids)
        return [position <= last for position in range(len(token_ids))]

    def _by_marks(self, chat: "_Chat", first: int) -> ExampleTokens:
        rendered = chat.marked()
        mask = [bool(mark) for mark in rendered["assistant_masks"]]
        starts = [start for start, _ in rendered["offset_mapping"]]
        if first:
            prompt = chat.text(first)
            if not chat.text(len(chat.messages)).startswith(prompt):
                raise DataError("the chat template renders `prompt` differently once `completion` follows")
            num_prompt = bisect_left(starts, len(prompt))
            mask[:num_prompt] = [False] * num_prompt
        return ExampleTokens(list(rendered["input_ids"]), mask, starts=starts)

    def _encode(self, text: str, start: int) -> tuple[list[int], list[int]]:
        """Encodes a text at position `start`; also returns where each token starts, if it is known."""
        anchor, num_anchor = (self._anchor, self._num_anchor) if start else ("", 0)
        is_fast = self._tokenizer.is_fast
        encoded = self._tokenizer(anchor + text, add_special_tokens=False, return_offsets_mapping=is_fast)
        offsets = encoded["offset_mapping"][num_anchor:] if is_fast else []
        return encoded["input_ids"][num_anchor:], [start - len(anchor) + offset for offset, _ in offsets]


class _Chat:
    """A conversation, and the texts that the chat template renders for its first messages."""

    def __init__(self, tokenizer: Any, messages: list[Message], tools: Any) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; use a model that was made for "
                "chat, add a chat_template.jinja to its folder, or give `prompt` and `completion` as texts"
            )
        self._tokenizer = tokenizer
        self._tools = tools
        self._texts: dict[tuple[int, bool], str] = {}
        self.messages = messages

    @property
    def marks_replies(self) -> bool:
        template = self._tokenizer.get_chat_template(tools=self._tools)
        return self._tokenizer.is_fast and _MARKS_REPLIES.search(template) is not None

    def text(self, num_messages: int, *, opens_reply: bool = False) -> str:
        """Renders the first messages, with the generation prompt if `opens_reply`."""
        asked = num_messages, opens_reply
        if asked not in self._texts:
            self._texts[asked] = self._render(
                self.messages[:num_messages], add_generation_prompt=opens_reply, tokenize=False
            )
        return self._texts[asked]

    def marked(self) -> Mapping[str, Any]:
        """Tokenises all messages, with the template's own marks on the replies."""
        rendered: Mapping[str, Any] = self._render(
            self.messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        return rendered

    def _render(self, messages: list[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=self._tools, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses it: {error}") from error


def _role_spans(chat: _Chat, starts: Sequence[int]) -> list[RoleSpan]:
    """Finds the tokens of each message; empty unless the template renders messages one after the other."""
    text = chat.text(len(chat.messages))
    stops = [0]
    for index in range(1, len(chat.messages) + 1):
        try:
            upto = chat.text(index)
        except DataError:  # templates may refuse a system message alone
            return []
        if not text.startswith(upto):
            return []
        stops.append(bisect_left(starts, len(upto)))
    roles = [message["role"] for message in chat.messages]
    return [(role, start, stop) for role, (start, stop) in zip(roles, pairwise(stops), strict=True)]


def _messages(value: Any, key: str, text_role: str | None = None) -> list[Message]:
    if isinstance(value, str) and text_role is not None:
        return [{"role": text_role, "content": value}]
    if not isinstance(value, list) or not value:
        expected = "a list of messages" if text_role is None else "a text or a list of messages"
        raise DataError(f"`{key}` is {_short(value)}; expected {expected}")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, key: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"`{key}` is {_short(value)}; expected an object with `role` and `content`")
    message = {name: part for name, part in value.items() if part is not None}
    if message.get("role") not in ROLES:
        raise DataError(f"`{key}.role` is {_short(message.get('role'))}; expected {', '.join(ROLES)}")
    if "content" not in message and "tool_calls" in message:
        message["content"] = ""
    if not isinstance(content := message.get("content"), str):
        raise DataError(f"`{key}.content` is {_short(content)}; expected text")
    return message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
