"""OpenAI's answers: completions as one body, or token by token as server-sent events.

Invariants of streamed text:
- A piece is never taken back: bytes of an unfinished character and text that may be the start of a stop
  string are held until the next token decides.
- The pieces together are the text that a request without streaming gets.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from pellucid.data import Completion
from pellucid.inference.client import SamplingParams
from pellucid.inference.engine_thread import StreamEvent
from pellucid.inference.openai_request import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    chat_prompt,
    check_model,
    text_prompt,
)

_BROKEN = "\ufffd"
"""Character that decoders return for bytes that are no character, or an unfinished one."""


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
        return self._past_stop(self._new_text(is_last=False), is_last=False)

    def finish(self) -> str:
        """Returns the text that was held back; call it once no token can follow."""
        return self._past_stop(self._new_text(is_last=True), is_last=True)

    def _new_text(self, is_last: bool) -> str:
        known = self._decode(self._token_ids[self._context : self._given])
        text = self._decode(self._token_ids[self._context :])
        if len(text) <= len(known) or (text.endswith(_BROKEN) and not is_last):
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return text[len(known) :]

    def _past_stop(self, text: str, is_last: bool) -> str:
        if self._ended:
            return ""
        text = self._held + text
        before = cut_at_stop(text, self._stop)
        self._ended = len(before) < len(text)
        keep = 0 if self._ended or is_last else _num_undecided(text, self._stop)
        self._held = text[len(text) - keep :]
        return before[: len(before) - keep]


def _num_undecided(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins a stop string."""
    starts = (each[:length] for each in stop for length in range(1, len(each)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


R = TypeVar("R", bound=OpenAIRequest)


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pellucid",
        "max_model_len": max_model_len,
    }


@dataclass(frozen=True, slots=True)
class Served:
    """Facts about the server that the answers contain or depend on."""

    model: str
    tokenizer: Any
    stop_token_ids: list[int]
    max_model_len: int

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id])
        return text


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a choice, or all of it."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str | None = None
    policy_versions: Sequence[tuple[int, int]] = ()


class Answer(Generic[R]):
    """One request: its prompt, how to sample, and the shape of what comes back, whole or in chunks."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, request: R, prompt_ids: list[int], served: Served, *, number: int, created: int
    ) -> None:
        self.request = request
        self.prompt_ids = prompt_ids
        self._served = served
        self._head = {"id": f"{self.prefix}-{number}", "created": created, "model": served.model}

    def params(self) -> list[SamplingParams]:
        """Returns parameters per choice, each with its own seed, so that a seeded answer is reproducible."""
        request = self.request
        each = SamplingParams(
            temperature=request.temperature,
            max_tokens=self.max_tokens(),
            stop_token_ids=self._served.stop_token_ids,
            stop=request.stop_strings(),
        )
        if request.seed is None:
            return [each] * request.n
        # Python's generator ignores the sign of a seed: without the modulus, -1 and 1 would be the same.
        seeds = [(request.seed + index) % 2**64 for index in range(request.n)]
        return [msgspec.structs.replace(each, seed=seed) for seed in seeds]

    def max_tokens(self) -> int:
        raise NotImplementedError

    def choice(self, index: int, piece: Piece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        raise NotImplementedError

    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    def extras(self, *, is_first: bool) -> dict[str, Any]:
        """Returns the fields beside the choices."""
        return {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                self.choice(index, self._all_of(completion), is_first=True, is_whole=True)
                for index, completion in enumerate(completions)
            ],
            "usage": self._usage(sum(len(each.token_ids) for each in completions)),
            **self.extras(is_first=True),
        }

    async def lines(self, events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events, one per chunk."""
        texts = [TextStream(self._served.decode, self.request.stop_strings()) for _ in range(self.request.n)]
        begun: set[int] = set()
        num_sampled = 0
        async with aclosing(events):
            async for index, event in events:
                num_sampled += not isinstance(event, Completion)
                for piece in self._pieces(texts[index], event):
                    choice = self.choice(index, piece, is_first=index not in begun, is_whole=False)
                    yield self._line([choice], is_first=not begun)
                    begun.add(index)
        if self._includes_usage:
            yield self._line([], usage=self._usage(num_sampled))
        yield b"data: [DONE]\n\n"

    def _pieces(self, text: TextStream, event: tuple[int, float] | Completion) -> Iterator[Piece]:
        if isinstance(event, Completion):
            yield Piece(
                text.finish(),
                finish_reason=event.finish_reason,
                policy_versions=event.policy_versions,
            )
            return
        token_id, logprob = event
        new = text.push(token_id)
        if new or self.request.return_token_ids or self.wants_logprobs():
            yield Piece(new, [token_id], [logprob])

    def _all_of(self, completion: Completion) -> Piece:
        text = cut_at_stop(self._served.decode(completion.token_ids), self.request.stop_strings())
        return Piece(
            text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.policy_versions,
        )

    def _line(
        self, choices: list[dict[str, Any]], *, is_first: bool = False, usage: dict[str, int] | None = None
    ) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._includes_usage:
            chunk["usage"] = usage
        return b"data: " + msgspec.json.encode(chunk | self.extras(is_first=is_first)) + b"\n\n"

    @property
    def _includes_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _usage(self, num_sampled: int) -> dict[str, int]:
        num_prompt = len(self.prompt_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }

    def _token_fields(self, piece: Piece) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        fields: dict[str, Any] = {"token_ids": piece.token_ids}
        if piece.finish_reason is not None:
            fields["policy_versions"] = piece.policy_versions
        return fields


class ChatAnswer(Answer[ChatRequest]):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def max_tokens(self) -> int:
        """Returns the request's limit, else as many as fit into the model's length."""
        asked = self.request.max_completion_tokens or self.request.max_tokens
        return asked or max(1, self._served.max_model_len - len(self.prompt_ids))

    def wants_logprobs(self) -> bool:
        return self.request.logprobs

    def extras(self, *, is_first: bool) -> dict[str, Any]:
        given = is_first and self.request.return_token_ids
        return {"prompt_token_ids": self.prompt_ids} if given else {}

    def choice(self, index: int, piece: Piece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        message = {"role": "assistant"} if is_first else {}
        if is_first or piece.text:
            message["content"] = piece.text
        return {
            "index": index,
            "message" if is_whole else "delta": message,
            "logprobs": self._logprobs(piece) if self.wants_logprobs() else None,
            "finish_reason": piece.finish_reason,
            **self._token_fields(piece),
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        content = []
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            text = self._served.token_text(token_id)
            # A token that is part of a character has bytes that its text does not tell.
            octets = None if "\ufffd" in text else list(text.encode())
            content.append({"token": text, "logprob": logprob, "bytes": octets, "top_logprobs": []})
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer[CompletionRequest]):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def max_tokens(self) -> int:
        return self.request.max_tokens

    def wants_logprobs(self) -> bool:
        return self.request.logprobs is not None

    def choice(self, index: int, piece: Piece, *, is_first: bool, is_whole: bool) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self.wants_logprobs() else None,
            "finish_reason": piece.finish_reason,
            **self._token_fields(piece),
        }
        if is_first and self.request.return_token_ids:
            choice["prompt_token_ids"] = self.prompt_ids
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [self._served.token_text(token_id) for token_id in piece.token_ids],
            "token_logprobs": piece.logprobs,
        }


def answer_to(
    request: ChatRequest | CompletionRequest, served: Served, *, number: int, created: int
) -> ChatAnswer | CompletionAnswer:
    check_model(request.model, served.model)
    if isinstance(request, ChatRequest):
        prompt_ids = chat_prompt(served.tokenizer, request.messages, served.max_model_len)
        return ChatAnswer(request, prompt_ids, served, number=number, created=created)
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = text_prompt(served.tokenizer, prompt, served.max_model_len)
    return CompletionAnswer(request, prompt, served, number=number, created=created)
