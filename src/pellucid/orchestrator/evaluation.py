"""Evaluations: policy versions measured on environments that train nothing.

- An evaluation is of one policy version: no other is served before it is over. `evaluate` runs inside the
  task that serves the versions, and relies on that.
- It attempts the same examples every time, at most `max_inflight_rollouts` at once. That is its own limit:
  training goes on sampling beside it.
- Every token sampled for it is `eval` in the ledger, whether its rollout is scored, fails or is cut short.
- A rollout that fails is counted and never stops the run.
- A version with a record in `metrics/eval.jsonl` is done; a resumed run does not evaluate it again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pellucid.config import EvalConfig, OrchestratorRunConfig
from pellucid.data import Example, Rollout
from pellucid.errors import ConfigError
from pellucid.ledger import State
from pellucid.metrics.evaluation import evaluation_line, measure, metric_name
from pellucid.orchestrator.books import Books
from pellucid.orchestrator.environment import Environment, draw_example, load_environment
from pellucid.orchestrator.failures import FailureLog
from pellucid.orchestrator.group import GroupRun
from pellucid.orchestrator.session import Sampler
from pellucid.orchestrator.verdict import Verdict

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


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
    if environment.num_examples is not None and config.num_examples > environment.num_examples:
        raise ConfigError(
            f"{config.KEY}.num_examples = {config.num_examples}, but environment {config.label!r} has only "
            f"{environment.num_examples} different ones; lower num_examples"
        )
    remedy = f"lower {config.KEY}.num_examples = {config.num_examples} to what it has"
    indices = range(config.num_examples)
    examples = [draw_example(environment, config.label, index, remedy) for index in indices]
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
    ) -> None:
        self._last_version = config.max_steps
        self._evaluations = evaluations
        self._samplers = {
            each.config.label: replace(
                sampler,
                temperature=each.config.temperature,
                max_tokens=each.config.max_tokens or sampler.max_tokens,
            )
            for each in evaluations
        }
        self._books = books
        self._spawn = spawn
        self._failures = failures
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
        name = evaluation.config.label
        self._version, self._rewards, self._num_scored_tokens = version, [], 0
        attempts: list[asyncio.Task[None]] = []
        for index, example in enumerate(evaluation.examples):
            group = GroupRun(
                group_id=f"eval-{name}-v{version}-{index}",
                env_name=name,
                environment=evaluation.environment,
                example=example,
                size=evaluation.config.rollouts_per_example,
                sampler=self._samplers[name],
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
        measures = measure(self._rewards, evaluation.config.pass_reward)
        num_scored = sum(reward is not None for rewards in self._rewards for reward in rewards)
        if num_scored:
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
        self._books.settle_evaluation(self._version, judge_evaluated(group.rollouts))
        self._rewards.append([rollout.reward for rollout in group.rollouts])
        scored = (rollout for rollout in group.rollouts if rollout.reward is not None)
        self._num_scored_tokens += sum(rollout.num_sampled for rollout in scored)


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
