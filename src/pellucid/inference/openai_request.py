"""OpenAI's requests: what is understood, what is refused, and the prompt in token ids.

A parameter that would change what is sampled, and that the engine does not implement, is refused with the
reason; nothing is ignored but what is known to change nothing. The tokens of an answer are then drawn from
the model's own distribution, and their logprobs are those a trainer computes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from jinja2 import TemplateError

from pellucid.config.orchestrator import OWN_DISTRIBUTION
from pellucid.errors import InferenceError
from pellucid.inference.protocol import ChatMessage, OpenAIRequest

R = TypeVar("R", bound=OpenAIRequest)

_ABSENT = "the embedded engine does not offer it"

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
"""Fields that do not bear on the answer."""


class RequestError(InferenceError):
    """A request that is refused: the status, and OpenAI's `code` and `param`."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def decode_request(raw: bytes, kind: type[R]) -> R:
    """A checked request; null means that a parameter was left out."""
    try:
        fields = _without_nulls(msgspec.json.decode(raw, type=dict[str, Any]))
        request = msgspec.convert(_without_unserved(fields, kind), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(str(error)) from error
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream = true", param="stream_options")
    return request


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _without_unserved(fields: dict[str, Any], kind: type[OpenAIRequest]) -> dict[str, Any]:
    """The fields of the request type; raises if another one asks for something that is not served."""
    for name, value in fields.items():
        if name in kind.__struct_fields__ or name in HARMLESS:
            continue
        if name not in NEUTRAL:
            raise RequestError(
                f"unknown field `{name}`; it may ask for something that is not served, so leave it out",
                code="unknown_parameter",
                param=name,
            )
        served, reason = NEUTRAL[name]
        if value not in served:
            shown = msgspec.json.encode(value)[:100].decode(errors="replace")
            raise RequestError(
                f"{name} = {shown} is not supported: {reason}", code="unsupported_parameter", param=name
            )
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}


def check_model(asked: str, served: str) -> None:
    """The served name, its last part, or none at all."""
    if asked not in ("", served, served.rstrip("/").rpartition("/")[2]):
        raise RequestError(
            f"model {asked!r} is not served here; this server has {served!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def chat_prompt(tokenizer: Any, messages: Sequence[ChatMessage]) -> list[int]:
    """The conversation in the tokenizer's template, up to where the reply begins."""
    plain = [{"role": message.role, "content": message.text()} for message in messages]
    if tokenizer.chat_template is None:
        raise RequestError("the model's tokenizer has no chat template; use /v1/completions")
    try:
        text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids
