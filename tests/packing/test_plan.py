"""Plans for any number of ranks: what every one of them promises, and a few by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pellucid.model.attention import SharedAttention
from pellucid.model.segments import Family
from pellucid.packing import Cost, Sequences, plan
from pellucid.packing.plan import Bins, _costs_of

COST = Cost(parity=100)

SHAPES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 2), st.integers(-1, 3), st.integers(0, 40)),
    min_size=1,
    max_size=50,
)
"""(length, kind, group, prompt) of each sequence."""


def sequences(shapes) -> Sequences:
    """Groups stay within a kind; their members share a prompt that is shorter than any of them."""
    lengths, kinds, groups, prompts = (np.array(column, np.int64) for column in zip(*shapes, strict=True))
    groups = np.where(groups < 0, -1, groups + 4 * kinds)
    for group in set(groups.tolist()):
        members = groups == group
        alone = group < 0 or members.sum() == 1
        prompts[members] = 0 if alone else min(prompts[members].min(), lengths[members].min() - 1)
    return Sequences(lengths, kinds, groups, prompts)


@given(SHAPES, st.integers(2, 80), st.integers(1, 5))
def test_every_plan_of_rows(shapes, max_tokens, num_ranks) -> None:
    batch = sequences(shapes)
    steps = plan(batch, max_tokens=max_tokens, num_ranks=num_ranks, cost=COST, in_rows=True)
    bins = [chosen for step in steps for chosen in step.bins]
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(shapes)))
    for step in steps:
        assert len(step.bins) == num_ranks
        assert {int(batch.kinds[index]) for chosen in step.bins for index in chosen} == {step.kind}
    for chosen in bins:
        assert len(chosen) <= 1 or len(chosen) * batch.lengths[chosen].max() <= max_tokens
    for kind in set(batch.kinds.tolist()):
        own = [chosen for step in steps if step.kind == kind for chosen in step.bins]
        if not all(own):
            assert max(map(len, own)) == 1, "a bin is split rather than a dummy added"


def test_rows_of_a_bin_are_alike() -> None:
    steps = plan(Sequences.apart(np.array([5, 3, 4, 9])), max_tokens=10, num_ranks=1, cost=COST, in_rows=True)
    assert [step.bins for step in steps] == [[[3]], [[0, 2]], [[1]]]


@given(SHAPES, st.integers(2, 80), st.integers(1, 5))
def test_every_plan(shapes, max_tokens, num_ranks) -> None:
    batch = sequences(shapes)
    lengths, kinds, groups = batch.lengths.copy(), batch.kinds.copy(), batch.groups.copy()
    steps = plan(batch, max_tokens=max_tokens, num_ranks=num_ranks, cost=COST)

    bins = [chosen for step in steps for chosen in step.bins]
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(shapes)))
    for step in steps:
        assert len(step.bins) == num_ranks
        assert any(step.bins)
        assert {int(kinds[index]) for chosen in step.bins for index in chosen} == {step.kind}
    for chosen in bins:
        assert len(chosen) <= 1 or lengths[chosen].sum() <= max_tokens
        seen = [int(group) for group in groups[chosen] if group >= 0]
        assert seen == sorted(seen), "members of a group are neighbours"
    for kind in set(kinds.tolist()):
        own = [chosen for step in steps if step.kind == kind for chosen in step.bins]
        if not all(own):
            assert max(map(len, own)) == 1, "a bin is split rather than a dummy added"

    again = plan(batch, max_tokens=max_tokens, num_ranks=num_ranks, cost=COST)
    assert again == steps, "every rank plans alike"
    for before, now in ((lengths, batch.lengths), (kinds, batch.kinds), (groups, batch.groups)):
        assert (before == now).all()


def test_bins_are_split_rather_than_ranks_left_without_work() -> None:
    """Five tokens fit into one bin; four ranks get one sequence or two each."""
    steps = plan(Sequences.apart(np.ones(5, np.int64)), max_tokens=8, num_ranks=4, cost=COST)
    assert len(steps) == 1
    assert sorted(map(len, steps[0].bins)) == [1, 1, 1, 2]


def test_a_rank_is_left_without_work_only_for_want_of_sequences() -> None:
    (step,) = plan(Sequences.apart(np.array([4, 4, 4])), max_tokens=8, num_ranks=4, cost=COST)
    assert sorted(step.bins) == [[], [0], [1], [2]]


def test_a_longer_sequence_is_alone() -> None:
    steps = plan(Sequences.apart(np.array([3, 20, 3])), max_tokens=6, num_ranks=1, cost=COST)
    assert [step.bins for step in steps] == [[[1]], [[0, 2]]]


def test_kinds_come_in_the_order_of_their_appearance() -> None:
    lengths = np.array([2, 2, 2])
    batch = Sequences(lengths, np.array([5, 1, 5]), lengths * 0 - 1, lengths * 0)
    steps = plan(batch, max_tokens=8, num_ranks=1, cost=COST)
    assert [(step.kind, step.bins) for step in steps] == [(5, [[0, 2]]), (1, [[1]])]


def test_groups_stay_together_where_that_is_cheaper() -> None:
    """Two groups of a long prompt: six tokens a bin, of which four would be computed twice."""
    lengths = np.array([5, 5, 5, 5])
    groups = np.array([0, 1, 0, 1])
    together = Sequences(lengths, lengths * 0, groups, lengths * 0 + 4)
    for num_ranks in (1, 2):
        steps = plan(together, max_tokens=10, num_ranks=num_ranks, cost=COST)
        assert sorted(chosen for step in steps for chosen in step.bins) == [[0, 2], [1, 3]]


def test_groups_come_apart_where_waiting_for_one_rank_costs_more() -> None:
    """One group of four with a prompt of one token: a rank that computes it three times more is soon done."""
    lengths = np.array([8, 8, 8, 8])
    batch = Sequences(lengths, lengths * 0, lengths * 0, lengths * 0 + 1)
    (step,) = plan(batch, max_tokens=40, num_ranks=4, cost=COST)
    assert sorted(step.bins) == [[0], [1], [2], [3]]


def test_a_group_costs_what_its_attention_computes() -> None:
    """A prompt of 100 and own parts of 1,400 (too long to share), 60 and 150; as `SharedAttention` counts."""
    own = [1400, *[60] * 7, 150]
    attention = SharedAttention([Family(0, [1500]), Family(100, own[1:])])
    lengths = np.array(own) + 100
    group, prompts = np.zeros(len(own), np.int64), np.full(len(own), 100)
    parity, num_computed = 1000, 1500 + 100 + 7 * 60 + 150
    costs = _costs_of(
        Bins(np.arange(len(own)), np.array([0, len(own)])),
        Sequences(lengths, group, group, prompts),
        Cost(parity),
    )
    assert costs.tolist() == [num_computed * parity + 2 * attention.num_pairs]
