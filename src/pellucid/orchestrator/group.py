"""Groups: the attempts at one example, of training, of evaluations and of `pellucid env try` alike.

- An exception in an environment, session or client fails that rollout alone: `attempt` is the boundary where
  failures become data, see `failures`. A rollout with refused tokens fails, whatever its environment makes of
  the session's error.
- A rollout has a reward once all of its attempt has succeeded, and not before. Where groups are scored, the
  members of a group get theirs from one call of `score_group`, all or none: a group that could not be scored
  has no rewards, and so cannot train.
- All that an attempt does, the scoring of its group included, shares one deadline.

Evaluations measure policy versions on environments that train nothing:

- An evaluation is of one policy version: no other is served before it is over. `evaluate` runs inside the
  task that serves the versions, and relies on that.
- It attempts the same examples every time, at most `max_inflight_rollouts` at once. That is its own limit:
  training goes on sampling beside it.
- Every token sampled for it is `eval` in the ledger, whether its rollout is scored, fails or is cut short. A
  rollout that fails is counted and never stops the run.
- A version with a record in `metrics/eval.jsonl` is done; a resumed run does not evaluate it again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np

from pellucid.config import EvalConfig, OrchestratorRunConfig
from pellucid.data import Example, PackedArray, Rollout, TrainingMode
from pellucid.data.plain import to_json, to_plain
from pellucid.data.spans import SpanLog
from pellucid.errors import ConfigError, InferenceError, PellucidError, RolloutError, TeacherError
from pellucid.inference.client import REFUSED, InferenceClient
from pellucid.ledger import State
from pellucid.metrics.evaluation import evaluation_line, measure, metric_name
from pellucid.orchestrator.books import Books
from pellucid.orchestrator.chat import copy_nested
from pellucid.orchestrator.environment import (
    Environment,
    Score,
    ask,
    checked_score,
    checked_scores,
    draw_example,
    load_environment,
)
from pellucid.orchestrator.failures import EMPTY, FailureLog, fail, fail_by, is_being_cancelled
from pellucid.orchestrator.session import PromptCache, Sampler, Session
from pellucid.orchestrator.tasks import Deadline
from pellucid.orchestrator.verdict import Verdict, token_sequences

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]

_MAX_LABEL = 1_000  # characters of an example's id: batches carry it with every sample


@dataclass(frozen=True, slots=True)
class Scorer:
    """Adds the teacher's logprobs to finished rollouts.

    Every sample is scored as the sequence that the trainer will see, at the temperature at which it was
    sampled. Scoring samples nothing and is in no books.
    """

    client: InferenceClient
    run_id: str

    async def score(self, rollout: Rollout) -> None:
        name = f"{self.run_id}/{rollout.group_id}/{rollout.rollout_id}"
        if any(turn.images for turn in rollout.turns):
            raise TeacherError(
                "the rollout has images, and a teacher scores text alone; leave one of them out"
            )
        scored: list[PackedArray] = []
        for index, token_ids in enumerate(token_sequences(rollout)):
            request_id = f"{name}/teacher-{index}"
            try:
                logprobs = await self.client.score(token_ids.tolist(), rollout.temperature, request_id)
            except InferenceError as error:
                raise TeacherError(f"the teacher could not score the rollout: {error}") from error
            if len(logprobs) != len(token_ids):
                raise TeacherError(f"the teacher gave {len(logprobs)} logprobs for {len(token_ids)} tokens")
            scored.append(PackedArray.pack(np.asarray(logprobs, np.float32)))
        rollout.teacher_logprobs = scored


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
        deadline, started = Deadline(self.timeout_s), time.monotonic()
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
            rollout.time_s = time.monotonic() - started
            rollout.number_samples()
            self.num_over += 1

    async def _converse(self, rollout: Rollout, deadline: Deadline) -> Score:
        opening = self.example.messages
        session = Session(rollout, self.sampler, self._prompts, self.on_request, opening)
        # A copy: an environment that appends to its messages must not append to those of the whole group.
        example = Example(self.example.example_id, copy_nested(list(opening)), self.example.info)
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
    rollout.weights |= score.weights
    for column in rollout.state.keys() & score.state.keys():
        rollout.state[column] = to_json(score.state[column]).decode()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One `[[orchestrator.eval]]`, ready to run."""

    config: EvalConfig
    environment: Environment
    examples: Sequence[Example]

    def is_due(self, version: int, last_version: int) -> bool:
        if version == last_version:
            return True
        return version % self.config.interval == 0 and (version > 0 or self.config.at_start)


def load_evaluation(config: EvalConfig, seed: int) -> Evaluation:
    return prepare_evaluation(config, load_environment(config, seed))


def prepare_evaluation(config: EvalConfig, environment: Environment) -> Evaluation:
    """Makes all examples of an evaluation, so that a missing one is found before the run starts."""
    wanted = f"{config.KEY}.num_examples = {config.num_examples}"
    if environment.num_examples is not None and config.num_examples > environment.num_examples:
        raise ConfigError(
            f"{wanted}, but environment {config.label!r} has only {environment.num_examples} different ones; "
            "lower num_examples"
        )
    remedy = f"lower {wanted} to what it has"
    examples = [draw_example(environment, config.label, i, remedy) for i in range(config.num_examples)]
    return Evaluation(config, environment, examples)


class Evaluator:
    """Runs the evaluations of a run; with none, no version is ever due.

    `spawn` starts an attempt. Whoever stops the run cancels the attempts, and then calls `settle_all`.
    """

    def __init__(
        self,
        config: OrchestratorRunConfig,
        evaluations: Sequence[Evaluation],
        sampler: Sampler,
        books: Books,
        spawn: Spawn,
        failures: FailureLog,
        spans: SpanLog,
    ) -> None:
        self._last_version = config.max_steps
        self._evaluations = evaluations
        self._sampler = sampler
        self._books = books
        self._spawn = spawn
        self._failures = failures
        self._spans = spans
        self._timeout_s = config.orchestrator.rollout_timeout_s
        self._free = asyncio.Semaphore(config.max_inflight_rollouts)
        self._version = 0
        """Version that is evaluated now, or was last."""
        self._open: dict[str, GroupRun] = {}
        # Rollouts of an evaluation are saved and not kept in memory; these are.
        self._rewards: list[list[float | None]] = []
        """Rewards by example of the evaluation that is running."""
        self._num_scored_tokens = 0

    @property
    def environments(self) -> list[Environment]:
        return [each.environment for each in self._evaluations]

    def is_due(self, version: int) -> bool:
        """Whether this version is to be evaluated and has no record yet."""
        return version not in self._books.evaluated and bool(self._due(version))

    async def evaluate(self, version: int) -> dict[str, float]:
        """Measures a version, which has to be served until this returns; `Books` then writes its record."""
        values: dict[str, float] = {}
        for evaluation in self._due(version):
            name = evaluation.config.label
            with self._spans.timed(f"eval/{name}", version):
                measures = await self._measure(evaluation, version)
            log.info(evaluation_line(version, name, measures))
            values |= {metric_name(name, key): value for key, value in measures.items()}
        return values

    def settle_all(self) -> None:
        """Accounts for the examples whose attempts are still running."""
        for group in list(self._open.values()):
            self._settle(group)

    def _due(self, version: int) -> list[Evaluation]:
        return [each for each in self._evaluations if each.is_due(version, self._last_version)]

    async def _measure(self, evaluation: Evaluation, version: int) -> dict[str, float]:
        started = time.monotonic()
        config, name = evaluation.config, evaluation.config.label
        max_tokens = config.max_tokens or self._sampler.max_tokens
        sampler = replace(self._sampler, temperature=config.temperature, max_tokens=max_tokens)
        self._version, self._rewards, self._num_scored_tokens = version, [], 0
        attempts: list[asyncio.Task[None]] = []
        for index, example in enumerate(evaluation.examples):
            group = GroupRun(
                group_id=f"eval-{name}-v{version}-{index}",
                env_name=name,
                environment=evaluation.environment,
                example=example,
                size=config.rollouts_per_example,
                sampler=sampler,
                timeout_s=self._timeout_s,
            )
            self._open[group.group_id] = group
            for number in range(group.size):
                await self._free.acquire()
                rollout = group.open_rollout(f"{group.group_id}-r{number}")
                attempts.append(self._spawn(self._attempt(group, rollout)))
        # Not `gather`: cancelled, it would wait for attempts that refuse to end.
        await asyncio.wait(attempts)
        for attempt in attempts:
            attempt.result()
        measures = measure(self._rewards, config.pass_reward)
        if num_scored := sum(reward is not None for rewards in self._rewards for reward in rewards):
            measures["completion_length"] = self._num_scored_tokens / num_scored
        return {**measures, "time_s": time.monotonic() - started}

    async def _attempt(self, group: GroupRun, rollout: Rollout) -> None:
        try:
            await group.attempt(rollout)
        finally:
            self._free.release()
            if group.num_over == group.size:
                self._settle(group)

    def _settle(self, group: GroupRun) -> None:
        if self._open.pop(group.group_id, None) is None:
            return  # settled without waiting any longer
        for rollout in group.rollouts:
            if rollout.error is not None and not group.sampler.end.has_come:
                self._failures.note(rollout)
            self._num_scored_tokens += rollout.num_sampled if rollout.reward is not None else 0
        self._books.settle_evaluation(self._version, judge_evaluated(group.rollouts))
        self._rewards.append([rollout.reward for rollout in group.rollouts])


def judge_evaluated(rollouts: Sequence[Rollout]) -> list[Verdict]:
    """Returns the verdicts on one example's rollouts; the reason says why a rollout has no reward."""
    unscored = (
        "another rollout of its group failed, so the group was not scored"
        if any(rollout.error is not None for rollout in rollouts)
        else "the run ended before this attempt did"
    )
    return [
        Verdict(rollout, State.EVAL, rollout.error or ("" if rollout.reward is not None else unscored))
        for rollout in rollouts
    ]
