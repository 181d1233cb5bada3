"""What may start, what is final, what is stale: a state machine without clock, socket or task.

- Every dispatched rollout reaches exactly one outcome; the outcomes of a group are settled together.
- At most `max_inflight_rollouts` are in flight.
- A group starts only for a batch that is at most `max_async_level` ahead of the weights: while what is
  ready and what is open cannot yet fill the batches up to there, nor up to `max_steps`. With level 0,
  a batch is complete only when nothing is in flight: strictly on-policy.
- A group is started whole and final once all its rollouts are back. It then trains with those that
  survived, unless none did or a group-scored environment lost one.
- A ready group is never stale: age is checked when a group becomes ready and when the step advances.
- Groups are never cut: a batch takes whole groups, oldest first, until it has `batch_size` rollouts;
  the surplus opens the next batch.
- A run that stops early cancels what is open and holds what is ready; `state` and `restore` carry that,
  and the examples to attempt again, over to the run that resumes it. Once the last batch is sent, a
  surplus is cancelled, too.

    next_dispatch -> (in flight) -> finish -> (open) -> judge -> (ready) -> take_batch -> sent
                                        |                 |          |
                                        +-- failed        +-- zero   +-- stale, cancelled
                                        +-- dropped       +-- rejected
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pellucid.data import Rollout
from pellucid.ledger import Flow, State
from pellucid.orchestrator.drought import Drought
from pellucid.orchestrator.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Rules:
    batch_size: int
    rollouts_per_example: int
    max_inflight_rollouts: int
    max_async_level: int
    max_off_policy_steps: int
    max_steps: int


@dataclass(frozen=True, slots=True)
class Source:
    """An environment, as far as scheduling goes."""

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


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All that a resumed run has to know."""

    batches_sent: int
    positions: Mapping[str, int]
    """Next example of each environment."""

    num_groups: int
    generation: int
    """How often the run was resumed; keeps the names of its groups apart."""

    unfinished: Sequence[tuple[str, int]]
    """(environment, example) of each group that was started and is neither ready nor settled."""

    ready: Sequence[list[Verdict]]


@dataclass(slots=True)
class _OpenGroup:
    source: Source
    example_index: int
    group_id: str
    num_dispatched: int = 0
    returned: list[Rollout] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _ReadyGroup:
    verdicts: list[Verdict]
    num_sent: int


class Scheduler:
    """`judge` turns the surviving rollouts of a final group into verdicts, one each, in order."""

    def __init__(
        self, rules: Rules, sources: Sequence[Source], judge: Callable[[Sequence[Rollout]], list[Verdict]]
    ) -> None:
        self._rules = rules
        self._sources = sources
        self._judge = judge
        self._positions = {source.env_name: 0 for source in sources}
        self._num_groups = 0
        self._generation = 0
        self._again: deque[tuple[Source, int]] = deque()
        """Examples whose group did not survive the run that was resumed."""
        self._filling: _OpenGroup | None = None
        self._open: dict[str, _OpenGroup] = {}
        self._inflight: set[str] = set()
        self._ready: deque[_ReadyGroup] = deque()
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
        return sum(group.num_sent for group in self._ready)

    @property
    def num_settled(self) -> int:
        """Rollouts that `take_settled` would give."""
        return sum(map(len, self._settled))

    @property
    def waits_for_weights(self) -> bool:
        """Whether nothing starts until newer weights are served."""
        ahead = self.batches_sent - self.policy_version
        return self.batches_sent < self._rules.max_steps and ahead > self._rules.max_async_level

    def next_dispatch(self) -> Dispatch | None:
        if self.stopped or self.num_inflight >= self._rules.max_inflight_rollouts:
            return None
        group = self._filling or self._start_group()
        if group is None:
            return None
        rollout_id = f"{group.group_id}-r{group.num_dispatched}"
        group.num_dispatched += 1
        self._filling = group if group.num_dispatched < self._rules.rollouts_per_example else None
        self._inflight.add(rollout_id)
        return Dispatch(group.source.env_name, group.example_index, group.group_id, rollout_id)

    def finish(self, rollout: Rollout) -> None:
        """A dispatched rollout has come back, in success or (`rollout.error`) failure."""
        self._inflight.remove(rollout.rollout_id)
        group = self._open[rollout.group_id]
        group.returned.append(rollout)
        if self._is_final(group):
            self._close(group)

    def update_policy(self, version: int) -> None:
        self.policy_version = version

    def take_batch(self) -> list[Verdict] | None:
        """The rollouts of the next batch, once there are enough; they count as sent from here on."""
        if self.num_ready < self._rules.batch_size or self.batches_sent == self._rules.max_steps:
            return None
        batch: list[Verdict] = []
        while len(batch) < self._rules.batch_size:
            verdicts = self._ready.popleft().verdicts
            batch += [verdict for verdict in verdicts if verdict.is_sent]
            self._settled.append(verdicts)
        self.batches_sent += 1
        self._drop_stale()
        return batch

    def take_settled(self) -> list[list[Verdict]]:
        """The groups settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def stop(self) -> None:
        """Nothing starts any more; what is open is cancelled, in flight once it is back. See `state`."""
        self.stopped = True
        self._unfinished = self._find_unfinished()
        self._filling = None
        while self._ready and self.batches_sent == self._rules.max_steps:
            self._cancel(self._ready.popleft().verdicts)
        for group in list(self._open.values()):
            if self._is_final(group):
                self._close(group)

    def state(self) -> SchedulerState:
        """For a run that goes on from here; of one that was stopped, as it was then."""
        return SchedulerState(
            self.batches_sent,
            dict(self._positions),
            self._num_groups,
            self._generation,
            self._unfinished if self.stopped else self._find_unfinished(),
            [group.verdicts for group in self._ready],
        )

    def restore(self, state: SchedulerState) -> None:
        """Goes on from `state`; environments that are gone are forgotten, new ones start at the beginning."""
        sources = {source.env_name: source for source in self._sources}
        self.batches_sent = state.batches_sent
        self._positions |= {env: index for env, index in state.positions.items() if env in sources}
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
        num_wanted = (last_batch - self.batches_sent) * rules.batch_size
        if self.num_ready + len(self._open) * rules.rollouts_per_example >= num_wanted:
            return None
        source, index = self._again[0] if self._again else self._next_example()
        room = rules.max_inflight_rollouts - self.num_inflight
        if source.group_scored and room < rules.rollouts_per_example:
            return None  # its rollouts belong together: all at once or not yet
        if self._again:
            self._again.popleft()
        else:
            self._positions[source.env_name] += 1
        group = _OpenGroup(source, index, self._next_group_id())
        self._open[group.group_id] = group
        return group

    def _next_group_id(self) -> str:
        """`g57`; `g57.1` after the first resume: a run that was killed may have used the same numbers."""
        number = self._num_groups
        self._num_groups += 1
        return f"g{number}.{self._generation}" if self._generation else f"g{number}"

    def _next_example(self) -> tuple[Source, int]:
        source = self._next_source()
        return source, self._positions[source.env_name]

    def _next_source(self) -> Source:
        """The environment furthest behind its share of the groups; the first of equals."""
        num_groups = sum(self._positions.values()) + 1
        weight = sum(source.weight for source in self._sources)
        return max(
            self._sources,
            key=lambda source: num_groups * source.weight / weight - self._positions[source.env_name],
        )

    def _is_final(self, group: _OpenGroup) -> bool:
        started_whole = group.num_dispatched == self._rules.rollouts_per_example
        return len(group.returned) == group.num_dispatched and (started_whole or self.stopped)

    def _close(self, group: _OpenGroup) -> None:
        """Judged first: a group that cannot be judged stays open, and is cancelled when the run stops."""
        if self.stopped:
            self._cancel([Verdict(rollout, Flow.SENT) for rollout in group.returned])
        else:
            self._admit(self._verdicts(group))
        del self._open[group.group_id]

    def _verdicts(self, group: _OpenGroup) -> list[Verdict]:
        failed = [
            Verdict(rollout, State.FAILED_ROLLOUT, rollout.error)
            for rollout in group.returned
            if rollout.error is not None
        ]
        survivors = [rollout for rollout in group.returned if rollout.error is None]
        if not survivors or (failed and group.source.group_scored):
            reason = f"{len(failed)} of {len(group.returned)} rollouts of a group-scored group failed"
            return [*failed, *(Verdict(rollout, State.DROPPED_GROUP, reason) for rollout in survivors)]
        return [*failed, *self._judge(survivors)]

    def _admit(self, verdicts: list[Verdict]) -> None:
        verdicts = self._aged(verdicts)
        if num_sent := sum(verdict.is_sent for verdict in verdicts):
            self._ready.append(_ReadyGroup(verdicts, num_sent))
            self.drought = Drought()
        else:
            self._settled.append(verdicts)
            self.drought.add(verdicts)

    def _drop_stale(self) -> None:
        ready, self._ready = self._ready, deque()
        for group in ready:
            verdicts = self._aged(group.verdicts)
            if verdicts is group.verdicts:
                self._ready.append(group)
            else:
                self._settled.append(verdicts)

    def _aged(self, verdicts: list[Verdict]) -> list[Verdict]:
        """The verdicts at the current step: those of a group with a token that is too old are overruled."""
        survivors = [verdict.rollout for verdict in verdicts if verdict.outcome is not State.FAILED_ROLLOUT]
        versions = [rollout.oldest_version for rollout in survivors]
        oldest = min((version for version in versions if version is not None), default=self.batches_sent)
        if self.batches_sent - oldest <= self._rules.max_off_policy_steps:
            return verdicts
        reason = (
            f"oldest token of policy version {oldest} at step {self.batches_sent}; "
            f"orchestrator.max_off_policy_steps = {self._rules.max_off_policy_steps}"
        )
        return [verdict.overruled(State.STALE, reason) for verdict in verdicts]

    def _cancel(self, verdicts: list[Verdict]) -> None:
        reason = "the run ended before its batch"
        self._settled.append([verdict.overruled(State.CANCELLED, reason) for verdict in verdicts])
