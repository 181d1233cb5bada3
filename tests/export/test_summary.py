"""Summaries: distributions that add up, quantiles that are close, worst tokens that are the worst."""

import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import given

import pellucid.export
from pellucid.data import TokenTable
from pellucid.export.distribution import MAX_BLOCKS, Distribution, PerPosition, edges
from pellucid.export.summary import NUM_WORST, StepSummary
from token_exports import write_run

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=1, max_size=50), st.integers(0, 50))
def test_parts_add_up_to_the_whole(values, cut) -> None:
    whole, left, right = Distribution(), Distribution(), Distribution()
    whole.add(np.array(values, np.float32))
    left.add(np.array(values[:cut], np.float32))
    right.add(np.array(values[cut:], np.float32))
    left.merge(Distribution.from_dict(orjson.loads(orjson.dumps(right.as_dict([])))))
    assert (left.count, left.min, left.max) == (whole.count, whole.min, whole.max)
    assert (left.bins == whole.bins).all() and whole.bins.sum() == len(values)
    assert left.sum == pytest.approx(whole.sum, rel=1e-12, abs=1e-12 * np.abs(values).max())


@given(st.floats(-(2.0**126), 2.0**126, width=32).filter(lambda value: abs(value) > 1e-37))
def test_a_value_lies_in_its_bin(value) -> None:
    distribution = Distribution()
    distribution.add(np.array([value], np.float32))
    (place,) = np.flatnonzero(distribution.bins)
    low, high = (float(edge[0]) for edge in edges(np.array([place])))
    assert low <= value <= high and high - low <= abs(value) / 16


def test_bins_of_the_worked_example() -> None:
    low, high = edges(np.array([2063, 6128]))
    assert low.tolist() == [-1.0625, 1.0] and high.tolist() == [-1.0, 1.0625]


def test_quantiles_are_close_and_nothing_else_is_lost() -> None:
    values = np.random.default_rng(0).lognormal(-5, 2, 20_000).astype(np.float32)
    distribution = Distribution()
    distribution.add(np.concatenate([values, [np.nan, np.inf]]))
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert distribution.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.01)
    assert (distribution.quantile(0.0), distribution.quantile(1.0)) == (values.min(), values.max())
    assert distribution.mean == pytest.approx(values.mean(dtype=np.float64))
    assert distribution.std == pytest.approx(values.std(dtype=np.float64))
    assert Distribution().quantile(0.5) is None


def test_blocks_of_positions_grow() -> None:
    positions = PerPosition()
    positions.add("entropy", np.array([0, 1, 1]), np.array([1.0, 2.0, 4.0]))
    assert positions.means("entropy").tolist() == [1.0, 3.0]
    other = PerPosition()
    other.add("entropy", np.array([0, 2 * MAX_BLOCKS]), np.array([3.0, 5.0]))
    assert other.block == 4 and len(other.sums["entropy"]) == MAX_BLOCKS // 2 + 1
    positions.merge(other)
    assert positions.means("entropy")[[0, -1]].tolist() == [10 / 4, 5.0]
    assert other.counts["entropy"].sum() == 2


def batch_of(num_tokens: int, start: int = 0, env: str = "a") -> TokenTable:
    """One sequence, its entropies counting up."""
    text = {"env_name": env, "training_mode": "rl", "group_id": "g", "rollout_id": f"r{start}"}
    numbers = {"step": 0, "rank": 0, "export_sequence_idx": start}
    return TokenTable(
        np.array([num_tokens]),
        {
            **{name: np.array([value], object) for name, value in text.items()},
            **{name: np.array([value]) for name, value in numbers.items()},
            "token_ids": np.arange(num_tokens, dtype=np.uint32),
            "position_ids": np.arange(num_tokens),
            "loss_mask": np.arange(num_tokens) > 0,
            "entropy": np.arange(start, start + num_tokens).astype(np.float32),
            "is_masked": np.arange(num_tokens) == 2,
            "reward": np.array([0.5], np.float32),
        },
    )


def test_worst_tokens_are_the_worst_of_all_parts() -> None:
    summary, other = StepSummary(), StepSummary()
    summary.add(batch_of(100))
    other.add(batch_of(10, start=90))
    summary.merge(StepSummary.from_dict(orjson.loads(orjson.dumps(other.as_dict()))))
    (part,) = summary.parts
    assert len(part.worst["entropy"]) == NUM_WORST
    assert [token["value"] for token in part.worst["entropy"]][:4] == [99.0, 99.0, 98.0, 98.0]
    assert part.worst["entropy"][1] == {
        "value": 99.0,
        "rank": 0,
        "export_sequence_idx": 90,
        "rollout_id": "r90",
        "token": 9,
        "token_id": 9,
    }
    assert part.counts == {
        "sequences": 2, "tokens": 110, "trainable": 108, "masked": 2, "masked_high": 0, "masked_low": 0
    }  # fmt: skip
    assert set(part.metrics) == {"entropy"}


def test_names_of_any_characters_stay_apart_and_come_back() -> None:
    names = ["a", "a\0", "a\0b", "\x1b[31m", "é\n"]
    summary = StepSummary()
    for number, env in enumerate(names):
        summary.add(batch_of(3 + number, env=env))
    found = StepSummary.from_json(orjson.dumps(summary.as_dict(), option=orjson.OPT_SERIALIZE_NUMPY))
    assert {part.env_name: part.counts["tokens"] for part in found.parts} == {
        env: 3 + number for number, env in enumerate(names)
    }


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_the_writer_leaves_is_what_the_records_give(tmp_path, format) -> None:
    export = pellucid.export.open(write_run(tmp_path, format=format))
    written = export.summary(1)
    (tmp_path / "token_exports" / "step_1" / "summary.rank_0.json").unlink()
    assert orjson.dumps(written.as_dict()) == orjson.dumps(export.summary(1).as_dict())
    envs = [(part.env_name, part.training_mode, part.counts["masked"]) for part in written.parts]
    assert envs == [("a", "rl", 0), ("a", "sft", 0), ("b", "rl", 1), ("b", "sft", 0)]
    total = written.total()
    assert (total.counts["sequences"], total.counts["trainable"]) == (4, 6)
    assert total.metrics["entropy"].count == 6 and total.metrics["mismatch_kl"].count == 3
    assert total.worst["mismatch_kl"][0]["value"] == pytest.approx(np.exp(1.5) - 2.5)
    assert total.reward.mean == 0.5


def versioned(env: str, rank: int, versions: list[int], reward: float, stop: str) -> TokenTable:
    """One sequence whose first token is a prompt; the KL of a token is its version ÷ 8."""
    batch = batch_of(len(versions), env=env)
    columns = {
        **batch.columns,
        "rank": np.array([rank]),
        "policy_versions": np.array(versions, np.int32),
        "mismatch_kl": np.array(versions, np.float32) / 8,
        "reward": np.array([reward], np.float32),
        "stop_reason": np.array([stop], object),
    }
    return TokenTable(batch.lengths, columns)


def test_slices_are_by_rank_and_by_the_oldest_weights() -> None:
    batches = [
        versioned("a", 0, [-1, 4, 4], 1.0, "stop"),
        versioned("a", 0, [-1, 5, 4, 4], 0.0, "length"),
        versioned("a", 1, [-1, 5], 0.5, "stop"),
        versioned("b", 0, [-1, 4], 1.0, "stop"),
    ]
    at_once, one_by_one = StepSummary(), StepSummary()
    at_once.add(TokenTable.concat(batches))
    for batch in batches:
        own = StepSummary()
        own.add(batch)
        one_by_one.merge(StepSummary.from_dict(orjson.loads(orjson.dumps(own.as_dict()))))
    for summary in (at_once, one_by_one):
        first, _ = summary.parts
        assert [owner for owner, _ in first.slices] == [(0, 4), (1, 5)]
        found = dict(first.slices)[0, 4]
        assert found.counts == {
            "sequences": 2, "tokens": 7, "trainable": 5,
            "masked_high": 0, "masked_low": 0, "ended": 2, "cut": 1,
        }  # fmt: skip
        assert found.reward.mean == 0.5 and found.kl.count == 5
        assert found.kl.mean == (4 * 0.5 + 0.625) / 5 and found.kl.max == 0.625
        total = dict(summary.total().slices)
        assert total[0, 4].counts["sequences"] == 3 and total[1, 5].entropy.mean == 1.0
    assert dict(at_once.total().slices)[0, 4].as_dict() == dict(one_by_one.total().slices)[0, 4].as_dict()


def test_a_summary_with_less_is_made_again(tmp_path) -> None:
    export = pellucid.export.open(write_run(tmp_path))
    path = tmp_path / "token_exports" / "step_1" / "summary.rank_0.json"
    written = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({"version": 1, "parts": []}))
    assert export.summary(1).as_dict() == written
