"""Weights of a step's mean, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.loss import sequence_weights
from tolerance import near


def weights(reduction, counts, groups) -> list[float]:
    return sequence_weights(reduction, np.array(counts, np.int64), groups).tolist()


def test_by_hand() -> None:
    """Trainable tokens 1, 3, 4 | groups a, a, b: 8 tokens, 3 sequences, 2 groups of 4 tokens."""
    counts, groups = [1, 3, 4], ["a", "a", "b"]
    assert weights("token", counts, groups) == [1.0, 1.0, 1.0]
    assert weights("sequence", counts, groups) == pytest.approx([8 / 3, 8 / 9, 8 / 12])
    assert weights("group", counts, groups) == [1.0, 1.0, 1.0]
    assert weights("group", [1, 1, 6], groups) == pytest.approx([2.0, 2.0, 8 / 12])


def test_sequences_without_trainable_tokens_count_for_nothing() -> None:
    assert weights("sequence", [2, 0, 2], ["", "", ""])[::2] == [1.0, 1.0]
    assert weights("sequence", [0], [""]) == [0.0]


def test_sequences_in_no_group_are_groups_of_their_own() -> None:
    assert weights("group", [1, 3], ["", ""]) == pytest.approx([2.0, 2 / 3])


@given(
    st.sampled_from(["token", "sequence", "group"]),
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["", "a", "b", "c"])), min_size=1, max_size=12),
)
def test_the_mean_weight_of_a_token_is_one(reduction, rows) -> None:
    counts, groups = [count for count, _ in rows], [group for _, group in rows]
    total = np.dot(weights(reduction, counts, groups), counts)
    assert total == near(sum(counts), terms=len(counts) + 4)
