import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.errors import ConfigError
from pellucid.model import ContextParallel, packed_layout, shared_layout


def test_the_worked_example() -> None:
    """a b X Y and a b Z: the prompt once, every token predicted by the one before it."""
    layout = shared_layout([4, 3], np.array([1, 2, 7, 8, 1, 2, 9], np.uint32), ["g", "g"])
    assert layout.computed.tolist() == [0, 1, 2, 3, 6]
    assert layout.predicted.tolist() == [1, 2, 3, 6]
    assert layout.predecessors.tolist() == [0, 1, 2, 1]
    assert layout.targets.tolist() == [1, 2, 3, 5, 6]
    assert layout.sources.tolist() == [0, 1, 2, 0, 3]
    assert layout.read.tolist() == [0, 1, 2, 3]


def test_what_a_loss_reads_of_any_member_is_read() -> None:
    ids, mask = np.array([1, 2, 7, 8, 1, 2, 9], np.uint32), np.zeros(7, np.bool_)
    mask[[3, 5]] = True
    assert shared_layout([4, 3], ids, ["g", "g"], None, mask).read.tolist() == [0, 2]
    assert packed_layout([4, 3], mask).read.tolist() == [2, 3]


def test_tokens_at_another_temperature_are_not_shared() -> None:
    """Another temperature, another prediction."""
    ids = np.array([1, 2, 3, 1, 2, 3], np.uint32)
    temperatures = np.array([1, 1, 1, 1, 2, 2], np.float32)
    assert shared_layout([3, 3], ids, ["g", "g"], temperatures).computed.tolist() == [0, 1, 2, 4, 5]


def test_without_groups_every_token_is_computed() -> None:
    layout = packed_layout([2, 1, 3])
    assert layout.computed.tolist() == [0, 1, 2, 3, 4, 5]
    assert layout.predicted.tolist() == [1, 4, 5]
    assert layout.predecessors.tolist() == [0, 3, 4]


def test_only_neighbours_of_a_named_group_share() -> None:
    ids = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3], np.uint32)
    assert len(shared_layout([3, 3, 3], ids, ["", "", ""]).computed) == 9
    assert len(shared_layout([3, 3, 3], ids, ["g", "h", "g"]).computed) == 9
    assert len(shared_layout([3, 3, 3], ids, ["g", "g", "h"]).computed) == 7


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "g", "h"]), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
        min_size=1,
        max_size=8,
    )
)
def test_every_token_is_predicted_by_its_own_past(rows) -> None:
    """Following predecessors back from any token spells the sequence it stands in."""
    groups, sequences = [group for group, _ in rows], [ids for _, ids in rows]
    flat = np.array([token for ids in sequences for token in ids], np.uint32)
    layout = shared_layout([len(ids) for ids in sequences], flat, groups)
    computed = flat[layout.computed.numpy()]
    predecessors = computed[layout.predecessors.numpy()][layout.sources.numpy()]
    before = dict(zip(layout.targets.tolist(), predecessors.tolist(), strict=True))
    assert (flat[layout.predicted.numpy()][layout.sources.numpy()] == flat[layout.targets.numpy()]).all()
    position = 0
    for ids in sequences:
        assert position not in before
        for offset in range(1, len(ids)):
            assert before[position + offset] == ids[offset - 1]
        position += len(ids)
    assert len(layout.computed) <= len(flat)


def test_pairs_are_those_of_the_attention_matrix() -> None:
    """a b X Y and a b Z: a sees 1, b 2, X 3, Y 4, and Z sees a, b and itself."""
    shared = shared_layout([4, 3], np.array([1, 2, 7, 8, 1, 2, 9], np.uint32), ["g", "g"])
    assert shared.num_pairs == 1 + 2 + 3 + 4 + 3
    assert packed_layout([4, 3]).num_pairs == (1 + 2 + 3 + 4) + (1 + 2 + 3)


def test_slices_of_the_worked_example() -> None:
    """Computed: a b X Y Z and one token of padding, three per rank; X is predicted by the first rank's b."""
    layout = shared_layout([4, 3], np.array([1, 2, 7, 8, 1, 2, 9], np.uint32), ["g", "g"])
    first, second = (layout.slice(ContextParallel(None, rank, 2)) for rank in range(2))
    assert (first.computed.tolist(), second.computed.tolist()) == ([0, 1, 2], [3, 6, 0])
    assert (first.predicted.tolist(), second.predicted.tolist()) == ([1, 2, 3, 6], [])
    assert first.predecessors.tolist() == [0, 1, 2, 1]
    assert (first.own.rows.tolist(), second.own.rows.tolist()) == ([0, 1, 2, 3], [])


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_slices_compute_and_predict_everything_once(lengths, num_slices, random) -> None:
    mask = np.array([random.random() < 0.5 for _ in range(sum(lengths))], np.bool_)
    layout = packed_layout(lengths, mask)
    slices = [layout.slice(ContextParallel(None, rank, num_slices)) for rank in range(num_slices)]
    assert {len(each.computed) for each in slices} == {layout.slice_size(num_slices)}
    computed = [token for each in slices for token in each.computed.tolist()]
    assert computed[: len(layout.computed)] == layout.computed.tolist()
    rows = [row for each in slices for row in each.own.rows.tolist()]
    assert sorted(rows) == list(range(len(layout.predicted)))
    read = [row for each in slices for row in each.own.rows[each.read].tolist()]
    assert sorted(read) == layout.read.tolist()
    for each in slices:
        before = each.computed[each.predecessors] + 1
        assert before.tolist() == each.predicted.tolist()


def test_heads_that_cannot_be_divided_are_refused() -> None:
    ContextParallel(None, 0, 2).check_heads(4)
    with pytest.raises(ConfigError, match="trainer.model.cp = 3 does not divide the 4 attention heads"):
        ContextParallel(None, 0, 3).check_heads(4)


def test_a_member_that_would_save_little_stays_alone() -> None:
    """A prompt of 2: own parts of 16 tokens take part, one of 17 does not."""
    prompt, generator = [1, 2], np.random.default_rng(0)
    own = [generator.integers(3, 99, length).tolist() for length in (16, 17, 16)]
    sequences = [prompt + part for part in own]
    flat = np.concatenate(sequences).astype(np.uint32)
    layout = shared_layout([18, 19, 18], flat, ["g", "g", "g"])
    assert len(layout.computed) == 19 + 2 + 16 + 16
    assert len(shared_layout([18, 19], flat[:37], ["g", "g"]).computed) == 37


def test_without_such_a_member_the_others_share_more() -> None:
    """All start with a token, the two short ones with five."""
    sequences = [[1, 2, 3, 4, 5, 6], [1, *range(50, 70)], [1, 2, 3, 4, 5, 7]]
    lengths = [len(sequence) for sequence in sequences]
    flat = np.concatenate(sequences).astype(np.uint32)
    assert len(shared_layout(lengths, flat, ["g"] * 3).computed) == 21 + 5 + 1 + 1
