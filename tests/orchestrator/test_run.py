"""Whole runs against the fake server, with the real codec, journals, metrics and files."""

import asyncio
import contextlib
import logging
import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import pytest

from engine_books import close_engine_books
from full_disk import full_disk
from pellucid.config import FilterConfig, OrchestratorRunConfig
from pellucid.config.orchestrator import OPTIONAL_ROLLOUT_FIELDS, ROLLOUT_FIELDS
from pellucid.data import Completion, Example, Rollout, TokenTable, Turn
from pellucid.errors import ConfigError, DataError, InferenceError, RolloutError, UserCodeError
from pellucid.inference.client import Account, Expected, SamplingParams, group_of_request
from pellucid.inference.fake import FakeInferenceClient
from pellucid.inference.pool import ServerPool
from pellucid.launch.run_folder import has_begun
from pellucid.ledger import Flow, Journal, Stage, State, read_journal, reconcile
from pellucid.metrics import read_metrics
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import (
    AdvantageInputs,
    AdvantageOutputs,
    Environment,
    Orchestrator,
    Score,
    Session,
    SingleTurnEnvironment,
    load_environment,
    loop,
    run_orchestrator,
    tasks,
)
from pellucid.orchestrator.books import Books
from pellucid.orchestrator.group import prepare_evaluation
from pellucid.orchestrator.records import BatchProgress, progress_path, sample_line, shorten, step_line
from pellucid.orchestrator.servers import run_identity
from pellucid.orchestrator.snapshot import read_snapshot
from pellucid.orchestrator.tasks import RateLimit
from pellucid.orchestrator.verdict import FilterInputs, Verdict, load_filter
from pellucid.transport import Batch, MemoryChannel, publish_folder
from tolerance import near

TOKENIZER = character_tokenizer()


class Guess(SingleTurnEnvironment):
    """Reward is the share of `a` in the answer."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"guess {index}"}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(text.count("a") / max(len(text), 1), {"letters": len(text)})


class TwoTurns(Guess):
    async def rollout(self, example: Example, session: Session) -> Score:
        first = await session.respond(example.messages)
        reply = [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        return self.reward(example, await session.respond([*example.messages, *reply]))


class Constant(Guess):
    def reward(self, example: Example, text: str) -> Score:
        return Score(0.1)


class Ranked(Guess):
    """Scores a group against each other."""

    requires_group_scoring: ClassVar[bool] = True

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        order = sorted(range(len(rollouts)), key=lambda index: rollouts[index].turns[0].text)
        return [Score(order.index(index)) for index in range(len(rollouts))]


class Broken(Guess):
    async def rollout(self, example: Example, session: Session) -> Score:
        await session.respond(example.messages)
        raise ZeroDivisionError(f"bad example {example.example_id}")


class Impatient(Guess):
    """Gives up on replies just when they are due, and tries again."""

    async def rollout(self, example: Example, session: Session) -> Score:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                text = await asyncio.wait_for(session.respond(example.messages), random.uniform(0.015, 0.05))
                return self.reward(example, text)
        return Score(random.random())


class Forgetful(Guess):
    """Returns while a second reply is being sampled."""

    async def rollout(self, example: Example, session: Session) -> Score:
        calls = [asyncio.create_task(session.respond(example.messages)) for _ in range(2)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        return self.reward(example, done.pop().result())


class Stubborn(Guess):
    """Shrugs off its first cancellation."""

    async def rollout(self, example: Example, session: Session) -> Score:
        with contextlib.suppress(asyncio.CancelledError):
            await session.respond(example.messages)
            await asyncio.sleep(60)
        await asyncio.sleep(60)
        return Score(1.0)


class SolvedAtFirst(Guess):
    def reward(self, example: Example, text: str) -> Score:
        return Score(0.5) if int(example.example_id) < 150 else super().reward(example, text)


class Silent(Guess):
    async def rollout(self, example: Example, session: Session) -> Score:
        return Score(1.0)


class Hangs(Guess):
    """Every third example hangs in its first attempt, and shrugs off being cancelled."""

    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.seen: Counter[str] = Counter()

    async def rollout(self, example: Example, session: Session) -> Score:
        self.seen[example.example_id] += 1
        hangs = int(example.example_id) % 3 == 0 and self.seen[example.example_id] == 1
        score = await super().rollout(example, session)
        if hangs:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(60)
        return score


def letters(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
    text = "".join(generator.choices("abcd", k=generator.randint(1, 8)))
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def configure(tmp_path: Path, *envs: dict[str, Any], **changes: Any) -> OrchestratorRunConfig:
    orchestrator = {
        "env": list(envs) or [{"id": "x:Guess", "name": "guess"}],
        "batch_size": 12,
        "rollouts_per_example": 4,
        "max_inflight_rollouts": 20,
        "sampling": {"max_tokens": 6},
        **changes.pop("orchestrator", {}),
    }
    run = {"output_dir": tmp_path, "run_id": "run", "model": {"name": "none"}, "max_steps": 4, "seq_len": 200}
    return OrchestratorRunConfig.model_validate({**run, "orchestrator": orchestrator, **changes})


class Trainer:
    """Takes the batches, publishes weights for each, keeps its own books."""

    def __init__(self, config: OrchestratorRunConfig, channel: MemoryChannel) -> None:
        self._config = config
        self._channel = channel
        self.batches: list[Batch] = []

    async def run(self) -> None:
        for step in range(self._config.max_steps):
            self.batches.append(await asyncio.to_thread(self._channel.receive, step))
            await asyncio.sleep(0.005)
            publish_folder(self._config.output_dir / "weights" / f"step_{step + 1}", lambda folder: None)

    def close_books(self) -> None:
        journal = Journal(self._config.output_dir / "ledger" / "trainer.jsonl", Stage.TRAINER)
        for batch in self.batches:
            for env, num_sampled in sampled_by_env(batch.table).items():
                journal.count(batch.run_id, env, Flow.RECEIVED, num_sampled)
                journal.count(batch.run_id, env, State.TRAINED, num_sampled)
                journal.count(batch.run_id, env, Flow.COMPUTED, num_sampled)
        journal.close(len(self.batches))


def sampled_by_env(table: TokenTable) -> Counter[str]:
    counts: Counter[str] = Counter()
    for env, num_sampled in zip(table["env_name"], np.diff(table.sampled_offsets), strict=True):
        counts[env] += int(num_sampled)
    return counts


def run(
    config: OrchestratorRunConfig, environments: dict[str, Environment], client: FakeInferenceClient
) -> list[Batch]:
    """A run to its end, with a trainer; the books of all three stages balance."""

    async def all_parts() -> Trainer:
        channel = MemoryChannel()
        trainer = Trainer(config, channel)
        training = asyncio.create_task(trainer.run())
        async with asyncio.timeout(120):
            await Orchestrator(config, environments, TOKENIZER, client, channel).run()
            await training
        return trainer

    trainer = asyncio.run(all_parts())
    trainer.close_books()
    close_engine_books(config.output_dir, client)
    report = reconcile(config.output_dir / "ledger")
    assert report.balanced and not report.running, report.differences
    for account, states in report.states.items():
        assert states.total() == report.sampled[account] > 0
    return trainer.batches


def saved_rollouts(run_dir: Path) -> list[dict[str, Any]]:
    folders = sorted(
        (run_dir / "rollouts").iterdir(), key=lambda folder: int(folder.name.removeprefix("step_"))
    )
    return [
        orjson.loads(line)
        for folder in folders
        for line in (folder / "train_rollouts.jsonl").read_bytes().splitlines()
    ]


def tokens_by_outcome(run_dir: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for record in saved_rollouts(run_dir):
        counts[record["outcome"]] += record["num_tokens"]
    return counts


def journal_counts(run_dir: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for entry in read_journal(run_dir / "ledger" / "orchestrator.jsonl"):
        counts.update(entry.counts)
    return counts


def test_a_run_with_failures_and_delays_balances(tmp_path: Path) -> None:
    envs = [{"id": "x:Guess", "name": "guess", "weight": 2}, {"id": "x:TwoTurns", "name": "two-turns"}]
    config = configure(tmp_path, *envs, max_steps=6)
    client = FakeInferenceClient(
        letters,
        delay_s=lambda generator: generator.expovariate(100),
        fails=lambda generator: generator.random() < 0.05,
    )
    batches = run(config, {"guess": Guess(seed=1), "two-turns": TwoTurns(seed=1)}, client)

    assert [batch.step for batch in batches] == list(range(6)) and {batch.run_id for batch in batches} == {
        "run"
    }
    assert client.max_running <= 20
    versions = [version for version, _ in client.updates]
    assert versions == sorted(set(versions)) and versions[-1] >= 4
    assert [folder for _, folder in client.updates] == [tmp_path / "weights" / f"step_{v}" for v in versions]

    records = saved_rollouts(tmp_path)
    ids = [record["rollout_id"] for record in records]
    assert len(ids) == len(set(ids))
    assert {record["outcome"] for record in records} >= {"sent", "failed_rollout"}
    assert tokens_by_outcome(tmp_path) == +Counter(
        {key: count for key, count in journal_counts(tmp_path).items() if key != "received"}
    )
    assert journal_counts(tmp_path)["cancelled"] == 0
    sent_ids = [rollout_id for batch in batches for rollout_id in batch.table["rollout_id"]]
    assert sent_ids == [record["rollout_id"] for record in records if record["outcome"] == "sent"]

    metrics = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    assert [record["step"] for record in metrics] == list(range(6))
    for record, batch in zip(metrics, batches, strict=True):
        levels = batch.step - batch.table["policy_versions"]
        assert record["off_policy_level/all/mean"] == pytest.approx(levels.mean())
        assert record["off_policy_level/all/std"] == pytest.approx(levels.std())
        assert record["off_policy_level/all/max"] == levels.max()
        assert record["batch_rollouts"] == batch.table.num_sequences >= 12
        assert record["batch_tokens"] == batch.table.num_tokens
        assert record["time/batch_s"] >= record["time/wait_weights_s"] >= 0
    failed = [record for record in records if record["outcome"] == "failed_rollout"]
    counted = sum(record.get("error/InferenceError/count", 0) for record in metrics)
    assert 0 < counted <= len([record for record in records if record["error"]])
    assert all("injected failure" in record["reason"] for record in failed)


@pytest.mark.parametrize("max_queued", [17, 18])
def test_more_rollouts_in_flight_than_the_servers_hold_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_queued: int
) -> None:
    """20 are in flight."""
    inference = {"max_concurrent": 2, "max_queued": max_queued}
    config = configure(tmp_path, max_steps=1, inference=inference)
    run(config, {"guess": Guess(seed=1)}, FakeInferenceClient(letters))
    named = [message for message in caplog.messages if "requests that the servers hold" in message]
    assert [line.partition(" (")[0] for line in named] == [
        "orchestrator.max_inflight_rollouts = 20 exceeds the 19 requests that the servers hold"
    ] * (max_queued == 17)


def test_received_equals_states_plus_sent_at_every_flush(tmp_path: Path) -> None:
    client = FakeInferenceClient(letters, fails=lambda generator: generator.random() < 0.1)
    run(configure(tmp_path), {"guess": Guess(seed=1)}, client)
    entries = [entry for entry in read_journal(tmp_path / "ledger" / "orchestrator.jsonl") if entry.counts]
    assert len(entries) >= 4
    for entry in entries:
        counts = dict(entry.counts)
        assert counts.pop("received") == sum(counts.values())


def test_reward_is_the_mean_of_every_scored_rollout(tmp_path: Path) -> None:
    run(configure(tmp_path), {"guess": Guess(seed=1)}, FakeInferenceClient(letters))
    rewards, lengths = defaultdict(list), defaultdict(list)
    for record in saved_rollouts(tmp_path):
        rewards[record["step"]].append(record["reward"])
        lengths[record["step"]].append(record["num_tokens"])
    metrics = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    assert len(metrics) == 4
    for record in metrics:
        own = rewards[record["step"]]
        assert record["reward/all"] == record["reward/all/mean"] == pytest.approx(np.mean(own))
        assert record["reward/all/std"] == pytest.approx(np.std(own))
        assert record["reward/all/max"] == max(own)
        assert record["completion_length/guess/mean"] == pytest.approx(np.mean(lengths[record["step"]]))
        assert record["completion_length/guess/std"] == pytest.approx(np.std(lengths[record["step"]]))
        assert record["completion_length/all/max"] == max(lengths[record["step"]])
        assert record["reward/guess"] == record["reward/all"]
        assert 1 <= record["metrics/guess/letters"] <= 6
        assert record["errored_rollouts/all"] == record["empty_rollouts/guess"] == 0


def test_advantages_and_records(tmp_path: Path) -> None:
    batches = run(configure(tmp_path, max_steps=1), {"guess": Guess(seed=1)}, FakeInferenceClient(letters))
    records = {record["rollout_id"]: record for record in saved_rollouts(tmp_path)}
    table = batches[0].table
    for index, rollout_id in enumerate(table["rollout_id"]):
        record = records[rollout_id]
        group = [other["reward"] for other in records.values() if other["group_id"] == record["group_id"]]
        scale = np.abs(group).max()
        assert table["advantage"][index] == near(
            record["reward"] - np.mean(group), terms=len(group), scale=scale
        )
        assert table["advantage"][index] == pytest.approx(record["advantage"])
        assert table["sample_id"][index] == record["sample_ids"][0] == f"{rollout_id}-0"
        assert record["messages"] == [{"role": "user", "content": f"guess {record['example_id']}"}]
        assert record["sampling_args"] == {"temperature": 1.0, "max_tokens": 6}
        [turn] = record["trajectory"]
        start, stop = table.token_offsets[index], table.token_offsets[index + 1]
        completion = table["token_ids"][start:stop][table["sampled"][start:stop]]
        assert turn["text"] == TOKENIZER.decode(completion.tolist(), skip_special_tokens=True)
        assert turn["num_tokens"] == len(completion) == record["num_tokens"]
        assert turn["finish_reason"] == table["stop_reason"][index]
        assert turn["policy_versions"] == [[0, len(completion)]]


def test_a_group_shares_one_prompt(tmp_path: Path) -> None:
    prompts: defaultdict[str, set[bytes]] = defaultdict(set)

    def remember(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
        prompts[TOKENIZER.decode(prompt_ids)].add(np.asarray(prompt_ids, np.uint32).tobytes())
        return letters(prompt_ids, generator)

    config = configure(tmp_path, max_steps=1, max_async_level=0, orchestrator={"batch_size": 20})
    batches = run(config, {"guess": Guess(seed=1)}, FakeInferenceClient(remember))
    table = batches[0].table
    starts: defaultdict[str, set[bytes]] = defaultdict(set)
    for index, group_id in enumerate(table["group_id"]):
        token_ids = table["token_ids"][table.token_offsets[index] : table.token_offsets[index + 1]]
        sampled = table["sampled"][table.token_offsets[index] : table.token_offsets[index + 1]]
        starts[group_id].add(token_ids[~sampled].tobytes())
    assert len(starts) >= 5 and all(len(variants) == 1 for variants in starts.values())
    assert all(len(variants) == 1 for variants in prompts.values())


def test_level_zero_is_on_policy(tmp_path: Path) -> None:
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.01 * generator.random())
    batches = run(configure(tmp_path, max_async_level=0), {"guess": Guess(seed=1)}, client)
    for batch in batches:
        assert set(batch.table["policy_versions"].tolist()) == {batch.step}


def test_old_tokens_are_stale(tmp_path: Path) -> None:
    """A rollout in ten takes longer than several steps do."""
    config = configure(tmp_path, max_steps=12, orchestrator={"max_off_policy_steps": 1})
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.2 * (generator.random() < 0.1))
    for batch in run(config, {"guess": Guess(seed=1)}, client):
        assert min(batch.table["policy_versions"]) >= batch.step - 1
    stale = [record for record in saved_rollouts(tmp_path) if record["outcome"] == "stale"]
    assert stale and all("orchestrator.max_off_policy_steps = 1" in record["reason"] for record in stale)
    assert journal_counts(tmp_path)["stale"] == sum(record["num_tokens"] for record in stale)


class SlowJudge(Ranked):
    """Three groups take longer to score than the run lasts."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        if rollouts[0].example.example_id in ("0", "8", "16"):
            await asyncio.sleep(600)
        return await super().score_group(rollouts)


def test_a_group_that_is_cut_while_its_only_member_waits_for_a_retry_is_forgotten(tmp_path: Path) -> None:
    """Six rollouts may start, of g0, g1 and g2; one of g0 fails then, and is not retried before g0 is old."""

    class FailsLate(Guess):
        num_asked = 0

        def __init__(self) -> None:
            super().__init__(seed=1)
            self.all_asked = asyncio.Event()

        async def rollout(self, example: Example, session: Session) -> Score:
            self.num_asked += 1
            number = self.num_asked
            await session.respond(example.messages)
            if number == 6:
                self.all_asked.set()
            if number == 2:
                await self.all_asked.wait()
                raise ZeroDivisionError("late")
            while number in (5, 6) and scheduler.num_inflight > 2:
                await asyncio.sleep(0.001)
            return Score(float(number))

    class SixAtFirst(RateLimit):
        def wait_s(self) -> float:
            return 0.0 if environment.num_asked < 6 or scheduler.batches_sent == 2 else 0.001

    async def main() -> None:
        training = asyncio.create_task(Trainer(config, channel).run())
        async with asyncio.timeout(120):
            await orchestrator.run()
            await training

    own = {"batch_size": 2, "rollouts_per_example": 2, "max_off_policy_steps": 1, "max_retries": 1}
    config = configure(tmp_path, max_steps=3, max_async_level=1, orchestrator=own)
    environment, channel = FailsLate(), MemoryChannel()
    client = FakeInferenceClient(letters)
    orchestrator = Orchestrator(config, {"guess": environment}, TOKENIZER, client, channel)
    scheduler = orchestrator._scheduler
    orchestrator._limit = SixAtFirst(None)
    asyncio.run(main())
    first = [record for record in saved_rollouts(tmp_path) if record["group_id"] == "g0"]
    assert sorted(record["outcome"] for record in first) == ["failed_rollout", "stale"]
    assert not orchestrator._groups


@pytest.mark.parametrize("environment", [TwoTurns(seed=1), SlowJudge(seed=1)])
def test_a_group_in_flight_that_is_too_old_is_cancelled_and_stale(
    tmp_path: Path, environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    """The second replies, or the scores, of three groups would outlast the run; that is no failure."""
    own = {"max_off_policy_steps": 2, "max_inflight_rollouts": 40, "max_retries": 2}
    config = configure(tmp_path, max_steps=12, max_async_level=2, orchestrator=own)
    delay_s = 0.0

    def reply(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
        nonlocal delay_s
        asked = re.search(r"guess (\d+)(.*again)?", TOKENIZER.decode(prompt_ids), re.DOTALL)
        assert asked is not None
        delay_s = 600.0 if asked[2] and asked[1] in ("0", "8", "16") else 0.0
        return letters(prompt_ids, generator)

    run(config, {"guess": environment}, FakeInferenceClient(reply, delay_s=lambda generator: delay_s))

    records = saved_rollouts(tmp_path)
    stale = [record for record in records if record["outcome"] == "stale"]
    cut = [record for record in stale if record["error"] is not None]
    assert cut and any(record["num_tokens"] for record in cut)
    assert all("orchestrator.max_off_policy_steps = 2" in record["reason"] for record in stale)
    assert {record["example_id"] for record in cut} == {"0", "8", "16"}
    assert journal_counts(tmp_path)["stale"] == sum(record["num_tokens"] for record in stale) > 0
    assert not any("~" in record["rollout_id"] for record in records)
    assert {record["outcome"] for record in records if record["error"] is not None} <= {"stale", "cancelled"}
    metrics = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    assert sum(record["errored_rollouts/all"] for record in metrics) == 0
    assert not any(key.startswith("error/") for record in metrics for key in record)
    assert not [message for message in caplog.messages if " failed" in message]


def test_replies_that_are_given_up_just_when_they_are_due_lose_no_token(tmp_path: Path) -> None:
    """Sampled in 20 ms, received after 24, awaited for 15 to 50; `run` balances the books."""
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.02, transit_s=0.002)
    config = configure(tmp_path, max_steps=6)
    run(config, {"guess": Impatient(seed=1)}, client)
    reasons = Counter(
        turn["finish_reason"] for record in saved_rollouts(tmp_path) for turn in record["trajectory"]
    )
    assert min(reasons["abort"], reasons["stop"] + reasons["length"]) > 10


def test_a_rollout_is_settled_with_every_turn_that_it_started(tmp_path: Path) -> None:
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.02 * generator.random())
    run(configure(tmp_path, max_steps=2), {"guess": Forgetful(seed=1)}, client)
    assert {len(record["trajectory"]) for record in saved_rollouts(tmp_path)} == {2}


def test_sampling_goes_on_while_a_batch_is_handed_over(tmp_path: Path) -> None:
    """The first batch is not taken before the rollouts of the second one are back."""
    config = configure(tmp_path, max_steps=2, max_async_level=2)
    client = FakeInferenceClient(letters)
    num_scored = 0
    second_is_back = threading.Event()

    class Counting(Guess):
        def reward(self, example: Example, text: str) -> Score:
            nonlocal num_scored
            num_scored += 1
            if num_scored >= 2 * config.orchestrator.batch_size:
                second_is_back.set()
            return super().reward(example, text)

    class Busy(MemoryChannel):
        def send(self, step: int, payload: bytes) -> None:
            assert second_is_back.wait(120)
            super().send(step, payload)

    async def run_it() -> None:
        orchestrator = Orchestrator(config, {"guess": Counting(seed=1)}, TOKENIZER, client, Busy())
        async with asyncio.timeout(120):
            await orchestrator.run()

    asyncio.run(run_it())
    assert len(list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))) == 2


@pytest.mark.parametrize("max_retries", [0, 1])
def test_partial_groups_train_and_are_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_retries: int
) -> None:
    """Also where retries fill up some of the groups: those are whole, whatever failed before."""
    client = FakeInferenceClient(letters, fails=lambda generator: generator.random() < 0.4)
    config = configure(tmp_path, orchestrator={"max_retries": max_retries, "retry_backoff_s": 0})
    run(config, {"guess": Guess(seed=1)}, client)
    groups = defaultdict(list)
    for record in saved_rollouts(tmp_path):
        groups[record["group_id"]].append(record)
    partial = [
        records
        for records in groups.values()
        if {"sent", "failed_rollout"} <= {record["outcome"] for record in records}
    ]
    assert partial
    for records in partial:
        survivors = [record for record in records if record["reward"] is not None]
        mean = np.mean([record["reward"] for record in survivors])
        for record in survivors:
            assert record["advantage"] == near(record["reward"] - mean, terms=8, scale=1.0)

    judged = [
        Counter(record["outcome"] for record in records)
        for records in groups.values()
        if not {"cancelled", "stale"} & {record["outcome"] for record in records}
    ]
    survived = [outcomes.total() - outcomes["failed_rollout"] for outcomes in judged]
    refilled = [n == 4 and outcomes["failed_rollout"] for n, outcomes in zip(survived, judged, strict=True)]
    assert any(refilled) == (max_retries > 0)
    num_partial = sum(0 < number < 4 for number in survived)
    metrics = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    for scope in ("all", "guess"):
        counted = sum(record[f"partial_groups/{scope}"] for record in metrics)
        assert 0 < counted <= num_partial  # what is settled after the last batch is in no record
    lines = [record.getMessage() for record in caplog.records if "is partial" in record.getMessage()]
    assert len(lines) == num_partial
    outcomes = Counter(record["outcome"] for record in groups[lines[0].split()[1]])
    survivors = outcomes.total() - outcomes["failed_rollout"]
    assert lines[0].partition(" of guess is partial and ")[2] == (
        f"goes on with {survivors}: {4 - survivors} of 4 rollouts failed ({outcomes.total()} attempts)"
    )


def test_group_scores_replace_the_own_ones_and_one_failure_drops_the_group(tmp_path: Path) -> None:
    client = FakeInferenceClient(letters, fails=lambda generator: generator.random() < 0.1)
    run(configure(tmp_path), {"guess": Ranked(seed=1)}, client)
    groups = defaultdict(list)
    for record in saved_rollouts(tmp_path):
        groups[record["group_id"]].append(record)
    outcomes = [Counter(record["outcome"] for record in records) for records in groups.values()]
    assert any(counts["failed_rollout"] and counts["dropped_group"] for counts in outcomes)
    for records, counts in zip(groups.values(), outcomes, strict=True):
        if counts["sent"]:
            assert sorted(record["reward"] for record in records) == [0, 1, 2, 3]
            assert counts["failed_rollout"] == 0
    dropped = sum(
        record["dropped_groups/guess"] for record in read_metrics(tmp_path / "metrics/orchestrator.jsonl")
    )
    assert dropped >= 1


def test_zero_advantages_are_filtered_or_sent_as_configured(tmp_path: Path) -> None:
    envs = [{"id": "x:Guess", "name": "guess"}, {"id": "x:Constant", "name": "constant"}]
    environments = {"guess": Guess(seed=1), "constant": Constant(seed=1)}
    filtered = run(configure(tmp_path / "a", *envs), environments, FakeInferenceClient(letters))
    assert all(set(batch.table["env_name"]) == {"guess"} for batch in filtered)
    constant = [record for record in saved_rollouts(tmp_path / "a") if record["env_name"] == "constant"]
    assert {record["outcome"] for record in constant} <= {"zero_advantage", "cancelled"}
    metrics = list(read_metrics(tmp_path / "a/metrics/orchestrator.jsonl"))
    assert sum(record["zero_advantage_groups/all"] for record in metrics) >= 4
    for record in metrics:
        own = [record[f"zero_advantage_groups/{env}"] for env in ("guess", "constant")]
        assert sum(own) == record["zero_advantage_groups/all"] and own[1] > own[0]
    assert metrics[0]["reward/constant"] == pytest.approx(0.1)
    assert {record["reason"] for record in constant if record["outcome"] == "zero_advantage"} == {
        "the rewards of its group are equal"
    }

    keep = configure(tmp_path / "b", *envs, orchestrator={"filter_zero_advantages": False})
    kept = run(keep, environments, FakeInferenceClient(letters))
    assert any("constant" in batch.table["env_name"] for batch in kept)


@pytest.mark.parametrize(
    ("logprob", "reason"),
    [
        (float("nan"), "logprob is not finite"),
        (-120.0, "is -120; a logprob is 0 at most, and one below -44 overflows"),
    ],
)
def test_a_sample_that_cannot_train_is_rejected_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logprob: float, reason: str
) -> None:
    class Garbled(FakeInferenceClient):
        async def generate(self, *arguments: Any) -> Any:
            completion = await super().generate(*arguments)
            if completion.token_ids[0] == TOKENIZER.encode("a", add_special_tokens=False)[0]:
                completion.logprobs[0] = logprob
            return completion

    run(configure(tmp_path), {"guess": Guess(seed=1)}, Garbled(letters))
    rejected = [record for record in saved_rollouts(tmp_path) if record["outcome"] == "rejected"]
    assert rejected and all(reason in record["reason"] for record in rejected)
    warnings = [record for record in caplog.records if "rejected" in record.getMessage()]
    assert len(warnings) == len(rejected)


def stops_with(
    config: OrchestratorRunConfig,
    environment: Environment,
    client: FakeInferenceClient,
    error: type[Exception],
) -> str:
    """The message of a run that cannot go on; whatever happens, every token is in its journal or snapshot."""
    orchestrator = Orchestrator(config, {"guess": environment}, TOKENIZER, client, MemoryChannel())

    async def run_it() -> None:
        async with asyncio.timeout(120):
            await orchestrator.run()

    with pytest.raises(error) as caught:
        asyncio.run(run_it())
    assert_nothing_lost(config.output_dir, client)
    return str(caught.value)


def assert_nothing_lost(run_dir: Path, client: FakeInferenceClient) -> None:
    """Of a run that was stopped; its journal stays open, for it may be resumed."""
    assert not any(entry.closed for entry in read_journal(run_dir / "ledger" / "orchestrator.jsonl"))
    counts = journal_counts(run_dir)
    received = counts.pop("received", 0)
    assert received == counts.total() == client.delivered.total() - held(run_dir).total()


def held(run_dir: Path) -> Counter[tuple[str, str]]:
    snapshot = read_snapshot(run_dir)
    assert snapshot is not None
    return snapshot.held()


def test_an_environment_that_always_fails_stops_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(tmp_path, orchestrator={"max_fruitless_groups": 3})
    message = stops_with(config, Broken(seed=1), FakeInferenceClient(letters), RolloutError)
    assert message.startswith(
        "orchestrator.max_fruitless_groups = 3: as many groups in a row were lost whole"
    )
    assert "of guess, failed_rollout: ZeroDivisionError: bad example" in message
    failures = [record for record in caplog.records if "failed: ZeroDivisionError" in record.getMessage()]
    assert len(failures) == len({record.getMessage() for record in failures}) >= 12
    assert {record.levelno for record in failures} == {logging.WARNING}
    place = r"\(tests/orchestrator/test_run.py:\d+\)"
    first, *later = (record.getMessage() for record in failures)
    assert re.match(
        rf"rollout \S+ of guess failed: ZeroDivisionError: bad example \d+ {place}\nTraceback", first
    )
    assert all(re.search(rf"bad example \d+ {place}$", line) for line in later)
    assert journal_counts(tmp_path)["failed_rollout"] > 0


def test_a_dropped_group_counts_rollouts_not_attempts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"rollouts_per_example": 2, "batch_size": 2, "max_retries": 1, "retry_backoff_s": 0.001}
    config = configure(tmp_path, orchestrator={**own, "max_fruitless_groups": 2})
    stops_with(config, Broken(seed=1), FakeInferenceClient(letters), RolloutError)
    assert "group g0 of guess dropped: 2 of 2 rollouts failed (4 attempts)" in caplog.text


def test_a_task_without_signal_stops_the_run_and_is_written_down_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pellucid.orchestrator")
    config = configure(tmp_path, orchestrator={"max_signalless_groups": 200})
    message = stops_with(config, Constant(seed=1), FakeInferenceClient(letters), RolloutError)
    assert message.startswith(
        "orchestrator.max_signalless_groups = 200: as many groups in a row gave nothing"
    )
    assert "for zero_advantage; their mean reward is 0.100, the same for every rollout of a group" in message
    lines = [record.getMessage() for record in caplog.records if "no batch yet" in record.getMessage()]
    assert lines == ["step    0  no batch yet; settled: 256 zero_advantage"] * 3
    flushes = [entry for entry in read_journal(tmp_path / "ledger/orchestrator.jsonl") if entry.counts]
    assert len(flushes) == 4
    assert len(saved_rollouts(tmp_path)) >= 800
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_0"]


def test_a_run_without_a_signal_says_so_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written down, and after; what the batch of a step trains on is not counted."""
    monkeypatch.setattr(loop, "_SHOW_PROGRESS_EVERY_S", 0.001)
    seen: list[BatchProgress] = []
    monkeypatch.setattr(loop, "write_progress", lambda folder, progress: seen.append(progress))
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.002)
    config = configure(tmp_path, orchestrator={"max_signalless_groups": 100})
    stops_with(config, Constant(seed=1), client, RolloutError)
    settled = [progress.outcomes.get("zero_advantage", 0) for progress in seen]
    assert settled == sorted(settled) and len(set(settled)) > 2
    assert settled[-1] > 256  # some are in the books by then, the others wait for it
    assert seen[-1].zero_advantage_reward == pytest.approx(0.1)
    assert {progress.step for progress in seen} == {0} and max(each.num_running for each in seen) > 0


def test_a_run_that_is_over_shows_no_progress(tmp_path: Path) -> None:
    class Curious(Guess):
        was_shown = False

        async def rollout(self, example: Example, session: Session) -> Score:
            self.was_shown |= progress_path(tmp_path).exists()
            return await super().rollout(example, session)

    environment = Curious(seed=1)
    run(configure(tmp_path), {"guess": environment}, FakeInferenceClient(letters))
    assert environment.was_shown and not progress_path(tmp_path).exists()


def test_a_start_that_fails_at_its_first_example_is_no_run(tmp_path: Path) -> None:
    class NoData(Guess):
        def example(self, index: int) -> Example:
            raise FileNotFoundError("no data")

    stops_with(configure(tmp_path), NoData(seed=1), FakeInferenceClient(letters), UserCodeError)
    assert not progress_path(tmp_path).exists() and not has_begun(tmp_path)


def test_a_hung_environment_holds_no_batch_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_GRACE_S", 0.05)
    own = {"rollout_timeout_s": 1.0, "max_retries": 1, "retry_backoff_s": 0.01}
    run(configure(tmp_path, orchestrator=own), {"guess": Hangs(seed=1)}, FakeInferenceClient(letters))
    failed = [record for record in saved_rollouts(tmp_path) if record["outcome"] == "failed_rollout"]
    # Where in the environment its time was over is not the same for all.
    errors = {record["error"].partition(" (")[0] for record in failed}
    assert errors == {"TimeoutError: not finished within 1 s"}
    assert all(int(record["example_id"]) % 3 == 0 and record["num_tokens"] > 0 for record in failed)
    again = {record["rollout_id"] for record in saved_rollouts(tmp_path) if "~1" in record["rollout_id"]}
    assert {f"{record['rollout_id']}~1" for record in failed} == again


def test_batches_by_tokens(tmp_path: Path) -> None:
    envs = {"guess": Guess(seed=1)}
    config = configure(tmp_path)
    own = config.orchestrator.model_copy(update={"token_batch_size": 400})
    batches = run(config.model_copy(update={"orchestrator": own}), envs, FakeInferenceClient(letters))
    for batch in batches:
        sizes = Counter(np.repeat(batch.table["group_id"], batch.table.lengths).tolist())
        assert batch.table.num_tokens >= 400
        assert batch.table.num_tokens - max(sizes.values()) < 400


def test_rollouts_start_at_a_limited_rate() -> None:
    now = 100.0
    limit = RateLimit(30, clock=lambda: now)
    assert limit.wait_s() == 0
    limit.note()
    limit.note()
    assert limit.wait_s() == 4
    now = 103.0
    assert limit.wait_s() == 1
    now = 1000.0
    limit.note()
    assert limit.wait_s() == 2  # what was not used is not made up for
    assert RateLimit(None, clock=lambda: now).wait_s() == 0


def test_a_limited_run_takes_its_time(tmp_path: Path) -> None:
    started = time.monotonic()
    run(
        configure(tmp_path, max_steps=1, orchestrator={"tasks_per_minute": 3000}),
        {"guess": Guess(seed=1)},
        FakeInferenceClient(letters),
    )
    num_started = len(saved_rollouts(tmp_path))
    assert time.monotonic() - started >= (num_started - 1) * 60 / 3000 > 0.2


def test_what_is_settled_before_a_batch_is_in_its_report_once(tmp_path: Path) -> None:
    """The first 150 groups are solved: they are written down in parts, long before the first batch."""
    run(configure(tmp_path, max_steps=2), {"guess": SolvedAtFirst(seed=1)}, FakeInferenceClient(letters))
    flushes = [entry for entry in read_journal(tmp_path / "ledger/orchestrator.jsonl") if entry.counts]
    assert [entry.step for entry in flushes] == [0, 0, 0, 1]
    rewards, lengths = defaultdict(list), defaultdict(list)
    for record in saved_rollouts(tmp_path):
        rewards[record["step"]].append(record["reward"])
        lengths[record["step"]].append(record["num_tokens"])
    assert len(rewards[0]) > 600
    metrics = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    assert [record["reward/all"] for record in metrics] == [
        pytest.approx(np.mean(rewards[step])) for step in (0, 1)
    ]
    assert metrics[0]["zero_advantage_groups/all"] >= 150 > metrics[1]["zero_advantage_groups/all"]
    assert all((tmp_path / "rollouts" / f"step_{step}" / "STABLE").exists() for step in (0, 1))


def fail_at_ten(inputs: AdvantageInputs) -> AdvantageOutputs:
    if int(inputs.rollouts[0].example_id) >= 10:
        raise ZeroDivisionError("no advantage today")
    return AdvantageOutputs([1.0] * len(inputs.rollouts))


def test_an_advantage_function_that_raises_is_named_and_loses_no_token(tmp_path: Path) -> None:
    advantage = {"type": "custom", "import_path": f"{__name__}:fail_at_ten"}
    config = configure(tmp_path, max_async_level=3, orchestrator={"advantage": advantage})
    message = stops_with(config, Guess(seed=1), FakeInferenceClient(letters), ConfigError)
    assert re.match(r"advantage function '.*:fail_at_ten', group 'g1\d': ZeroDivisionError: no adv", message)
    assert journal_counts(tmp_path)["cancelled"] > 0


def test_a_rollout_without_tokens_is_empty(tmp_path: Path) -> None:
    config = configure(tmp_path, orchestrator={"max_fruitless_groups": 1})
    message = stops_with(config, Silent(seed=1), FakeInferenceClient(letters), RolloutError)
    assert "EmptyRollout: the environment returned a score but sampled nothing" in message


def test_a_stream_that_ends_stops_the_run(tmp_path: Path) -> None:
    class Short(Guess):
        def example(self, index: int) -> Example:
            return [super().example(0)][index]

    message = stops_with(configure(tmp_path), Short(seed=1), FakeInferenceClient(letters), UserCodeError)
    assert re.fullmatch(
        r"environment 'guess' has no example 1: IndexError: list index out of range "
        r"\(tests/orchestrator/test_run.py:\d+\); `example` has to answer for every index",
        message,
    )


def test_weights_that_cannot_be_served_stop_the_run(tmp_path: Path) -> None:
    class Refusing(FakeInferenceClient):
        async def update_weights(self, version: int, folder: Path) -> None:
            raise InferenceError(f"version {version} refused")

    publish_folder(tmp_path / "weights" / "step_1", lambda folder: None)
    client = Refusing(letters, delay_s=lambda generator: 0.05)
    message = stops_with(configure(tmp_path), Guess(seed=1), client, InferenceError)
    assert message == (
        "no weights could be served in 3 tries; policy version 1: version 1 refused; go on with --resume: a "
        "damaged file is made anew"
    )


def test_an_interrupted_run_cuts_short_and_cancels_what_it_has(tmp_path: Path) -> None:
    """Five rollouts are back and wait for their batch, twenty are being sampled."""
    own = {"batch_size": 100, "rollouts_per_example": 1, "filter_zero_advantages": False}
    config = configure(tmp_path, orchestrator=own)
    delays = [1.0] * 20 + [0.0] * 5
    client = FakeInferenceClient(letters, delay_s=lambda generator: delays.pop())

    async def interrupt() -> None:
        orchestrator = Orchestrator(config, {"guess": Guess(seed=1)}, TOKENIZER, client, MemoryChannel())
        running = asyncio.create_task(orchestrator.run())
        while delays or client.sampled.total() - client.delivered.total() < 10:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(interrupt())
    outcomes = Counter((record["outcome"], record["stop_reason"]) for record in saved_rollouts(tmp_path))
    assert outcomes == {("cancelled", "abort"): 20}
    close_engine_books(tmp_path, client)
    Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER).close(0)
    report = reconcile(tmp_path / "ledger")
    assert report.balanced and report.running == [Stage.ORCHESTRATOR]
    waiting = held(tmp_path)["guess", ""]
    states = {"cancelled": client.sampled.total() - waiting, "in_flight": waiting}
    assert report.states["run", "guess"] == states and waiting > 0


def test_a_resumed_run_trains_what_was_ready_and_attempts_again_what_was_open(tmp_path: Path) -> None:
    """Ten examples; three are ready when the run is interrupted, the other seven are being sampled."""
    own = {"batch_size": 10, "rollouts_per_example": 1, "filter_zero_advantages": False}
    config = configure(tmp_path, max_steps=1, orchestrator={**own, "max_inflight_rollouts": 10})
    delays = [1.0] * 7 + [0.0] * 3
    client = FakeInferenceClient(letters, delay_s=lambda generator: delays.pop() if delays else 0.0)

    async def interrupt() -> None:
        orchestrator = Orchestrator(config, {"guess": Guess(seed=1)}, TOKENIZER, client, MemoryChannel())
        running = asyncio.create_task(orchestrator.run())
        while delays or client.delivered.total() < 3 or client.sampled.total() - client.delivered.total() < 7:
            await asyncio.sleep(0.01)
        for _ in range(100):  # turns of the event loop, in which what was delivered becomes ready
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(interrupt())
    [batch] = run(config.model_copy(update={"resume": True}), {"guess": Guess(seed=1)}, client)
    assert sorted(batch.table["example_id"].tolist(), key=int) == [str(index) for index in range(10)]
    names = [name for name in batch.table["rollout_id"].tolist() if "." not in name]
    assert sorted(names) == ["g0-r0", "g1-r0", "g2-r0"]
    cancelled = [record["example_id"] for record in saved_rollouts(tmp_path) if record["outcome"] != "sent"]
    assert sorted(cancelled, key=int) == [str(index) for index in range(3, 10)]
    assert reconcile(tmp_path / "ledger").states["run", "guess"]["lost"] == 0


def interrupt_twice(
    config: OrchestratorRunConfig, environment: Environment, client: FakeInferenceClient
) -> None:
    """A run that is cancelled, and once more while it winds down, accounts for every token."""

    async def run_it() -> None:
        orchestrator = Orchestrator(config, {"guess": environment}, TOKENIZER, client, MemoryChannel())
        running = asyncio.create_task(orchestrator.run())
        while client.sampled.total() < 30:
            await asyncio.sleep(0.001)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert_nothing_lost(config.output_dir, client)

    asyncio.run(run_it())
    assert client.delivered.total() == client.sampled.total()


def test_a_second_interruption_while_answers_are_on_their_way_loses_no_token(tmp_path: Path) -> None:
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.05, transit_s=0.03)
    interrupt_twice(configure(tmp_path, orchestrator={"batch_size": 100}), Guess(seed=1), client)


def test_an_environment_that_will_not_be_cancelled_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "WIND_DOWN_S", 0.2)
    environment = Stubborn(seed=1)
    interrupt_twice(configure(tmp_path), environment, FakeInferenceClient(letters))
    assert "20 rollouts did not end within 0.2 s" in caplog.text


def test_books_that_do_not_agree_are_no_point_to_go_on_from(tmp_path: Path) -> None:
    """A full disk takes what goes into the journal and not the saved rollouts; then there is room again."""
    books = Books(configure(tmp_path))
    rollout = Rollout("g0-r0", "g0", Guess(seed=1).example(0), "guess", 1.0)
    assert books.mark(0) == 1
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*train_rollouts\.jsonl'"):
        books.settle(0, [[Verdict(rollout, State.CANCELLED)]])
    books.settle(0, [[Verdict(rollout, State.CANCELLED)]])
    with pytest.raises(OSError, match=r"File too large: '.*train_rollouts\.jsonl'"):
        books.mark(0)
    books.close()


class Restarting(FakeInferenceClient):
    """Is another process, with the weights it was started with, after every 40th request."""

    def __init__(self) -> None:
        super().__init__(letters, delay_s=lambda generator: 0.001)
        self.num_asked = 0

    async def generate(self, *arguments: Any) -> Completion:
        self.num_asked += 1
        if self.num_asked % 40 == 0:
            self.server_id += "'"
            self.policy_version, self.run = 0, ""
        return await super().generate(*arguments)


def test_a_server_that_restarts_never_trains_on_other_weights_than_it_was_given(tmp_path: Path) -> None:
    """What it sampled before it had the current weights has failed, to the token."""
    server = Restarting()
    expected = Expected("policy server", "none", "", 200, run=run_identity(tmp_path, "run"))

    pool = ServerPool({"s0": server}, group_of_request, expected, ask_again_s=0.001)

    async def all_parts() -> Trainer:
        channel = MemoryChannel()
        trainer = Trainer(config, channel)
        training = asyncio.create_task(trainer.run())
        async with asyncio.timeout(120):
            await pool.wait_until_ready()
            await Orchestrator(config, {"guess": Guess(seed=1)}, TOKENIZER, pool, channel).run()
            await training
        await pool.close()
        return trainer

    config = configure(tmp_path, max_steps=8, max_async_level=1)
    trainer = asyncio.run(all_parts())
    assert "'" in server.server_id
    trainer.close_books()
    close_engine_books(tmp_path, server)
    report = reconcile(tmp_path / "ledger")
    assert report.balanced and not report.running, report.differences
    for batch in trainer.batches[2:]:
        assert (batch.step - batch.table["policy_versions"]).max() <= 2
    refused = [record for record in saved_rollouts(tmp_path) if "refused" in (record["error"] or "")]
    assert refused and all(record["num_tokens"] for record in refused)


class Hanging(FakeInferenceClient):
    """Hangs at its 30th request, with what it has by then."""

    def __init__(self) -> None:
        super().__init__(letters, delay_s=lambda generator: 0.01)
        self.num_asked = 0
        self.has_hung = asyncio.Event()

    async def generate(self, *arguments: Any) -> Completion:
        self.num_asked += 1
        if self.num_asked == 30:
            self.hang()
            self.has_hung.set()
        return await super().generate(*arguments)


@pytest.mark.parametrize("recovers", ["soon", "at the end"])
@pytest.mark.parametrize("environment", [Guess, Ranked])
def test_a_server_that_hangs_costs_neither_rollouts_nor_groups(
    tmp_path: Path, environment: type[Guess], recovers: str
) -> None:
    """In the midst of an evaluation and of training, with no retries: its requests go to the other server."""
    evaluated = {"id": "x:Guess", "name": "test", "num_examples": 40, "interval": 2}
    config = configure(tmp_path, max_steps=8, orchestrator={"eval": [evaluated]})
    hanging, steady = Hanging(), FakeInferenceClient(letters, delay_s=lambda generator: 0.01)
    expected = Expected("policy server", "none", "", 200, run=run_identity(tmp_path, "run"))
    servers = {"s0": hanging, "s1": steady}
    pool = ServerPool(servers, group_of_request, expected, ask_again_s=0.01, hang_s=0.1)
    evaluation = prepare_evaluation(config.orchestrator.eval[0], Guess(seed=2))
    environments = {"guess": environment(seed=1)}

    async def recover() -> None:
        await hanging.has_hung.wait()
        while not steady.updates:
            await asyncio.sleep(0.01)
        if recovers == "soon":
            hanging.recover()

    async def all_parts() -> Trainer:
        channel = MemoryChannel()
        trainer = Trainer(config, channel)
        beside = [asyncio.create_task(each) for each in (trainer.run(), recover())]
        async with asyncio.timeout(60):
            await pool.wait_until_ready()
            orchestrator = Orchestrator(config, environments, TOKENIZER, pool, channel, [evaluation])
            await orchestrator.run()
            await asyncio.gather(*beside)
        hanging.recover()
        await pool.close()
        while hanging.num_running:
            await asyncio.sleep(0.01)
        return trainer

    trainer = asyncio.run(all_parts())
    trainer.close_books()
    close_engine_books(tmp_path, hanging)
    close_engine_books(tmp_path, steady, "inference_1")
    report = reconcile(tmp_path / "ledger")
    assert report.balanced and not report.running, report.differences
    states = sum(report.states.values(), Counter())
    assert hanging.has_hung.is_set() and states["trained"] > 0 and states["eval"] > 0
    assert states["failed_rollout"] == states["dropped_group"] == 0
    assert {record["step"] for record in read_metrics(tmp_path / "metrics" / "eval.jsonl")} == {0, 2, 4, 6, 8}


def test_a_run_has_one_identity_for_good(tmp_path: Path) -> None:
    first = run_identity(tmp_path / "a", "run")
    assert run_identity(tmp_path / "a", "run") == first and first.startswith("run-")
    assert run_identity(tmp_path / "b", "run") != first


def test_weights_from_ahead_of_the_run_are_served_once_and_never_train(tmp_path: Path) -> None:
    """Only the newest of them; a batch of their tokens would have a negative off-policy level."""
    for version in (1, 2, 3):
        publish_folder(tmp_path / "weights" / f"step_{version}", lambda folder: None)
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.05)
    message = stops_with(configure(tmp_path), Guess(seed=1), client, DataError)
    assert message == (
        "the batch of step 0 has tokens of policy version 3, which only a later batch makes: they are of "
        "another run's weights; give this run an inference server of its own, and go on with --resume"
    )
    assert client.updates == [(3, tmp_path / "weights" / "step_3")]


def test_the_log_line_fits_a_hundred_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pellucid.orchestrator")
    run(configure(tmp_path), {"guess": Guess(seed=1)}, FakeInferenceClient(letters))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step")]
    assert len(lines) == 2 * 4
    assert lines[0].startswith("step    0  reward 0.") and "  off-policy 0.0  " in lines[0]
    first = {record["rollout_id"]: record for record in saved_rollouts(tmp_path)}[lines[1].split()[2]]
    assert f"reward {first['reward']:.3f}" in lines[1] and f'→ "{first["trajectory"][0]["text"]}"' in lines[1]
    values = {"reward/all": 0.5, "batch_rollouts": 512, "batch_tokens": 234_567, "lost_rollouts/all": 128}
    times = {"off_policy_level/all/mean": 2.5, "time/batch_s": 10.25, "time/wait_weights_s": 2.5}
    line = step_line(9999, {**values, **times})
    assert line == (
        "step 9999  reward 0.500  512 rollouts  234.6k tokens  off-policy 2.5  10.2 s, 2.5 waiting  128 lost"
    )
    assert len(line) <= 100


def test_a_sample_line_shows_both_ends_of_what_is_long() -> None:
    turn = Turn(
        [5], Completion([1] * 300, [-0.5] * 300, [(0, 300)], "length"), "a" * 500 + "\n\n  " + "z" * 500
    )
    example = Example("0", [{"role": "user", "content": "Say   it.\nNow."}])
    line = sample_line(12, Rollout("g54-r2", "g54", example, "env", 1.0, [turn], reward=0.75))
    assert line == (
        f'step   12  g54-r2  reward 0.750  "Say it. Now." → "{"a" * 6}…{"z" * 6}" (300 tokens, length)'
    )
    assert len("12:34:56 INFO " + line) == 100
    assert shorten("abcdef", 6) == "abcdef" and shorten("abcdefg", 6) == "abc…fg" and shorten("ab", 0) == "…"


def test_reverse_text_end_to_end(tmp_path: Path) -> None:
    """A policy that reverses its prompt earns 1.0 everywhere once it is always right."""

    def reverse(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
        word = TOKENIZER.decode(prompt_ids).split("user\n")[1].split("<|im_end|>")[0]
        answer = word[::-1] if generator.random() < 0.5 else word
        return [*TOKENIZER.encode(answer, add_special_tokens=False), TOKENIZER.eos_token_id]

    config = configure(
        tmp_path, {"id": "reverse-text"}, max_steps=2, orchestrator={"sampling": {"max_tokens": 9}}
    )
    environment = load_environment(config.orchestrator.env[0], config.seed)
    run(config, {"reverse-text": environment}, FakeInferenceClient(reverse))
    exact = [record for record in saved_rollouts(tmp_path) if record["metrics"]["exact"]]
    assert exact and all(record["reward"] == 1.0 and record["advantage"] >= 0 for record in exact)


def test_a_port_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inference\.port = 0 .*set the port"):
        run_orchestrator(configure(tmp_path))


def test_accounts_name_run_and_environment(tmp_path: Path) -> None:
    client = FakeInferenceClient(letters)
    run(configure(tmp_path, max_steps=1), {"guess": Guess(seed=1)}, client)
    assert set(client.sampled) == {Account("run", "guess")}


class Answers(Guess):
    """Says in its state what it heard."""

    def reward(self, example: Example, text: str) -> Score:
        score = super().reward(example, text)
        return Score(score.reward, state={"heard": text, "unasked": 1})


def test_weighted_environments_with_sampling_and_columns_of_their_own(tmp_path: Path) -> None:
    envs = [
        {"id": "x:Answers", "name": "long", "weight": 3, "state_columns": ["heard", "trajectory", "heard"]},
        {"id": "x:Guess", "name": "short", "sampling": {"temperature": 0.5, "max_tokens": 2}},
    ]
    config = configure(tmp_path, *envs, max_steps=6, orchestrator={"sampling": {"max_tokens": 5}})
    asked: defaultdict[str, set[tuple[float, int]]] = defaultdict(set)

    class Client(FakeInferenceClient):
        async def generate(
            self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
        ) -> Completion:
            asked[account.env].add((params.temperature, params.max_tokens))
            return await super().generate(prompt_ids, params, account, request_id)

    batches = run(config, {"long": Answers(seed=1), "short": Guess(seed=1)}, Client(letters))

    assert asked == {"long": {(1.0, 5)}, "short": {(0.5, 2)}}
    groups = Counter(env for env, _ in {(r["env_name"], r["group_id"]) for r in saved_rollouts(tmp_path)})
    assert groups["long"] / groups["short"] == pytest.approx(3, abs=0.5)
    for batch in batches:
        for env, temperature in zip(batch.table["env_name"], batch.table["temperature"], strict=True):
            assert temperature == {"long": 1.0, "short": 0.5}[env]
    for record in saved_rollouts(tmp_path):
        assert "unasked" not in record
        assert tuple(record)[: len(ROLLOUT_FIELDS)] == ROLLOUT_FIELDS
        rest = [name for name in record if name not in OPTIONAL_ROLLOUT_FIELDS][len(ROLLOUT_FIELDS) :]
        assert rest == (["heard"] if record["env_name"] == "long" else [])
        if record["env_name"] == "long":
            assert record["heard"] == record["trajectory"][0]["text"]
            assert record["sampling_args"] == {"temperature": 1.0, "max_tokens": 5}
        else:
            assert record["sampling_args"] == {"temperature": 0.5, "max_tokens": 2}
            assert record["num_tokens"] <= 2


def short_ones(inputs: FilterInputs, max_tokens: int) -> list[bool]:
    return [rollout.num_sampled <= max_tokens for rollout in inputs.rollouts]


def of_the_first_half(inputs: FilterInputs) -> list[bool]:
    return [advantage >= 0 for advantage in inputs.advantages]


def too_few_answers(inputs: FilterInputs) -> list[bool]:
    return [True]


def test_filters_count_what_they_remove(tmp_path: Path) -> None:
    filters = [
        {"import_path": f"{__name__}:short_ones", "kwargs": {"max_tokens": 4}},
        {"import_path": f"{__name__}:of_the_first_half"},
    ]
    batches = run(
        configure(tmp_path, orchestrator={"filter": filters}),
        {"guess": Guess(seed=1)},
        FakeInferenceClient(letters),
    )
    for batch in batches:
        assert np.diff(batch.table.sampled_offsets).max() <= 4 and batch.table["advantage"].min() > 0
    records = saved_rollouts(tmp_path)
    for record in records:
        is_long = record["num_tokens"] > 4
        if record["outcome"] == "filtered":
            name = "short_ones" if is_long else "of_the_first_half"
            assert record["reason"] == f"removed by {__name__}:{name}"
        elif record["outcome"] in ("sent", "zero_advantage"):
            assert not is_long and record["advantage"] >= 0
    num_filtered = sum(record["outcome"] == "filtered" for record in records)
    assert tokens_by_outcome(tmp_path)["filtered"] == journal_counts(tmp_path)["filtered"] > 0
    reported = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    late = [r for r in records if r["outcome"] == "filtered" and r["step"] == len(reported)]
    assert sum(record["filtered_rollouts/all"] for record in reported) == num_filtered - len(late)
    assert all(record["filtered_rollouts/guess"] == record["filtered_rollouts/all"] for record in reported)


def test_a_filter_that_does_not_work_is_named(tmp_path: Path) -> None:
    config = configure(tmp_path, orchestrator={"filter": [{"import_path": f"{__name__}:too_few_answers"}]})
    message = stops_with(config, Guess(seed=1), FakeInferenceClient(letters), ConfigError)
    assert re.search(r"too_few_answers', group 'g\d+': 1 answers for 4 rollouts", message)


def test_a_filter_that_lacks_an_argument_is_refused_before_it_is_called() -> None:
    with pytest.raises(ConfigError, match=r"short_ones' cannot be called .*'max_tokens'"):
        load_filter(FilterConfig(import_path=f"{__name__}:short_ones"))


def test_a_filter_that_does_not_exist_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"orchestrator\.filter\.import_path = 'nowhere:f'"):
        load_filter(FilterConfig(import_path="nowhere:f"))


class Served(Guess):
    def __init__(self, *, seed: int, fails: bool = False) -> None:
        super().__init__(seed=seed)
        self._fails = fails
        self.events: list[str] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.events.append("open")
        if self._fails:
            raise ConfigError("cannot be served")
        async with super().serving():
            yield
        self.events.append("close")

    def reward(self, example: Example, text: str) -> Score:
        self.events.append("reward")
        return super().reward(example, text)


def test_environments_are_served_around_the_run(tmp_path: Path) -> None:
    environment = Served(seed=1)
    run(configure(tmp_path), {"guess": environment}, FakeInferenceClient(letters))
    assert environment.events[0] == "open" and environment.events[-1] == "close"
    assert set(environment.events[1:-1]) == {"reward"}
    failing = Served(seed=1, fails=True)
    assert stops_with(configure(tmp_path / "2"), failing, FakeInferenceClient(letters), ConfigError) == (
        "cannot be served"
    )


class NeverClosed(Guess):
    """It waits for something when it closes that will not come; as it begins to, it looks at the books."""

    def __init__(self, *, seed: int, folder: Path) -> None:
        super().__init__(seed=seed)
        self._folder = folder
        self.found_closed: bool | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield
        self.found_closed = is_closed(self._folder)
        await asyncio.sleep(600)


def is_closed(folder: Path) -> bool:
    return list(read_journal(folder / "ledger" / "orchestrator.jsonl"))[-1].closed


def test_books_are_closed_before_environments_which_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launcher
) -> None:
    monkeypatch.setattr(loop, "_CLOSE_ENVIRONMENTS_S", 0.05)
    environment = NeverClosed(seed=1, folder=tmp_path)
    run(configure(tmp_path), {"guess": environment}, FakeInferenceClient(letters))
    assert environment.found_closed
    assert "the environments did not close within 0.05 s" in caplog.text
    assert launcher.doings()[1:] == [
        "closing its books",
        "handing over its last batches",
        "closing its metrics",
        "closing the environments",
    ]


@pytest.mark.parametrize("process", ["orchestrator", "eval"])
def test_books_are_closed_before_metrics_which_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    found: list[bool] = []

    class Tracker:
        def log(self, step: int, values: object) -> None:
            pass

        def close(self) -> None:
            found.append(is_closed(tmp_path))

    monkeypatch.setattr(
        "pellucid.orchestrator.books.open_sinks",
        lambda config, opened_for: [Tracker()] if opened_for == process else [],
    )
    evaluated = {"eval": [{"id": "x:Guess", "name": "quiz", "interval": 100}]}
    run(configure(tmp_path, orchestrator=evaluated), {"guess": Guess(seed=1)}, FakeInferenceClient(letters))
    assert found == [True]


def test_a_run_that_fails_says_so_before_it_winds_down(tmp_path: Path, launcher) -> None:
    failing = Served(seed=1, fails=True)
    stops_with(configure(tmp_path), failing, FakeInferenceClient(letters), ConfigError)
    assert launcher.hear().failed == "cannot be served"


def test_a_taskset_of_verifiers_trains_and_balances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "verifiers" / "tasksets"))
    envs = [
        {"id": "verifiers:shout-tasks", "name": "shout", "args": {"words": ["A", "b"]}},
        {"id": "x:Guess", "name": "guess"},
    ]
    config = configure(tmp_path, *envs, max_steps=3)
    client = FakeInferenceClient(
        letters,
        delay_s=lambda generator: generator.expovariate(100),
        fails=lambda generator: generator.random() < 0.05,
    )
    shout = load_environment(config.orchestrator.env[0], config.seed)
    batches = run(config, {"shout": shout, "guess": Guess(seed=1)}, client)
    owners = Counter(env for batch in batches for env in batch.table["env_name"])
    assert owners["shout"] > 0 and owners["guess"] > 0
    records = [record for record in saved_rollouts(tmp_path) if record["env_name"] == "shout"]
    assert {record["outcome"] for record in records} >= {"sent"}
    for record in records:
        if record["error"] is None:
            text = record["trajectory"][0]["text"]
            assert record["reward"] == 2.0 * (text == record["messages"][1]["content"].upper()) + (
                len(text) >= 3
            )
            assert record["metrics"]["letters"] == len(text)
        elif record["outcome"] == "failed_rollout":
            assert record["error"].startswith("ProviderError: injected failure")
    metrics = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    shares = [value for record in metrics if (value := record.get("metrics/shout/long_enough")) is not None]
    assert shares and all(0 <= share <= 1 for share in shares)
