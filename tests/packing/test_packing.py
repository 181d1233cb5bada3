import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.data import TokenTable, TrainingSample
from pellucid.packing import pack, pack_batch


def sample(length, env="a", mode="rl", run="r", start=0) -> TrainingSample:
    ids = list(range(start, start + length))
    return TrainingSample.from_turn(
        ids[:1],
        ids[1:],
        [-0.5] * (length - 1),
        env_name=env,
        training_mode=mode,
        run_id=run,
        sample_id=str(start),
    )


def test_first_fit_decreasing() -> None:
    assert pack([5, 3, 4, 9], 8) == [[3], [0, 1], [2]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_bins_hold_everything_once_and_respect_the_cap(lengths, capacity) -> None:
    bins = pack(lengths, capacity)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(lengths)))
    for chosen in bins:
        assert sum(lengths[index] for index in chosen) <= capacity or len(chosen) == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from("ab"), st.sampled_from(["r1", "r2"])),
        min_size=1,
        max_size=20,
    ),
    st.integers(2, 20),
    st.integers(2, 40),
)
def test_micro_batches_lose_no_token_and_never_mix_runs(shapes, seq_len, max_tokens) -> None:
    samples = [sample(length, env, run=run, start=100 * i) for i, (length, env, run) in enumerate(shapes)]
    table = TokenTable.from_samples(samples)
    packed = pack_batch(table, seq_len=seq_len, max_tokens=max_tokens)
    seen = []
    for micro_batch in packed.micro_batches:
        part = micro_batch.table
        assert set(part["run_id"]) == {micro_batch.run_id}
        assert part.num_tokens <= max_tokens or part.num_sequences == 1
        assert micro_batch.sample_count == part.num_sequences
        for index in range(part.num_sequences):
            row = part.select([index])
            seen.append(row["token_ids"].tolist())
    expected = [
        list(range(100 * i, 100 * i + min(length, seq_len))) for i, (length, _, _) in enumerate(shapes)
    ]
    assert sorted(seen) == sorted(expected)
    assert packed.num_trainable == sum(len(ids) - 1 for ids in expected)
    assert packed.truncated_tokens == sum(length for length, _, _ in shapes) - sum(map(len, expected))


def test_modes_get_their_own_micro_batches() -> None:
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
    packed = pack_batch(TokenTable.from_samples([sample(3), sft]), seq_len=9, max_tokens=9)
    assert [micro_batch.training_mode for micro_batch in packed.micro_batches] == ["rl", "sft"]


@pytest.mark.golden("sequence_boundaries")
def test_boundaries_are_carried_not_recovered(case) -> None:
    """Sequences of one token included: the lengths come back from positions that cannot tell them apart."""
    lengths = case["outputs"]["true_lengths"]
    table = TokenTable.from_samples([sample(length, start=10 * i) for i, length in enumerate(lengths)])
    assert table.positions().tolist() == case["inputs"]["position_ids"]
    packed = pack_batch(table, seq_len=64, max_tokens=64).micro_batches[0].table
    assert packed.lengths.tolist() == lengths
    assert np.diff(packed.token_offsets).tolist() == lengths
