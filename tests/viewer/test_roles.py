"""Segments by role: every token in exactly one, whatever the record says."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.viewer.roles import segments_of

CHATML = [
    "<|im_start|>",
    "us",
    "er",
    "\n",
    "hi",
    "<|im_end|>",
    "\n",
    "<|im_start|>",
    "assistant",
    "\n",
    "yes",
]


def test_recorded_spans_come_first_and_gaps_are_kept() -> None:
    record = {"role_spans": [["assistant", 6, 9], ["system", 1, 4]]}
    expected = [("", 0, 1), ("system", 1, 4), ("", 4, 6), ("assistant", 6, 9), ("", 9, 11)]
    assert segments_of(record, CHATML) == expected


@pytest.mark.parametrize("spans", [None, [], [["user"]], [{"role": "user"}], ["user"]])
def test_without_usable_spans_the_chatml_markers_decide(spans: Any) -> None:
    assert segments_of({"role_spans": spans}, CHATML) == [("user", 0, 7), ("assistant", 7, 11)]


def test_without_either_there_is_one_segment() -> None:
    assert segments_of({}, ["#1", "#2"]) == [("", 0, 2)]
    assert segments_of({}, []) == []


def test_a_marker_without_a_line_end_takes_no_content_as_its_role() -> None:
    texts = ["<|im_start|>", "tool", "<|im_end|>", "x"]
    assert segments_of({}, texts) == [("tool", 0, 4)]


@given(
    st.lists(st.tuples(st.text(max_size=3), st.integers(-5, 30), st.integers(-5, 30)).map(list)),
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", "a"]), max_size=25),
)
def test_segments_cover_every_token_once(spans: list[list[Any]], texts: list[str]) -> None:
    segments = segments_of({"role_spans": spans}, texts)
    assert [index for _, start, end in segments for index in range(start, end)] == list(range(len(texts)))
