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
from dataclasses import dataclass, field, replace
from typing import Any

from pellucid.config import EvalConfig, OrchestratorRunConfig
from pellucid.data import Example, Rollout
from pellucid.errors import ConfigError
from pellucid.metrics.evaluation import evaluation_line, measure, metric_name
from pellucid.orchestrator.attempt import FailureLog, GroupRun
from pellucid.orchestrator.environment import Environment, draw_example, load_environment
from pellucid.orchestrator.eval_books import EvalBooks
from pellucid.orchestrator.session import PromptCache, Sampler

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
    examples = []
    for index in range(config.num_examples):
        examples.append(draw_example(environment, config.label, index, remedy))
    return Evaluation(config, environment, examples)


@dataclass(slots=True)
class _Tally:
    """Rewards and token counts of an evaluation so far. Its rollouts are saved and not kept in memory."""

    rewards: list[list[float | None]] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens sampled in the rollouts that have a reward."""

    def measures(self, pass_reward: float) -> dict[str, float]:
        measures = measure(self.rewards, pass_reward)
        num_scored = sum(reward is not None for rewards in self.rewards for reward in rewards)
        if num_scored:
            measures["completion_length"] = self.num_tokens / num_scored
        return measures


@dataclass(slots=True)
class _OpenExample:
    """The attempts at one example."""

    version: int
    run: GroupRun
    tally: _Tally
    rollouts: list[Rollout] = field(default_factory=list)
    num_returned: int = 0

    def open_rollout(self) -> Rollout:
        rollout = self.run.open_rollout(f"{self.run.group_id}-r{len(self.rollouts)}")
        self.rollouts.append(rollout)
        return rollout


class Evaluator:
    """Runs the evaluations of a run; with none, no version is ever due.

    `spawn` starts an attempt. Whoever stops the run cancels the attempts, and then calls `settle_all`.
    """

    def __init__(
        self,
        config: OrchestratorRunConfig,
        evaluations: Sequence[Evaluation],
        sampler: Sampler,
        books: EvalBooks,
        spawn: Spawn,
        failures: FailureLog,
    ) -> None:
        self._last_version = config.max_steps
        self._evaluations = evaluations
        self._samplers = {each.config.label: _sampler(each.config, sampler) for each in evaluations}
        self._books = books
        self._spawn = spawn
        self._failures = failures
        self._timeout_s = config.orchestrator.rollout_timeout_s
        self._free = asyncio.Semaphore(config.max_inflight_rollouts)
        self._open: dict[str, _OpenExample] = {}
        self._stopped = False

    @property
    def environments(self) -> list[Environment]:
        return [each.environment for each in self._evaluations]

    def is_due(self, version: int) -> bool:
        """Whether this version is to be evaluated and has no record yet."""
        return version not in self._books.done and bool(self._due(version))

    async def evaluate(self, version: int) -> dict[str, float]:
        """Measures a version, which has to be served until this returns; `report` then writes its record."""
        values: dict[str, float] = {}
        for evaluation in self._due(version):
            name = evaluation.config.label
            measures = await self._measure(evaluation, version)
            log.info(evaluation_line(version, name, measures))
            values |= {metric_name(name, key): value for key, value in measures.items()}
        return values

    def report(self, version: int, values: dict[str, float]) -> None:
        self._books.report(version, values)

    def stop(self, patience_s: float) -> None:
        """Ends sampling; `patience_s` is set for all samplers, see `Sampler.patience_s`."""
        self._stopped = True
        for sampler in self._samplers.values():
            sampler.close(patience_s)

    def settle_all(self) -> None:
        """Accounts for the examples whose attempts are still running."""
        for group in list(self._open.values()):
            self._settle(group)

    def close(self) -> None:
        self._books.close()

    def _due(self, version: int) -> list[Evaluation]:
        return [each for each in self._evaluations if each.is_due(version, self._last_version)]

    async def _measure(self, evaluation: Evaluation, version: int) -> dict[str, float]:
        started = time.monotonic()
        tally = _Tally()
        attempts: list[asyncio.Task[None]] = []
        for index in range(len(evaluation.examples)):
            group = self._open_group(evaluation, version, index, tally)
            for _ in range(group.run.size):
                await self._free.acquire()
                attempts.append(self._spawn(self._attempt(group, group.open_rollout())))
        # Not `gather`: cancelled, it would wait for attempts that refuse to end.
        await asyncio.wait(attempts)
        for attempt in attempts:
            attempt.result()
        measures = tally.measures(evaluation.config.pass_reward)
        return {**measures, "time_s": time.monotonic() - started}

    def _open_group(self, evaluation: Evaluation, version: int, index: int, tally: _Tally) -> _OpenExample:
        name = evaluation.config.label
        sampler = self._samplers[name]
        run = GroupRun(
            group_id=f"eval-{name}-v{version}-{index}",
            env_name=name,
            environment=evaluation.environment,
            example=evaluation.examples[index],
            size=evaluation.config.rollouts_per_example,
            sampler=sampler,
            prompts=PromptCache(sampler.chat),
            timeout_s=self._timeout_s,
        )
        group = self._open[run.group_id] = _OpenExample(version, run, tally)
        return group

    async def _attempt(self, group: _OpenExample, rollout: Rollout) -> None:
        try:
            await group.run.attempt(rollout)
        finally:
            self._free.release()
            group.num_returned += 1
            if group.num_returned == group.run.size:
                self._settle(group)

    def _settle(self, group: _OpenExample) -> None:
        if self._open.pop(group.run.group_id, None) is None:
            return  # settled without waiting any longer
        for rollout in group.rollouts:
            if rollout.error is not None and not self._stopped:
                self._failures.note(rollout)
        sampler = group.run.sampler
        self._books.settle(
            group.version,
            group.rollouts,
            {"temperature": sampler.temperature, "max_tokens": sampler.max_tokens},
        )
        group.tally.rewards.append([rollout.reward for rollout in group.rollouts])
        group.tally.num_tokens += sum(
            rollout.num_sampled for rollout in group.rollouts if rollout.reward is not None
        )


def _sampler(config: EvalConfig, training: Sampler) -> Sampler:
    return replace(
        training, temperature=config.temperature, max_tokens=config.max_tokens or training.max_tokens
    )
