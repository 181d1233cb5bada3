from typing import Any

import pytest

pytest.importorskip("verifiers")

import verifiers.v1 as vf

from pellucid.data import Completion, Turn
from pellucid.errors import RolloutError
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator.taskset import ReplyParser, for_template, split_calls

TOKENIZER = character_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


def parse(text: str, tools: list[dict[str, Any]], tokenizer: Any = TOKENIZER, renderer: str | None = None):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    turn = Turn([5], Completion(token_ids, [-0.5] * len(token_ids), [(0, len(token_ids))], "stop"), text)
    return ReplyParser(tokenizer, renderer).parse(turn, tools)


def test_plain_text() -> None:
    assert parse("a  b\n<|im_end|>", TOOLS) == vf.AssistantMessage(content="a  b\n")
    assert parse("<|im_end|>", TOOLS) == vf.AssistantMessage(content=None)


def test_reasoning_is_apart() -> None:
    reply = parse("<think>hm</think>yes<|im_end|>", [])
    assert (reply.reasoning_content, reply.content) == ("hm", "yes")


def test_calls_are_found_where_there_are_tools() -> None:
    text = 'so <tool_call>\n{"name": "f", "arguments": {"x": [1, 2]}}\n</tool_call>'
    reply = parse(text + "<|im_end|>", TOOLS)
    assert reply.content == "so "
    assert reply.tool_calls == [vf.ToolCall(id="call_0", name="f", arguments='{"x": [1, 2]}')]
    assert parse(text, []) == vf.AssistantMessage(content=text)


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        (
            'a<tool_call>{"name": "f"}</tool_call>b<tool_call>{"name": "g"}</tool_call>',
            "ab",
            [("f", {}), ("g", {})],
        ),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("<tool_call>{f}</tool_call>", "<tool_call>{f}</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ],
)
def test_what_is_no_call_stays_text(text: str, rest: str, calls: list[tuple[str, Any]]) -> None:
    assert split_calls(text) == (rest, calls)


def test_another_parser_by_name() -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"], special_tokens=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_response>", "</tool_response>"]})
    reply = parse('<tool_call>{"name": "f", "arguments": {}}</tool_call>', TOOLS, tokenizer, "qwen3")
    assert [call.name for call in reply.tool_calls or ()] == ["f"]


def test_messages_for_templates() -> None:
    call = vf.ToolCall(id="1", name="f", arguments='{"x": 1}')
    broken = vf.ToolCall(id="2", name="f", arguments="{x")
    assert for_template(vf.AssistantMessage(content=None, tool_calls=[call, broken])) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{x"}},
        ],
    }
    parts = [vf.TextContentPart(text="a"), vf.TextContentPart(text="b")]
    assert for_template(vf.UserMessage(content=parts)) == {"role": "user", "content": "ab"}
    image = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:"))
    with pytest.raises(RolloutError, match="image_url.*; only text can be trained on"):
        for_template(vf.UserMessage(content=[*parts, image]))
