"""Messages of verifiers for chat templates, and replies of the model for verifiers.

A reply is parsed once, to be read by rewards and tools. It is never rendered again: the session keeps its
tokens.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf
from renderers import DefaultRenderer, Renderer, ToolCallParseStatus, config_from_name, create_renderer
from verifiers.v1.dialects.chat import message_to_wire

from pellucid.data import Turn
from pellucid.orchestrator.chat import join_parts

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

Wire = dict[str, Any]


def for_template(message: vf.Message) -> Wire:
    """In the form that chat templates expect: text as text, and the arguments of a call as an object."""
    wire: Wire = message_to_wire(message)
    wire["content"] = _text(wire["content"])
    for call in wire.get("tool_calls", ()):
        function = call.get("function", {})
        function["arguments"] = _json_or_text(function.get("arguments", ""))
    return wire


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return join_parts(content, "a message")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ReplyParser:
    """Content, reasoning and tool calls of what the model wrote.

    By default `<think>…</think>` is reasoning, and `<tool_call>{"name": …, "arguments": {…}}</tool_call>` a
    call, as Qwen, Hermes and many others write it. For other models, `renderer` names a parser of the
    `renderers` library.
    """

    def __init__(self, tokenizer: Any, renderer: str | None) -> None:
        self._renderer: Renderer = (
            DefaultRenderer(tokenizer)
            if renderer is None
            else create_renderer(tokenizer, config_from_name(renderer))
        )
        self._finds_calls = renderer is not None

    def parse(self, turn: Turn, tools: Sequence[Wire]) -> vf.AssistantMessage:
        parsed = self._renderer.parse_response(
            turn.completion.token_ids, tools=list(tools) or None, prompt_ids=list(turn.prompt_ids)
        )
        content, calls = parsed.content, []
        if self._finds_calls:
            calls = [
                (call.name, call.arguments)
                for call in parsed.tool_calls
                if call.name and call.status != ToolCallParseStatus.UNKNOWN_TOOL
            ]
        elif tools:
            content, calls = split_calls(content)
        return vf.AssistantMessage(
            content=content or None,
            reasoning_content=parsed.reasoning_content,
            tool_calls=[
                vf.ToolCall(id=f"call_{index}", name=name, arguments=_as_text(arguments))
                for index, (name, arguments) in enumerate(calls)
            ]
            or None,
        )


def split_calls(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """`ask <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>` -> `("ask ", [("f", {"x": 1})])`.

    A block that is not such a call stays text.
    """
    calls = []
    rest = text
    for block in _CALL.finditer(text):
        call = _json_or_text(block[1])
        if isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]:
            calls.append((call["name"], call.get("arguments", {})))
            rest = rest.replace(block[0], "", 1)
    return rest, calls


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
