"""Batches in micro batches: tokens, their order, their columns, and what is counted about them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.data import TokenTable, TrainingSample
from pellucid.packing import Counts, Kind, pack_batch
from tolerance import near


def sample(length, env="a", mode="rl", run="r", start=0, **columns) -> TrainingSample:
    """Token ids count up from `start`."""
    ids = list(range(start, start + length))
    return TrainingSample.from_turn(
        ids[:1],
        ids[1:],
        [-0.001 * token for token in ids[1:]],
        env_name=env,
        training_mode=mode,
        run_id=run,
        sample_id=str(start),
        **columns,
    )


SHAPES = st.lists(
    st.tuples(st.integers(1, 20), st.sampled_from("ab"), st.sampled_from(["r1", "r2"]), st.booleans()),
    min_size=1,
    max_size=20,
)
"""(length, environment, run, whether there is a teacher) of each sample."""


def table_of(shapes) -> TokenTable:
    return TokenTable.from_samples(
        [
            sample(
                length,
                env,
                run=run,
                start=100 * index,
                group_id=f"g{index // 3}",
                teacher_logprobs=[-0.01 * (100 * index + i) for i in range(length)] if teacher else None,
            )
            for index, (length, env, run, teacher) in enumerate(shapes)
        ]
    )


@given(SHAPES, st.integers(2, 20), st.integers(2, 40), st.integers(1, 4), st.sampled_from([1, 4, 7]))
def test_every_micro_batch(shapes, seq_len, max_tokens, num_ranks, multiple) -> None:
    table = table_of(shapes)
    before = {name: table[name].copy() for name in table.columns}
    packed = pack_batch(
        table, seq_len=seq_len, max_tokens=max_tokens, num_ranks=num_ranks, pad_to_multiple_of=multiple
    )
    ranks = [list(packed.micro_batches(rank)) for rank in range(num_ranks)]
    assert len({len(own) for own in ranks}) == 1, "as many micro batches on every rank"
    micro_batches = [micro_batch for own in ranks for micro_batch in own]

    seen = []
    for micro_batch in micro_batches:
        part, counts = micro_batch.table, micro_batch.counts
        owned = np.flatnonzero(part["env_name"] != "")
        padding = np.flatnonzero(part["env_name"] == "")
        assert set(part["run_id"][owned]) <= {micro_batch.kind.run_id}
        assert len(owned) <= 1 or part.lengths[owned].sum() <= max_tokens
        assert part.num_tokens % multiple == 0
        assert padding.tolist() in ([], [part.num_sequences - 1]), "one sequence of its own, at the end"
        assert not part.select(padding)["loss_mask"].any()
        assert counts == Counts(
            samples=len(owned),
            tokens=part.num_tokens,
            loss_tokens=int(part["loss_mask"].sum()),
            padding_tokens=int(part.lengths[padding].sum()),
            truncated_tokens=sum(
                max(0, shapes[int(name) // 100][0] - seq_len) for name in part["sample_id"][owned]
            ),
            oversized_samples=int((part.lengths[owned] > max_tokens).sum()),
        )
        assert counts.padding_tokens < multiple or counts.samples == 0
        seen += [part.select([index]) for index in owned]

    # Every sample once, its tokens in order, and every value beside the token that it belongs to.
    seen.sort(key=lambda row: int(row["sample_id"][0]))
    for index, (row, (length, env, run, teacher)) in enumerate(zip(seen, shapes, strict=True)):
        kept = min(length, seq_len)
        ids = np.arange(100 * index, 100 * index + kept)
        assert row["token_ids"].tolist() == ids.tolist()
        assert (row["env_name"][0], row["run_id"][0]) == (env, run)
        assert row["loss_mask"].tolist() == [False] + [True] * (kept - 1)
        assert row["inference_logprobs"] == near(-0.001 * ids[1:], terms=1, each=True)
        expected = -0.01 * ids if teacher else np.full(kept, np.nan)
        assert row["teacher_logprobs"] == near(expected, terms=1, each=True)
    assert packed.num_trainable == sum(micro_batch.counts.loss_tokens for micro_batch in micro_batches)

    for name in table.columns:
        np.testing.assert_array_equal(table[name], before[name])
    assert table.lengths.tolist() == [length for length, *_ in shapes]


def test_modes_and_runs_get_their_own_micro_batches() -> None:
    sft = TrainingSample.build(
        token_ids=[1, 2],
        loss_mask=[False, True],
        sampled=[False, False],
        inference_logprobs=[],
        policy_versions=[],
        env_name="a",
        training_mode="sft",
        run_id="r",
    )
    table = TokenTable.from_samples([sample(3), sft, sample(3, run="s")])
    packed = pack_batch(table, seq_len=9, max_tokens=9)
    assert [micro_batch.kind for micro_batch in packed.micro_batches(0)] == [
        Kind("rl", "r"),
        Kind("sft", "r"),
        Kind("rl", "s"),
    ]


def test_samples_with_tensors_of_another_modality_get_their_own_micro_batches() -> None:
    image = sample(3, start=10, mm_tensors=b"pixels", mm_token_type_ids=[0, 1, 0])
    packed = pack_batch(
        TokenTable.from_samples([sample(3), image, sample(3, start=20)]), seq_len=9, max_tokens=9
    )
    parts = {part.kind: part.table for part in packed.micro_batches(0)}
    assert parts.keys() == {Kind("rl", "r"), Kind("rl", "r", is_multimodal=True)}
    assert parts[Kind("rl", "r")]["sample_id"].tolist() == ["0", "20"]
    assert parts[Kind("rl", "r", is_multimodal=True)]["mm_token_type_ids"].tolist() == [0, 1, 0]


def test_a_dummy_has_every_column_but_nothing_to_train() -> None:
    """Two samples, three ranks; the third has a micro batch of padding in the same mode."""
    samples = [sample(3, mode="opd", start=10 * i, teacher_logprobs=[-1.0] * 3) for i in range(2)]
    packed = pack_batch(
        TokenTable.from_samples(samples), seq_len=8, max_tokens=8, num_ranks=3, pad_to_multiple_of=4
    )
    parts = [next(packed.micro_batches(rank)) for rank in range(3)]
    assert [part.counts.samples for part in parts] == [1, 1, 0]
    dummy = parts[2]
    assert dummy.kind == Kind("opd", "r")
    assert dummy.counts == Counts(
        samples=0, tokens=4, loss_tokens=0, padding_tokens=4, truncated_tokens=0, oversized_samples=0
    )
    assert np.isnan(dummy.table["teacher_logprobs"]).all()
    assert dummy.indices == [] and dummy.received.tolist() == []


def test_each_rank_copies_its_own_sequences_only() -> None:
    table = TokenTable.from_samples([sample(4, start=10 * i) for i in range(6)])
    packed = pack_batch(table, seq_len=8, max_tokens=8, num_ranks=2)
    own = [[index for part in packed.micro_batches(rank) for index in part.indices] for rank in range(2)]
    assert sorted(own[0] + own[1]) == list(range(6))
    for rank in range(2):
        names = [str(10 * index) for index in own[rank]]
        assert [name for part in packed.micro_batches(rank) for name in part.table["sample_id"]] == names


def test_a_group_shares_a_bin_and_its_members_are_neighbours() -> None:
    """Two groups of two, interleaved; their prompts of five tokens are most of them."""
    samples = [
        TrainingSample.from_turn(
            [group] * 5,
            [7],
            [-1.0],
            env_name="a",
            run_id="r",
            group_id=str(group),
            sample_id=f"{group}{member}",
        )
        for member in range(2)
        for group in range(2)
    ]
    table = TokenTable.from_samples(samples)

    def bins(max_tokens, share_prompts) -> list[list[str]]:
        packed = pack_batch(table, seq_len=16, max_tokens=max_tokens, share_prompts=share_prompts)
        return sorted(part.table["sample_id"].tolist() for part in packed.micro_batches(0))

    assert bins(12, share_prompts=True) == [["00", "01"], ["10", "11"]]
    assert bins(24, share_prompts=True) == [["00", "01", "10", "11"]]
    assert bins(12, share_prompts=False) == [["00", "10"], ["01", "11"]]


def test_truncation_counts_what_is_cut_and_trains_the_rest() -> None:
    table = TokenTable.from_samples([sample(10), sample(3, start=20)])
    packed = pack_batch(table, seq_len=6, max_tokens=4)
    counts = [part.counts for part in packed.micro_batches(0)]
    assert [count.truncated_tokens for count in counts] == [4, 0]
    assert [count.oversized_samples for count in counts] == [1, 0]
    assert packed.num_trainable == 5 + 2


@pytest.mark.golden("sequence_boundaries")
def test_boundaries_are_carried_not_recovered(case) -> None:
    """Sequences of one token included: the lengths come back from positions that cannot tell them apart."""
    lengths = case["outputs"]["true_lengths"]
    table = TokenTable.from_samples([sample(length, start=10 * i) for i, length in enumerate(lengths)])
    assert table.positions().tolist() == case["inputs"]["position_ids"]
    (micro_batch,) = pack_batch(table, seq_len=64, max_tokens=64).micro_batches(0)
    assert micro_batch.table.lengths.tolist() == lengths
    assert np.diff(micro_batch.table.token_offsets).tolist() == lengths
