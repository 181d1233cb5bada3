"""Chat messages to token ids, with the tokenizer's template, and where each message ends.

    [{"role": "user", "content": "hi"}]

    <|im_start|>user\\nhi<|im_end|>\\n  <|im_start|>assistant\\n
    |------------ user -------------|  |---- the reply's opening ...

A system message that the template adds on its own is one, too.

A message is a dict with a role. Its content is text, or a list of parts (OpenAI's form). Parts of text are
joined: most templates would write such a list as Python does. Images stay parts, for a model that takes them.

What the model wrote is never rendered again: a later prompt is the earlier tokens plus what the template
puts after the reply.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from pellucid.data.images import FAMILIES, image_url, load_image_processor, urls_of
from pellucid.data.plain import brief
from pellucid.data.tokenizer import end_of_turn_ids, no_chat_template
from pellucid.errors import ModelError, RolloutError

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template reads, such as `tool_calls`."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that the model may call, in OpenAI's form."""

_REPLY = "pellucid"  # stands for a reply while the template is asked what follows one
_MAX_ADDED = 64  # lists of tools whose system message is remembered; every example may have its own


def take_messages(messages: Sequence[Message]) -> list[Message]:
    """Joins parts of text; messages with images stay as they are. TypeError if these are no messages,
    RolloutError for parts of other types."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"the messages are {brief(messages)}; give a list of dicts")
    return [
        # The usual form first: a conversation is taken whole at each of its turns.
        message
        if type(message) is dict and type(message.get("role")) is type(message.get("content")) is str
        else take_message(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def take_message(message: Message, what: str) -> Message:
    if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
        raise TypeError(f'{what} is {brief(message)}; give a dict such as {{"role": "user", "content": "…"}}')
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part for part in content if image_url(part) is None]
    joined = join_parts(texts, what)
    return {**message, "content": joined} if len(texts) == len(content) else message


def copy_nested(value: Any) -> Any:
    """Copies dicts and lists within `value`; anything else is shared."""
    if isinstance(value, dict):
        return {key: each if type(each) is str else copy_nested(each) for key, each in value.items()}
    return [copy_nested(each) for each in value] if isinstance(value, (list, tuple)) else value


def join_parts(parts: Sequence[Any], what: str) -> str:
    """`[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]` -> `ab`."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RolloutError(
                f"the content of {what} has the part {brief(part)}; only text can be trained on: give "
                'parts such as {"type": "text", "text": "…"}'
            )
        texts.append(text)
    return "".join(texts)


@dataclass(frozen=True, slots=True)
class Rendered:
    token_ids: list[int]
    stops: list[tuple[str, int]]
    """(role, end in tokens) of each message whose end is known; the rest opens the reply."""


class ChatTemplate:
    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(no_chat_template(tokenizer.name_or_path))
        self.tokenizer = tokenizer
        self.end_of_turn_ids = end_of_turn_ids(tokenizer)
        self._images = load_image_processor(tokenizer)
        self._backend = _plain_backend(tokenizer)
        self._added: dict[tuple[str, str], list[int]] = {}

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Rendered:
        """Renders a conversation from its beginning up to where the reply starts."""
        token_ids = self._encode(self._text(messages, tools, opens_reply=True))
        stops = self._stops(token_ids, messages, tools, 0, "")
        added = self._added_system(str(messages[0]["role"]), tools) if messages else []
        is_there = added and token_ids[: len(added)] == added
        stops = [("system", len(added)), *stops] if is_there else stops
        return Rendered(self.with_images(token_ids, messages), stops)

    def with_images(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Adds the tensors of the messages' images to the token ids of their prompt."""
        return token_ids if self._images is None else self._images.prompt(token_ids, messages)

    @property
    def image_token_id(self) -> int | None:
        """Id of the token that stands for a part of an image; None: the model takes text alone."""
        return None if self._images is None else self._images.shape.token_id

    def continuation(self, messages: Sequence[Message], reply: int, tools: Tools = ()) -> Rendered | None:
        """Renders what the template puts after the text of `messages[reply]`, up to where the next reply
        starts.

        The first of its stops is the end of `messages[reply]`. Returns None if the template rewrites earlier
        messages once later ones follow, or refuses the stand-in for the reply.
        """
        stand_in = {"role": messages[reply]["role"], "content": _REPLY}
        known = [*messages[:reply], stand_in, *messages[reply + 1 :]]
        try:
            before = self._text(known[:reply], tools, opens_reply=True) + _REPLY
            text = self._text(known, tools, opens_reply=True)
        except TemplateError:
            return None
        if not text.startswith(before):
            return None
        token_ids = self._encode(text[len(before) :])
        reply_stop = self._stop(token_ids, known[: reply + 1], tools, before) or 0
        later = self._stops(token_ids, known, tools, reply + 1, before)
        return Rendered(token_ids, [(stand_in["role"], reply_stop), *later])

    def decode(self, token_ids: Sequence[int]) -> str:
        decoder = self._backend or self.tokenizer
        text: str = decoder.decode(token_ids, skip_special_tokens=True)
        return text

    def _added_system(self, role: str, tools: Tools) -> list[int]:
        """Returns the system message that the template adds before a first message of this role, if any."""
        key = role, repr(tools)
        if key not in self._added:
            if len(self._added) >= _MAX_ADDED:
                del self._added[next(iter(self._added))]  # the oldest
            self._added[key] = self._encode(self._added_text(role, tools))
        return self._added[key]

    def _added_text(self, role: str, tools: Tools) -> str:
        system, first = {"role": "system", "content": _REPLY}, {"role": role, "content": _REPLY}
        try:
            given = self._text([system], tools, opens_reply=False)
            after = self._text([system, first], tools, opens_reply=False)
            alone = self._text([first], tools, opens_reply=False)
        except TemplateError:  # it knows no system message, or refuses one alone
            return ""
        message = after.removeprefix(given)
        added = alone.removesuffix(message)
        opening = given.partition(_REPLY)[0]
        is_system = opening and added.startswith(opening) and message != after and added != alone
        return added if is_system else ""

    def _stops(
        self, token_ids: list[int], messages: Sequence[Message], tools: Tools, first: int, before: str
    ) -> list[tuple[str, int]]:
        stops = []
        for index in range(first, len(messages)):
            stop = self._stop(token_ids, messages[: index + 1], tools, before)
            if stop is not None:
                stops.append((messages[index]["role"], stop))
        return stops

    def _stop(
        self, token_ids: list[int], messages: Sequence[Message], tools: Tools, before: str
    ) -> int | None:
        """Returns where these messages end in `token_ids`; None if they are rendered differently alone."""
        try:
            text = self._text(messages, tools, opens_reply=False)
        except TemplateError:  # templates may refuse a system message alone
            return None
        part = self._encode(text[len(before) :])
        return len(part) if text.startswith(before) and token_ids[: len(part)] == part else None

    def _text(self, messages: Sequence[Message], tools: Tools, *, opens_reply: bool) -> str:
        images = self._images
        if images is None and urls_of(messages):
            raise RolloutError(
                "the messages have images, and the model takes text alone: train a model of "
                f"{' or '.join(FAMILIES)}, or leave them out"
            )
        text: str = self.tokenizer.apply_chat_template(
            list(messages) if images is None else images.for_template(messages),
            tools=list(tools) or None,
            add_generation_prompt=opens_reply,
            tokenize=False,
        )
        return text if images is None else images.expand(text, messages)

    def _encode(self, text: str) -> list[int]:
        try:
            if self._backend is not None:
                token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            else:
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            _refuse_surrogates(text)
            raise
        return token_ids


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.end + 20]
        raise RolloutError(
            f"the prompt has half of a character (a lone surrogate) at {error.start}, in {around!r}; no "
            "tokenizer can encode it: replace it where the message is made, as "
            "text.encode(errors='replace').decode() does"
        ) from None


def _plain_backend(tokenizer: Any) -> Any:
    """Returns the tokenizer's backend if calling it directly gives the same result; None if a class overrides
    it.

    transformers checks the type of every id and encodes one text as a batch for many threads. Both take
    longer than the encoding itself.
    """
    from transformers import PreTrainedTokenizerFast

    is_plain = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("encode", "_encode_plus", "decode", "_decode")
    )
    if not is_plain or tokenizer.clean_up_tokenization_spaces:
        return None
    tokenizer.encode("", add_special_tokens=False)  # leaves the backend set up: no truncation, no padding
    return tokenizer.backend_tokenizer
