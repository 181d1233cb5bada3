"""Evaluations inside whole runs against the fake server: one version each, apart in the books."""

import asyncio
import contextlib
import logging
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest

from engine_books import close_engine_books
from pellucid.config import EnvConfig, EvalConfig, OrchestratorRunConfig
from pellucid.data import Completion, Example, Rollout
from pellucid.errors import ConfigError, DataError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow, Journal, Stage, State, read_journal, reconcile
from pellucid.metrics import JsonlSink, read_metrics
from pellucid.metrics.evaluation import evaluations_in
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import (
    Environment,
    Orchestrator,
    Score,
    Session,
    SingleTurnEnvironment,
    load_environment,
    loop,
    tasks,
)
from pellucid.orchestrator.books import Books
from pellucid.orchestrator.group import Evaluation, prepare_evaluation
from pellucid.orchestrator.records import progress_path
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import Batch, MemoryChannel, publish_folder

TOKENIZER = character_tokenizer()
PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"


class Guess(SingleTurnEnvironment):
    """Reward is the share of `a` in the answer."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"guess {index}"}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(text.count("a") / max(len(text), 1))


class Broken(Guess):
    async def rollout(self, example: Example, session: Session) -> Score:
        await session.respond(example.messages)
        raise ZeroDivisionError(f"bad example {example.example_id}")


class Ranked(Guess):
    requires_group_scoring: ClassVar[bool] = True

    async def score_group(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        return [Score(1.0) for _ in rollouts]


class Stubborn(Guess):
    """Shrugs off its first cancellation."""

    async def rollout(self, example: Example, session: Session) -> Score:
        with contextlib.suppress(asyncio.CancelledError):
            await session.respond(example.messages)
            await asyncio.sleep(60)
        await asyncio.sleep(60)
        return Score(1.0)


class Persistent(Guess):
    """Asks again when it is cancelled."""

    async def rollout(self, example: Example, session: Session) -> Score:
        with contextlib.suppress(asyncio.CancelledError):
            return self.reward(example, await session.respond(example.messages))
        return self.reward(example, await session.respond(example.messages))


class Crowded(Guess):
    """Counts the rollouts that run at once."""

    num_running = max_running = 0

    async def rollout(self, example: Example, session: Session) -> Score:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            return await super().rollout(example, session)
        finally:
            self.num_running -= 1


class Short(Guess):
    def example(self, index: int) -> Example:
        return [super(Short, self).example(number) for number in range(3)][index]


def encode(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def letters(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
    return encode("".join(generator.choices("abcd", k=generator.randint(1, 8))))


class Improving(FakeInferenceClient):
    """Policy version v answers with v times `a`, and `b` up to four letters. Remembers what it was asked."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(lambda prompt_ids, generator: encode("a" * self.policy_version + "bbbb"), **settings)
        self.asked: list[tuple[Account, SamplingParams]] = []

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        self.asked.append((account, params))
        return await super().generate(prompt_ids, params, account, request_id)


def configure(tmp_path: Path, *evals: dict[str, Any], **changes: Any) -> OrchestratorRunConfig:
    orchestrator = {
        "env": [{"id": "x:Guess", "name": "guess"}],
        "eval": list(evals),
        "batch_size": 12,
        "rollouts_per_example": 4,
        "max_inflight_rollouts": 20,
        "sampling": {"max_tokens": 6},
        "filter_zero_advantages": False,
        **changes.pop("orchestrator", {}),
    }
    run = {"output_dir": tmp_path, "run_id": "run", "model": {"name": "none"}, "max_steps": 5, "seq_len": 200}
    return OrchestratorRunConfig.model_validate({**run, "orchestrator": orchestrator, **changes})


def evaluations(config: OrchestratorRunConfig, *environments: Environment) -> list[Evaluation]:
    return [
        prepare_evaluation(own, environment)
        for own, environment in zip(config.orchestrator.eval, environments, strict=True)
    ]


def run(
    config: OrchestratorRunConfig, client: FakeInferenceClient, *eval_environments: Environment
) -> list[Batch]:
    """A run to its end; the books of all three stages balance."""

    async def train(channel: MemoryChannel) -> list[Batch]:
        batches = []
        for step in range(config.max_steps):
            batches.append(await asyncio.to_thread(channel.receive, step))
            publish_folder(config.output_dir / "weights" / f"step_{step + 1}", lambda folder: None)
        return batches

    async def all_parts() -> list[Batch]:
        channel = MemoryChannel()
        training = asyncio.create_task(train(channel))
        measured = evaluations(config, *eval_environments)
        async with asyncio.timeout(120):
            environments = {"guess": Guess(seed=1)}
            await Orchestrator(config, environments, TOKENIZER, client, channel, measured).run()
            return await training

    batches = asyncio.run(all_parts())
    journal = Journal(config.output_dir / "ledger" / "trainer.jsonl", Stage.TRAINER)
    num_sampled = sum(int(batch.table.sampled_offsets[-1]) for batch in batches)
    for what in (Flow.RECEIVED, State.TRAINED, Flow.COMPUTED):
        journal.count("run", "guess", what, num_sampled)
    journal.close(config.max_steps)
    close_engine_books(config.output_dir, client)
    report = reconcile(config.output_dir / "ledger")
    assert report.balanced and not report.running, report.verdict()
    for account, states in report.states.items():
        assert states.total() == report.sampled[account] > 0
    return batches


def eval_records(run_dir: Path) -> dict[int, dict[str, dict[str, float]]]:
    """Measures by version and environment; each version has one record."""
    records = list(read_metrics(run_dir / "metrics" / "eval.jsonl"))
    found = {record["step"]: evaluations_in(record) for record in records}
    assert len(found) == len(records)
    return found


def eval_rollouts(run_dir: Path, version: int) -> list[dict[str, Any]]:
    path = run_dir / "rollouts" / f"step_{version}" / "eval_rollouts.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def eval_tokens(run_dir: Path) -> int:
    entries = read_journal(run_dir / "ledger" / "orchestrator.jsonl")
    return sum(entry.counts.get("eval", 0) for entry in entries)


def versions_of(rollouts: Sequence[dict[str, Any]]) -> set[int]:
    return {
        version
        for rollout in rollouts
        for turn in rollout["trajectory"]
        for version, _ in turn["policy_versions"]
    }


@pytest.mark.parametrize(
    ("settings", "max_steps", "versions"),
    [
        ({"interval": 2}, 5, [0, 2, 4, 5]),
        ({"interval": 2, "at_start": False}, 4, [2, 4]),
        ({}, 120, [0, 50, 100, 120]),
        ({"at_start": False}, 3, [3]),
    ],
)
def test_when_an_evaluation_is_due(settings: dict[str, Any], max_steps: int, versions: list[int]) -> None:
    evaluation = Evaluation(EvalConfig(id="x:Guess", **settings), Guess(seed=1), [])
    assert [version for version in range(max_steps + 1) if evaluation.is_due(version, max_steps)] == versions


@pytest.mark.parametrize("level", [0, 1, 3])
def test_each_evaluation_is_of_exactly_one_version_though_training_goes_on(
    tmp_path: Path, level: int
) -> None:
    """The evaluation takes longer than a step: weights wait for it."""
    entry = {"id": "x:Guess", "name": "held-out", "interval": 2, "num_examples": 30}
    config = configure(tmp_path, entry, max_async_level=level)
    client = Improving(delay_s=lambda generator: 0.05)
    run(config, client, Guess(seed=2))

    records = eval_records(tmp_path)
    assert list(records) == [0, 2, 4, 5]
    for version, measured in records.items():
        rollouts = eval_rollouts(tmp_path, version)
        assert versions_of(rollouts) == {version}
        assert sorted(int(rollout["example_id"]) for rollout in rollouts) == list(range(30))
        assert {rollout["trajectory"][0]["text"] for rollout in rollouts} == {("a" * version + "bbbb")[:6]}
        share = min(version, 6) / min(version + 4, 6)
        assert measured["held-out"].pop("time_s") > 0
        assert measured["held-out"] == {
            "avg@1": pytest.approx(share),
            "pass@1": float(share == 1),
            "num_failed": 0,
            "completion_length": min(version + 5, 6),
        }
    assert [version for version, _ in client.updates][-1] == 5
    assert eval_tokens(tmp_path) == client.sampled[Account("run", "held-out")]
    assert client.sampled[Account("run", "held-out")] == 30 * (5 + 6 + 6 + 6)


def test_greedy_and_sampled_evaluations_ask_for_what_they_say(tmp_path: Path) -> None:
    config = configure(
        tmp_path,
        {"id": "x:Guess", "name": "greedy", "num_examples": 2},
        {"id": "x:Guess", "name": "sampled", "num_examples": 2, "temperature": 0.7, "max_tokens": 3}
        | {"rollouts_per_example": 4, "at_start": False},
        max_steps=1,
    )
    client = Improving()
    run(config, client, Guess(seed=2), Guess(seed=3))

    asked = Counter((account.env, params.temperature, params.max_tokens) for account, params in client.asked)
    assert asked["greedy", 0.0, 6] == 4 and asked["sampled", 0.7, 3] == 8 and len(asked) == 3
    assert [list(measured) for measured in eval_records(tmp_path).values()] == [
        ["greedy"],
        ["greedy", "sampled"],
    ]
    assert list(eval_records(tmp_path)[1]["sampled"]) == [
        *("avg@4", "pass@1", "pass@2", "pass@4", "num_failed", "completion_length", "time_s")
    ]
    rollouts = eval_rollouts(tmp_path, 1)
    assert Counter(orjson.dumps(rollout["sampling_args"]) for rollout in rollouts) == {
        orjson.dumps({"temperature": 0.0, "max_tokens": 6}): 2,
        orjson.dumps({"temperature": 0.7, "max_tokens": 3}): 8,
    }
    seeds = [params.seed for account, params in client.asked if account.env == "sampled"]
    assert len(set(seeds)) == 8


def test_an_evaluation_under_the_name_of_what_trains_stays_apart(tmp_path: Path) -> None:
    settings = {"temperature": 1.0, "rollouts_per_example": 4, "num_examples": 5, "interval": 2}
    config = configure(tmp_path, {"id": "x:Guess", "name": "guess", **settings})
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.01 * generator.random())
    batches = run(config, client, Guess(seed=2))

    saved = {version: eval_rollouts(tmp_path, version) for version in (0, 2, 4, 5)}
    ids = [rollout["rollout_id"] for rollouts in saved.values() for rollout in rollouts]
    assert len(ids) == len(set(ids)) == 4 * 5 * 4
    assert {rollout["outcome"] for rollouts in saved.values() for rollout in rollouts} == {"eval"}
    assert not {name for batch in batches for name in batch.table["rollout_id"]} & set(ids)
    assert eval_tokens(tmp_path) == sum(
        rollout["num_tokens"] for rollouts in saved.values() for rollout in rollouts
    )
    states = reconcile(tmp_path / "ledger").states["run", "guess"]
    assert states == {"eval": eval_tokens(tmp_path), "trained": states["trained"]}
    for record in read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"):
        assert record["batch_rollouts"] == 12
        assert not any("eval" in name for name in record)


def test_measures_are_those_of_the_saved_rollouts(tmp_path: Path) -> None:
    settings = {"temperature": 1.0, "rollouts_per_example": 4, "num_examples": 10, "pass_reward": 0.5}
    config = configure(tmp_path, {"id": "x:Guess", "name": "held-out", **settings}, max_steps=1)
    client = FakeInferenceClient(letters, fails=lambda generator: generator.random() < 0.2)
    run(config, client, Guess(seed=2))

    for version, measured in eval_records(tmp_path).items():
        rollouts = eval_rollouts(tmp_path, version)
        scored = [rollout for rollout in rollouts if rollout["error"] is None]
        failed = [rollout for rollout in rollouts if rollout["error"] is not None]
        assert len(scored) + len(failed) == 40 and failed
        assert all("injected failure" in rollout["reason"] for rollout in failed)
        own = measured["held-out"]
        assert own["num_failed"] == len(failed)
        assert own["avg@4"] == pytest.approx(sum(r["reward"] for r in scored) / len(scored))
        assert own["completion_length"] == pytest.approx(sum(r["num_tokens"] for r in scored) / len(scored))
        passed = Counter(r["example_id"] for r in scored if r["reward"] >= 0.5)
        assert own["pass@1"] == pytest.approx(sum(passed.values()) / 40)
        assert own["pass@4"] == pytest.approx(len(passed) / 10)


def test_an_evaluation_in_which_everything_fails_is_a_record_and_no_crash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(tmp_path, {"id": "x:Broken", "name": "broken", "num_examples": 3}, max_steps=1)
    client = FakeInferenceClient(letters)
    run(config, client, Broken(seed=2))

    measured = eval_records(tmp_path)[1]["broken"]
    assert list(measured) == ["pass@1", "num_failed", "time_s"]
    assert (measured["pass@1"], measured["num_failed"]) == (0.0, 3)
    assert eval_tokens(tmp_path) == client.delivered[Account("run", "broken")] > 0
    failures = [line for line in caplog.messages if "ZeroDivisionError" in line]
    assert any(
        line.startswith("rollout eval-broken-v1-2-r0 of broken failed: ZeroDivisionError: bad example 2")
        for line in failures
    )
    assert len(failures) == 6
    assert sum("Traceback" in line for line in failures) == 1


def test_one_failure_leaves_a_group_scored_example_without_a_score(tmp_path: Path) -> None:
    settings = {"temperature": 1.0, "rollouts_per_example": 4, "num_examples": 20, "at_start": False}
    config = configure(tmp_path, {"id": "x:Ranked", "name": "ranked", **settings}, max_steps=1)
    client = FakeInferenceClient(letters, fails=lambda generator: generator.random() < 0.1)
    run(config, client, Ranked(seed=2))

    groups = defaultdict(list)
    for rollout in eval_rollouts(tmp_path, 1):
        groups[rollout["group_id"]].append(rollout["error"] is None)
    num_whole = sum(map(all, groups.values()))
    assert 0 < num_whole < 20
    measured = eval_records(tmp_path)[1]["ranked"]
    assert (measured["avg@4"], measured["pass@4"]) == (1.0, pytest.approx(num_whole / 20))
    assert measured["num_failed"] == 4 * (20 - num_whole)


def test_evaluation_has_a_limit_of_its_own(tmp_path: Path) -> None:
    own = {"max_inflight_rollouts": 4, "batch_size": 4}
    config = configure(tmp_path, {"id": "x:Crowded", "num_examples": 30}, max_steps=2, orchestrator=own)
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.01)
    environment = Crowded(seed=2)
    run(config, client, environment)
    assert environment.max_running == 4
    assert 4 < client.max_running <= 8, "training goes on sampling meanwhile"


def test_the_last_evaluation_does_not_run_beside_the_status_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patient(Guess):
        async def rollout(self, example: Example, session: Session) -> Score:
            while progress_path(tmp_path).exists():
                await asyncio.sleep(0.001)
            return await super().rollout(example, session)

    monkeypatch.setattr(loop, "_SHOW_PROGRESS_EVERY_S", 0.001)
    own = {"id": "x:Guess", "name": "held-out", "interval": 9, "at_start": False, "num_examples": 2}
    config = configure(tmp_path, own, max_steps=2)
    run(config, FakeInferenceClient(letters), Patient(seed=1))
    assert list(eval_records(tmp_path)) == [2]


def test_a_version_that_has_a_record_is_not_evaluated_again(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics" / "eval.jsonl")
    for version in (0, 2):
        sink.log(version, {"eval/held-out/avg@1": 0.5})
    sink.close()
    entry = {"id": "x:Guess", "name": "held-out", "interval": 2, "num_examples": 2}
    run(configure(tmp_path, entry, resume=True), FakeInferenceClient(letters), Guess(seed=2))
    assert list(eval_records(tmp_path)) == [0, 2, 4, 5]
    evaluated = {
        int(path.parent.name.removeprefix("step_")) for path in tmp_path.rglob("eval_rollouts.jsonl")
    }
    assert evaluated == {4, 5}


def interrupt(
    config: OrchestratorRunConfig,
    client: FakeInferenceClient,
    environment: Environment,
    until: Callable[[], bool],
) -> None:
    """A run that is cancelled once `until`; its books account for every token."""

    async def run_it() -> None:
        orchestrator = Orchestrator(
            config,
            {"guess": Guess(seed=1)},
            TOKENIZER,
            client,
            MemoryChannel(),
            evaluations(config, environment),
        )
        running = asyncio.create_task(orchestrator.run())
        async with asyncio.timeout(120):
            while not until():
                await asyncio.sleep(0.001)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(run_it())
    counts: Counter[str] = Counter()
    for entry in read_journal(config.output_dir / "ledger" / "orchestrator.jsonl"):
        if entry.env == "held-out":
            counts.update(entry.counts)
    num_sampled = client.sampled[Account("run", "held-out")]
    assert counts == {"received": num_sampled, "eval": num_sampled}
    assert client.delivered[Account("run", "held-out")] == num_sampled


def test_a_run_that_is_stopped_while_it_evaluates_loses_no_token(tmp_path: Path) -> None:
    config = configure(tmp_path, {"id": "x:Guess", "name": "held-out", "num_examples": 30})
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.2 * generator.random())
    account = Account("run", "held-out")
    interrupt(config, client, Guess(seed=2), lambda: client.delivered[account] >= 20)

    assert eval_records(tmp_path) == {}
    rollouts = eval_rollouts(tmp_path, 0)
    assert sum(rollout["num_tokens"] for rollout in rollouts) == client.sampled[account]
    assert {rollout["outcome"] for rollout in rollouts} == {"eval"}
    assert {rollout["stop_reason"] for rollout in rollouts} > {"abort"}


def test_an_evaluation_that_was_cut_short_is_run_again_when_the_run_is_resumed(tmp_path: Path) -> None:
    entry = {"id": "x:Guess", "name": "held-out", "num_examples": 30}
    config = configure(tmp_path, entry, max_steps=1, orchestrator={"batch_size": 100})
    slowness = [0.2]
    client = FakeInferenceClient(letters, delay_s=lambda generator: slowness[0] * generator.random())
    account = Account("run", "held-out")
    interrupt(config, client, Guess(seed=2), lambda: client.delivered[account] >= 20)
    first = eval_tokens(tmp_path)

    slowness[0] = 0.0
    run(config.model_copy(update={"resume": True}), client, Guess(seed=2))
    assert list(eval_records(tmp_path)) == [0, 1]
    rollouts = [eval_rollouts(tmp_path, version) for version in (0, 1)]
    assert [len(each) for each in rollouts] == [30, 30], "those of the first attempt are replaced"
    second = sum(rollout["num_tokens"] for each in rollouts for rollout in each)
    assert eval_tokens(tmp_path) == first + second == client.sampled[account]


def test_nothing_is_sampled_for_an_evaluation_once_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_GRACE_S", 60.0)  # a busy machine does not decide which reason is recorded
    config = configure(tmp_path, {"id": "x:Persistent", "name": "held-out", "num_examples": 10})
    client = FakeInferenceClient(letters, delay_s=lambda generator: 0.5)
    interrupt(config, client, Persistent(seed=2), lambda: client.sampled[Account("run", "held-out")] >= 5)

    reasons = [rollout["reason"] for rollout in eval_rollouts(tmp_path, 0)]
    assert reasons == ["RolloutError: the run is over; no further turn is sampled"] * 10


def test_an_evaluation_that_will_not_be_cancelled_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "WIND_DOWN_S", 0.2)
    config = configure(tmp_path, {"id": "x:Stubborn", "name": "held-out", "num_examples": 30})
    client = FakeInferenceClient(letters)
    environment = Stubborn(seed=2)
    interrupt(config, client, environment, lambda: client.delivered[Account("run", "held-out")] >= 40)

    assert "20 rollouts did not end within 0.2 s" in caplog.text
    reasons = [rollout["reason"] for rollout in eval_rollouts(tmp_path, 0)]
    assert reasons == ["the run ended before this attempt did"] * 20


def test_an_environment_with_too_few_examples_is_refused_before_the_run() -> None:
    config = EvalConfig(id="x:Short", name="short", num_examples=5)
    with pytest.raises(ConfigError) as caught:
        prepare_evaluation(config, Short(seed=1))
    assert re.fullmatch(
        r"environment 'short' has no example 3: IndexError: list index out of range "
        r"\(tests/orchestrator/test_evaluation.py:\d+\); "
        r"lower orchestrator.eval.num_examples = 5 to what it has",
        str(caught.value),
    )


def test_the_examples_of_an_evaluation_are_not_those_that_train() -> None:
    trained = load_environment(EnvConfig(id="reverse-text"), seed=3)
    measured = load_environment(EvalConfig(id="reverse-text"), seed=3)
    again = load_environment(EvalConfig(id="reverse-text"), seed=3)
    words = [
        [environment.example(index) for index in range(20)] for environment in (trained, measured, again)
    ]
    assert words[1] == words[2]
    assert not [example for example in words[1] if example.messages in [other.messages for other in words[0]]]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"id": "reverse-txt"}, r"orchestrator\.eval\.id = 'reverse-txt' is not a built-in environment"),
        (
            {"id": "reverse-text", "args": {"min_letters": 9}},
            r"environment 'reverse-text' refuses orchestrator\.eval\.args = {'min_letters': 9}",
        ),
    ],
)
def test_a_refusal_names_the_section(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment(EvalConfig(**settings), seed=0)


def test_one_line_per_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pellucid.orchestrator")
    config = configure(tmp_path, {"id": "x:Guess", "name": "held-out", "num_examples": 2}, max_steps=1)
    run(config, Improving(), Guess(seed=2))
    lines = [line for line in caplog.messages if line.startswith("eval")]
    assert [re.sub(r"\d+\.\d s", "0.0 s", line) for line in lines] == [
        "eval    0  held-out  avg@1 0.000  pass@1 0.000  5.0 tokens  0.0 s",
        "eval    1  held-out  avg@1 0.200  pass@1 0.000  6.0 tokens  0.0 s",
    ]


def test_the_page_names_every_measure(tmp_path: Path) -> None:
    settings = {"temperature": 1.0, "rollouts_per_example": 2, "num_examples": 2}
    config = configure(tmp_path, {"id": "x:Guess", "name": "held-out", **settings}, max_steps=1)
    run(config, FakeInferenceClient(letters), Guess(seed=2))
    (table,) = re.findall(r"^### Evaluations\n(.*?)(?:^### |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    documented = {
        re.sub(r"@[KJ]$", "", name) for name in re.findall(r"`eval/NAME/(.*?)`", table, re.MULTILINE)
    }
    measured = eval_records(tmp_path)[1]["held-out"]
    assert {name.partition("@")[0] for name in measured} == documented


class Garbled(Guess):
    """Fails with half of a character, in its examples and in what it says."""

    def example(self, index: int) -> Example:
        return Example(f"a\ud83d{index}", super().example(index).messages)

    async def rollout(self, example: Example, session: Session) -> Score:
        await session.respond(example.messages)
        raise ValueError("b\ud83d")


def test_half_of_a_character_is_spelt_out_in_what_is_saved(tmp_path: Path) -> None:
    own = {"id": "x:Garbled", "name": "garbled", "num_examples": 2, "rollouts_per_example": 1}
    run(configure(tmp_path, own, max_steps=1), FakeInferenceClient(letters), Garbled(seed=2))
    saved = eval_rollouts(tmp_path, 0)
    assert sorted(each["example_id"] for each in saved) == ["a\\ud83d0", "a\\ud83d1"]
    assert {each["error"].partition(" (")[0] for each in saved} == {"ValueError: b\\ud83d"}


def test_rollouts_are_not_saved_through_a_link(tmp_path: Path) -> None:
    config = configure(tmp_path, {"id": "x:Guess", "name": "quiz"})
    (tmp_path / "precious").write_bytes(b"precious")
    path = tmp_path / "rollouts" / "step_3" / "eval_rollouts.jsonl"
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "precious")
    books = Books(config)
    rollout = Rollout("r", "g", Example("0", []), "quiz", 1.0, reward=1.0)
    with pytest.raises(DataError, match=r"eval_rollouts\.jsonl is a link"):
        books.settle_evaluation(3, [Verdict(rollout, State.EVAL)])
    books.close()
    assert (tmp_path / "precious").read_bytes() == b"precious"
