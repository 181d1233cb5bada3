"""Turns: byte-backed, and the same for whoever looks."""

import tracemalloc

import numpy as np
import pytest

from pellucid.data import Completion, Example, Rollout, Turn, join_columns
from pellucid.errors import DataError


def test_a_turn_gives_back_what_it_was_made_of() -> None:
    completion = Completion([9, 2**32 - 1], [-0.5, -1.25], [(3, 1), (4, 1)], "length")
    turn = Turn([5, 6], completion, "né", [("user", 0, 2)], trainable=False)
    assert [part.tolist() for part in turn.tokens[:3]] == [[5, 6], completion.token_ids, completion.logprobs]
    assert turn.known_ids.tolist() == [5, 6, *completion.token_ids] and turn.text == "né"
    assert (turn.num_prompt_tokens, turn.num_tokens) == (2, 2)
    assert (turn.policy_versions, turn.finish_reason) == ([(3, 1), (4, 1)], "length")
    assert turn.role_spans == [("user", 0, 2)] and not turn.trainable
    assert [part.dtype for part in turn.tokens[:3]] == [np.uint32, np.uint32, np.float32]


@pytest.mark.parametrize("text", ["", "a", "é" * 4095, "é" * 4096, "lorem ipsum 🙂 " * 1000])
def test_texts_of_any_length_come_back(text: str) -> None:
    assert Turn([5], Completion([1], [-0.5], [(0, 1)], "stop"), text).text == text


def test_ids_that_are_no_tokens_are_kept_to_be_rejected() -> None:
    turn = Turn([5], Completion([-1, 2**40], [-0.5, -0.5], [(0, 2)], "stop"), "")
    assert turn.tokens.token_ids.tolist() == [-1, 2**40]


def test_a_rollout_that_forgets_its_tokens_still_counts_them() -> None:
    turns = [
        Turn([5], Completion([1, 2], [-0.5, -0.5], [(7, 1), (6, 1)], "stop"), "one"),
        Turn([5, 1, 2], Completion([3], [-0.5], [(8, 1)], "length"), "two"),
    ]
    rollout = Rollout("r", "g", Example("0", []), "env", 1.0, turns)
    rollout.forget_tokens()
    assert (rollout.num_sampled, rollout.stop_reason, rollout.oldest_version) == (3, "length", 6)
    assert [turn.text for turn in rollout.turns] == ["one", "two"]
    with pytest.raises(DataError, match="are in the samples of its rollout"):
        _ = turns[0].tokens


def test_fifteen_thousand_tokens_take_the_bytes_of_their_arrays() -> None:
    """15,000 + 15,000 ids and 15,000 logprobs of four bytes, and 75,000 letters that compress to a tenth."""
    ids, logprobs = list(range(1000, 16_000)), [-0.1 - n / 1e6 for n in range(15_000)]
    completion, text = Completion(ids, logprobs, [(0, 15_000)], "stop"), "word " * 15_000
    tracemalloc.start()
    turn = Turn(ids, completion, text)
    held = tracemalloc.get_traced_memory()[0]
    turn.forget_tokens()
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 180_000 < held < 195_000 and left < 10_000


def test_columns_that_an_engine_adds_are_kept_and_joined() -> None:
    first = Turn(
        [5], Completion([1, 2], [-0.5, -0.5], [(0, 2)], "stop", columns={"temperatures": [0.5, 0.7]}), ""
    )
    second = Turn([5, 1, 2], Completion([3], [-0.5], [(0, 1)], "stop"), "", goes_on_from=first)
    assert {name: values.tolist() for name, values in first.tokens.columns.items()} == {
        "temperatures": [0.5, 0.7]
    }
    assert second.tokens.columns == {}
    assert join_columns([second]) == {}
    joined = join_columns([first, second])["temperatures"]
    assert joined.tolist() == [0.5, 0.7, 1.0]  # the fill where a turn has none
    first.forget_tokens()
    odd = Turn([5], Completion([1], [-0.5], [(0, 1)], "stop", columns={"odd": [1.0]}), "")
    with pytest.raises(DataError, match="'odd'.*which the schema does not declare"):
        join_columns([odd])
