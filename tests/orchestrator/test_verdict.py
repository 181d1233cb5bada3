import gc
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.config import DefaultAdvantageConfig
from pellucid.data import Completion, Example, PackedArray, Rollout, TokenTable, TrainingSample, Turn
from pellucid.errors import DataError
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.verdict import Judge, build_samples


def turn(
    prompt: list[int],
    sampled: list[int],
    *runs: tuple[int, int],
    logprob: float = -0.5,
    experts: PackedArray | None = None,
) -> Turn:
    completion = Completion(sampled, [logprob - token for token in sampled], list(runs), "stop", experts)
    spans = [("user", 0, len(prompt)), ("assistant", len(prompt), len(prompt) + len(sampled))]
    return Turn(prompt, completion, "", spans)


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
        "role_spans": [("user", 0, 2), ("assistant", 2, 5)],
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
    judge = Judge("run", load_advantage(DefaultAdvantageConfig()), filter_zero_advantages=False)
    verdicts = judge(rollouts)
    assert [verdict.advantage for verdict in verdicts] == advantages
    assert [verdict.samples for verdict in verdicts] == alone
    assert [len(samples) for samples in alone] == [2, 0, 1]


class Step(NamedTuple):
    """One more turn: which earlier one it goes on from, what is put after it, and what is sampled."""

    parent: int
    added: list[int]
    sampled: list[int]
    stale_parent: bool


steps = st.builds(
    Step,
    st.integers(-1, 30),
    st.lists(st.integers(1, 3), max_size=3),
    st.lists(st.integers(1, 3), max_size=3),
    st.booleans(),
)


def told_apart(turns: Sequence[tuple[list[int], Completion]]) -> list[tuple[list[int], list[int]]]:
    """Token ids and turns of every sample, by lists: a turn joins the last branch that it extends."""
    branches: list[list[int]] = []
    for index, (prompt, completion) in enumerate(turns):
        if completion.token_ids:
            for branch in reversed(branches):
                last_prompt, last = turns[branch[-1]]
                known = [*last_prompt, *last.token_ids]
                if prompt[: len(known)] == known:
                    branch.append(index)
                    break
            else:
                branches.append([index])
    return [([*turns[branch[-1]][0], *turns[branch[-1]][1].token_ids], branch) for branch in branches]


@given(st.lists(steps, min_size=1, max_size=12))
def test_turns_that_share_their_tokens_give_the_samples_of_turns_that_do_not(
    conversation: list[Step],
) -> None:
    """Whatever goes on from whatever: the end of a line, the middle of one, or a turn without tokens."""
    whole: list[tuple[list[int], Completion]] = []
    shared: list[Turn] = []
    for number, step in enumerate(conversation):
        parent = step.parent if step.parent < len(whole) else len(whole) - 1
        known = [] if parent < 0 else [*whole[parent][0], *whole[parent][1].token_ids]
        prompt = [*known, *step.added] or [9]
        tokens = [*prompt, *step.sampled]  # what a token's experts depend on: all up to it
        record = experts(*(hash(tuple(tokens[: place + 1])) % 251 for place in range(len(tokens) - 1)))
        logprobs = [-(number + 1) / 16] * len(step.sampled)
        completion = Completion(step.sampled, logprobs, [(number, len(step.sampled))], "stop", record)
        spans = [("user", 0, len(prompt)), ("assistant", len(prompt), len(prompt) + len(step.sampled))]
        whole.append((prompt, completion))
        last = None if parent < 0 or step.stale_parent else shared[parent]
        before = [] if last is None else last.role_spans
        own = [*before, (f"tool{number}", len(known), len(prompt)), spans[-1]]
        shared.append(Turn(prompt, completion, "", own, goes_on_from=last))
        assert shared[-1].role_spans == own

    for turn, (prompt, completion) in zip(shared, whole, strict=True):
        assert [part.tolist() for part in turn.tokens[:2]] == [prompt, completion.token_ids]
    expected = told_apart(whole)
    samples = samples_of(*shared)
    assert [sample.arrays["token_ids"].array().tolist() for sample in samples] == [ids for ids, _ in expected]
    for sample, (token_ids, branch) in zip(samples, expected, strict=True):
        completions = [whole[index][1] for index in branch]
        logprobs = [value for each in completions for value in each.logprobs]
        assert sample.arrays["inference_logprobs"].array().tolist() == logprobs
        expected_experts = [hash(tuple(token_ids[: place + 1])) % 251 for place in range(len(token_ids) - 1)]
        recorded = sample.arrays["routed_experts"].array()[:, 0, 0].tolist()
        assert recorded == [*expected_experts, *expected_experts[-1:]]


def test_200_turns_hold_what_their_tokens_take() -> None:
    """Each prompt is all that came before: stored anew, 200 of them took 13.5 MB. Texts are left aside."""
    num_turns, num_added, num_sampled = 200, 70, 100
    prompt: list[int] = list(range(500))
    logprobs = [-0.5] * num_sampled
    spans: list[tuple[str, int, int]] = [("user", 0, 500)]
    gc.collect()
    tracemalloc.start()
    try:
        turns: list[Turn] = []
        for _ in range(num_turns):
            completion = Completion(list(range(num_sampled)), logprobs, [(0, num_sampled)], "stop")
            reply = ("assistant", len(prompt), len(prompt) + num_sampled)
            turns.append(Turn(prompt, completion, "", [*spans, reply], True, turns[-1] if turns else None))
            prompt = [*prompt, *completion.token_ids, *range(num_added)]
            spans = [*spans, reply, ("tool", reply[2], len(prompt))]
        num_tokens = turns[-1].num_prompt_tokens + num_sampled
        del prompt, spans, completion, reply
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tokens_bytes = 4 * num_tokens + 4 * num_turns * num_sampled + 2 * num_tokens // 8  # ids, logprobs, masks
    assert held <= 1.6 * tokens_bytes, (held, tokens_bytes)  # a tenth is Python objects
    assert len(samples_of(*turns)) == 1
