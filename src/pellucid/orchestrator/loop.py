"""The orchestrator's loop: asks the scheduler what to do, and does it.

    dispatch ──> attempts ──> collect ──> scheduler ──> send ──> trainer
                  │    ^                      ^                     │
                  v    │                      │                     v
               inference server <── watch_weights <────── weights/step_N

    who             waits for                         is woken by
    run             a change                          collect, watch_weights, a dead task
    an attempt      the server                        its completion, or abort_all at the end
    watch_weights   a newer stable weights/step_N     the trainer
    the trainer     a batch                           send

Back-pressure is the scheduler's: nothing here decides what may start. A failed rollout is data; any other
exception in a task stops the run. However the run ends, what was sampled is accounted for.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.data import Rollout, TokenTable
from pellucid.errors import InferenceError, RolloutError
from pellucid.inference.client import InferenceClient
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.attempt import GroupRun
from pellucid.orchestrator.books import Books
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.environment import Environment
from pellucid.orchestrator.judge import Judge
from pellucid.orchestrator.scheduler import Dispatch, Rules, Scheduler, Source
from pellucid.orchestrator.session import PromptCache, Sampler
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import Batch, BatchSender, stable_steps

log = logging.getLogger(__name__)

_POLL_S = 0.01
_ABORT_AGAIN_S = 1.0
_WIND_DOWN_S = 10.0


class Orchestrator:
    """One run: samples, scores and sends `max_steps` batches."""

    def __init__(
        self,
        config: OrchestratorRunConfig,
        environments: Mapping[str, Environment],
        tokenizer: Any,
        client: InferenceClient,
        sender: BatchSender,
    ) -> None:
        self._config = config
        self._environments = environments
        self._client = client
        self._sender = sender
        self._sampler = _sampler(config, ChatTemplate(tokenizer), client)
        self._scheduler = _scheduler(config, environments)
        self._books = Books(config)
        self._stopwatch = _Stopwatch()
        self._group: GroupRun | None = None
        self._attempts: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._dead: BaseException | None = None
        self._last_failure = ""

    async def run(self) -> None:
        watcher = self._spawn(self._watch_weights())
        try:
            while self._scheduler.batches_sent < self._config.max_steps:
                self._dispatch()
                await self._change()
                self._check_progress()
                while (batch := self._scheduler.take_batch()) is not None:
                    self._send(batch)
        finally:
            await _cancel([watcher])
            await self._wind_down()

    def _dispatch(self) -> None:
        while (dispatch := self._scheduler.next_dispatch()) is not None:
            if self._group is None or self._group.group_id != dispatch.group_id:
                self._group = self._open_group(dispatch)
            rollout = self._group.open_rollout(dispatch.rollout_id)
            self._attempts.add(self._spawn(self._attempt(self._group, rollout)))

    async def _attempt(self, group: GroupRun, rollout: Rollout) -> None:
        try:
            await group.attempt(rollout)
        finally:
            self._collect(rollout)

    def _collect(self, rollout: Rollout) -> None:
        if rollout.error is not None and not self._scheduler.stopped:
            self._last_failure = f"rollout {rollout.rollout_id} of {rollout.env_name} failed: {rollout.error}"
            log.warning(self._last_failure)
        self._scheduler.finish(rollout)
        self._changed.set()

    def _check_progress(self) -> None:
        limit = self._config.orchestrator.max_fruitless_groups
        if self._scheduler.fruitless_groups >= limit:
            raise RolloutError(
                f"orchestrator.max_fruitless_groups = {limit}: as many groups in a row gave nothing to train "
                f"on; the last reason: {self._last_failure}"
            )

    async def _watch_weights(self) -> None:
        """Serves the newest published weights, each version once."""
        weights = self._config.output_dir / "weights"
        while True:
            version = max(stable_steps(weights), default=0)
            if version > self._scheduler.policy_version:
                await self._client.update_weights(version, weights / f"step_{version}")
                self._scheduler.update_policy(version)
                self._stopwatch.note(blocked=self._scheduler.waits_for_weights)
                self._changed.set()
            await asyncio.sleep(_POLL_S)

    def _send(self, verdicts: Sequence[Verdict]) -> None:
        step = self._scheduler.batches_sent - 1
        table = TokenTable.from_samples([sample for verdict in verdicts for sample in verdict.samples])
        num_bytes = self._sender.send(Batch(self._config.run_name, step, table))
        batch_s, blocked_s = self._stopwatch.lap(blocked=self._scheduler.waits_for_weights)
        groups = self._scheduler.take_settled()
        self._books.settle(step, groups)
        own = {
            "batch_rollouts": len(verdicts),
            "batch_tokens": table.num_tokens,
            "batch_bytes": num_bytes,
            "policy_version": self._scheduler.policy_version,
            "time/batch_s": batch_s,
            "time/wait_weights_s": blocked_s,
        }
        self._books.report(step, groups, table, own)

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        if self._dead is not None:
            raise self._dead

    async def _wind_down(self) -> None:
        """Cuts short what is running, waits until it is back, and accounts for everything not sent."""
        self._scheduler.stop()
        self._sampler.closed = True
        try:
            async with asyncio.timeout(_WIND_DOWN_S):
                while self._attempts:
                    await self._client.abort_all()  # more than once: a request may still be on its way
                    if self._attempts:
                        await asyncio.wait(self._attempts, timeout=_ABORT_AGAIN_S)
        except (InferenceError, TimeoutError) as error:
            log.warning("%d rollouts could not be cut short: %r", len(self._attempts), error)
            await _cancel(list(self._attempts))
        step = self._scheduler.batches_sent
        if groups := self._scheduler.take_settled():
            self._books.settle(step, groups)
        self._books.close(step)

    def _open_group(self, dispatch: Dispatch) -> GroupRun:
        environment = self._environments[dispatch.env_name]
        try:
            example = environment.example(dispatch.example_index)
        except Exception as error:
            raise RolloutError(
                f"environment {dispatch.env_name!r} has no example {dispatch.example_index}: "
                f"{type(error).__name__}: {error}; `example` has to answer for every index"
            ) from error
        return GroupRun(
            group_id=dispatch.group_id,
            env_name=dispatch.env_name,
            environment=environment,
            example=example,
            size=self._config.orchestrator.rollouts_per_example,
            sampler=self._sampler,
            prompts=PromptCache(self._sampler.chat),
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        """A task that died stops the run."""
        self._attempts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._dead = self._dead or error
            self._changed.set()


class _Stopwatch:
    """Seconds since the last batch, and how many of them nothing could start for lack of weights."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._blocked_since: float | None = None
        self._blocked_s = 0.0

    def note(self, *, blocked: bool) -> None:
        now = time.monotonic()
        if self._blocked_since is not None:
            self._blocked_s += now - self._blocked_since
        self._blocked_since = now if blocked else None

    def lap(self, *, blocked: bool) -> tuple[float, float]:
        self.note(blocked=blocked)
        now = time.monotonic()
        lap = now - self._started, self._blocked_s
        self._started, self._blocked_s = now, 0.0
        return lap


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _sampler(config: OrchestratorRunConfig, chat: ChatTemplate, client: InferenceClient) -> Sampler:
    sampling = config.orchestrator.sampling
    return Sampler(
        client=client,
        chat=chat,
        run_id=config.run_name,
        seed=config.seed,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        max_model_len=config.inference.max_model_len,
    )


def _scheduler(config: OrchestratorRunConfig, environments: Mapping[str, Environment]) -> Scheduler:
    own = config.orchestrator
    rules = Rules(
        batch_size=own.batch_size,
        rollouts_per_example=own.rollouts_per_example,
        max_inflight_rollouts=own.max_inflight_rollouts,
        max_async_level=config.max_async_level,
        max_off_policy_steps=own.max_off_policy_steps,
        max_steps=config.max_steps,
    )
    sources = [
        Source(env.label, env.weight, environments[env.label].requires_group_scoring) for env in own.env
    ]
    judge = Judge(config.run_name, load_advantage(own.advantage), own.filter_zero_advantages)
    return Scheduler(rules, sources, judge)
