"""OpenAI's requests and answers: which parameters are served, the prompt in token ids, the shape of answers.

- A parameter that would change what is sampled, and that the engine does not implement, is refused with the
  reason; nothing is ignored but what is known to change nothing. The tokens of an answer are then drawn from
  the model's own distribution, and their logprobs are those a trainer computes.
- A streamed piece of text is never taken back: bytes of an unfinished character and text that may begin a
  stop string are held until the next token decides. The pieces together are the text of an unstreamed answer.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from jinja2 import TemplateError

from pellucid.config.orchestrator import OWN_DISTRIBUTION
from pellucid.data import Completion
from pellucid.data.images import FAMILIES, ImageProcessor, urls_of
from pellucid.errors import InferenceError, RolloutError
from pellucid.inference.client import NonEmptyIds, SamplingParams
from pellucid.inference.engine_thread import StreamEvent
from pellucid.inference.entrance import RequestError

_ABSENT = "the embedded engine does not offer it"
_BROKEN = "\ufffd"
"""Character that decoders return for bytes that are no character, or an unfinished one."""

_FIRST_CHARACTERS_PER_TOKEN = 4
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 1000
_LEAST_CHARACTERS = 1 << 20
"""Some tokenizers make one token of a word of any length, or none of spaces: this bounds their texts."""
_OBJECTS_PER_TOKEN = 16
_LEAST_OBJECTS = 1 << 16
"""Messages and their parts are at most so many, and so many for each token that the model takes: an object of
three bytes takes 100 in memory. Braces in texts count, too, which makes counting cheap."""
_MAX_FIELD_BYTES = 1 << 17
"""Fields other than the prompt: 16 stop strings of 1,000 characters, each written as `\\u…`, are 96 kB."""

NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "top_p": ([1], OWN_DISTRIBUTION),
    "top_k": ([-1, 0], OWN_DISTRIBUTION),
    "min_p": ([0], OWN_DISTRIBUTION),
    "typical_p": ([1], OWN_DISTRIBUTION),
    "presence_penalty": ([0], OWN_DISTRIBUTION),
    "frequency_penalty": ([0], OWN_DISTRIBUTION),
    "repetition_penalty": ([1], OWN_DISTRIBUTION),
    "length_penalty": ([1], OWN_DISTRIBUTION),
    "logit_bias": ([{}], OWN_DISTRIBUTION),
    "min_tokens": ([0], OWN_DISTRIBUTION),
    "ignore_eos": ([False], OWN_DISTRIBUTION),
    "use_beam_search": ([False], OWN_DISTRIBUTION),
    "response_format": ([{"type": "text"}], OWN_DISTRIBUTION),
    "best_of": ([1], OWN_DISTRIBUTION),
    "tools": ([[]], _ABSENT),
    "tool_choice": (["none", "auto"], _ABSENT),
    "functions": ([[]], _ABSENT),
    "function_call": (["none", "auto"], _ABSENT),
    "top_logprobs": ([0], "only the sampled token has a logprob; ask for 0 alternatives"),
    "modalities": ([["text"]], _ABSENT),
    "reasoning_effort": ([], _ABSENT),
    "echo": ([False], _ABSENT),
    "suffix": ([""], _ABSENT),
}
"""Parameters of which only these values are served, and why."""

HARMLESS = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    ]
)
"""Fields that do not affect the answer."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    """Adds a last chunk without choices that contains the number of tokens."""

    include_obfuscation: bool = False
    """Accepted and without effect: padding against eavesdroppers is not for a server inside a cluster."""


StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
NumTokens = Annotated[int, msgspec.Meta(ge=1)]


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str = ""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    seed: int | None = None
    """Choice i is sampled with seed + i."""

    stop: StopString | Annotated[list[StopString], msgspec.Meta(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Adds `prompt_token_ids`, and `token_ids` and `policy_versions` per choice."""

    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(OpenAIRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`, for one prompt."""

    prompt: str | NonEmptyIds
    max_tokens: NumTokens = 16
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    """0 or 1: those of the sampled tokens. There are no alternatives."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    """`data:image/png;base64,…`; nothing is fetched."""

    detail: Literal["auto"] = "auto"


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart | ImagePart]

    @property
    def num_characters(self) -> int:
        """Characters of its text."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.text) for part in self.content if isinstance(part, TextPart))

    def plain(self) -> dict[str, Any]:
        """Returns the message as a dict, whose content is text unless it has images."""
        parts = [] if isinstance(self.content, str) else self.content
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if len(texts) < len(parts):
            return {"role": self.role, "content": msgspec.to_builtins(self.content)}
        return {
            "role": self.role,
            "content": self.content if isinstance(self.content, str) else "".join(texts),
        }


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    """The newer name; it wins. Without either, the reply may fill the model's length."""

    logprobs: bool = False


AnyRequest = ChatRequest | CompletionRequest


def decode_request(raw: bytes, kind: type[AnyRequest], max_tokens: int) -> AnyRequest:
    """Decodes and checks a request; null means that a parameter was left out.

    Fields that do not affect the answer are never decoded, and others only after their size was checked.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        request = msgspec.convert(_served_fields(fields, kind, max_tokens), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(str(error)) from error
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream = true", param="stream_options")
    return request


def _served_fields(
    fields: Mapping[str, msgspec.Raw], kind: type[AnyRequest], max_tokens: int
) -> dict[str, Any]:
    """Returns the fields of the request type; raises if another field asks for what is not served."""
    served = {}
    for name, raw in fields.items():
        if name in HARMLESS:
            continue
        if name not in kind.__struct_fields__ and name not in NEUTRAL:
            raise RequestError(
                f"unknown field `{name[:100]}`; it may ask for something that is not served, so leave it out",
                code="unknown_parameter",
                param=name[:100],
            )
        _check_size(name, bytes(raw), max_tokens)
        value = _without_nulls(msgspec.json.decode(raw))
        if value is None:
            continue
        if name in kind.__struct_fields__:
            served[name] = value
        elif value not in NEUTRAL[name][0]:
            shown = msgspec.json.encode(value)[:100].decode(errors="replace")
            raise RequestError(
                f"{name} = {shown} is not supported: {NEUTRAL[name][1]}",
                code="unsupported_parameter",
                param=name,
            )
    return served


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _check_size(name: str, raw: bytes, max_tokens: int) -> None:
    """Raises RequestError if a field would take much more memory than its bytes, or than it can need."""
    if name == "prompt":
        num_tokens = raw.count(b",") + 1
        if raw.startswith(b"[") and num_tokens > max_tokens:
            raise _too_long(f"it has {num_tokens} tokens", max_tokens)
    elif name == "messages":
        num_objects, most = num_opened(raw), max(_LEAST_OBJECTS, _OBJECTS_PER_TOKEN * max_tokens)
        if num_objects > most:
            raise _too_long(
                f"it has {num_objects} objects, and no more than {most} are looked at", max_tokens
            )
    elif len(raw) > _MAX_FIELD_BYTES:
        raise RequestError(
            f"{name} has {len(raw)} bytes; no more than {_MAX_FIELD_BYTES} are looked at, so shorten it",
            param=name,
        )


def num_opened(raw: bytes) -> int:
    """Counts the objects and lists in a JSON text, at most: brackets in strings count, too."""
    return raw.count(b"{") + raw.count(b"[")


def chat_prompt(
    tokenizer: Any, messages: Sequence[ChatMessage], max_tokens: int, images: ImageProcessor | None = None
) -> list[int]:
    """Renders the conversation by the tokenizer's template, up to where the reply begins."""
    plain = [message.plain() for message in messages]
    _check_characters(sum(message.num_characters for message in messages), max_tokens)
    if images is None and urls_of(plain):
        raise RequestError(
            f"the messages have images, and only models of {' and '.join(FAMILIES)} take them",
            param="messages",
        )
    if tokenizer.chat_template is None:
        raise RequestError("the model's tokenizer has no chat template; use /v1/completions")
    try:
        given = plain if images is None else images.for_template(plain)
        text = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    if images is None:
        return text_prompt(tokenizer, text, max_tokens, add_special_tokens=False)
    try:
        text = images.expand(text, plain)
        return images.prompt(text_prompt(tokenizer, text, max_tokens, add_special_tokens=False), plain)
    except RolloutError as error:
        raise RequestError(str(error), param="messages") from error


def text_prompt(tokenizer: Any, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
    """Tokenizes a text. One that is much too long is refused after tokenizing only its beginning.

    Beginnings of the text are tokenized, each twice as long as the last, until one has more than twice the
    tokens that the model takes. What follows could merge with the last tokens of a beginning, but never with
    half of them. Time and memory are therefore bounded by a few times the longest prompt that is served.
    """

    def encode(part: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(part, add_special_tokens=add_special_tokens)
        return token_ids

    _check_characters(len(text), max_tokens)
    num_characters = _FIRST_CHARACTERS_PER_TOKEN * max_tokens
    while num_characters < len(text):
        num_tokens = len(encode(text[:num_characters]))
        if num_tokens > 2 * max_tokens + _MARGIN_TOKENS:
            raise _too_long(f"its first {num_characters} characters have {num_tokens} tokens", max_tokens)
        num_characters *= 2
    return encode(text)


def _check_characters(number: int, max_tokens: int) -> None:
    most = max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
    if number > most:
        raise _too_long(f"it has {number} characters, and no more than {most} are looked at", max_tokens)


def _too_long(reason: str, max_tokens: int) -> RequestError:
    return RequestError(
        f"the prompt exceeds inference.max_model_len = {max_tokens}: {reason}; shorten it",
        code="context_length_exceeded",
    )


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Text before the first stop string: `cut_at_stop("ab\\n\\ncd", ["\\n\\n"]) == "ab"`."""
    return text[: min((text.find(each) for each in stop if each in text), default=len(text))]


class TextStream:
    """Token ids in, text out.

    With the stop string "END": the tokens "a", "E", "x", "EN", "D" give "a", "", "Ex", "", "".
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._token_ids: list[int] = []
        self._context = 0
        """Token where decoding starts: some decoders treat the first token of a text differently."""
        self._given = 0
        """Number of tokens that have become text."""
        self._held = ""
        self._ended = False

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return self._advance(is_last=False)

    def finish(self) -> str:
        """Returns the text that was held back; call it once no token can follow."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        if self._ended:
            return ""
        text = self._held + self._new_text(is_last=is_last)
        before = cut_at_stop(text, self._stop)
        self._ended = len(before) < len(text)
        starts = (each[:length] for each in self._stop for length in range(1, len(each)))
        undecided = max((len(start) for start in starts if text.endswith(start)), default=0)
        keep = 0 if self._ended or is_last else undecided
        self._held = text[len(text) - keep :]
        return before[: len(before) - keep]

    def _new_text(self, *, is_last: bool) -> str:
        known = self._decode(self._token_ids[self._context : self._given])
        text = self._decode(self._token_ids[self._context :])
        if len(text) <= len(known) or (text.endswith(_BROKEN) and not is_last):
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return text[len(known) :]


@dataclass(frozen=True, slots=True)
class Served:
    """Facts about the server that the answers contain or depend on."""

    model: str
    tokenizer: Any
    stop_token_ids: list[int]
    max_model_len: int
    images: ImageProcessor | None = None
    """Prepares the images of messages; None: the model takes text alone."""

    def check_model(self, asked: str) -> None:
        """Raises RequestError unless the request asks for the served name, its last part, or none at all."""
        if asked not in ("", self.model, self.model.rstrip("/").rpartition("/")[2]):
            raise RequestError(
                f"model {asked!r} is not served here; this server has {self.model!r}",
                status=404,
                code="model_not_found",
                param="model",
            )

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class OpenAIAnswer:
    """One request: its prompt, how to sample, and the shape of what comes back, whole or in chunks."""

    def __init__(self, request: AnyRequest, served: Served, *, number: int, created: int) -> None:
        served.check_model(request.model)
        self.request = request
        self._served = served
        room = served.max_model_len
        self._chat = isinstance(request, ChatRequest)
        if isinstance(request, ChatRequest):
            self.prompt_ids = chat_prompt(served.tokenizer, request.messages, room, served.images)
            asked = request.max_completion_tokens or request.max_tokens
            self._max_tokens = asked or max(1, room - len(self.prompt_ids))
        else:
            prompt = request.prompt
            if isinstance(prompt, str):
                prompt = text_prompt(served.tokenizer, prompt, room)
            self.prompt_ids = prompt
            self._max_tokens = request.max_tokens
        self._wants_logprobs = request.logprobs is not None and request.logprobs is not False
        self._includes_usage = request.stream_options is not None and request.stream_options.include_usage
        name = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{name}-{number}", "created": created, "model": served.model}

    def params(self) -> list[SamplingParams]:
        """Returns parameters per choice, each with its own seed, so that a seeded answer is reproducible."""
        request = self.request
        each = SamplingParams(
            temperature=request.temperature,
            max_tokens=self._max_tokens,
            stop_token_ids=self._served.stop_token_ids,
            stop=request.stop_strings(),
        )
        if request.seed is None:
            return [each] * request.n
        # Python's generator ignores the sign of a seed: without the modulus, -1 and 1 would be the same.
        seeds = [(request.seed + index) % 2**64 for index in range(request.n)]
        return [msgspec.structs.replace(each, seed=seed) for seed in seeds]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        stop = self.request.stop_strings()
        texts = [cut_at_stop(self._served.decode(each.token_ids), stop) for each in completions]
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [
                self._choice(index, text, completion, is_first=True, name="message")
                for index, (text, completion) in enumerate(zip(texts, completions, strict=True))
            ],
            "usage": self._usage(sum(len(each.token_ids) for each in completions)),
            **self._extras(),
        }

    async def lines(self, events: AsyncGenerator[list[StreamEvent], None]) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events, one per chunk."""
        request = self.request
        texts = [TextStream(self._served.decode, request.stop_strings()) for _ in range(request.n)]
        begun: set[int] = set()
        num_sampled = 0
        async with aclosing(events):
            async for index, event in (each async for together in events for each in together):
                if isinstance(event, InferenceError):
                    raise event
                if isinstance(event, Completion):
                    text = texts[index].finish()
                    part = msgspec.structs.replace(event, token_ids=[], logprobs=[])
                else:
                    token_id, logprob = event
                    text = texts[index].push(token_id)
                    part = Completion([token_id], [logprob], [], "")
                    num_sampled += 1
                    if not (text or request.return_token_ids or self._wants_logprobs):
                        continue
                choice = self._choice(index, text, part, is_first=index not in begun, name="delta")
                yield self._line([choice], None, {} if begun else self._extras())
                begun.add(index)
        if self._includes_usage:
            yield self._line([], self._usage(num_sampled), {})
        yield b"data: [DONE]\n\n"

    def _choice(
        self, index: int, text: str, part: Completion, *, is_first: bool, name: str
    ) -> dict[str, Any]:
        """Returns a choice, or what a chunk adds to it; an empty `finish_reason` means that it goes on."""
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice[name] = {"role": "assistant"} if is_first else {}
            if is_first or text:
                choice[name]["content"] = text
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(part) if self._wants_logprobs else None
        choice["finish_reason"] = part.finish_reason or None
        if self.request.return_token_ids:
            choice["token_ids"] = part.token_ids
            if part.finish_reason:
                choice["policy_versions"] = part.policy_versions
            if is_first and not self._chat:
                choice["prompt_token_ids"] = self.prompt_ids
        return choice

    def _logprobs(self, part: Completion) -> dict[str, Any]:
        texts = [self._served.tokenizer.decode([token_id]) for token_id in part.token_ids]
        if not self._chat:
            return {"tokens": texts, "token_logprobs": part.logprobs}
        content = []
        for text, logprob in zip(texts, part.logprobs, strict=True):
            # A token that is part of a character has bytes that its text does not tell.
            octets = None if _BROKEN in text else list(text.encode())
            content.append({"token": text, "logprob": logprob, "bytes": octets, "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _extras(self) -> dict[str, Any]:
        """Returns the fields beside the choices of an answer, or of its first chunk."""
        return {"prompt_token_ids": self.prompt_ids} if self._chat and self.request.return_token_ids else {}

    def _line(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None, extras: dict[str, Any]
    ) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        if self._includes_usage:
            chunk["usage"] = usage
        return b"data: " + msgspec.json.encode(chunk | extras) + b"\n\n"

    def _usage(self, num_sampled: int) -> dict[str, int]:
        num_prompt = len(self.prompt_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }
