"""Which steps a page keeps."""

from hypothesis import given
from hypothesis import strategies as st

from pellucid.viewer.spread import Size, choose_spread, evenly, measure


def test_the_documented_case() -> None:
    spread = choose_spread(dict.fromkeys(range(300), Size(128, 128 * 30)))
    assert sorted(spread.steps)[:3] == [0, 10, 20] and max(spread.steps) == 299
    assert (len(spread.steps), spread.stride) == (31, 1)


def test_records_are_thinned_only_where_two_steps_are_too_many() -> None:
    spread = choose_spread({3: Size(90, 900)}, Size(40, 10_000))
    assert (spread.steps, spread.stride) == ({3}, 3)
    assert "one record in 3" in (spread.note(30) or "")


def test_tokens_count_as_well_as_records() -> None:
    assert choose_spread(dict.fromkeys(range(5), Size(1, 100)), Size(1000, 300)).steps == {0, 2, 4}


def test_measure_counts_by_step() -> None:
    records = [{"step": 1, "token_ids": [1, 2]}, {"step": 1, "token_ids": [1]}, {"token_ids": []}]
    assert measure(records) == {1: Size(2, 3), 0: Size(1, 0)}


def test_evenly_keeps_both_ends() -> None:
    assert evenly([1, 2, 4, 8, 16], 3) == [1, 4, 16]
    assert evenly([1, 2], 5) == [1, 2]


@given(
    st.dictionaries(
        st.integers(0, 500), st.builds(Size, st.integers(1, 50), st.integers(1, 900)), min_size=1
    ),
    st.builds(Size, st.integers(1, 200), st.integers(1, 5000)),
)
def test_the_first_and_last_step_stay_and_the_budget_holds(sizes: dict[int, Size], budget: Size) -> None:
    spread = choose_spread(sizes, budget)
    assert {min(sizes), max(sizes)} <= spread.steps <= sizes.keys()
    kept = sum(sizes[step].records for step in spread.steps)
    assert -(-kept // spread.stride) <= budget.records
    if spread.total.over(budget) <= 1:
        assert (spread.steps, spread.stride) == (sizes.keys(), 1)
        assert spread.note(spread.total.records) is None
