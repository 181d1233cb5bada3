"""OpenAI's requests: what is understood, what is refused, and the prompt in token ids.

A parameter that would change what is sampled, and that the engine does not implement, is refused with the
reason; nothing is ignored but what is known to change nothing. The tokens of an answer are then drawn from
the model's own distribution, and their logprobs are those a trainer computes.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from jinja2 import TemplateError

from pellucid.config.orchestrator import OWN_DISTRIBUTION
from pellucid.errors import InferenceError
from pellucid.inference.client import NonEmptyIds

_ABSENT = "the embedded engine does not offer it"

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
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
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


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    """The newer name; it wins. Without either, the reply may fill the model's length."""

    logprobs: bool = False


R = TypeVar("R", bound=OpenAIRequest)


class RequestError(InferenceError):
    """A request that is refused: the status, and OpenAI's `code` and `param`."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def decode_request(raw: bytes, kind: type[R], max_tokens: int) -> R:
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


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _served_fields(
    fields: Mapping[str, msgspec.Raw], kind: type[OpenAIRequest], max_tokens: int
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


def _check_size(name: str, raw: bytes, max_tokens: int) -> None:
    """Raises RequestError if a field would take much more memory than its bytes, or than it can need."""
    if name == "prompt" and raw.startswith(b"["):
        num_tokens = raw.count(b",") + 1
        if num_tokens > max_tokens:
            raise _too_long(f"it has {num_tokens} tokens", max_tokens)
    elif name == "messages":
        num_objects = num_opened(raw)
        most = max(_LEAST_OBJECTS, _OBJECTS_PER_TOKEN * max_tokens)
        if num_objects > most:
            reason = f"it has {num_objects} objects, and no more than {most} are looked at"
            raise _too_long(reason, max_tokens)
    elif name != "prompt" and len(raw) > _MAX_FIELD_BYTES:
        raise RequestError(
            f"{name} has {len(raw)} bytes; no more than {_MAX_FIELD_BYTES} are looked at, so shorten it",
            param=name,
        )


def num_opened(raw: bytes) -> int:
    """Counts the objects and lists in a JSON text, at most: brackets in strings count, too."""
    return raw.count(b"{") + raw.count(b"[")


def check_model(asked: str, served: str) -> None:
    """Raises RequestError unless the request asks for the served name, its last part, or none at all."""
    if asked not in ("", served, served.rstrip("/").rpartition("/")[2]):
        raise RequestError(
            f"model {asked!r} is not served here; this server has {served!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def chat_prompt(tokenizer: Any, messages: Sequence[ChatMessage], max_tokens: int) -> list[int]:
    """Renders the conversation by the tokenizer's template, up to where the reply begins."""
    plain = [{"role": message.role, "content": message.text()} for message in messages]
    _check_characters(sum(len(message["content"]) for message in plain), max_tokens)
    if tokenizer.chat_template is None:
        raise RequestError("the model's tokenizer has no chat template; use /v1/completions")
    try:
        text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    return text_prompt(tokenizer, text, max_tokens, add_special_tokens=False)


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


def _check_characters(num_characters: int, max_tokens: int) -> None:
    most = max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
    if num_characters > most:
        raise _too_long(
            f"it has {num_characters} characters, and no more than {most} are looked at", max_tokens
        )


def _too_long(reason: str, max_tokens: int) -> RequestError:
    return RequestError(
        f"the prompt exceeds inference.max_model_len = {max_tokens}: {reason}; shorten it",
        code="context_length_exceeded",
    )
