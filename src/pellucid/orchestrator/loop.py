"""The orchestrator's loop: asks the scheduler what to do, and does it.

    dispatch ──> attempts ──> collect ──> scheduler ──> send ──> trainer
                  │    ^                      ^                     │
                  v    │                      │                     v
               inference server <── follow_weights <───── weights/step_N

    who              waits for                         is woken by
    run              a change                          collect, follow_weights, a dead task
                     the batch that is being written   the clerk, a thread of its own
    dispatch         a change                          collect, follow_weights, run
    an attempt       the server                        its completion; its cancellation (too old, at the end)
                     the teacher, where one scores     its logprobs, or the same
    follow_weights   a newer stable weights/step_N     the trainer
                     the evaluation of the last one    the attempts of the evaluation
    the trainer      a batch                           send

Back-pressure is the scheduler's: nothing here decides what may start. A failed rollout is data; any other
exception in a task stops the run. A version that is evaluated stays until that is over, and a run with
evaluations ends with that of its last version. However the run ends, what was sampled is accounted for:
attempts are cancelled, which makes their sessions take in what the server has. A run that sent its last
batch then closes its books; one that was stopped leaves them open, with a snapshot to go on from. Books come
before all that may be slow or hang: metrics, environments.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from pellucid.config import OrchestratorRunConfig
from pellucid.data import Example, Rollout, TrainingMode
from pellucid.data.spans import SpanLog
from pellucid.ending import DISK_SILENCE_S, SILENCE_S, SINK_SILENCE_S, say, say_failure
from pellucid.errors import PellucidError, RolloutError, UserCodeError
from pellucid.inference.client import InferenceClient
from pellucid.ledger import new_process
from pellucid.ledger.settings import changed_settings, record_settings
from pellucid.ledger.weights import WeightsBook
from pellucid.orchestrator.advantage import load_advantage
from pellucid.orchestrator.alarms import OrchestratorAlarms, WatchedClient
from pellucid.orchestrator.books import Books, Clerk, TeacherBooks
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.environment import Environment, draw_example
from pellucid.orchestrator.failures import FailureLog, pause_before
from pellucid.orchestrator.group import Evaluation, Evaluator, GroupRun, Scorer
from pellucid.orchestrator.records import BatchProgress, remove_progress, write_progress
from pellucid.orchestrator.scheduler import Dispatch, Rules, Scheduler, Source
from pellucid.orchestrator.servers import LAST_WORD_S, OfferedVersionsList, follow_weights
from pellucid.orchestrator.session import Sampler
from pellucid.orchestrator.snapshot import Snapshot, settle_orchestrator
from pellucid.orchestrator.tasks import Pace, RateLimit, cancel, finish_despite_cancellation
from pellucid.orchestrator.verdict import Judge, Verdict, load_filter
from pellucid.transport import BatchSender, stable_steps

log = logging.getLogger(__name__)

WIND_DOWN_S = 5.0
"""Seconds that cancelled rollouts get to receive their tokens; an environment may hold on to one."""

_LAST_PATIENCE_S = 3.0
_CLOSE_ENVIRONMENTS_S = 30.0
_CHECK_SENDER_EVERY_S = 1.0
_SHOW_PROGRESS_EVERY_S = 2.0
_STARTS_PER_TURN = 32
_MAX_UNWRITTEN = 256  # settled rollouts that are kept in memory while no batch forms


class Orchestrator:
    """One run: samples, scores and sends `max_steps` batches."""

    def __init__(
        self,
        config: OrchestratorRunConfig,
        environments: Mapping[str, Environment],
        tokenizer: Any,
        client: InferenceClient,
        sender: BatchSender,
        evaluations: Sequence[Evaluation] = (),
        teacher: InferenceClient | None = None,
        process: str = "",
        weights_book: WeightsBook | None = None,
        offered: OfferedVersionsList | None = None,
        missing: int | None = None,
    ) -> None:
        """`teacher`: the servers of `orchestrator.teacher`, where there is one. `weights_book`: that of
        `client`, for the metrics. `offered`: the list of versions, where the trainer offers them over HTTP.
        `missing`: see `settle_orchestrator`.

        `process`: this process's name in the ledger, which the clients send to their servers.
        """
        process = process or new_process()
        snapshot = Snapshot()
        if config.resume:
            changes = changed_settings(config, "orchestrator")
            snapshot = settle_orchestrator(config, changes, missing=missing)
        self._config = config
        self._environments = environments
        self._alarms = OrchestratorAlarms(
            config.output_dir, lambda: self._scheduler.batches_sent, config.seed, config.weights_dir
        )
        self._weights_book = weights_book or WeightsBook()
        self._offered = offered
        self._client = client = WatchedClient(client, self._alarms)
        self._clients = [client] if teacher is None else [client, teacher]
        self._sender = sender
        self._sampling = _open_sampling(
            config, tokenizer, client, teacher, process, lambda: self._pace.asking()
        )
        self._envs = {env.label: env for env in config.orchestrator.env}
        self._scheduler = _scheduler(config, environments)
        self._books = Books(config, process, snapshot.mark)
        self._clerk = Clerk(config, self._books, sender)
        self._failures = FailureLog()
        self._spans = SpanLog(config.output_dir, "orchestrator")
        self._evaluator = Evaluator(
            config,
            evaluations,
            self._sampling.evaluating,
            self._books,
            self._start,
            self._failures,
            self._spans,
        )
        self._progress = BatchProgress()
        """Counts of the groups settled and written down since the last batch."""
        self._limit = RateLimit(config.orchestrator.tasks_per_minute)
        self._groups: dict[str, GroupRun] = {}
        self._attempts: set[asyncio.Task[None]] = set()
        self._inflight: dict[str, tuple[Rollout, asyncio.Task[None]]] = {}
        self._returned: list[Rollout] = []
        """Rollouts that came back in this turn of the event loop."""
        self._changed = asyncio.Event()
        self._may_start = asyncio.Event()
        self._dead: BaseException | None = None
        if config.resume:
            self._scheduler.restore(snapshot.scheduler_state(config.run_name))
        scheduler = self._scheduler
        self._pace = Pace(
            self._spans, scheduler.batches_sent, lambda: (scheduler.waits_for_weights, scheduler.num_inflight)
        )

    async def run(self) -> None:
        config, settings = self._config, self._config.orchestrator
        start = self._scheduler.batches_sent
        for change in record_settings(config, "orchestrator", start):
            log.info(change.line(start))
        if (inflight := config.max_inflight_rollouts) > (held := config.max_held_requests):
            log.warning(
                f"orchestrator.max_inflight_rollouts = {inflight} exceeds the {held} requests that the "
                "servers hold (inference.max_concurrent + inference.max_queued, each); others wait in the "
                "orchestrator, growing old; lower it, unless rollouts spend most of their time in their "
                "environment"
            )
        services: list[asyncio.Task[None]] = []
        async with self._closing_in_time() as stack:
            try:
                for environment in (*self._environments.values(), *self._evaluator.environments):
                    await stack.enter_async_context(environment.serving())
                loops = [self._follow_weights(), self._watch_sender(), self._show_progress()]
                watches = [client.watch() for client in self._clients]
                if self._offered is not None:
                    watches.append(self._offered.follow())
                services = [self._spawn(each) for each in (*loops, *watches, self._keep_dispatching())]
                while self._scheduler.batches_sent < config.max_steps:
                    await self._change()
                    while (batch := self._scheduler.take_batch()) is not None:
                        self._cut_short_what_is_too_old()
                        await self._send(batch)
                    await self._write_down()
                    limits = settings.max_fruitless_groups, settings.max_signalless_groups
                    if reason := self._scheduler.drought.reason_to_stop(*limits):
                        raise RolloutError(reason)
                while self._evaluator.is_due(config.max_steps):
                    await self._change()
            except Exception as error:
                say_failure(error)
                raise
            finally:
                await finish_despite_cancellation(self._finish(services))

    @asynccontextmanager
    async def _closing_in_time(self) -> AsyncIterator[AsyncExitStack]:
        """Opens a stack for the environments and closes it with a time limit, even if one hangs."""
        stack = AsyncExitStack()
        try:
            yield stack
        finally:
            say("closing the environments", silence_s=_CLOSE_ENVIRONMENTS_S + SILENCE_S)
            try:
                async with asyncio.timeout(_CLOSE_ENVIRONMENTS_S) as limit:
                    await stack.aclose()
            except TimeoutError:
                if not limit.expired():
                    raise
                log.warning("the environments did not close within %g s", _CLOSE_ENVIRONMENTS_S)

    async def _watch_sender(self) -> None:
        """Raises when the trainer refuses a batch; the weights that the run waits for would never come."""
        while True:
            await asyncio.sleep(_CHECK_SENDER_EVERY_S)
            self._sender.check()

    async def _show_progress(self) -> None:
        """Writes `metrics/progress.json` every other second until the last batch is sent."""
        scheduler = self._scheduler
        try:
            while scheduler.batches_sent < self._config.max_steps:
                progress = msgspec.structs.replace(
                    self._progress,
                    step=scheduler.batches_sent,
                    num_ready=scheduler.num_ready,
                    num_running=scheduler.num_inflight,
                    waits_for_weights=scheduler.waits_for_weights,
                    outcomes=dict(self._progress.outcomes),
                )
                write_progress(self._config.output_dir, progress.add(scheduler.settled))
                self._spans.flush()
                await asyncio.sleep(_SHOW_PROGRESS_EVERY_S)
        finally:
            remove_progress(self._config.output_dir)

    async def _keep_dispatching(self) -> None:
        while True:
            await self._dispatch()
            await self._may_start.wait()
            self._may_start.clear()

    async def _dispatch(self) -> None:
        """Starts all rollouts that may start now; other tasks run after every few starts."""
        num_started = 0
        while not (wait_s := self._limit.wait_s()):
            dispatch = self._scheduler.next_dispatch()
            if dispatch is None:
                return
            self._limit.note()
            group = self._groups.get(dispatch.group_id) or self._open_group(dispatch)
            rollout = group.open_rollout(dispatch.rollout_id)
            pause_s = pause_before(dispatch.attempt, self._config.orchestrator.retry_backoff_s)
            task = self._start(self._attempt(group, rollout, pause_s))
            self._inflight[rollout.rollout_id] = rollout, task
            self._pace.note()
            num_started += 1
            if num_started % _STARTS_PER_TURN == 0:
                await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(wait_s, self._may_start.set)

    async def _attempt(self, group: GroupRun, rollout: Rollout, pause_s: float) -> None:
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            await group.attempt(rollout)
        finally:
            self._collect(rollout)

    def _collect(self, rollout: Rollout) -> None:
        if self._inflight.pop(rollout.rollout_id, None) is None:
            return  # settled without waiting any longer
        cut_short = self._scheduler.stopped or self._scheduler.is_cut(rollout.group_id)
        if rollout.error is not None and not cut_short:
            self._failures.note(rollout)
        if not self._returned:
            asyncio.get_running_loop().call_soon(self._take_back)
        self._returned.append(rollout)

    def _take_back(self) -> None:
        """Gives the scheduler the rollouts that came back in a turn of the event loop: a step of an engine
        ends many, and groups are judged together."""
        returned, self._returned = self._returned, []
        if not returned:
            return
        try:
            self._scheduler.finish(*returned)
        except Exception as error:
            self._dead = self._dead or error
        self._pace.note()
        for group_id in {rollout.group_id for rollout in returned}:
            if not self._scheduler.is_open(group_id):
                del self._groups[group_id]
        self._note_change()

    def _cut_short_what_is_too_old(self) -> None:
        """Cancels attempts that are too old. Their tokens so far are received and settled as stale."""
        self._take_back()
        rollout_ids = self._scheduler.take_cut()
        for rollout_id in rollout_ids:
            # Not at once: a task that is cancelled before it runs for the first time never collects.
            asyncio.get_running_loop().call_soon(self._inflight[rollout_id][1].cancel)
        if rollout_ids:
            step, number = self._scheduler.batches_sent, len(rollout_ids)
            log.info("step %4d  %d rollouts in flight are too old for it and were cancelled", step, number)
        # Groups without a rollout in flight: no rollout comes back whose `_collect` would delete them.
        for group_id in [each for each in self._groups if not self._scheduler.is_open(each)]:
            del self._groups[group_id]

    async def _follow_weights(self) -> None:
        weights = self._config.weights_dir
        if self._offered is not None:
            await self._offered.is_known.wait()
        if not stable_steps(weights):
            await self._evaluate(0)
        await follow_weights(
            weights, self._client, self._update_policy, self._evaluator.is_due, self._spans.timed
        )

    async def _update_policy(self, version: int) -> None:
        self._scheduler.update_policy(version)
        self._pace.note()
        self._note_change()
        await self._evaluate(version)

    async def _evaluate(self, version: int) -> None:
        if self._evaluator.is_due(version):
            values = await self._evaluator.evaluate(version)
            await self._save()  # before the record: a version with a record is never evaluated again
            self._books.report_evaluation(version, values)
            self._changed.set()

    async def _send(self, verdicts: Sequence[Verdict]) -> None:
        batch_s, blocked_s = self._pace.lap()
        metrics = {
            "policy_version": self._scheduler.policy_version,
            **self._weights_book.metrics(),
            "time/batch_s": batch_s,
            "time/wait_weights_s": blocked_s,
            **self._alarms.judge_batch(verdicts, self._environments),
        }
        self._may_start.set()
        self._progress = BatchProgress()
        with self._spans.timed("send", self._scheduler.batches_sent - 1):
            await self._clerk.send(verdicts, self._scheduler.take_settled(), self._scheduler.state(), metrics)
        self._spans.flush()

    def _take_settled(self) -> list[list[Verdict]]:
        settled = self._scheduler.take_settled()
        self._progress.add(settled)
        return settled

    async def _save(self) -> None:
        """Enters settled groups into the books of the coming step and writes a snapshot."""
        await self._clerk.save(self._take_settled(), self._scheduler.state())

    async def _write_down(self) -> None:
        """Writes settled rollouts down once there are many: their batch may never form."""
        num_settled = sum(map(len, self._scheduler.settled))
        if num_settled >= max(_MAX_UNWRITTEN, self._config.orchestrator.batch_size):
            await self._clerk.settle(self._scheduler.batches_sent, self._take_settled())

    def _note_change(self) -> None:
        self._changed.set()
        self._may_start.set()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        if self._dead is not None:
            raise self._dead

    async def _finish(self, services: "Sequence[asyncio.Task[None]]") -> None:
        self._take_back()
        self._scheduler.stop()
        try:
            await cancel(services)
            await self._wind_down()
        finally:
            stake = "what was sampled since the last batch"
            say("closing its books", at_stake=stake, silence_s=DISK_SILENCE_S)
            try:
                await self._close_books()
            finally:
                say("closing its metrics", silence_s=SINK_SILENCE_S)
                self._spans.flush()
                self._books.close()

    async def _close_books(self) -> None:
        for rollout, _ in list(self._inflight.values()):
            self._collect(rollout)
        self._take_back()
        step = self._scheduler.batches_sent
        self._evaluator.settle_all()
        try:
            await self._save()
        finally:
            self._clerk.close()
        is_finished = step == self._config.max_steps and not self._evaluator.is_due(step)
        if is_finished:
            self._books.finish(step)
        if self._sampling.teacher_books is not None:
            self._sampling.teacher_books.close()
        if is_finished:
            say("handing over its last batches", at_stake="these", silence_s=DISK_SILENCE_S)
            await asyncio.to_thread(self._sender.close)
        if is_finished and self._offered is not None:
            say("telling the trainer that it needs no more weights", silence_s=LAST_WORD_S + SILENCE_S)
            await self._offered.finish()

    async def _wind_down(self) -> None:
        """Cancels running attempts and waits up to a limit until their tokens are received."""
        self._sampling.evaluating.end.has_come = True
        self._sampling.evaluating.end.patience_s = _LAST_PATIENCE_S
        say(
            f"cutting {len(self._attempts)} rollouts short",
            at_stake="what these have sampled",
            silence_s=WIND_DOWN_S + _LAST_PATIENCE_S + SILENCE_S,
        )
        for attempt in self._attempts:
            attempt.cancel()
        if self._attempts:
            await asyncio.wait(self._attempts, timeout=WIND_DOWN_S)
        if self._attempts:
            log.warning("%d rollouts did not end within %g s", len(self._attempts), WIND_DOWN_S)

    def _open_group(self, dispatch: Dispatch) -> GroupRun:
        """Draws the example and opens its group. A bad row of data fails its own rollouts, and no others."""
        name, index = dispatch.env_name, dispatch.example_index
        unusable: PellucidError | None = None
        try:
            example = draw_example(self._environments[name], name, index)
        except (UserCodeError, RolloutError) as error:
            if index == 0 or isinstance(error.__cause__, (IndexError, StopIteration)):
                raise  # there is no data set, or it has ended
            example, unusable = Example(str(index), []), error
        group = self._groups[dispatch.group_id] = GroupRun(
            group_id=dispatch.group_id,
            env_name=name,
            environment=self._environments[name],
            example=example,
            size=self._config.orchestrator.rollouts_per_example,
            sampler=self._sampling.by_env[name],
            timeout_s=self._config.orchestrator.rollout_timeout_s,
            state_columns=self._envs[name].state_columns,
            training_mode=self._sampling.mode,
            scorer=self._sampling.scorer,
            on_request=self._scheduler.note_request if self._sampling.teacher_books is None else None,
            unusable=unusable,
        )
        return group

    def _start(self, attempt: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts an attempt as a task, which is cancelled when the run ends."""
        task = self._spawn(attempt)
        self._attempts.add(task)
        return task

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        """Stops the run if the task raised."""
        self._attempts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._dead = self._dead or error
            self._changed.set()


class _Sampling(NamedTuple):
    """Who samples and scores the rollouts of a run."""

    by_env: dict[str, Sampler]
    """Samplers of training, by environment."""

    evaluating: Sampler
    """That of evaluations, whose `end` is that of all."""

    mode: TrainingMode
    scorer: Scorer | None = None
    teacher_books: TeacherBooks | None = None
    """Present if a teacher samples."""


def _open_sampling(
    config: OrchestratorRunConfig,
    tokenizer: Any,
    client: InferenceClient,
    teacher: InferenceClient | None,
    process: str,
    asking: Callable[[], AbstractContextManager[None]],
) -> _Sampling:
    settings = config.orchestrator
    policy = Sampler(
        client=client,
        chat=ChatTemplate(tokenizer),
        run_id=config.run_name,
        seed=config.seed,
        temperature=settings.sampling.temperature,
        max_tokens=settings.sampling.max_tokens,
        max_model_len=config.inference.max_model_len,
    )
    mode = TrainingMode(settings.teacher.mode if settings.teacher else TrainingMode.RL)
    training, scorer, books = replace(policy, asking=asking), None, None
    if teacher is not None and mode is TrainingMode.SFT:
        books = TeacherBooks(config, process)
        training = replace(training, client=teacher, on_completion=books.take)
    elif teacher is not None:
        scorer = Scorer(teacher, config.run_name)
    by_env = {env.label: replace(training, **settings.sampling_of(env).model_dump()) for env in settings.env}
    return _Sampling(by_env, policy, mode, scorer, books)


def _scheduler(config: OrchestratorRunConfig, environments: Mapping[str, Environment]) -> Scheduler:
    settings = config.orchestrator
    rules = Rules(
        batch_size=settings.token_batch_size or settings.batch_size,
        max_rollout_tokens=None if settings.token_batch_size is None else config.inference.max_model_len,
        rollouts_per_example=settings.rollouts_per_example,
        max_inflight_rollouts=config.max_inflight_rollouts,
        max_async_level=config.max_async_level,
        max_off_policy_steps=settings.max_off_policy_steps,
        max_steps=config.max_steps,
        max_retries=settings.max_retries,
        paced=settings.pace_sampling,
    )
    sources = [
        Source(env.label, env.weight, environments[env.label].requires_group_scoring) for env in settings.env
    ]
    judge = Judge(
        config.run_name,
        load_advantage(settings.advantage),
        settings.drops_zero_advantages,
        [load_filter(each) for each in settings.filter],
    )
    return Scheduler(rules, sources, judge)
