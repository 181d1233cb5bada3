"""Whose turn it is: shares under a budget."""

from hypothesis import given
from hypothesis import strategies as st

from pellucid.trainer.many import take_turns


def test_turns_by_hand() -> None:
    waiting = {"a": [5, 5, 5, 5], "b": [3, 3, 3]}
    assert take_turns(waiting, 16) == {"a": 2, "b": 2}  # 5 | 3 | 3 | 5
    assert take_turns({"a": [5, 5], "b": [3]}, 16) == {"a": 2, "b": 1}
    assert take_turns({"a": [40]}, 16) == {"a": 1}  # alone, however long
    assert take_turns({"a": [], "b": []}, 16) == take_turns({}, 16) == {}


def test_the_first_turn_goes_round() -> None:
    waiting = {"a": [8], "b": [8], "c": [8]}
    assert [take_turns(waiting, 10, first=first) for first in range(4)] == [
        {"a": 1},
        {"b": 1},
        {"c": 1},
        {"a": 1},
    ]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(1, 120),
    st.integers(0, 7),
)
def test_none_gets_more_than_its_share_and_one_sample(lengths, budget, first) -> None:
    waiting = {f"run{index}": each for index, each in enumerate(lengths)}
    taken = take_turns(waiting, budget, first=first)
    tokens = {name: sum(waiting[name][:count]) for name, count in taken.items()}
    total = sum(tokens.values())
    assert total > 0
    assert total <= budget or sum(taken.values()) == 1
    open_runs = [name for name in waiting if taken.get(name, 0) < len(waiting[name])]
    if open_runs == list(waiting):  # nobody ran out, so nobody left anything to the others
        share = budget / len(waiting)
        assert all(num <= share + max(waiting[name][: taken[name]]) for name, num in tokens.items())


@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_equal_runs_are_served_equally(num_runs, budget, lengths) -> None:
    """Round after round until all is taken; in none of them is one run two samples ahead of another."""
    waiting = {f"run{index}": list(lengths) for index in range(num_runs)}
    served = dict.fromkeys(waiting, 0)
    number = 0
    while any(waiting.values()):
        taken = take_turns(waiting, budget, first=number)
        counts = [taken.get(name, 0) for name, left in waiting.items() if left]
        if len({tuple(left) for left in waiting.values()}) == 1:
            assert max(counts) - min(counts) <= 1
        for name, count in taken.items():
            del waiting[name][:count]
            served[name] += count
        number += 1
        assert number <= num_runs * len(lengths)
    assert set(served.values()) == {len(lengths)}
