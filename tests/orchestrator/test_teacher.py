"""Runs with a teacher, on fakes: who samples, what the samples carry, and whether the books balance."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from engine_books import close_engine_books
from pellucid.config import OrchestratorRunConfig
from pellucid.data import NOT_OURS, Completion, Example, Rollout, TokenTable, Turn
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import ConfigError, InferenceError, RolloutError
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow, Journal, Report, Stage, State, reconcile
from pellucid.metrics import read_metrics
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import (
    Environment,
    Orchestrator,
    Score,
    Session,
    SingleTurnEnvironment,
    run_orchestrator,
)
from pellucid.orchestrator.group import Evaluation, Scorer, prepare_evaluation
from pellucid.orchestrator.verdict import build_samples, token_sequences
from pellucid.transport import Batch, MemoryChannel, publish_folder
from tolerance import near

TOKENIZER = character_tokenizer()
SERVERS = ["http://teacher:8000"]


class Guess(SingleTurnEnvironment):
    """Every answer is worth the same, so every advantage is 0."""

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"guess {index}"}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(0.5)


class Branches(Guess):
    """Two turns that belong together, and one beside them."""

    async def rollout(self, example: Example, session: Session) -> Score:
        first = await session.respond(example.messages)
        reply = [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        await session.respond([*example.messages, *reply])
        await session.respond([{"role": "user", "content": "something else"}])
        return Score(0.5)


def by_id(token_ids: Sequence[int], temperature: float) -> list[float]:
    """Logprobs that tell token and temperature."""
    return [math.nan] + [-token / 1000 - temperature for token in token_ids[1:]]


def writes(letters: str):
    def respond(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
        text = "".join(generator.choices(letters, k=generator.randint(1, 8)))
        return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    return respond


def configure(folder: Path, teacher: dict[str, Any], **changes: Any) -> OrchestratorRunConfig:
    orchestrator = {
        "env": [{"id": "x:Guess", "name": "guess"}],
        "batch_size": 12,
        "rollouts_per_example": 4,
        "max_inflight_rollouts": 20,
        "sampling": {"max_tokens": 6, "temperature": 0.5},
        "teacher": {"servers": SERVERS, **teacher},
        **changes.pop("orchestrator", {}),
    }
    run = {"output_dir": folder, "run_id": "run", "model": {"name": "none"}, "max_steps": 4, "seq_len": 200}
    return OrchestratorRunConfig.model_validate({**run, "orchestrator": orchestrator, **changes})


def run(
    config: OrchestratorRunConfig,
    policy: FakeInferenceClient,
    teacher: FakeInferenceClient,
    environment: Environment | None = None,
    evaluations: Sequence[Evaluation] = (),
) -> list[Batch]:
    """A run to its end, with a trainer that trains every token."""
    batches: list[Batch] = []

    async def train(channel: MemoryChannel) -> None:
        for step in range(config.max_steps):
            batches.append(await asyncio.to_thread(channel.receive, step))
            publish_folder(config.output_dir / "weights" / f"step_{step + 1}", lambda folder: None)

    async def all_parts() -> None:
        channel = MemoryChannel()
        training = asyncio.create_task(train(channel))
        environments = {"guess": environment or Guess(seed=0)}
        async with asyncio.timeout(120):
            await Orchestrator(config, environments, TOKENIZER, policy, channel, evaluations, teacher).run()
            await training

    asyncio.run(all_parts())
    return batches


def close_books(config: OrchestratorRunConfig, batches: Sequence[Batch], **engines: Any) -> Report:
    """Those of the trainer, and of the engines that keep their own."""
    ledger = config.output_dir / "ledger"
    for name, client in engines.items():
        close_engine_books(config.output_dir, client, name)
    journal = Journal(ledger / "trainer.jsonl", Stage.TRAINER)
    for batch in batches:
        for what in (Flow.RECEIVED, State.TRAINED, Flow.COMPUTED):
            journal.count("run", "guess", what, int(batch.table.sampled_offsets[-1]))
    journal.close(config.max_steps)
    return reconcile(ledger)


def saved_rollouts(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "rollouts").glob("step_*/train_rollouts.jsonl"))
    return [orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def per_sequence(table: TokenTable, column: str) -> list[np.ndarray]:
    return np.split(table[column], np.cumsum(table.lengths)[:-1])


def assert_scored(table: TokenTable, temperature: float) -> None:
    """Every token of every sequence, by the function above."""
    for ids, logprobs in zip(
        per_sequence(table, "token_ids"), per_sequence(table, "teacher_logprobs"), strict=True
    ):
        assert logprobs == near(by_id(ids.tolist(), temperature), terms=1, each=True)


@pytest.mark.parametrize("mode", ["opd", "rl"])
def test_the_policy_samples_and_the_teacher_scores_every_token(tmp_path: Path, mode: str) -> None:
    """Rewards are all the same; yet nothing is left out, because the teacher has something to say."""
    config = configure(tmp_path, {"mode": mode})
    policy, teacher = FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("x"), scores=by_id)
    batches = run(config, policy, teacher)
    for batch in batches:
        table = batch.table
        assert set(table["training_mode"]) == {mode}
        assert table.num_sequences >= 12
        assert_scored(table, 0.5)
        assert (table["policy_versions"] >= 0).all()
    report = close_books(config, batches, inference=policy)
    assert report.balanced and not report.running
    assert report.states["run", "guess"]["trained"] > 0
    assert report.states["run", "guess"]["zero_advantage"] == 0
    assert not teacher.sampled and teacher.num_scored >= 4 * 12


def test_each_sample_of_a_rollout_is_scored_by_itself(tmp_path: Path) -> None:
    config = configure(tmp_path, {"mode": "opd"})
    policy, teacher = FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("x"), scores=by_id)
    batches = run(config, policy, teacher, Branches(seed=0))
    num_samples: Counter[str] = Counter()
    for table in (batch.table for batch in batches):
        num_samples.update(table["rollout_id"])
        assert_scored(table, 0.5)
    assert set(num_samples.values()) == {2}
    assert close_books(config, batches, inference=policy).balanced


def test_sequences_to_score_are_those_of_the_samples() -> None:
    def turn(prompt: list[int], completion: list[int]) -> Turn:
        size = len(completion)
        return Turn(prompt, Completion(completion, [-1.0] * size, [(0, size)], "stop"), "")

    rollout = Rollout("r", "g", Example("e", []), "env", 1.0, reward=0.0)
    rollout.turns = [turn([5, 6], [7]), turn([5, 8], [9, 9]), turn([5, 6, 7, 4], [3]), turn([5], [])]
    sequences = [[5, 6, 7, 4, 3], [5, 8, 9, 9]]
    assert [token_ids.tolist() for token_ids in token_sequences(rollout)] == sequences
    client = FakeInferenceClient(writes("x"), scores=by_id)
    asyncio.run(Scorer(client, "run").score(rollout))
    samples = build_samples(rollout, run_id="run", advantage=0.0)
    table = TokenTable.from_samples(samples)
    assert [ids.tolist() for ids in per_sequence(table, "token_ids")] == sequences
    assert_scored(table, 1.0)


def test_a_rollout_that_cannot_be_scored_has_failed_and_is_attempted_again(tmp_path: Path) -> None:
    fails = random.Random(0)

    def scores(token_ids: Sequence[int], temperature: float) -> list[float]:
        if fails.random() < 0.3:
            raise InferenceError("http://teacher:8000 answered 503: full")
        return by_id(token_ids, temperature)

    config = configure(tmp_path, {"mode": "opd"}, orchestrator={"max_retries": 1, "retry_backoff_s": 0.0})
    policy, teacher = FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("x"), scores=scores)
    batches = run(config, policy, teacher)
    report = close_books(config, batches, inference=policy)
    assert report.balanced and not report.running
    failed = [record for record in saved_rollouts(tmp_path) if record["outcome"] == "failed_rollout"]
    assert {record["error"] for record in failed} == {
        "TeacherError: the teacher could not score the rollout: http://teacher:8000 answered 503: full"
    }
    assert report.states["run", "guess"]["failed_rollout"] == sum(each["num_tokens"] for each in failed) > 0
    assert any("~1" in record["rollout_id"] for record in saved_rollouts(tmp_path))


@pytest.mark.parametrize("ruled_out", [-np.inf, -9999.0])
def test_a_sample_that_the_teacher_rules_out_is_rejected_and_the_others_train(
    tmp_path: Path, ruled_out: float
) -> None:
    """A teacher that has never heard of the letter a."""
    letter = TOKENIZER.encode("a", add_special_tokens=False)[0]

    def scores(token_ids: Sequence[int], temperature: float) -> list[float]:
        return [ruled_out if each == letter else -1.0 for each in token_ids]

    policy = FakeInferenceClient(writes("abcd"))
    config = configure(tmp_path, {"mode": "opd"})
    batches = run(config, policy, FakeInferenceClient(writes("x"), scores=scores))
    rejected = [record for record in saved_rollouts(tmp_path) if record["outcome"] == "rejected"]
    assert rejected and all("teacher_logprobs of token" in record["reason"] for record in rejected)
    for batch in batches:
        trainable = batch.table["loss_mask"]
        assert np.isfinite(batch.table["teacher_logprobs"][trainable]).all()
        assert letter not in batch.table["token_ids"][trainable]
    report = close_books(config, batches, inference=policy)
    assert report.balanced and report.states["run", "guess"]["rejected"] > 0


def test_too_few_logprobs_fail_the_rollout(tmp_path: Path) -> None:
    """Whole groups are lost, so the run stops, and says why."""
    config = configure(tmp_path, {"mode": "opd"}, orchestrator={"max_fruitless_groups": 3})
    teacher = FakeInferenceClient(writes("x"), scores=lambda token_ids, temperature: [-1.0])
    policy = FakeInferenceClient(writes("abcd"))
    untrained = Orchestrator(
        config, {"guess": Guess(seed=0)}, TOKENIZER, policy, MemoryChannel(), teacher=teacher
    )
    with pytest.raises(RolloutError, match=r"TeacherError: the teacher gave 1 logprobs for \d+ tokens"):
        asyncio.run(untrained.run())


def test_the_teacher_samples_and_its_tokens_are_never_stale(tmp_path: Path) -> None:
    """Its server is not the run's: what arrives is booked as sampled."""
    config = configure(tmp_path, {"mode": "sft"}, max_steps=6, orchestrator={"max_off_policy_steps": 1})
    policy, teacher = FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("xyz"))
    batches = run(config, policy, teacher)
    known = set(TOKENIZER.encode("xyz", add_special_tokens=False)) | {TOKENIZER.eos_token_id}
    for batch in batches:
        table = batch.table
        assert set(table["training_mode"]) == {"sft"}
        assert set(table["policy_versions"]) == {NOT_OURS}
        assert set(table["token_ids"][table["sampled"]].tolist()) <= known
    assert not policy.sampled and len(policy.updates) > 0
    report = close_books(config, batches, inference=policy)
    assert report.balanced and not report.running, report.differences
    states = report.states["run", "guess"]
    assert report.sampled["run", "guess"] == teacher.delivered.total() == states.total()
    assert states["trained"] > 0 and not states["stale"] and not states["zero_advantage"]
    records = list(read_metrics(tmp_path / "metrics" / "orchestrator.jsonl"))
    assert len(records) == 6 and not any("off_policy_level/all/mean" in record for record in records)


def test_a_teacher_that_keeps_the_runs_books_is_not_booked_twice(tmp_path: Path) -> None:
    config = configure(tmp_path, {"mode": "sft", "servers": [], "model": "some/teacher", "port": 8001})
    policy, teacher = FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("xyz"))
    batches = run(config, policy, teacher)
    report = close_books(config, batches, inference=policy, inference_teacher=teacher)
    assert report.balanced and not report.running, report.differences
    assert report.sampled["run", "guess"] == teacher.sampled.total()


def test_a_filter_rejects_what_the_teacher_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short_replies.py").write_text(
        "def keep(inputs):\n    return [rollout.num_sampled <= 4 for rollout in inputs.rollouts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = configure(
        tmp_path / "run", {"mode": "sft"}, orchestrator={"filter": [{"import_path": "short_replies:keep"}]}
    )
    batches = run(config, FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("xyz")))
    for batch in batches:
        assert np.diff(batch.table.sampled_offsets).max() <= 4
    report = close_books(config, batches)
    assert report.balanced
    assert report.states["run", "guess"]["filtered"] > 0


def test_evaluations_are_of_the_policy_whoever_samples(tmp_path: Path) -> None:
    held_out = {"id": "x:Guess", "name": "held-out", "num_examples": 3, "interval": 2}
    config = configure(tmp_path, {"mode": "sft"}, orchestrator={"eval": [held_out]})
    evaluation = prepare_evaluation(config.orchestrator.eval[0], Guess(seed=1))
    policy, teacher = FakeInferenceClient(writes("abcd")), FakeInferenceClient(writes("xyz"))
    batches = run(config, policy, teacher, evaluations=[evaluation])
    report = close_books(config, batches, inference=policy)
    assert report.balanced and not report.running
    assert {account.env for account in policy.sampled} == {"held-out"}
    assert {account.env for account in teacher.sampled} == {"guess"}
    assert report.states["run", "held-out"] == {"eval": policy.sampled.total()}


def test_vocabularies_are_equal_only_if_every_id_is_the_same_token() -> None:
    class Words:
        def __init__(self, **ids: int) -> None:
            self._ids = ids

        def get_vocab(self) -> dict[str, int]:
            return self._ids

    assert fingerprint(Words(a=0, b=1)) == fingerprint(Words(b=1, a=0))
    assert len({fingerprint(each) for each in (Words(a=0, b=1), Words(a=1, b=0), Words(a=0, b=2))}) == 3


def test_the_orchestrator_alone_serves_no_teacher(tmp_path: Path) -> None:
    config = configure(tmp_path, {"servers": [], "model": "some/teacher"}, inference={"port": 8000})
    with pytest.raises(ConfigError, match=r"give its address as orchestrator\.teacher\.servers"):
        run_orchestrator(config)
