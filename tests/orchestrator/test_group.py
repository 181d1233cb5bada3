"""Attempts at one example: who is scored, by whom and until when; retries, timeouts and cancellations."""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import Completion, Example, Rollout
from pellucid.errors import RolloutError
from pellucid.inference.client import REFUSED
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow, State
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Environment, Score, Session
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.group import GroupRun
from pellucid.orchestrator.scheduler import Rules, Scheduler, Source
from pellucid.orchestrator.session import Sampler
from pellucid.orchestrator.verdict import Verdict

PLACEHOLDER = -7.0
SIZE = 3


class Ranked(Environment):
    """Rewards are places among the members of a group, plus ten for every earlier call of `score_group`.

    `members` and `groups` say what goes wrong with each attempt and with each call, in turn.
    """

    requires_group_scoring: ClassVar[bool] = True

    def __init__(self, members: Sequence[str] = (), groups: Sequence[str] = ()) -> None:
        super().__init__(seed=0)
        self._members = iter(members)
        self._groups = iter(groups)
        self.scored: list[list[str]] = []
        """Who took part in each call."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": "?"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        fate = next(self._members, "fine")
        if fate == "empty":
            return Score(PLACEHOLDER)
        await session.respond(example.messages)
        if fate == "fails":
            raise ZeroDivisionError("a member")
        return Score(PLACEHOLDER, {"own": 1.0})

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        assert [rollout.reward for rollout in rollouts] == [None] * SIZE
        fate = next(self._groups, "fine")
        base = 10.0 * len(self.scored)
        self.scored.append([rollout.rollout_id for rollout in rollouts])
        scores = [Score(base + place) for place in range(len(rollouts))]
        if fate == "fails":
            raise ZeroDivisionError("a group")
        if fate == "hangs":
            await asyncio.sleep(60)
        if fate == "too few":
            return scores[:-1]
        return [*scores[:-1], Score(math.nan)] if fate == "NaN" else scores


def group_of(environment: Environment, timeout_s: float = 60.0) -> GroupRun:
    tokenizer = character_tokenizer()
    client = FakeInferenceClient(lambda prompt_ids, generator: [7, tokenizer.eos_token_id])
    sampler = Sampler(client, ChatTemplate(tokenizer), "run", 0, 1.0, 100, 2000)
    return GroupRun("g0", "env", environment, environment.example(0), SIZE, sampler, timeout_s)


def keep_all(rollouts: Sequence[Rollout]) -> list[Verdict]:
    return [Verdict(rollout, Flow.SENT) for rollout in rollouts]


async def play(group: GroupRun, *, max_retries: int) -> list[Verdict]:
    """The group, attempted as the scheduler says, until it is settled."""
    rules = Rules(
        batch_size=1,
        rollouts_per_example=SIZE,
        max_inflight_rollouts=SIZE,
        max_async_level=0,
        max_off_policy_steps=0,
        max_steps=1,
        max_retries=max_retries,
    )
    scheduler = Scheduler(rules, [Source("env", group_scored=True)], keep_all)

    async def attempt(rollout_id: str) -> None:
        rollout = group.open_rollout(rollout_id)
        await group.attempt(rollout)
        scheduler.finish(rollout)

    started = False
    while not started or scheduler.is_open("g0"):
        dispatches = []
        while (dispatch := scheduler.next_dispatch()) is not None:
            dispatches.append(dispatch)
        started = True
        await asyncio.gather(*(attempt(dispatch.rollout_id) for dispatch in dispatches))
    scheduler.take_batch()
    [verdicts] = scheduler.take_settled()
    return verdicts


def rewards(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    return {verdict.rollout.rollout_id: verdict.rollout.reward for verdict in verdicts}


@pytest.mark.parametrize(
    ("fate", "error"),
    [
        ("fails", "ZeroDivisionError: a group"),
        ("too few", "return one Score per rollout, here 3, not 2"),
        ("NaN", "returned reward = nan (float); return a finite number"),
    ],
)
def test_a_group_whose_scoring_fails_is_scored_again_with_the_retried_rollout(fate: str, error: str) -> None:
    environment = Ranked(groups=[fate])
    verdicts = asyncio.run(play(group_of(environment), max_retries=1))
    first, second = environment.scored
    failed = first[-1]
    assert second == [*first[:-1], f"{failed}~1"]
    places = {name: 10.0 + place for place, name in enumerate(second)}
    assert rewards(verdicts) == {failed: None, **places}
    [lost] = [verdict.rollout for verdict in verdicts if not verdict.is_sent]
    assert lost.rollout_id == failed and error in (lost.error or "")


def test_a_group_that_is_never_scored_is_dropped_without_rewards() -> None:
    verdicts = asyncio.run(play(group_of(Ranked(groups=["fails", "fails"])), max_retries=1))
    assert set(rewards(verdicts).values()) == {None}
    states = [State.FAILED_ROLLOUT] * 2 + [State.DROPPED_GROUP] * 2
    assert [verdict.outcome for verdict in verdicts] == states


def test_an_empty_rollout_is_no_member_of_the_group_that_is_scored() -> None:
    environment = Ranked(members=["fine", "fine", "empty"])
    verdicts = asyncio.run(play(group_of(environment), max_retries=1))
    [failed] = [verdict.rollout for verdict in verdicts if not verdict.is_sent]
    assert failed.error_type == "EmptyRollout" and failed.reward is None
    assert [set(names) for names in environment.scored] == [set(rewards(verdicts)) - {failed.rollout_id}]


def test_a_group_that_hangs_in_its_scoring_is_bound_by_the_rollouts_deadline() -> None:
    environment = Ranked(groups=["hangs"])
    verdicts = asyncio.run(play(group_of(environment, timeout_s=2.0), max_retries=1))
    [failed] = [verdict.rollout for verdict in verdicts if not verdict.is_sent]
    assert (failed.error or "").startswith("TimeoutError: score_group: not finished within 2 s")
    assert len(environment.scored) == 2 and sorted(filter(None, rewards(verdicts).values())) == [10, 11, 12]


def test_parts_of_an_attempt_share_one_deadline() -> None:
    """Two thirds of the time for the conversation leave one third for the scores."""

    class Slow(Ranked):
        async def rollout(self, example: Example, session: Session) -> Score:
            score = await super().rollout(example, session)
            await asyncio.sleep(0.8)
            return score

        async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
            await asyncio.sleep(0.8)
            return await super().score_group(rollouts)

    verdicts = asyncio.run(play(group_of(Slow(), timeout_s=1.2), max_retries=0))
    failed = [verdict.rollout for verdict in verdicts if verdict.outcome is State.FAILED_ROLLOUT]
    assert failed and {rollout.error_type for rollout in failed} == {"TimeoutError"}
    assert set(rewards(verdicts).values()) == {None}


def test_a_cancelled_scoring_leaves_the_group_without_rewards() -> None:
    async def cancel() -> list[Rollout]:
        group = group_of(environment)
        rollouts = [group.open_rollout(f"g0-r{index}") for index in range(SIZE)]
        for rollout in rollouts[:-1]:
            await group.attempt(rollout)
        scoring = asyncio.create_task(group.attempt(rollouts[-1]))
        while not environment.scored:
            await asyncio.sleep(0)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert [rollout.error_type for rollout in rollouts] == [None, None, "CancelledError"]
        assert [rollout.reward for rollout in rollouts] == [None] * SIZE
        again = group.open_rollout("g0-r2~1")
        await group.attempt(again)
        return [*rollouts[:-1], again]

    environment = Ranked(groups=["hangs"])
    assert [rollout.reward for rollout in asyncio.run(cancel())] == [10, 11, 12]


def test_group_scores_keep_the_metrics_that_they_do_not_replace() -> None:
    verdicts = asyncio.run(play(group_of(Ranked()), max_retries=0))
    assert all(verdict.rollout.metrics == {"own": 1.0} for verdict in verdicts)


class Undaunted(Ranked):
    """Asks twice, and takes whatever the session raises for an empty reply."""

    requires_group_scoring: ClassVar[bool] = False

    async def rollout(self, example: Example, session: Session) -> Score:
        for _ in range(2):
            with contextlib.suppress(RolloutError):
                await session.respond(example.messages)
        return Score(1.0)


class Refusing(FakeInferenceClient):
    """Stands for a pool that does not believe the server's first answer."""

    async def generate(self, *arguments: Any) -> Completion:
        is_first = not self.delivered
        completion = await super().generate(*arguments)
        return msgspec.structs.replace(completion, finish_reason=REFUSED) if is_first else completion


def test_refused_tokens_fail_the_rollout_even_if_its_environment_goes_on() -> None:
    async def attempt() -> Rollout:
        group = group_of(Undaunted())
        group.sampler.client = Refusing(lambda prompt_ids, generator: [7, 8])
        rollout = group.open_rollout("g0-r0")
        await group.attempt(rollout)
        return rollout

    rollout = asyncio.run(attempt())
    assert [turn.finish_reason for turn in rollout.turns] == [REFUSED, "stop"]
    assert (rollout.error_type, rollout.reward) == ("RolloutError", None)
    assert rollout.error == (
        "RolloutError: tokens of this rollout were refused; the environment went on without them"
    )


def test_an_error_with_half_a_character_can_be_written_down() -> None:
    """As of a reply that was cut between the two halves of an emoji in UTF-16."""

    class Halved(Ranked):
        async def rollout(self, example: Example, session: Session) -> Score:
            raise ValueError("no answer in '\ud83d'")

    async def attempt() -> Rollout:
        group = group_of(Halved())
        rollout = group.open_rollout("g0-r0")
        await group.attempt(rollout)
        return rollout

    rollout = asyncio.run(attempt())
    assert (rollout.error or "").startswith(r"ValueError: no answer in '\ud83d' (")
    assert r"ValueError: no answer in '\ud83d'" in rollout.traceback
    assert msgspec.json.decode(msgspec.json.encode([rollout.error, rollout.traceback])) == [
        rollout.error,
        rollout.traceback,
    ]


@given(
    members=st.lists(st.sampled_from(["fine", "fine", "fails", "empty"]), max_size=9),
    groups=st.lists(st.sampled_from(["fails", "too few", "NaN"]), max_size=4),
    max_retries=st.integers(0, 3),
)
@settings(deadline=None, max_examples=60)
def test_what_trains_was_scored_together(members: list[str], groups: list[str], max_retries: int) -> None:
    """Whatever fails and is attempted again: all members of a group have their rewards from one call."""
    environment = Ranked(members, groups)
    verdicts = asyncio.run(play(group_of(environment), max_retries=max_retries))
    sent = {verdict.rollout.rollout_id: verdict.rollout.reward for verdict in verdicts if verdict.is_sent}
    if sent:
        last = environment.scored[-1]
        assert sent == {name: 10.0 * (len(environment.scored) - 1) + last.index(name) for name in last}
    for verdict in verdicts:
        assert verdict.is_sent or verdict.rollout.reward is None
