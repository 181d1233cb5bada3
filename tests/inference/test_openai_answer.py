"""Text in pieces: never broken, never taken back, and in sum the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.inference.openai import TextStream, cut_at_stop


def from_bytes(token_ids) -> str:
    """One token per byte, as in the worst case of a byte-level tokenizer."""
    return bytes(token_ids).decode(errors="replace")


def from_characters(token_ids) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


def pieces_of(decode, token_ids, stop=()):
    stream = TextStream(decode, stop)
    return [*(stream.push(token_id) for token_id in token_ids), stream.finish()]


def test_a_character_comes_whole() -> None:
    assert pieces_of(from_bytes, "a€😀".encode()) == ["a", "", "", "€", "", "", "", "😀", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    assert pieces_of(from_bytes, "a€".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(lambda ids: "".join(["a", "E", "x", "EN", "D", "y"][i] for i in ids), ["END"])
    assert [stream.push(i) for i in range(6)] == ["a", "", "Ex", "", "", ""]
    assert stream.finish() == ""


def test_a_stop_string_that_did_not_come_is_text() -> None:
    assert pieces_of(from_characters, map(ord, "aEN"), ["END"]) == ["a", "", "", "EN"]


@pytest.mark.parametrize(
    ("stop", "before"), [([], "ab-cd"), (["-"], "ab"), (["d", "b-"], "a"), (["x"], "ab-cd")]
)
def test_text_is_cut_before_the_first_stop_string(stop, before) -> None:
    assert cut_at_stop("ab-cd", stop) == before


@given(st.text())
def test_no_piece_is_broken(text) -> None:
    pieces = pieces_of(from_bytes, text.encode())
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(st.binary())
def test_pieces_are_the_text_whatever_the_bytes(raw) -> None:
    assert "".join(pieces_of(from_bytes, raw)) == from_bytes(raw)


@given(st.text("ab"), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_are_what_an_unstreamed_answer_gives(text, stop) -> None:
    ends = [i for i in range(1, len(text) + 1) if any(each in text[:i] for each in stop)]
    sampled = text[: ends[0]] if ends else text  # the engine stops there
    assert "".join(pieces_of(from_characters, map(ord, sampled), stop)) == cut_at_stop(sampled, stop)
