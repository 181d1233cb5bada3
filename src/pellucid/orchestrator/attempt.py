"""The attempts at one example. An exception in an environment, session or client fails that rollout alone.

- `attempt` is the boundary where failures become data: type, message and line of the environment's code are
  kept in the rollout. A rollout with refused tokens fails, whatever its environment makes of the session's
  error. Tracebacks are for whoever mends the environment: `FailureLog` logs each of them once.
- A rollout has a reward once all of its attempt has succeeded, and not before. Where groups are scored, the
  members of a group get theirs from one call of `score_group`, all or none: a group that could not be scored
  has no rewards, and so cannot train.
- All that an attempt does, the scoring of its group included, shares one deadline.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from pellucid.config.imports import describe
from pellucid.data import Example, Rollout, TrainingMode
from pellucid.data.plain import clip_middle, encodable, printable, to_json, to_plain
from pellucid.errors import PellucidError, RolloutError, UserCodeError
from pellucid.inference.client import REFUSED
from pellucid.orchestrator.chat import copy_nested
from pellucid.orchestrator.environment import Environment, Score, ask, checked_score, checked_scores
from pellucid.orchestrator.session import PromptCache, Sampler, Session
from pellucid.orchestrator.tasks import Deadline
from pellucid.orchestrator.teacher import Scorer

log = logging.getLogger(__name__)

_MAX_ERROR = 10_000  # characters that are kept of an error, and ten times as many of its traceback
_MAX_LABEL = 1_000  # characters of an example's id: batches carry it with every sample

_CANCELLED = "CancelledError: the attempt was cancelled"

EMPTY = "EmptyRollout"
"""Error type of a rollout in which nothing was sampled."""


@dataclass(slots=True)
class GroupRun:
    """One example, its prompt rendered once, and the rollouts that attempt it."""

    group_id: str
    env_name: str
    environment: Environment
    example: Example
    size: int
    sampler: Sampler
    prompts: PromptCache
    timeout_s: float
    state_columns: Sequence[str] = ()
    training_mode: TrainingMode = TrainingMode.RL
    scorer: Scorer | None = None
    """Adds a teacher's logprobs to finished rollouts; None: the run has no teacher that scores."""

    on_request: Callable[[str], None] | None = None
    """Called with the id of a rollout before each of its requests to the policy."""

    unusable: PellucidError | None = None
    """Why the example cannot be attempted; all its rollouts fail with this error."""

    _unscored: list[Rollout] = field(default_factory=list)
    """Finished members that wait for `score_group`; failed rollouts are not among them."""

    _kept: Example = field(init=False)
    """The example as it is written down; the environment's own may hold anything."""

    def __post_init__(self) -> None:
        example = self.example
        self._kept = replace(
            example, example_id=_label(example.example_id), messages=to_plain(list(example.messages))
        )

    def open_rollout(self, rollout_id: str) -> Rollout:
        return Rollout(
            rollout_id,
            self.group_id,
            self._kept,
            self.env_name,
            self.sampler.temperature,
            state=dict.fromkeys(self.state_columns, "null"),
            training_mode=self.training_mode,
        )

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
                _fail(rollout, EMPTY, f"{EMPTY}: the environment returned a score but sampled nothing")
                return
            if self.scorer is not None:
                await deadline.bound(self.scorer.score(rollout))
            _note(rollout, score)
            if self.environment.requires_group_scoring:
                await self._score_with_group(rollout, deadline)
            else:
                rollout.reward = score.reward
        except PellucidError as error:
            _fail(rollout, type(error).__name__, f"{type(error).__name__}: {error}")
            if isinstance(error, UserCodeError):
                rollout.traceback = _traceback(error.__cause__)
        except Exception as error:
            _fail(rollout, type(error).__name__, describe(error))
            rollout.traceback = _traceback(error)
        except asyncio.CancelledError as error:
            is_ours = _is_being_cancelled()
            _fail(rollout, "CancelledError", _CANCELLED if is_ours else describe(error))
            if is_ours:
                raise

    async def _converse(self, rollout: Rollout, deadline: Deadline) -> Score:
        session = Session(rollout, self.sampler, self.prompts, self.on_request)
        # A copy: an environment that appends to its messages must not append to those of the whole group.
        own = replace(self.example, messages=copy_nested(list(self.example.messages)))
        try:
            return await deadline.bound(ask(self.environment.rollout, own, session))
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


class FailureLog:
    """Failed rollouts in the log: one line each, with the traceback where an environment fails anew."""

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def note(self, rollout: Rollout) -> None:
        frames = (line for line in rollout.traceback.splitlines() if line.startswith("  File "))
        failure = (rollout.env_name, rollout.error_type or "", *frames)
        is_new = failure not in self._known
        self._known.add(failure)
        detail = f"\n{rollout.traceback.rstrip()}" if rollout.traceback and is_new else ""
        log.warning(
            "rollout %s of %s failed: %s%s", rollout.rollout_id, rollout.env_name, rollout.error, detail
        )


def _label(example_id: object) -> str:
    """Returns an example's id as text. A long one (some are whole prompts) is cut and gets a digest."""
    text = str(to_plain(example_id))
    if len(text) <= _MAX_LABEL:
        return text
    return f"{text[:_MAX_LABEL]}…{sha256(text.encode()).hexdigest()[:16]}"


def _fail(rollout: Rollout, error_type: str, error: str) -> None:
    rollout.error_type = encodable(error_type)
    rollout.error = _to_be_shown(error, _MAX_ERROR)


def _traceback(error: BaseException | None) -> str:
    return _to_be_shown("".join(traceback.format_exception(error)), 10 * _MAX_ERROR)


def _to_be_shown(text: str, width: int) -> str:
    return clip_middle(printable(text), width)


def _is_being_cancelled() -> bool:
    """Whether this task is being cancelled; if not, the environment itself raised the CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _note(rollout: Rollout, score: Score) -> None:
    """Keeps all of a score but the reward."""
    rollout.metrics |= score.metrics
    for column in rollout.state.keys() & score.state.keys():
        rollout.state[column] = to_json(score.state[column]).decode()
