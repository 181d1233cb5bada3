import numpy as np

from pellucid.data import PackedArray, RecordedExperts, join_experts


def packed(*experts: int) -> PackedArray:
    """One layer, one expert per token."""
    return PackedArray.pack(np.array(experts, np.uint8).reshape(-1, 1, 1))


def recorded(*experts: int) -> RecordedExperts:
    return RecordedExperts(packed(*experts))


def experts_of(*turns: RecordedExperts | None) -> list[int]:
    joined = join_experts(turns)
    assert joined is not None and joined.dtype == np.uint8
    return joined[:, 0, 0].tolist()


def test_the_last_token_repeats_the_experts_of_the_one_before_it() -> None:
    assert experts_of(recorded(3, 1, 4)) == [3, 1, 4, 4]


def test_a_token_has_the_experts_of_the_turn_that_computed_it_first() -> None:
    """Turn 0 sampled four tokens' sequence and computed three; turn 1 computed all of them again."""
    assert experts_of(recorded(3, 1, 4), recorded(9, 9, 9, 1, 5, 9)) == [3, 1, 4, 1, 5, 9, 9]
    three = recorded(8, 8, 8, 8, 8, 8, 2, 6)
    assert experts_of(recorded(3, 1, 4), recorded(9, 9, 9, 1, 5, 9), three) == [3, 1, 4, 1, 5, 9, 2, 6, 6]


def test_a_turn_without_a_record_leaves_none() -> None:
    assert join_experts([None]) is None
    assert join_experts([recorded(3, 1), None]) is None


def test_a_record_after_another_holds_what_it_adds_and_knows_where_the_rest_is() -> None:
    first = recorded(3, 1, 4)
    second = RecordedExperts.of(packed(9, 9, 9, 1, 5, 9), first)
    assert second is not None and second.packed == packed(1, 5, 9) and (second.start, second.stop) == (3, 6)
    assert experts_of(first, second) == [3, 1, 4, 1, 5, 9, 9]
    assert experts_of(second) == [3, 1, 4, 1, 5, 9, 9]
    assert experts_of(recorded(8, 8), second) == [8, 8, 4, 1, 5, 9, 9]
