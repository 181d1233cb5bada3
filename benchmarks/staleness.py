"""What does it save to end groups in flight once they are too old to train?

A simulated run on the real scheduler, the same on every machine. Its clock ticks once per decode step: every
rollout in flight gets a token. Lengths are log-normal, so that a few rollouts outlast several steps; a step
of training takes as long as half a rollout of mean length.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.ledger import Flow, State
from pellucid.orchestrator.scheduler import Dispatch, Rules, Scheduler, Source
from pellucid.orchestrator.verdict import Verdict

RULES = Rules(
    batch_size=64,
    rollouts_per_example=8,
    max_inflight_rollouts=128,
    max_async_level=1,
    max_off_policy_steps=2,
    max_steps=100,
)
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 200, 1.0, 4096
TRAINING_TICKS = 150


@dataclass(frozen=True, slots=True)
class Simulated:
    num_sampled: int
    """Tokens, until the last batch was sent."""

    num_stale: int
    """Tokens that were sampled for groups that grew too old."""

    num_saved: int
    """Tokens that these groups would have sampled on."""

    num_ticks: int
    """Decode steps until the last batch was sent."""


@dataclass(slots=True)
class _Decoding:
    dispatch: Dispatch
    length: int
    version: int
    num_sampled: int = 0

    def rollout(self, error: str | None = None) -> Rollout:
        completion = Completion([], [], [(self.version, self.num_sampled)], "stop")
        turn = Turn([], completion, "")
        turn.num_tokens = self.num_sampled
        name, group, index = self.dispatch.rollout_id, self.dispatch.group_id, self.dispatch.example_index
        return Rollout(name, group, Example(str(index), []), "env", 1.0, [turn], reward=1.0, error=error)


def simulate(rules: Rules = RULES) -> Simulated:
    """A run to its last batch."""
    scheduler = Scheduler(rules, [Source("env")], _keep)
    running: dict[str, _Decoding] = {}
    num_sampled = num_stale = num_saved = num_ticks = 0
    ready_at: list[int] = []
    """When each batch is trained."""
    while scheduler.batches_sent < rules.max_steps:
        while (dispatch := scheduler.next_dispatch()) is not None:
            running[dispatch.rollout_id] = _Decoding(dispatch, _length(dispatch), scheduler.policy_version)
            scheduler.note_request(dispatch.rollout_id)
        num_ticks += 1
        num_sampled += len(running)
        for name, decoding in list(running.items()):
            decoding.num_sampled += 1
            if decoding.num_sampled == decoding.length:
                scheduler.finish(running.pop(name).rollout())
        while scheduler.take_batch() is not None:
            ready_at.append(max([num_ticks, *ready_at[-1:]]) + TRAINING_TICKS)
            for name in scheduler.take_cut():
                cut = running.pop(name)
                num_saved += cut.length - cut.num_sampled
                scheduler.finish(cut.rollout(error="cut short"))
        scheduler.update_policy(sum(at <= num_ticks for at in ready_at))
        settled = (verdict for group in scheduler.take_settled() for verdict in group)
        num_stale += sum(verdict.rollout.num_sampled for verdict in settled if verdict.outcome is State.STALE)
    return Simulated(num_sampled, num_stale, num_saved, num_ticks)


def _keep(rollouts: Sequence[Rollout]) -> list[Verdict]:
    return [Verdict(rollout, Flow.SENT) for rollout in rollouts]


def _length(dispatch: Dispatch) -> int:
    """Depends on the name alone, whatever else happens in the run."""
    drawn = random.Random(dispatch.rollout_id).lognormvariate(math.log(MEDIAN_TOKENS), SPREAD)
    return min(MAX_TOKENS, 1 + int(drawn))
