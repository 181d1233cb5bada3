import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.data import COLUMNS, Axis, TokenTable, TrainingSample
from pellucid.data.rows import BitRows
from pellucid.errors import DataError


def sample(prompt=(5, 6), completion=(9, 8), **columns) -> TrainingSample:
    columns = {"env_name": "a", **columns}
    return TrainingSample.from_turn(
        prompt, completion, [-0.1 * (i + 1) for i in range(len(completion))], **columns
    )


@st.composite
def samples(draw):
    """Samples of any shape: length 1 prompts, empty completions, optional columns present or not."""
    prompt = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
    completion = draw(st.lists(st.integers(0, 2**32 - 1), max_size=6))
    columns = {"env_name": draw(st.sampled_from(["a", "b"])), "group_id": draw(st.sampled_from(["", "g1"]))}
    if draw(st.booleans()):
        columns["teacher_logprobs"] = [-0.5] * (len(prompt) + len(completion))
    if draw(st.booleans()):
        columns["advantages"] = [0.25 * i for i in range(len(completion))]
    else:
        columns["advantage"] = 0.5
    versions = draw(st.lists(st.integers(0, 3), min_size=len(completion), max_size=len(completion)))
    return TrainingSample.from_turn(
        prompt, completion, [-0.1] * len(completion), policy_versions=versions, **columns
    )


def test_columns_are_stored_where_they_declare() -> None:
    table = TokenTable.from_samples(
        [sample(), sample(prompt=(7,), completion=(3,), env_name="b", advantage=2.0)]
    )
    assert table.lengths.tolist() == [4, 2]
    assert table["token_ids"].tolist() == [5, 6, 9, 8, 7, 3]
    assert table["sampled"].tolist() == [False, False, True, True, False, True]
    assert table["inference_logprobs"].tolist() == pytest.approx([-0.1, -0.2, -0.1])
    assert table["env_name"].tolist() == ["a", "b"]
    assert table["advantage"].tolist() == [0.0, 2.0]


def test_dense_puts_values_at_their_tokens() -> None:
    table = TokenTable.from_samples(
        [sample(advantage=0.5), sample(prompt=(7,), completion=(3,), advantage=2.0)]
    )
    assert table.dense("inference_logprobs").tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, -0.1])
    assert table.dense("advantages").tolist() == [0.5, 0.5, 0.5, 0.5, 2.0, 2.0]
    assert table.dense("policy_versions").tolist() == [-1, -1, 0, 0, -1, 0]
    assert table.positions().tolist() == [0, 1, 2, 3, 0, 1]


def test_a_column_that_only_some_samples_have_is_filled_for_the_others() -> None:
    table = TokenTable.from_samples(
        [sample(advantages=[0.1, 0.2]), sample(advantage=3.0), sample(teacher_logprobs=[-1.0] * 4)]
    )
    assert table["advantages"].tolist() == pytest.approx([0.1, 0.2, 3.0, 3.0, 0.0, 0.0])
    assert np.isnan(table["teacher_logprobs"]).tolist() == [True] * 8 + [False] * 4


def test_padding_is_a_sequence_of_its_own() -> None:
    table = TokenTable.from_samples([sample()]).pad_to(8)
    assert table.lengths.tolist() == [4, 4]
    assert table["env_name"].tolist() == ["a", ""]
    assert table["loss_mask"].tolist() == [False, False, True, True] + [False] * 4
    assert table.pad_to(4) is table


def test_truncate_cuts_every_column() -> None:
    table = TokenTable.from_samples([sample(), sample(prompt=(7,), completion=(3,))]).truncate(3)
    assert table.lengths.tolist() == [3, 2]
    assert table["token_ids"].tolist() == [5, 6, 9, 7, 3]
    assert table["inference_logprobs"].tolist() == pytest.approx([-0.1, -0.1])


def test_a_column_of_the_wrong_length_is_refused() -> None:
    table = TokenTable.from_samples([sample()])
    columns = {**table.columns, "inference_logprobs": np.zeros(3, np.float32)}
    with pytest.raises(DataError, match="inference_logprobs has 3 entries; expected 2"):
        TokenTable(table.lengths, columns)


def test_a_table_of_an_export_has_values_of_every_token_and_columns_of_other_trainers() -> None:
    """Three sequences of 3, 0 and 2 tokens; nobody sampled the prompt of the first."""
    table = TokenTable(
        np.array([3, 0, 2]),
        {
            "token_ids": np.array([5, 6, 9, 7, 8], np.uint32),
            "inference_logprobs": np.array([0, -1, -2, -3, -4], np.float32),
            "entropy": np.array([1, np.nan, 2, 3, 4], np.float32),
            "sampled": np.array([False, True, True, True, True]),
            "mine": np.arange(5.0),
            "note": np.array(["a", None, "c"], object),
        },
    )
    assert table.dense("inference_logprobs").tolist() == table["inference_logprobs"].tolist()
    assert table.sampled_lengths.tolist() == [2, 0, 2] and table.prompt_lengths.tolist() == [1, 0, 0]
    assert [name for name in table.columns if not table.is_per_token(name)] == ["note"]
    assert table.owners.tolist() == [0, 0, 0, 2, 2] and table.tokens_of(np.array([2, 0])).tolist() == [
        3,
        4,
        0,
        1,
        2,
    ]
    turned = table.select([2, 0])
    assert turned["mine"].tolist() == [3, 4, 0, 1, 2] and turned["note"].tolist() == ["c", "a"]
    cut = turned.truncate(1)
    assert cut["inference_logprobs"].tolist() == [-3, 0] and cut["mine"].tolist() == [3, 0]
    assert cut["sampled"].tolist() == [True, False] and cut.get("loss_mask") is None
    without = TokenTable(np.array([1]), {"token_ids": np.array([4], np.uint32), "mine": np.array([0.5])})
    joined = TokenTable.concat([table, without])
    assert list(joined.columns) == ["token_ids", "mine"] and joined.num_tokens == 6


def inflated(table: TokenTable) -> set[str]:
    """Columns of tokens that were inflated in this table."""
    return {name for name, rows in table.columns.items() if "array" in vars(rows)} & {
        name for name, column in COLUMNS.items() if column.stored is not Axis.SEQUENCES
    }


def test_nothing_is_inflated_until_it_is_read() -> None:
    table = TokenTable.from_samples([sample(group_id="g"), sample(group_id="g")])
    micro_batch = table.truncate(3).select([1, 0])
    assert (table.num_tokens, table.num_sampled, table.num_trainable) == (8, 4, 4)
    assert (micro_batch.num_tokens, micro_batch.num_sampled, micro_batch.num_trainable) == (6, 2, 2)
    assert inflated(table) == inflated(micro_batch) == set()
    assert micro_batch["token_ids"].tolist() == [5, 6, 9] * 2
    assert inflated(table) == set() and inflated(micro_batch) == {"token_ids"}


def test_entries_of_several_numbers() -> None:
    experts = np.arange(16).reshape(4, 2, 2)
    table = TokenTable.from_samples([sample(routed_experts=experts), sample()])
    assert table["routed_experts"][:4].tolist() == experts.tolist()
    assert (table["routed_experts"][4:] == -1).all()
    joined = TokenTable.concat([table.select([0]), table.select([0]), table.padding(2)])
    assert joined["routed_experts"].shape == (10, 2, 2)
    assert (joined["routed_experts"][8:] == -1).all()
    with pytest.raises(DataError, match=r"routed_experts has entries of .*\(layers × top_k\)"):
        TokenTable.from_samples([sample(routed_experts=experts), sample(routed_experts=experts[:, :1])])


def test_masks_with_many_spans_are_bits_for_the_whole_table() -> None:
    odd = TrainingSample.from_turn(
        [1], [2] * 99, [-0.5] * 99, completion_mask=np.arange(99) % 2 == 0, env_name="a"
    )
    plain = TrainingSample.from_turn(range(300), range(300), [-0.5] * 300, env_name="a")
    table = TokenTable.from_samples([odd, plain])
    assert [type(table.columns[name]) for name in ("loss_mask", "sampled")] == [BitRows, BitRows]
    assert table.trainable_lengths.tolist() == [50, 300]
    assert table["loss_mask"].tolist() == [False] + [True, False] * 49 + [True] + [False] * 300 + [True] * 300


def _same(left: TokenTable, right: TokenTable) -> None:
    assert left.lengths.tolist() == right.lengths.tolist()
    for name in COLUMNS:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@given(st.lists(samples(), min_size=1, max_size=6), st.data())
def test_select_then_concat_gives_back_the_sequences(batch, data) -> None:
    table = TokenTable.from_samples(batch)
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = TokenTable.concat([table.select([index]) for index in order])
    back = shuffled.select(np.argsort(order))
    _same(table, back)


@given(st.lists(samples(), min_size=1, max_size=6), st.integers(1, 9))
def test_truncation_and_padding_neither_lose_nor_invent(batch, limit) -> None:
    table = TokenTable.from_samples(batch)
    cut = table.truncate(limit)
    for index in range(len(batch)):
        whole, part = table.select([index]), cut.select([index])
        assert part["token_ids"].tolist() == whole["token_ids"].tolist()[:limit]
        kept = int(whole["sampled"][:limit].sum())
        assert part["policy_versions"].tolist() == whole["policy_versions"].tolist()[:kept]
    padded = table.pad_to(limit)
    assert padded.num_tokens % limit == 0
    _same(table, padded.select(range(len(batch))))
