"""Small cases by hand, and the invariants under random schedules."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from pellucid.data import Completion, Example, Rollout, TrainingSample, Turn
from pellucid.ledger import Flow, State
from pellucid.orchestrator.scheduler import Dispatch, Rules, Scheduler, Source
from pellucid.orchestrator.verdict import Verdict


def keep_all(rollouts: Sequence[Rollout]) -> list[Verdict]:
    return [Verdict(rollout, Flow.SENT, advantage=1.0) for rollout in rollouts]


def by_reward(rollouts: Sequence[Rollout]) -> list[Verdict]:
    """Reward 0 carries no signal, a negative one cannot train."""
    outcomes = {0: State.ZERO_ADVANTAGE, -1: State.REJECTED, 1: Flow.SENT}
    return [Verdict(rollout, outcomes[int(rollout.reward or 0)]) for rollout in rollouts]


def make(judge=keep_all, sources: Sequence[Source] = (Source("env"),), **changes: int) -> Scheduler:
    rules = {
        "batch_size": 4,
        "rollouts_per_example": 2,
        "max_inflight_rollouts": 8,
        "max_async_level": 1,
        "max_off_policy_steps": 2,
        "max_steps": 10,
    }
    return Scheduler(Rules(**{**rules, **changes}), sources, judge)


def come_back(
    dispatch: Dispatch,
    *,
    num_tokens: int = 3,
    version: int = 0,
    reward: float = 1.0,
    error: str | None = None,
) -> Rollout:
    completion = Completion([1] * num_tokens, [-0.5] * num_tokens, [(version, num_tokens)], "stop")
    turns = [Turn([5], completion, "")]
    return Rollout(
        dispatch.rollout_id,
        dispatch.group_id,
        Example(str(dispatch.example_index), []),
        dispatch.env_name,
        1.0,
        turns,
        reward,
        error=error,
    )


def dispatch_all(scheduler: Scheduler) -> list[Dispatch]:
    dispatches = []
    while (dispatch := scheduler.next_dispatch()) is not None:
        dispatches.append(dispatch)
    return dispatches


def outcomes(scheduler: Scheduler) -> list[list[tuple[str, str]]]:
    return [
        [(verdict.rollout.rollout_id, verdict.outcome.value) for verdict in group]
        for group in scheduler.take_settled()
    ]


def test_groups_start_for_the_batches_within_reach() -> None:
    """Level 1 at version 0: batches 0 and 1, eight rollouts, and no more."""
    scheduler = make(max_inflight_rollouts=100)
    dispatches = dispatch_all(scheduler)
    assert [dispatch.rollout_id for dispatch in dispatches] == [
        f"g{g}-r{r}" for g in range(4) for r in (0, 1)
    ]
    assert [dispatch.example_index for dispatch in dispatches] == [0, 0, 1, 1, 2, 2, 3, 3]
    for dispatch in dispatches:
        scheduler.finish(come_back(dispatch))
    assert [len(scheduler.take_batch() or []) for _ in range(2)] == [4, 4]
    assert scheduler.take_batch() is None
    assert scheduler.waits_for_weights and scheduler.next_dispatch() is None
    scheduler.update_policy(1)
    assert not scheduler.waits_for_weights
    assert len(dispatch_all(scheduler)) == 4


def test_the_last_batches_need_no_more_than_they_hold() -> None:
    scheduler = make(max_steps=1, max_async_level=5, max_inflight_rollouts=100)
    assert len(dispatch_all(scheduler)) == 4


def test_level_zero_leaves_nothing_in_flight_when_a_batch_is_complete() -> None:
    scheduler = make(max_async_level=0, batch_size=5, max_inflight_rollouts=100)
    first = dispatch_all(scheduler)
    assert len(first) == 6
    for dispatch in first[:-1]:
        scheduler.finish(come_back(dispatch))
        assert scheduler.take_batch() is None
    scheduler.finish(come_back(first[-1]))
    assert len(scheduler.take_batch() or []) == 6 and scheduler.num_inflight == 0


def test_capacity_dispatches_a_group_one_by_one() -> None:
    scheduler = make(max_inflight_rollouts=3)
    first = dispatch_all(scheduler)
    assert [dispatch.rollout_id for dispatch in first] == ["g0-r0", "g0-r1", "g1-r0"]
    scheduler.finish(come_back(first[2]))
    assert scheduler.num_ready == 0
    assert [dispatch.rollout_id for dispatch in dispatch_all(scheduler)] == ["g1-r1"]


def test_groups_that_end_together_are_judged_together() -> None:
    """What becomes of them is what would have become of each alone; a failed rollout is not judged."""
    judged: list[list[str]] = []

    def judge(rollouts):
        judged.append([rollout.rollout_id for rollout in rollouts])
        return by_reward(rollouts)

    scheduler = make(judge)
    a, b, c, d, *_ = dispatch_all(scheduler)
    fates = {"reward": 0.0}, {"error": "ValueError: no"}, {"reward": 0.0}, {"reward": 1.0}
    order = (c, fates[0]), (a, fates[2]), (b, fates[1]), (d, fates[3])
    scheduler.finish(*(come_back(dispatch, **fate) for dispatch, fate in order))
    assert judged == [["g0-r0", "g1-r0", "g1-r1"]]
    assert outcomes(scheduler) == [[("g0-r1", "failed_rollout"), ("g0-r0", "zero_advantage")]]
    assert scheduler.num_ready == 1 and scheduler.is_open("g2") and not scheduler.is_open("g1")


def test_a_failed_rollout_is_scrapped_alone() -> None:
    scheduler = make(batch_size=1)
    a, b, *_ = dispatch_all(scheduler)
    scheduler.finish(come_back(a, error="ValueError: no"))
    assert scheduler.take_settled() == [] and scheduler.take_batch() is None
    scheduler.finish(come_back(b))
    batch = scheduler.take_batch()
    assert batch is not None and [verdict.rollout.rollout_id for verdict in batch] == ["g0-r1"]
    [[failed, sent]] = scheduler.take_settled()
    assert (failed.outcome, failed.reason) == (State.FAILED_ROLLOUT, "ValueError: no")
    assert sent.outcome is Flow.SENT and scheduler.drought.num_groups == 0


def test_a_drought_lasts_until_a_group_has_something_to_send() -> None:
    """Groups that are lost whole count apart from those that survive without an advantage."""
    scheduler = make(by_reward, max_off_policy_steps=0, max_async_level=9, batch_size=2)
    counts = []

    def come_back_twice(**fate: float | str) -> None:
        for _ in range(2):
            dispatch = scheduler.next_dispatch()
            assert dispatch is not None
            scheduler.finish(come_back(dispatch, **fate))
        counts.append((scheduler.drought.num_groups, scheduler.drought.num_fruitless))

    come_back_twice()
    assert scheduler.take_batch() is not None and sum(map(len, scheduler.settled)) == 2
    come_back_twice(version=0)  # stale
    come_back_twice(version=1, reward=-1)  # rejected
    come_back_twice(version=1, reward=0)  # no advantage
    come_back_twice(version=1, error="ValueError: no")
    assert counts == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)] and sum(map(len, scheduler.settled)) == 10
    come_back_twice(version=1)
    assert counts[-1] == (0, 0) and sum(map(len, scheduler.settled)) == 10


def test_a_group_that_cannot_be_judged_is_not_lost() -> None:
    def refuse(rollouts: Sequence[Rollout]) -> list[Verdict]:
        raise ValueError("no advantages today")

    scheduler = make(refuse)
    a, b, *_ = dispatch_all(scheduler)
    scheduler.finish(come_back(a))
    with pytest.raises(ValueError, match="no advantages today"):
        scheduler.finish(come_back(b))
    scheduler.stop()
    assert [("g0-r0", "cancelled"), ("g0-r1", "cancelled")] in outcomes(scheduler)


def test_a_group_scored_environment_loses_the_group_with_any_rollout() -> None:
    scheduler = make(sources=[Source("env", group_scored=True)])
    a, b, *_ = dispatch_all(scheduler)
    scheduler.finish(come_back(a))
    scheduler.finish(come_back(b, error="ValueError: no"))
    [[failed, dropped]] = scheduler.take_settled()
    assert failed.outcome is State.FAILED_ROLLOUT
    assert dropped.outcome is State.DROPPED_GROUP and dropped.reason.startswith("1 of 2 rollouts")
    assert scheduler.drought.num_fruitless == 1


def test_a_group_scored_group_starts_at_once_or_not_yet() -> None:
    scheduler = make(sources=[Source("env", group_scored=True)], max_inflight_rollouts=3)
    first = dispatch_all(scheduler)
    assert len(first) == 2
    scheduler.finish(come_back(first[0]))
    assert len(dispatch_all(scheduler)) == 2


def test_zero_advantages_are_settled_before_the_batch_is_counted() -> None:
    scheduler = make(by_reward, batch_size=3)
    for dispatch, reward in zip(dispatch_all(scheduler)[:6], [0, 0, 1, 0, 1, 1], strict=True):
        scheduler.finish(come_back(dispatch, reward=reward))
    batch = scheduler.take_batch()
    assert batch is not None
    assert [verdict.rollout.rollout_id for verdict in batch] == ["g1-r0", "g2-r0", "g2-r1"]
    assert outcomes(scheduler) == [
        [("g0-r0", "zero_advantage"), ("g0-r1", "zero_advantage")],
        [("g1-r0", "sent"), ("g1-r1", "zero_advantage")],
        [("g2-r0", "sent"), ("g2-r1", "sent")],
    ]


def test_groups_are_never_cut_and_the_surplus_opens_the_next_batch() -> None:
    scheduler = make(batch_size=3)
    for dispatch in dispatch_all(scheduler):
        scheduler.finish(come_back(dispatch))
    assert len(scheduler.take_batch() or []) == 4
    assert scheduler.num_ready == 2


def test_stale_groups_are_dropped_when_the_step_advances() -> None:
    """Bound 2: a token of version 0 may train at step 2 and no later."""
    scheduler = make(batch_size=2, max_async_level=9)
    dispatches = dispatch_all(scheduler)
    for dispatch, version in zip(dispatches, [0, 0, 1, 1, 2, 2, 0, 3], strict=True):
        scheduler.finish(come_back(dispatch, version=version))
    for step in range(3):
        assert len(scheduler.take_batch() or []) == 2, step
    settled = scheduler.take_settled()
    assert [verdict.outcome for verdict in settled[-1]] == [State.STALE, State.STALE]
    assert settled[-1][0].reason == (
        "oldest token of policy version 0 at step 3; orchestrator.max_off_policy_steps = 2"
    )


def test_a_group_that_comes_back_too_late_is_stale_at_once() -> None:
    scheduler = make(by_reward, batch_size=2, max_async_level=9, max_off_policy_steps=0)
    dispatches = dispatch_all(scheduler)
    for dispatch in dispatches[:2]:
        scheduler.finish(come_back(dispatch))
    assert scheduler.take_batch() is not None
    scheduler.finish(come_back(dispatches[2], error="ValueError: no"))
    scheduler.finish(come_back(dispatches[3], reward=0))
    assert outcomes(scheduler)[-1] == [("g1-r0", "failed_rollout"), ("g1-r1", "stale")]


def test_sources_get_their_share_and_count_their_own_examples() -> None:
    sources = [Source("a", weight=3), Source("b", weight=1)]
    scheduler = make(sources=sources, batch_size=100, rollouts_per_example=1, max_inflight_rollouts=8)
    dispatches = dispatch_all(scheduler)
    assert [dispatch.env_name for dispatch in dispatches] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert [d.example_index for d in dispatches if d.env_name == "a"] == [0, 1, 2, 3, 4, 5]
    assert [d.example_index for d in dispatches if d.env_name == "b"] == [0, 1]


def test_stop_cancels_what_is_open_and_holds_what_is_ready() -> None:
    scheduler = make(batch_size=100, max_inflight_rollouts=5)
    dispatches = dispatch_all(scheduler)
    for dispatch in dispatches[:3]:
        scheduler.finish(come_back(dispatch))
    scheduler.stop()
    assert scheduler.next_dispatch() is None
    scheduler.finish(come_back(dispatches[3], error="RolloutError: cut short"))
    scheduler.finish(come_back(dispatches[4]))
    assert outcomes(scheduler) == [
        [("g1-r0", "cancelled"), ("g1-r1", "cancelled")],
        [("g2-r0", "cancelled")],
    ]
    state = scheduler.state()
    assert [[verdict.rollout.rollout_id for verdict in each] for each in state.ready] == [["g0-r0", "g0-r1"]]
    assert state.unfinished == [("env", 1), ("env", 2)]


def test_a_resumed_run_attempts_again_what_was_open_and_skips_no_example() -> None:
    before = make(batch_size=4, max_inflight_rollouts=7)
    dispatches = dispatch_all(before)
    for dispatch in (*dispatches[:4], *dispatches[6:]):
        before.finish(come_back(dispatch))
    before.take_batch()
    assert [(d.group_id, d.example_index) for d in dispatches[4:]] == [("g2", 2), ("g2", 2), ("g3", 3)]

    resumed = make(batch_size=4, max_inflight_rollouts=7)
    resumed.restore(before.state())
    assert resumed.batches_sent == 1 and resumed.num_ready == 0
    again = [(d.group_id, d.example_index) for d in dispatch_all(resumed)]
    assert again == [("g4.1", 2)] * 2 + [("g5.1", 3)] * 2

    twice = make(batch_size=4, max_inflight_rollouts=7, max_async_level=9)
    twice.restore(resumed.state())
    again = [(d.group_id, d.example_index) for d in dispatch_all(twice)]
    assert again == [("g6.2", 2)] * 2 + [("g7.2", 3)] * 2 + [("g8.2", 4)] * 2 + [("g9.2", 5)]


def test_a_resumed_run_trains_what_was_ready_unless_it_aged() -> None:
    before = make(batch_size=4)
    a, b, *_ = dispatch_all(before)
    for dispatch in (a, b):
        before.finish(come_back(dispatch))
    state = before.state()

    resumed = make(batch_size=2)
    resumed.restore(state)
    batch = resumed.take_batch()
    assert batch is not None and [verdict.rollout.rollout_id for verdict in batch] == ["g0-r0", "g0-r1"]

    late = make(batch_size=2, max_off_policy_steps=2)
    late.restore(structs.replace(state, batches_sent=3))
    assert late.take_batch() is None
    assert outcomes(late) == [[("g0-r0", "stale"), ("g0-r1", "stale")]]


def test_environments_may_come_and_go_between_a_run_and_its_resumption() -> None:
    before = make(sources=[Source("old"), Source("kept")], max_inflight_rollouts=8)
    dispatch_all(before)
    resumed = make(sources=[Source("kept"), Source("new")], max_inflight_rollouts=12, batch_size=6)
    resumed.restore(before.state())
    starts = [(d.env_name, d.example_index) for d in dispatch_all(resumed) if d.rollout_id.endswith("r0")]
    assert starts == [("kept", 0), ("kept", 1), ("kept", 2), ("new", 0), ("kept", 3), ("new", 1)]


def names(dispatches: Sequence[Dispatch]) -> list[str]:
    return [dispatch.env_name for dispatch in dispatches]


def start_groups(scheduler: Scheduler, number: int) -> list[Dispatch]:
    """Groups of one rollout, each back before the next one starts."""
    dispatches = []
    for _ in range(number):
        dispatch = scheduler.next_dispatch()
        assert dispatch is not None
        scheduler.finish(come_back(dispatch))
        dispatches.append(dispatch)
    return dispatches


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ([("old", 1)], [("old", 1), ("new", 1)], {"old": 20, "new": 20}),
        ([("old", 1), ("gone", 5)], [("new", 3), ("old", 1)], {"old": 10, "new": 30}),
        ([("a", 9), ("b", 1)], [("a", 1), ("b", 1)], {"a": 20, "b": 20}),
        ([("a", 1), ("b", 1)], [("a", 1), ("b", 7)], {"a": 5, "b": 35}),
    ],
)
def test_environments_that_change_at_a_resume_get_their_share_from_there_on(
    before: list[tuple[str, float]], after: list[tuple[str, float]], share: dict[str, int]
) -> None:
    """Groups that were started before do not count: a new environment has nothing to catch up on."""
    rules = {"batch_size": 10_000, "rollouts_per_example": 1, "max_inflight_rollouts": 1}
    first = make(sources=[Source(*each) for each in before], **rules)
    start_groups(first, 600)
    resumed = make(sources=[Source(*each) for each in after], **rules)
    resumed.restore(first.state())
    counts = Counter(names(start_groups(resumed, 40)))
    assert all(abs(counts[env] - number) <= 1 for env, number in share.items()), counts


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    num_before=st.integers(0, 30),
    num_resumes=st.integers(1, 3),
)
@settings(deadline=None, max_examples=50)
def test_a_resumed_run_takes_environments_in_the_order_of_an_uninterrupted_one(
    weights: list[float], num_before: int, num_resumes: int
) -> None:
    sources = [Source(f"env-{index}", weight) for index, weight in enumerate(weights)]
    rules = {"batch_size": 10_000, "rollouts_per_example": 1, "max_inflight_rollouts": 1}
    whole = make(sources=sources, **rules)
    expected = names(start_groups(whole, num_before * (num_resumes + 1)))
    actual: list[str] = []
    state = None
    for _ in range(num_resumes + 1):
        part = make(sources=sources, **rules)
        if state is not None:
            part.restore(state)
        actual += names(start_groups(part, num_before))
        state = part.state()
    assert actual == expected
    total = sum(weights)
    for source in sources:
        assert abs(actual.count(source.env_name) - len(actual) * source.weight / total) < len(sources)


def test_a_group_in_flight_that_is_too_old_is_cut_short_and_gives_up_its_place() -> None:
    """Bound 1: what was asked for under version 0 may train at step 1 and no later."""
    scheduler = make(batch_size=2, max_off_policy_steps=1, max_retries=1)
    slow, failing, *others = dispatch_all(scheduler)
    scheduler.note_request(slow.rollout_id)
    scheduler.finish(come_back(failing, error="ValueError: no"))
    [again] = dispatch_all(scheduler)
    for dispatch in others:
        scheduler.finish(come_back(dispatch))
    assert scheduler.take_batch() is not None and scheduler.take_cut() == []

    scheduler.update_policy(1)
    for dispatch in dispatch_all(scheduler):
        scheduler.finish(come_back(dispatch, version=1))
    assert scheduler.take_batch() is not None and scheduler.batches_sent == 2
    assert scheduler.take_cut() == ["g0-r0", "g0-r1~1"] and scheduler.take_cut() == []
    assert scheduler.is_open("g0") and scheduler.is_cut("g0")
    assert {dispatch.group_id for dispatch in dispatch_all(scheduler)} == {"g3"}
    assert scheduler.num_inflight == 4 and scheduler.state().unfinished == [("env", 3)]

    scheduler.take_settled()
    scheduler.finish(come_back(slow, error="CancelledError: the attempt was cancelled"))
    scheduler.finish(come_back(again, version=1))
    assert not scheduler.is_open("g0") and dispatch_all(scheduler) == []
    [verdicts] = scheduler.take_settled()
    assert [(verdict.rollout.rollout_id, verdict.outcome.value) for verdict in verdicts] == [
        ("g0-r1", "failed_rollout"),
        ("g0-r0", "stale"),
        ("g0-r1~1", "stale"),
    ]
    assert verdicts[1].reason == (
        "oldest token of policy version 0 at step 2; orchestrator.max_off_policy_steps = 1"
    )


def test_a_group_is_not_old_before_it_asks_for_tokens() -> None:
    """Both are started under version 0; one needs until version 2 to get ready, and trains at step 3."""
    scheduler = make(batch_size=1, rollouts_per_example=1, max_off_policy_steps=1, max_inflight_rollouts=3)
    patient, eager = dispatch_all(scheduler)
    scheduler.note_request(eager.rollout_id)
    for version in range(3):
        scheduler.update_policy(version)
        dispatch = dispatch_all(scheduler)[0] if version else eager
        scheduler.finish(come_back(dispatch, version=version))
        assert scheduler.take_batch() is not None and scheduler.take_cut() == []
    scheduler.note_request(patient.rollout_id)
    scheduler.finish(come_back(patient, version=2))
    batch = scheduler.take_batch()
    assert batch is not None and scheduler.batches_sent == 4
    assert [verdict.rollout.rollout_id for verdict in batch] == [patient.rollout_id]


class RandomSchedules(RuleBasedStateMachine):
    """Rollouts come back in any order, fail, age and are filtered; the bounds and the books hold."""

    @initialize(
        batch_size=st.integers(1, 6),
        rollouts_per_example=st.integers(1, 4),
        room=st.integers(0, 6),
        max_async_level=st.integers(0, 3),
        max_off_policy_steps=st.integers(0, 3),
        max_steps=st.integers(1, 6),
        group_scored=st.booleans(),
        max_retries=st.integers(0, 2),
        paced=st.booleans(),
    )
    def start(self, room: int, group_scored: bool, rollouts_per_example: int, **rules: int) -> None:
        # What is sampled ahead may be trained: the configuration sees to that.
        rules["max_off_policy_steps"] = max(rules["max_off_policy_steps"], rules["max_async_level"])
        self.rules = Rules(
            max_inflight_rollouts=rollouts_per_example + room,
            rollouts_per_example=rollouts_per_example,
            **rules,
        )
        sources = [Source("a", 2.0), Source("b", 1.0, group_scored)]
        self.scheduler = Scheduler(self.rules, sources, by_reward)
        self.running: dict[str, Dispatch] = {}
        self.asked: dict[str, int] = {}
        """Policy version at the first request of what is running."""
        self.received: Counter[str] = Counter()
        self.settled: dict[str, Verdict] = {}
        self.sent: list[str] = []
        self.cut_short: set[str] = set()

    @rule()
    def dispatch(self) -> None:
        waiting = self.scheduler.waits_for_weights
        dispatch = self.scheduler.next_dispatch()
        if dispatch is not None:
            assert dispatch.rollout_id not in self.running and dispatch.rollout_id not in self.received
            assert not (waiting and dispatch.rollout_id.endswith("-r0"))
            self.running[dispatch.rollout_id] = dispatch

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.running)))
        self.scheduler.note_request(rollout_id)
        self.asked.setdefault(rollout_id, self.scheduler.policy_version)

    @rule()
    def cut(self) -> None:
        """What is cut short comes back with what it has, and its failure is not its own."""
        for rollout_id in self.scheduler.take_cut():
            dispatch = self.running.pop(rollout_id)
            version = self.asked.pop(rollout_id, self.scheduler.policy_version)
            self.received[rollout_id] = 1
            self.cut_short.add(rollout_id)
            self.scheduler.finish(come_back(dispatch, num_tokens=1, version=version, error="cut"))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 5), fate=st.sampled_from(["fail", -1, 0, 1, 1, 1, 1]))
    def come_back(self, data: st.DataObject, num_tokens: int, fate: str | int) -> None:
        rollout_id = data.draw(st.sampled_from(sorted(self.running)))
        dispatch = self.running.pop(rollout_id)
        version = self.asked.pop(rollout_id, self.scheduler.policy_version)
        error = "ValueError: no" if fate == "fail" else None
        reward = 0.0 if fate == "fail" else float(fate)
        self.received[rollout_id] = num_tokens
        self.scheduler.finish(
            come_back(dispatch, num_tokens=num_tokens, version=version, reward=reward, error=error)
        )

    @precondition(lambda self: self.scheduler.policy_version < self.scheduler.batches_sent)
    @rule()
    def train(self) -> None:
        self.scheduler.update_policy(self.scheduler.policy_version + 1)

    @rule()
    def send(self) -> None:
        step = self.scheduler.batches_sent
        batch = self.scheduler.take_batch()
        if batch is not None:
            assert len(batch) >= self.rules.batch_size and step < self.rules.max_steps
            assert self.scheduler.batches_sent == step + 1
            levels = [step - (verdict.rollout.oldest_version or 0) for verdict in batch]
            assert max(levels) <= self.rules.max_off_policy_steps
            assert self.rules.max_async_level > 0 or max(levels) == 0
            last_group = batch[-1].rollout.group_id
            num_others = sum(verdict.rollout.group_id != last_group for verdict in batch)
            assert num_others < self.rules.batch_size or self.rules.paced
            self.sent += [verdict.rollout.rollout_id for verdict in batch]

    @rule()
    def settle(self) -> None:
        for group in self.scheduler.take_settled():
            assert len({verdict.rollout.group_id for verdict in group}) == 1
            for verdict in group:
                assert verdict.rollout.rollout_id not in self.settled
                self.settled[verdict.rollout.rollout_id] = verdict

    @invariant()
    def bounds_hold(self) -> None:
        assert self.scheduler.num_inflight == len(self.running) <= self.rules.max_inflight_rollouts
        assert self.settled.keys() <= self.received.keys()
        uncut = {
            rollout_id
            for rollout_id, dispatch in self.running.items()
            if not self.scheduler.is_cut(dispatch.group_id)
        }
        oldest = min((self.asked[key] for key in uncut & self.asked.keys()), default=0)
        assert self.scheduler.batches_sent - oldest <= self.rules.max_off_policy_steps or not (
            uncut & self.asked.keys()
        )
        if self.scheduler.batches_sent == self.rules.max_steps:
            assert not uncut and self.scheduler.num_ready == 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.settle()
        self.scheduler.stop()
        for rollout_id, dispatch in self.running.items():
            self.received[rollout_id] = 2
            version = self.asked.get(rollout_id, self.scheduler.policy_version)
            self.scheduler.finish(come_back(dispatch, num_tokens=2, version=version))
        self.settle()
        held = {verdict.rollout.rollout_id for group in self.scheduler.state().ready for verdict in group}
        assert not held & self.settled.keys()
        assert held | self.settled.keys() == self.received.keys()
        by_outcome: Counter[str] = Counter()
        for rollout_id, verdict in self.settled.items():
            by_outcome[verdict.outcome.value] += self.received[rollout_id]
        assert by_outcome.total() == self.received.total() - sum(self.received[key] for key in held)
        assert sorted(self.sent) == sorted(key for key, verdict in self.settled.items() if verdict.is_sent)
        assert not (self.rules.paced and by_outcome["stale"])
        assert {self.settled[key].outcome for key in self.cut_short} <= {State.STALE}
        attempts = Counter(key.partition("~")[0] for key in self.received)
        assert max(attempts.values(), default=0) <= 1 + self.rules.max_retries
        assert self.scheduler.num_inflight == 0 and bool(self.scheduler.num_ready) == bool(held)


TestRandomSchedules = RandomSchedules.TestCase
TestRandomSchedules.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_unfinished_rollouts_cannot_finish_twice() -> None:
    scheduler = make()
    rollout = come_back(dispatch_all(scheduler)[0])
    scheduler.finish(rollout)
    with pytest.raises(KeyError):
        scheduler.finish(rollout)


def test_a_failed_rollout_is_attempted_again_under_a_name_of_its_own() -> None:
    scheduler = make(max_retries=2, batch_size=2, max_async_level=0)
    a, b = dispatch_all(scheduler)
    scheduler.finish(come_back(a, error="ValueError: 1"))
    scheduler.finish(come_back(b))
    assert scheduler.num_ready == 0
    again = scheduler.next_dispatch()
    assert again is not None and (again.rollout_id, again.attempt) == ("g0-r0~1", 1)
    assert again.example_index == a.example_index
    scheduler.finish(come_back(again, error="ValueError: 2"))
    last = scheduler.next_dispatch()
    assert last is not None and (last.rollout_id, last.attempt) == ("g0-r0~2", 2)
    scheduler.finish(come_back(last))
    batch = scheduler.take_batch()
    assert batch is not None and {v.rollout.rollout_id for v in batch} == {"g0-r1", "g0-r0~2"}
    assert outcomes(scheduler) == [
        [("g0-r0", "failed_rollout"), ("g0-r0~1", "failed_rollout"), ("g0-r1", "sent"), ("g0-r0~2", "sent")]
    ]


def test_a_group_scored_group_survives_if_every_rollout_succeeds_in_the_end() -> None:
    for num_failures, outcome in ((1, "sent"), (2, "dropped_group")):
        scheduler = make(max_retries=1, sources=[Source("env", group_scored=True)], batch_size=2)
        a, b, *_ = dispatch_all(scheduler)
        scheduler.finish(come_back(a))
        scheduler.finish(come_back(b, error="ValueError: no"))
        again = scheduler.next_dispatch()
        assert again is not None
        scheduler.finish(come_back(again, error="ValueError: no" if num_failures == 2 else None))
        scheduler.take_batch()
        assert (a.rollout_id, outcome) in outcomes(scheduler)[0]


@cache
def sample_of(length: int) -> TrainingSample:
    return TrainingSample.from_turn([5], [6] * (length - 1), [-1.0] * (length - 1), env_name="env")


def with_samples(rollouts: Sequence[Rollout]) -> list[Verdict]:
    return [
        Verdict(rollout, Flow.SENT, advantage=1.0, samples=[sample_of(1 + rollout.num_sampled)])
        for rollout in rollouts
    ]


def test_batches_by_tokens_take_whole_groups() -> None:
    """Each group has 2 × (1 + 9) tokens; a batch of 50 takes three of them, and two may be sampled ahead."""
    scheduler = make(with_samples, batch_size=50, max_rollout_tokens=10, max_inflight_rollouts=20)
    dispatches = dispatch_all(scheduler)
    assert len(dispatches) == 10  # five groups of 20 tokens for 100
    for number, dispatch in enumerate(dispatches[:6], start=1):
        scheduler.finish(come_back(dispatch, num_tokens=9))
        batch = scheduler.take_batch()
        assert (batch is not None) == (number == 6)
    assert batch is not None and len(batch) == 6
    # Two groups are open; the second batch needs 50 tokens.
    assert len(dispatch_all(scheduler)) == 2


def with_signal(rollouts: Sequence[Rollout]) -> list[Verdict]:
    """Reward 0 carries no signal."""
    return [
        verdict if verdict.rollout.reward else Verdict(verdict.rollout, State.ZERO_ADVANTAGE)
        for verdict in with_samples(rollouts)
    ]


def tokens_of(verdicts: Sequence[Verdict]) -> int:
    return sum(sample.length for verdict in verdicts for sample in verdict.samples)


@pytest.mark.parametrize("max_rollout_tokens", [10, 80, 1000])
@pytest.mark.parametrize("reward_of_others", [1.0, 0.0])
def test_strictly_on_policy_the_first_batch_by_tokens_has_a_groups_surplus_at_most(
    max_rollout_tokens: int, reward_of_others: float
) -> None:
    """Rollouts of 10 tokens, known only once they are back; every third group may be without a signal."""
    scheduler = make(
        with_signal,
        batch_size=310,
        max_rollout_tokens=max_rollout_tokens,
        max_async_level=0,
        max_inflight_rollouts=1000,
    )
    running: list[Dispatch] = []
    for _ in range(1000):
        running += dispatch_all(scheduler)
        if (batch := scheduler.take_batch()) is not None:
            break
        dispatch = running.pop(0)
        reward = reward_of_others if dispatch.example_index % 3 else 1.0
        scheduler.finish(come_back(dispatch, num_tokens=9, reward=reward))
    assert batch is not None and tokens_of(batch) == 320 and not running and scheduler.num_ready == 0


@given(
    seed=st.integers(0, 10_000),
    max_async_level=st.integers(0, 3),
    shortest=st.integers(2, 20),
    spread=st.integers(0, 20),
    signal=st.floats(0.3, 1),
    num_resumes=st.integers(0, 3),
)
@settings(deadline=None, max_examples=80)
def test_batches_by_tokens_keep_the_level_and_their_size(
    seed: int, max_async_level: int, shortest: int, spread: int, signal: float, num_resumes: int
) -> None:
    """Lengths are random, rollouts come back in any order, the trainer takes its time, the run is resumed."""
    generator = random.Random(seed)
    longest, batch_size, num_steps = shortest + spread, 150, 8
    largest_group = 2 * longest

    def start() -> Scheduler:
        return make(
            with_signal,
            batch_size=batch_size,
            max_rollout_tokens=longest + generator.randint(0, 100),
            max_async_level=max_async_level,
            max_off_policy_steps=9,
            max_inflight_rollouts=1000,
            max_steps=num_steps,
        )

    scheduler = start()
    resumes = sorted(generator.sample(range(1, num_steps), num_resumes))
    running: list[tuple[Dispatch, int]] = []
    while scheduler.batches_sent < num_steps:
        started = dispatch_all(scheduler)
        running += [(dispatch, scheduler.policy_version) for dispatch in started]
        num_open = len({dispatch.group_id for dispatch, _ in running})
        num_batches = scheduler.policy_version + max_async_level + 1 - scheduler.batches_sent
        assert not started or (num_open - 1) * 2 * shortest < num_batches * batch_size
        if running and generator.random() < 0.8:
            dispatch, version = running.pop(generator.randrange(len(running)))
            num_tokens = generator.randint(shortest, longest) - 1
            reward = float(generator.random() < signal)
            scheduler.finish(come_back(dispatch, num_tokens=num_tokens, version=version, reward=reward))
        elif scheduler.policy_version < scheduler.batches_sent:
            scheduler.update_policy(scheduler.policy_version + 1)
        step = scheduler.batches_sent
        if (batch := scheduler.take_batch()) is not None:
            assert step - scheduler.policy_version <= max_async_level
            last_group = [v for v in batch if v.rollout.group_id == batch[-1].rollout.group_id]
            assert tokens_of(batch) >= batch_size
            if max_async_level:
                assert tokens_of(batch) - tokens_of(last_group) < batch_size
            else:  # all that was started belongs to it: as much as lengths differ
                assert tokens_of(batch) < batch_size * longest / shortest + largest_group
        if resumes and scheduler.batches_sent == resumes[0]:
            before, scheduler = scheduler, start()
            scheduler.restore(before.state())
            scheduler.update_policy(before.policy_version)
            running.clear()
            resumes.pop(0)


@pytest.mark.parametrize("resumed", [False, True])
def test_rollouts_longer_than_expected_do_not_run_ahead_of_the_weights(resumed: bool) -> None:
    """Ten groups are started for two batches, and turn out to fill twenty."""
    rules = {"batch_size": 100, "max_rollout_tokens": 10, "max_inflight_rollouts": 1000, "max_steps": 50}
    scheduler = make(with_signal, **rules, max_off_policy_steps=50)
    dispatches = dispatch_all(scheduler)
    assert len(dispatches) == 20
    for dispatch in dispatches:
        scheduler.finish(come_back(dispatch, num_tokens=99))
    if resumed:
        before, scheduler = scheduler, make(with_signal, **rules, max_off_policy_steps=50)
        scheduler.restore(before.state())
    for version in range(5):
        scheduler.update_policy(version)
        while scheduler.take_batch() is not None:
            pass
        assert scheduler.batches_sent == version + 2 and scheduler.waits_for_weights
        assert dispatch_all(scheduler) == []


def test_a_resumed_run_knows_how_long_rollouts_are() -> None:
    rules = {"batch_size": 100, "max_rollout_tokens": 1000, "max_inflight_rollouts": 1000}
    before = make(with_signal, **rules)
    for _ in range(30):
        for dispatch in dispatch_all(before):
            before.finish(come_back(dispatch, num_tokens=9, reward=0.0))
    state = before.state()
    resumed = make(with_signal, **rules)
    resumed.restore(state)
    expected = [dispatch.example_index for dispatch in dispatch_all(before)]
    assert [dispatch.example_index for dispatch in dispatch_all(resumed)] == expected
    assert len(expected) > 2


def test_paced_a_batch_waits_for_what_would_be_too_old_for_the_next() -> None:
    slow: list[list[tuple[str, str]]] = []
    for paced in (False, True):
        scheduler = make(
            rollouts_per_example=1, batch_size=1, max_off_policy_steps=1, max_inflight_rollouts=4, paced=paced
        )
        a, b, *_ = dispatch_all(scheduler)
        scheduler.note_request(a.rollout_id)
        scheduler.finish(come_back(b))
        assert scheduler.take_batch() is not None  # step 0; `a` would be one step old at step 1: not too old
        scheduler.update_policy(1)
        c = scheduler.next_dispatch()
        assert c is not None
        scheduler.finish(come_back(c, version=1))
        assert (scheduler.take_batch() is None) == paced  # step 1; at step 2 `a` would be two steps old
        scheduler.finish(come_back(a))
        while scheduler.take_batch() is not None:
            pass
        slow.append([pair for group in outcomes(scheduler) for pair in group if pair[0] == a.rollout_id])
    assert slow == [[(a.rollout_id, "stale")], [(a.rollout_id, "sent")]]


@given(
    seed=st.integers(0, 10_000),
    paced=st.booleans(),
    counts_tokens=st.booleans(),
    max_async_level=st.integers(0, 3),
    max_retries=st.integers(0, 1),
)
@settings(deadline=None, max_examples=60)
def test_every_run_comes_to_its_end(seed: int, counts_tokens: bool, **rules: int) -> None:
    """Whatever order rollouts come back in, the scheduler never waits for something that cannot happen."""
    generator = random.Random(seed)
    batch_size, max_rollout_tokens = (40, 30) if counts_tokens else (5, None)
    own = {**rules, "max_off_policy_steps": 3, "max_steps": 8, "max_rollout_tokens": max_rollout_tokens}
    scheduler = make(with_samples, batch_size=batch_size, max_inflight_rollouts=6, **own)
    running: list[tuple[Dispatch, int]] = []
    for _ in range(5_000):
        while (dispatch := scheduler.next_dispatch()) is not None:
            running.append((dispatch, scheduler.policy_version))
        if running and generator.random() < 0.7:
            dispatch, version = running.pop(generator.randrange(len(running)))
            error = "ValueError: no" if generator.random() < 0.1 else None
            scheduler.finish(
                come_back(dispatch, version=version, num_tokens=generator.randint(1, 9), error=error)
            )
        while scheduler.take_batch() is not None:
            pass
        if scheduler.policy_version < scheduler.batches_sent and generator.random() < 0.3:
            scheduler.update_policy(scheduler.policy_version + 1)
        if scheduler.batches_sent == own["max_steps"]:
            return
    pytest.fail(f"stuck at step {scheduler.batches_sent}")
