"""The scheduler decides what may start, what is final and what is stale, without clock, socket or task.

- Every dispatched rollout reaches exactly one outcome; the outcomes of a group are settled together.
- At most `max_inflight_rollouts` are in flight.
- A batch forms only if it is at most `max_async_level` ahead of the weights, and a group starts only for
  such a batch: while what is ready and what is open cannot yet fill the batches up to there, nor up to
  `max_steps`. With level 0, a batch is complete only when nothing is in flight: strictly on-policy.
- Where batches count tokens, an open group counts as long as its rollouts are expected to be: as long as they
  were lately, and before anything is known, as long as they can be.
- Environments take turns by weight. Their turns depend on the latest groups, never on all of them, so one
  that joins a resumed run, or has another weight there, gets its share and has nothing to catch up on.
- A failed rollout is attempted again, under a name of its own, up to `max_retries` times.
- A group is started whole and final once all its rollouts are back. It then trains with those that
  survived, unless none did or a group-scored environment lost one.
- No group that is ready or in flight is stale: age is checked when a group becomes ready and when the step
  advances. A group in flight is as old as the weights that were served when the first request of a rollout
  of it was sent. One that is too old for the next batch is cut short: it no longer counts, `take_cut` names
  its rollouts, and it is settled once they are back.
  With `paced`, no group is ever stale: a batch waits for what is open and would be too old for the next one,
  and takes along what is ready and would be.
- Groups are never cut: a batch takes whole groups, oldest first, until it has `batch_size` rollouts or
  `token_batch_size` tokens; the surplus opens the next batch.
- A run that stops early cancels what is open and holds what is ready; `state` and `restore` carry that,
  and the examples to attempt again, over to the run that resumes it. Once the last batch is sent, a
  surplus is cancelled, too.

    next_dispatch -> (in flight) -> finish -> (open) -> judge -> (ready) -> take_batch -> sent
                         |              |                 |          |
                         +-- cut short, +-- failed        +-- zero   +-- stale, cancelled
                             stale      +-- dropped       +-- rejected
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import msgspec

from pellucid.data import Rollout
from pellucid.ledger import Flow, State
from pellucid.orchestrator.failures import Drought
from pellucid.orchestrator.verdict import Verdict

_REMEMBERED_GROUPS = 64  # lengths change as the policy learns


@dataclass(frozen=True, slots=True)
class Rules:
    batch_size: int
    """Rollouts, or tokens if there is a `max_rollout_tokens`."""

    rollouts_per_example: int
    max_inflight_rollouts: int
    max_async_level: int
    max_off_policy_steps: int
    max_steps: int
    max_rollout_tokens: int | None = None
    """The most tokens that a rollout can have, where a batch counts tokens; None: it counts rollouts."""

    max_retries: int = 0
    paced: bool = False

    def size(self, verdict: Verdict) -> int:
        """Returns what a rollout adds to a batch: 1, or its tokens where those count; 0 unless sent."""
        if not verdict.is_sent:
            return 0
        return 1 if self.max_rollout_tokens is None else _length(verdict)


@dataclass(frozen=True, slots=True)
class Source:
    """An environment as the scheduler sees it: name, weight, how its groups are scored."""

    env_name: str
    weight: float = 1.0
    group_scored: bool = False


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One rollout to start now."""

    env_name: str
    example_index: int
    group_id: str
    rollout_id: str
    attempt: int = 0
    """How often this rollout has failed before."""


@dataclass(frozen=True, slots=True)
class RolloutLength:
    """How many tokens a rollout is expected to have: the mean of the latest groups.

    RolloutLength(1000)                                              1000: the most it can have
    RolloutLength(1000).including(100).including(100).including(100)  325: that counts as one group
    """

    mean: float
    num_groups: int = 1

    def including(self, length: float) -> "RolloutLength":
        """Returns the expectation updated by a further group with this mean length."""
        weight = 1 / min(self.num_groups + 1, _REMEMBERED_GROUPS)
        return RolloutLength(self.mean + (length - self.mean) * weight, self.num_groups + 1)


class SchedulerState(msgspec.Struct, frozen=True):
    """The scheduler's part of a snapshot: all that a resumed run needs."""

    batches_sent: int = 0
    positions: dict[str, int] = {}
    """Next example of each environment."""

    num_groups: int = 0
    generation: int = 0
    """How often the run was resumed; keeps the names of its groups apart."""

    unfinished: list[tuple[str, int]] = []
    """(environment, example) of each group that was started and is neither ready nor settled."""

    ready: list[list[Any]] = []
    """Verdicts of the groups that wait for a batch."""

    credits: dict[str, float] = {}
    """Groups that each environment is behind its share."""

    rollout_length: RolloutLength | None = None
    """None if batches count rollouts."""


@dataclass(slots=True)
class _Running:
    """A rollout in flight."""

    num_failures: int
    """How often it has failed before."""

    version: int | None = None
    """Policy version that was served when its first request was sent, the oldest it can have; None before."""


@dataclass(slots=True)
class _OpenGroup:
    source: Source
    example_index: int
    group_id: str
    running: dict[str, _Running] = field(default_factory=dict)
    """Its rollouts in flight."""

    num_started: int = 0
    num_unfinished: int = 0
    """Rollouts in flight or to be attempted again."""

    returned: list[Rollout] = field(default_factory=list)
    """Every attempt that is over."""

    cut: frozenset[str] | None = None
    """Rollouts that were in flight when the group was cut short; None: it was not."""

    why_cut: str = ""


class Scheduler:
    """`judge` turns the surviving rollouts of final groups into verdicts, one each, in order."""

    def __init__(
        self, rules: Rules, sources: Sequence[Source], judge: Callable[[Sequence[Rollout]], list[Verdict]]
    ) -> None:
        self._rules = rules
        self._sources = sources
        self._judge = judge
        self._positions = {source.env_name: 0 for source in sources}
        self._credits = {source.env_name: 0.0 for source in sources}
        """Groups that each environment is behind its share: its next turn comes sooner the more it is."""
        longest = rules.max_rollout_tokens
        self._rollout_length = None if longest is None else RolloutLength(longest)
        self._num_groups = 0
        self._generation = 0
        self._again: deque[tuple[Source, int]] = deque()
        """Examples whose group did not survive the run that was resumed."""
        self._filling: _OpenGroup | None = None
        self._open: dict[str, _OpenGroup] = {}
        self._cut: dict[str, _OpenGroup] = {}
        """Groups that were cut short, and some of whose rollouts are not back yet."""
        self._inflight: dict[str, _OpenGroup] = {}
        """The group of each rollout in flight."""
        self._to_cut: list[str] = []
        self._retries: deque[tuple[_OpenGroup, str, int]] = deque()
        """Rollouts that failed and will be attempted again, and how often they have."""
        self._ready: list[list[Verdict]] = []
        self._ready_size = 0
        self._settled: list[list[Verdict]] = []
        self.batches_sent = 0
        self.policy_version = 0
        self.drought = Drought()
        self.stopped = False
        self._unfinished: list[tuple[str, int]] = []

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_ready(self) -> int:
        """Rollouts that wait for a batch."""
        return sum(verdict.is_sent for group in self._ready for verdict in group)

    @property
    def settled(self) -> Sequence[list[Verdict]]:
        """The groups that `take_settled` would give."""
        return self._settled

    @property
    def waits_for_weights(self) -> bool:
        """Whether nothing starts, and no batch forms, until newer weights are served."""
        ahead = self.batches_sent - self.policy_version
        return self.batches_sent < self._rules.max_steps and ahead > self._rules.max_async_level

    def next_dispatch(self) -> Dispatch | None:
        if self.stopped or self.num_inflight >= self._rules.max_inflight_rollouts:
            return None
        if self._retries:
            failed, name, attempt = self._retries.popleft()
            return self._dispatch(failed, f"{name.partition('~')[0]}~{attempt}", attempt)
        group = self._filling or self._start_group()
        if group is None:
            return None
        dispatch = self._dispatch(group, f"{group.group_id}-r{group.num_started}", attempt=0)
        group.num_started += 1
        group.num_unfinished += 1
        self._filling = group if group.num_started < self._rules.rollouts_per_example else None
        return dispatch

    def note_request(self, rollout_id: str) -> None:
        """Records that a rollout asks the policy for tokens. Its age counts from its first request on."""
        running = self._inflight[rollout_id].running[rollout_id]
        if running.version is None:
            running.version = self.policy_version

    def finish(self, *rollouts: Rollout) -> None:
        """Takes back dispatched rollouts, successful or failed (`rollout.error`).

        Groups that are final then are judged together, which takes hardly longer than judging one.
        """
        final = []
        for rollout in rollouts:
            group = self._inflight.pop(rollout.rollout_id)
            num_failures = group.running.pop(rollout.rollout_id).num_failures + (rollout.error is not None)
            group.returned.append(rollout)
            may_retry = num_failures <= self._rules.max_retries and not self.stopped and group.cut is None
            if rollout.error is not None and may_retry:
                self._retries.append((group, rollout.rollout_id, num_failures))
                continue
            group.num_unfinished -= 1
            if self._is_final(group):
                final.append(group)
        self._close(final)

    def is_open(self, group_id: str) -> bool:
        """Whether rollouts of the group are still to come."""
        return group_id in self._open or group_id in self._cut

    def is_cut(self, group_id: str) -> bool:
        """Whether the group was cut short, and rollouts of it are still to come."""
        return group_id in self._cut

    def take_cut(self) -> list[str]:
        """Returns the rollouts that were cut short since the last call; the caller has to cancel them."""
        cut, self._to_cut = self._to_cut, []
        return [rollout_id for rollout_id in cut if rollout_id in self._inflight]

    def update_policy(self, version: int) -> None:
        self.policy_version = version

    def take_batch(self) -> list[Verdict] | None:
        """Returns the rollouts of the next batch, now counted as sent; None while there are too few."""
        if self._ready_size < self._rules.batch_size or self.batches_sent == self._rules.max_steps:
            return None
        if self.waits_for_weights or self._must_wait_for_open_groups():
            return None
        groups, taken, size = self._by_age(), 0, 0
        while taken < len(groups) and (size < self._rules.batch_size or self._is_last_chance(groups[taken])):
            size += self._size(groups[taken])
            taken += 1
        self._settled += groups[:taken]
        self._set_ready(groups[taken:])
        self.batches_sent += 1
        self._drop_stale()
        self._cut_short_what_is_stale()
        return [verdict for group in groups[:taken] for verdict in group if verdict.is_sent]

    def _set_ready(self, groups: list[list[Verdict]]) -> None:
        self._ready = groups
        self._ready_size = sum(map(self._size, groups))

    def _size(self, group: Sequence[Verdict]) -> int:
        return sum(map(self._rules.size, group))

    def _must_wait_for_open_groups(self) -> bool:
        """Whether the batch waits: strictly on-policy, for all open groups; paced, for those that would be
        too old for the next batch."""
        if self._rules.max_async_level == 0:
            return bool(self._open)
        versions = (self._oldest_in_flight(group) for group in self._open.values())
        return self._rules.paced and any(
            self._ages_out(self.policy_version if version is None else version) for version in versions
        )

    def _by_age(self) -> list[list[Verdict]]:
        """Returns ready groups by arrival; paced, those that a later batch could not take come first."""
        if not self._rules.paced:
            return self._ready
        return sorted(self._ready, key=lambda group: not self._is_last_chance(group))

    def _is_last_chance(self, group: list[Verdict]) -> bool:
        """Whether even a full batch takes the group, because it would be too old for a later one."""
        if self._rules.max_async_level == 0:
            return True
        return self._rules.paced and self._ages_out(self._oldest_version(group))

    def _ages_out(self, version: int) -> bool:
        """Whether tokens of this version are too old for the batch after the next."""
        return self.batches_sent + 1 - version > self._rules.max_off_policy_steps

    def take_settled(self) -> list[list[Verdict]]:
        """Returns the groups settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def stop(self) -> None:
        """Starts nothing any more and cancels open groups; rollouts in flight follow once they are back."""
        self.stopped = True
        self._unfinished = self._find_unfinished()
        self._filling = None
        if self.batches_sent == self._rules.max_steps:
            for verdicts in self._ready:
                self._cancel(verdicts)
            self._set_ready([])
        while self._retries:
            self._retries.popleft()[0].num_unfinished -= 1
        self._close([group for group in self._open.values() if self._is_final(group)])

    def state(self) -> SchedulerState:
        """Returns the state for a resumed run; after `stop`, the state at the time of the stop."""
        return SchedulerState(
            self.batches_sent,
            dict(self._positions),
            self._num_groups,
            self._generation,
            self._unfinished if self.stopped else self._find_unfinished(),
            list(self._ready),
            dict(self._credits),
            self._rollout_length,
        )

    def restore(self, state: SchedulerState) -> None:
        """Goes on from `state`; environments that are gone are forgotten, new ones start at the beginning."""
        sources = {source.env_name: source for source in self._sources}
        self.batches_sent = state.batches_sent
        self._positions |= {env: index for env, index in state.positions.items() if env in sources}
        self._credits |= {env: credit for env, credit in state.credits.items() if env in sources}
        if self._rollout_length is not None:
            self._rollout_length = state.rollout_length or self._rollout_length
        self._num_groups = state.num_groups
        self._generation = state.generation + 1
        self._again.extend((sources[env], index) for env, index in state.unfinished if env in sources)
        for verdicts in state.ready:
            self._admit(verdicts)

    def _find_unfinished(self) -> list[tuple[str, int]]:
        again = [(source.env_name, index) for source, index in self._again]
        return again + [(group.source.env_name, group.example_index) for group in self._open.values()]

    def _start_group(self) -> _OpenGroup | None:
        rules = self._rules
        last_batch = min(self.policy_version + rules.max_async_level + 1, rules.max_steps)
        wanted = (last_batch - self.batches_sent) * rules.batch_size
        tokens_per_rollout = self._rollout_length.mean if self._rollout_length else 1
        expected = len(self._open) * rules.rollouts_per_example * tokens_per_rollout
        if self._ready_size + expected >= wanted:
            return None
        if self._again:
            source, index = self._again[0]
        else:
            # The environment that is furthest behind its share with the next group; the first of equals.
            source = max(self._sources, key=lambda each: self._credits[each.env_name] + self._share(each))
            index = self._positions[source.env_name]
        room = rules.max_inflight_rollouts - self.num_inflight
        if source.group_scored and room < rules.rollouts_per_example:
            return None  # its rollouts belong together: all at once or not yet
        if self._again:
            self._again.popleft()
        else:
            # Every environment gets its share of a group as credit, and this one pays for the whole group.
            for each in self._sources:
                self._credits[each.env_name] += self._share(each)
            self._credits[source.env_name] -= 1
            self._positions[source.env_name] += 1
        # `g57`; `g57.1` after the first resume: a run that was killed may have used the same numbers.
        generation = f".{self._generation}" if self._generation else ""
        group = _OpenGroup(source, index, f"g{self._num_groups}{generation}")
        self._num_groups += 1
        self._open[group.group_id] = group
        return group

    def _dispatch(self, group: _OpenGroup, rollout_id: str, attempt: int) -> Dispatch:
        self._inflight[rollout_id] = group
        group.running[rollout_id] = _Running(attempt)
        return Dispatch(group.source.env_name, group.example_index, group.group_id, rollout_id, attempt)

    def _share(self, source: Source) -> float:
        return source.weight / sum(each.weight for each in self._sources)

    def _is_final(self, group: _OpenGroup) -> bool:
        started_whole = group.num_started == self._rules.rollouts_per_example
        return group.num_unfinished == 0 and (started_whole or self.stopped or group.cut is not None)

    def _close(self, groups: Sequence[_OpenGroup]) -> None:
        """Settles final groups: cut, cancelled if the run was stopped, else judged.

        If judging raises, the groups stay open and are cancelled when the run stops. After judging, only the
        samples hold the tokens that train; the rollouts forget theirs.
        """
        judged = []
        for group in groups:
            if group.cut is not None:
                self._settle_cut(self._cut.pop(group.group_id), group.cut)
            elif self.stopped:
                self._cancel([Verdict(rollout, Flow.SENT) for rollout in group.returned])
                del self._open[group.group_id]
            else:
                judged.append(group)
        for group, verdicts in zip(judged, self._verdicts(judged), strict=True):
            self._note_lengths(verdicts)
            for rollout in group.returned:
                rollout.forget_tokens()
            self._admit(verdicts)
            del self._open[group.group_id]

    def _verdicts(self, groups: Sequence[_OpenGroup]) -> list[list[Verdict]]:
        """Returns the verdicts of each group: on failed rollouts, then on the survivors."""
        size = self._rules.rollouts_per_example
        verdicts: list[list[Verdict]] = []
        to_judge: list[list[Rollout]] = []
        for group in groups:
            survivors = [rollout for rollout in group.returned if rollout.error is None]
            own = [
                Verdict(rollout, State.FAILED_ROLLOUT, rollout.error)
                for rollout in group.returned
                if rollout.error is not None
            ]
            if len(survivors) < size and group.source.group_scored:
                reason = f"{size - len(survivors)} of {size} rollouts of a group-scored group failed"
                own += [Verdict(rollout, State.DROPPED_GROUP, reason) for rollout in survivors]
                survivors = []
            verdicts.append(own)
            to_judge.append(survivors)
        survivors = list(chain.from_iterable(to_judge))
        judged = iter(self._judge(survivors) if survivors else ())
        return [[*own, *islice(judged, len(each))] for own, each in zip(verdicts, to_judge, strict=True)]

    def _note_lengths(self, verdicts: list[Verdict]) -> None:
        """Updates the expected length by all rollouts but failed ones, whose full length is unknown."""
        lengths = [_length(verdict) for verdict in verdicts if verdict.outcome is not State.FAILED_ROLLOUT]
        if lengths and self._rollout_length is not None:
            self._rollout_length = self._rollout_length.including(sum(lengths) / len(lengths))

    def _admit(self, verdicts: list[Verdict]) -> None:
        verdicts = self._aged(verdicts)
        if any(verdict.is_sent for verdict in verdicts):
            self._ready.append(verdicts)
            self._ready_size += self._size(verdicts)
            self.drought = Drought()
        else:
            self._settled.append(verdicts)
            self.drought.add(verdicts)

    def _cut_short_what_is_stale(self) -> None:
        for group in list(self._open.values()):
            oldest = self._oldest_in_flight(group)
            if oldest is not None and self._is_too_old(oldest):
                self._cut_short(group, self._why_stale(oldest))

    def _drop_stale(self) -> None:
        fresh: list[list[Verdict]] = []
        for group in self._ready:
            aged = self._aged(group)
            (fresh if aged is group else self._settled).append(aged)
        self._set_ready(fresh)

    def _aged(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Returns the verdicts, all overruled as stale if a token of the group is too old."""
        oldest = self._oldest_version(verdicts)
        if not self._is_too_old(oldest):
            return verdicts
        reason = self._why_stale(oldest)
        return [verdict.overruled(State.STALE, reason) for verdict in verdicts]

    def _is_too_old(self, version: int) -> bool:
        """Whether tokens of this version are too old for the next batch."""
        return self.batches_sent - version > self._rules.max_off_policy_steps

    def _why_stale(self, version: int) -> str:
        return (
            f"oldest token of policy version {version} at step {self.batches_sent}; "
            f"orchestrator.max_off_policy_steps = {self._rules.max_off_policy_steps}"
        )

    def _oldest_in_flight(self, group: _OpenGroup) -> int | None:
        """Returns the oldest version that a token of an open group may have; None: it has no token yet."""
        returned = [rollout.oldest_version for rollout in group.returned if rollout.error is None]
        versions = [*returned, *(running.version for running in group.running.values())]
        return min((version for version in versions if version is not None), default=None)

    def _cut_short(self, group: _OpenGroup, reason: str) -> None:
        """Stops counting the group, so that others may start; it is stale once its rollouts are back."""
        group.cut, group.why_cut = frozenset(group.running), reason
        group.num_unfinished = len(group.running)
        self._retries = deque(retry for retry in self._retries if retry[0] is not group)
        self._filling = None if self._filling is group else self._filling
        self._cut[group.group_id] = self._open.pop(group.group_id)
        self._to_cut += group.running
        if self._is_final(group):
            self._close([group])

    def _settle_cut(self, group: _OpenGroup, cut: frozenset[str]) -> None:
        """Settles a cut group: rollouts that failed before the cut as failed, all others as stale."""
        verdicts = []
        for rollout in group.returned:
            rollout.forget_tokens()
            if rollout.error is not None and rollout.rollout_id not in cut:
                verdicts.append(Verdict(rollout, State.FAILED_ROLLOUT, rollout.error))
            else:
                verdicts.append(Verdict(rollout, State.STALE, group.why_cut))
        self._settled.append(verdicts)

    def _oldest_version(self, verdicts: list[Verdict]) -> int:
        """Returns the oldest policy version among the tokens of rollouts that did not fail."""
        survivors = [verdict.rollout for verdict in verdicts if verdict.outcome is not State.FAILED_ROLLOUT]
        versions = [rollout.oldest_version for rollout in survivors]
        return min((version for version in versions if version is not None), default=self.batches_sent)

    def _cancel(self, verdicts: list[Verdict]) -> None:
        reason = "the run ended before its batch"
        self._settled.append([verdict.overruled(State.CANCELLED, reason) for verdict in verdicts])


def _length(verdict: Verdict) -> int:
    """Counts the tokens of the rollout's samples; if it has none, those of its longest turn."""
    if verdict.is_sent:
        return sum(sample.length for sample in verdict.samples)
    turns = verdict.rollout.turns
    return max((turn.num_prompt_tokens + turn.num_tokens for turn in turns), default=0)
