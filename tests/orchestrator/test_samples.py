import numpy as np
import pytest

from pellucid.data import Completion, Example, PackedArray, Rollout, TokenTable, TrainingSample, Turn
from pellucid.errors import DataError
from pellucid.orchestrator.samples import build_group, build_samples


def turn(
    prompt: list[int],
    sampled: list[int],
    *runs: tuple[int, int],
    logprob: float = -0.5,
    experts: PackedArray | None = None,
) -> Turn:
    completion = Completion(sampled, [logprob - token for token in sampled], list(runs), "stop", experts)
    return Turn(prompt, completion, "", [("user", 0, len(prompt)), ("assistant", len(prompt), 99)])


def samples_of(*turns: Turn) -> list[TrainingSample]:
    rollout = Rollout("g4-r1", "g4", Example("17", []), "env", 0.7, list(turns), reward=0.25)
    return build_samples(rollout, run_id="run", advantage=-0.5)


def test_a_single_turn() -> None:
    [sample] = samples_of(turn([5, 6], [9, 8, 7], (3, 1), (4, 2)))
    table = TokenTable.from_samples([sample])
    assert table["token_ids"].tolist() == [5, 6, 9, 8, 7]
    assert table["sampled"].tolist() == table["loss_mask"].tolist() == [False, False, True, True, True]
    assert table["inference_logprobs"].tolist() == [-9.5, -8.5, -7.5]
    assert table["policy_versions"].tolist() == [3, 4, 4]
    assert dict(sample.values) == {
        "run_id": "run",
        "group_id": "g4",
        "rollout_id": "g4-r1",
        "sample_id": "g4-r1-0",
        "env_name": "env",
        "example_id": "17",
        "reward": 0.25,
        "advantage": -0.5,
        "temperature": 0.7,
        "stop_reason": "stop",
        "role_spans": [("user", 0, 2), ("assistant", 2, 99)],
        "training_mode": "rl",
    }


def test_turns_that_extend_each_other_are_one_sample_and_others_branch() -> None:
    first = turn([1, 2], [10, 11], (0, 2))
    second = turn([1, 2, 10, 11, 3], [12], (1, 1))
    branch = turn([1, 2, 3], [13, 14], (1, 2))
    merged, own = samples_of(first, second, branch)
    table = TokenTable.from_samples([merged, own])
    assert table.lengths.tolist() == [6, 5]
    assert table["token_ids"].tolist() == [1, 2, 10, 11, 3, 12, 1, 2, 3, 13, 14]
    assert np.flatnonzero(table["sampled"]).tolist() == [2, 3, 5, 9, 10]
    assert table["policy_versions"].tolist() == [0, 0, 1, 1, 1]
    assert table["sample_id"].tolist() == ["g4-r1-0", "g4-r1-1"]


def test_turns_of_conversations_that_interleave_find_their_own() -> None:
    a0, b0 = turn([1, 2], [10, 11], (0, 2)), turn([5], [20], (0, 1))
    a1, b1 = turn([1, 2, 10, 11, 3], [12], (1, 1)), turn([5, 20, 6], [21], (1, 1))
    a2 = turn([1, 2, 10, 11, 4], [13], (1, 1))
    table = TokenTable.from_samples(samples_of(a0, b0, a1, b1, a2))
    assert table["token_ids"].tolist() == [1, 2, 10, 11, 3, 12, 5, 20, 6, 21, 1, 2, 10, 11, 4, 13]
    assert np.flatnonzero(table["sampled"]).tolist() == [2, 3, 5, 7, 9, 15]
    assert table["policy_versions"].tolist() == [0, 0, 1, 0, 1, 1]


def test_what_shall_not_train_is_sampled_all_the_same() -> None:
    withdrawn = turn([1, 2, 3, 4], [5], (0, 1))
    withdrawn.trainable = False
    [sample] = samples_of(turn([1], [2, 3], (0, 2)), withdrawn)
    table = TokenTable.from_samples([sample])
    assert table["sampled"].tolist() == [False, True, True, False, True]
    assert table["loss_mask"].tolist() == [False, True, True, False, False]


def test_a_turn_in_which_nothing_was_sampled_is_no_sample() -> None:
    empty = turn([1, 2, 7], [])
    [sample] = samples_of(empty, turn([1, 2], [10], (0, 1)), empty, turn([1, 2, 10, 3], [12], (0, 1)))
    assert TokenTable.from_samples([sample])["token_ids"].tolist() == [1, 2, 10, 3, 12]


def test_a_changed_token_is_a_branch() -> None:
    assert len(samples_of(turn([1, 2], [10, 11], (0, 2)), turn([1, 2, 10, 99, 3], [12], (0, 1)))) == 2


def experts(*values: int) -> PackedArray:
    """One layer, one expert per token."""
    return PackedArray.pack(np.array(values, np.uint8).reshape(-1, 1, 1))


def test_experts_of_turns_that_are_merged_and_of_a_branch() -> None:
    first = turn([1, 2], [10, 11], (0, 2), experts=experts(3, 4, 5))
    second = turn([1, 2, 10, 11, 3], [12], (1, 1), experts=experts(0, 0, 0, 6, 7))
    branch = turn([1, 2, 3], [13, 14], (1, 2), experts=experts(1, 1, 1, 2))
    table = TokenTable.from_samples(samples_of(first, second, branch))
    assert table["routed_experts"].dtype == np.uint8
    assert table["routed_experts"][:, 0, 0].tolist() == [3, 4, 5, 6, 7, 7, 1, 1, 1, 2, 2]


def test_a_sample_has_no_experts_where_a_turn_of_it_has_none() -> None:
    first = turn([1, 2], [10, 11], (0, 2), experts=experts(3, 4, 5))
    [sample] = samples_of(first, turn([1, 2, 10, 11, 3], [12], (1, 1)))
    assert "routed_experts" not in sample.arrays


def test_experts_that_do_not_fit_the_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="routed_experts has 3 entries; expected 4"):
        samples_of(turn([1, 2], [10, 11], (0, 2), experts=experts(3, 4)))


def test_what_cannot_train_is_refused() -> None:
    with pytest.raises(DataError, match="not finite"):
        samples_of(turn([1], [2], (0, 1), logprob=float("nan")))


def test_a_group_gives_the_samples_of_each_rollout() -> None:
    first = [turn([1, 2], [10, 11], (0, 2)), turn([1, 2, 3], [13, 14], (1, 2))]
    rollouts = [
        Rollout("g4-r0", "g4", Example("17", []), "env", 0.7, first, reward=0.25),
        Rollout("g4-r1", "g4", Example("17", []), "env", 0.7, [], reward=0.5),
        Rollout("g4-r2", "g4", Example("17", []), "env", 0.7, first[:1], reward=0.75),
    ]
    advantages = [-0.25, 0.0, 0.25]
    alone = [
        build_samples(rollout, run_id="run", advantage=advantage)
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]
    assert build_group(rollouts, advantages, run_id="run") == alone
    assert [len(samples) for samples in alone] == [2, 0, 1]
