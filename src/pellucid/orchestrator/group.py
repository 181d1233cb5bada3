"""The attempts at one example. An exception in an environment, session or client fails that rollout alone.

- `attempt` is the boundary where failures become data, see `failures`. A rollout with refused tokens fails,
  whatever its environment makes of the session's error.
- A rollout has a reward once all of its attempt has succeeded, and not before. Where groups are scored, the
  members of a group get theirs from one call of `score_group`, all or none: a group that could not be scored
  has no rewards, and so cannot train.
- All that an attempt does, the scoring of its group included, shares one deadline.
- Training, evaluations and `pellucid env try` run the same groups; what becomes of the rollouts differs.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from pellucid.data import Example, Rollout, TrainingMode
from pellucid.data.plain import to_json, to_plain
from pellucid.errors import PellucidError, RolloutError
from pellucid.inference.client import REFUSED
from pellucid.orchestrator.chat import copy_nested
from pellucid.orchestrator.environment import Environment, Score, ask, checked_score, checked_scores
from pellucid.orchestrator.failures import EMPTY, fail, fail_by, is_being_cancelled
from pellucid.orchestrator.session import PromptCache, Sampler, Session
from pellucid.orchestrator.tasks import Deadline
from pellucid.orchestrator.teacher import Scorer

_MAX_LABEL = 1_000  # characters of an example's id: batches carry it with every sample


@dataclass(slots=True)
class GroupRun:
    """One example, its prompt rendered once, and the rollouts that attempt it."""

    group_id: str
    env_name: str
    environment: Environment
    example: Example
    size: int
    sampler: Sampler
    timeout_s: float
    state_columns: Sequence[str] = ()
    training_mode: TrainingMode = TrainingMode.RL
    scorer: Scorer | None = None
    """Adds a teacher's logprobs to finished rollouts; None: the run has no teacher that scores."""

    on_request: Callable[[str], None] | None = None
    """Called with the id of a rollout before each of its requests to the policy."""

    unusable: PellucidError | None = None
    """Why the example cannot be attempted; all its rollouts fail with this error."""

    rollouts: list[Rollout] = field(default_factory=list, init=False)
    """Every attempt that was started."""

    num_over: int = field(default=0, init=False)
    """Attempts that have ended."""

    _prompts: PromptCache = field(init=False)
    _unscored: list[Rollout] = field(default_factory=list, init=False)
    """Finished members that wait for `score_group`; failed rollouts are not among them."""

    _kept: Example = field(init=False)
    """The example as it is written down; the environment's own may hold anything."""

    def __post_init__(self) -> None:
        self._prompts = PromptCache(self.sampler.chat)
        messages = to_plain(list(self.example.messages))
        self._kept = replace(self.example, example_id=_label(self.example.example_id), messages=messages)

    def open_rollout(self, rollout_id: str) -> Rollout:
        rollout = Rollout(
            rollout_id,
            self.group_id,
            self._kept,
            self.env_name,
            self.sampler.temperature,
            state=dict.fromkeys(self.state_columns, "null"),
            training_mode=self.training_mode,
        )
        self.rollouts.append(rollout)
        return rollout

    async def attempt(self, rollout: Rollout) -> None:
        """Leaves the rollout scored, waiting for its group's scores, or with the reason why it failed."""
        deadline = Deadline(self.timeout_s)
        try:
            if self.unusable is not None:
                raise self.unusable
            score = checked_score(await self._converse(rollout, deadline), self.environment.rollout)
            if any(turn.finish_reason == REFUSED for turn in rollout.turns):
                raise RolloutError(
                    "tokens of this rollout were refused; the environment went on without them"
                )
            if rollout.num_sampled == 0:
                fail(rollout, EMPTY, f"{EMPTY}: the environment returned a score but sampled nothing")
                return
            if self.scorer is not None:
                await deadline.bound(self.scorer.score(rollout))
            _note(rollout, score)
            if self.environment.requires_group_scoring:
                await self._score_with_group(rollout, deadline)
            else:
                rollout.reward = score.reward
        except (Exception, asyncio.CancelledError) as error:
            fail_by(rollout, error)
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
        finally:
            self.num_over += 1

    async def _converse(self, rollout: Rollout, deadline: Deadline) -> Score:
        session = Session(rollout, self.sampler, self._prompts, self.on_request)
        # A copy: an environment that appends to its messages must not append to those of the whole group.
        example = replace(self.example, messages=copy_nested(list(self.example.messages)))
        try:
            return await deadline.bound(ask(self.environment.rollout, example, session))
        finally:
            await session.close()

    async def _score_with_group(self, rollout: Rollout, deadline: Deadline) -> None:
        """Calls `score_group` if this member completes the group.

        If scoring fails, this member fails; the others wait for the rollout that is attempted in its place.
        """
        members = [*self._unscored, rollout]
        if len(members) == self.size:
            score_group = self.environment.score_group
            scores = checked_scores(
                await deadline.bound(ask(score_group, members), "score_group: "), len(members), score_group
            )
            for member, score in zip(members, scores, strict=True):
                _note(member, score)
            for member, score in zip(members, scores, strict=True):
                member.reward = score.reward
        self._unscored.append(rollout)


def _label(example_id: object) -> str:
    """Returns an example's id as text. A long one (some are whole prompts) is cut and gets a digest."""
    text = str(to_plain(example_id))
    if len(text) <= _MAX_LABEL:
        return text
    return f"{text[:_MAX_LABEL]}…{sha256(text.encode()).hexdigest()[:16]}"


def _note(rollout: Rollout, score: Score) -> None:
    """Keeps all of a score but the reward."""
    rollout.metrics |= score.metrics
    for column in rollout.state.keys() & score.state.keys():
        rollout.state[column] = to_json(score.state[column]).decode()
