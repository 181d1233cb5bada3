"""Logprobs of given tokens, by the engine and over HTTP: the trainer's values, and nothing in the books."""

import asyncio
import math
import random

import aiohttp
import httpx
import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.errors import InferenceError
from pellucid.inference import engine as engine_module
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.http import HttpInferenceClient
from pellucid.inference.slots import QueueFullError, Request, Scoring, run_to_end
from pellucid.ledger import read_journal
from pellucid.metrics import read_metrics
from pellucid.model import load_policy, packed_layout
from tolerance import near_logprobs

ENV = Account("run", "env")


@pytest.fixture(scope="module", params=["packed", "rows"])
def policy(tiny_model, request):
    return load_policy(ModelConfig(name=str(tiny_model)), layout=request.param)


def trainer_logprobs(policy, token_ids, temperature):
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        output = policy(
            ids, torch.arange(len(ids)), torch.full((len(ids),), temperature), packed_layout([len(ids)])
        )
    return output.logprobs.tolist()


def sequences(count, longest=60):
    generator = random.Random(0)
    return [[generator.randrange(101) for _ in range(generator.randint(1, longest))] for _ in range(count)]


def submitted(engine, all_ids, temperature=1.0):
    """The answers by number, once the engine has run."""
    answers = {}
    for index, token_ids in enumerate(all_ids):
        engine.submit_scoring(
            Scoring(token_ids, temperature, lambda result, index=index: answers.__setitem__(index, result))
        )
    return answers


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_are_the_trainers(policy, temperature, monkeypatch) -> None:
    """Of ragged sequences, one of a single token among them, with logits in chunks of 7 tokens."""
    monkeypatch.setattr(policy, "max_logits", 7 * policy.vocab_size)
    engine = Engine(policy, num_slots=2, max_length=64)
    asked = [[9], *sequences(12)]
    answers = submitted(engine, asked, temperature)
    run_to_end(engine, [])
    for index, token_ids in enumerate(asked):
        assert math.isnan(answers[index][0])
        expected = trainer_logprobs(policy, token_ids, temperature)[1:]
        assert answers[index][1:] == near_logprobs(expected, policy)
    assert engine.counts.scored_tokens == sum(map(len, asked))


def test_scoring_beside_running_requests_changes_neither(policy) -> None:
    def requests(finished):
        return [
            Request([5 + n] * (4 * n + 1), SamplingParams(max_tokens=12, seed=n), ENV, finished.append)
            for n in range(5)
        ]

    asked = sequences(20)
    alone, together = [], []
    run_to_end(Engine(policy, num_slots=2, max_length=64), requests(alone))
    engine = Engine(policy, num_slots=2, max_length=64)
    for request in requests(together):
        engine.submit(request)
    answers = []
    while not engine.is_idle:
        engine.step()
        if len(answers) < len(asked):  # one more per step
            answers.append([])
            engine.submit_scoring(Scoring(asked[len(answers) - 1], 1.0, answers[-1].append))
    assert together == alone
    assert engine.counts.sampled == engine.counts.delivered == {ENV: 60}
    for token_ids, [logprobs] in zip(asked, answers, strict=True):
        assert logprobs[1:] == near_logprobs(trainer_logprobs(policy, token_ids, 1.0)[1:], policy)


def test_a_step_scores_what_prompts_leave_room_for_and_at_least_one(policy, monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_PREFILL_TOKENS", 40)
    engine = Engine(policy, num_slots=8, max_length=64)
    answers = submitted(engine, [[7] * 15] * 6 + [[8] * 50] * 2)
    engine.submit(Request([9] * 21, SamplingParams(max_tokens=5), ENV, lambda completion: None))
    num_scored = []
    while not engine.is_idle:
        engine.step()
        num_scored.append(len(answers))
    # The prompt computes 20 tokens: room for one sequence of 15; then two a step; those of 50 alone.
    assert num_scored == [1, 3, 5, 6, 7, 8]


def test_an_abandoned_scoring_is_not_computed(policy) -> None:
    engine = Engine(policy, num_slots=1, max_length=64)
    told = []
    kept, dropped = Scoring([5, 6, 7], 1.0, told.append), Scoring([5, 6], 1.0, told.append)
    for scoring in (dropped, kept):
        engine.submit_scoring(scoring)
    engine.abandon_scoring(dropped)
    run_to_end(engine, [])
    engine.abandon_scoring(kept)
    assert [len(logprobs) for logprobs in told] == [3]
    assert engine.counts.scored_tokens == 3


@pytest.mark.parametrize(
    ("token_ids", "temperature", "reason"),
    [
        ([], 1.0, "the prompt is empty"),
        ([5] * 65, 1.0, "a sequence of 65 tokens exceeds inference.max_model_len = 64"),
        ([5, 101], 1.0, "a token id outside 0 … 100"),
        ([5, -1], 1.0, "a token id outside 0 … 100"),
        ([5], 0.0, "temperature = 0.0; must be between 0.001 and 1000"),
        ([5], math.nan, "temperature = nan"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_reason(policy, token_ids, temperature, reason) -> None:
    engine = Engine(policy, num_slots=1, max_length=64)
    with pytest.raises(InferenceError, match=reason):
        engine.submit_scoring(Scoring(token_ids, temperature, lambda result: None))
    assert engine.is_idle


def test_the_queue_is_bounded_for_scorings_too(policy) -> None:
    engine = Engine(policy, num_slots=1, max_length=64, max_queued=2)
    answers = submitted(engine, [[5, 6]] * 3)
    with pytest.raises(QueueFullError):
        submitted(engine, [[5, 6]])
    with pytest.raises(QueueFullError):
        engine.submit(Request([5], SamplingParams(), ENV, lambda completion: None))
    run_to_end(engine, [])
    assert len(answers) == 3


def test_a_logprob_that_is_not_finite_fails_that_sequence_alone(tiny_model) -> None:
    """A vocabulary may hold tokens that the model gives no probability at all."""
    policy = load_policy(ModelConfig(name=str(tiny_model)))
    impossible = torch.zeros(policy.vocab_size).index_fill(0, torch.tensor([77]), -torch.inf)
    policy.hf.get_output_embeddings().bias = torch.nn.Parameter(impossible)
    engine = Engine(policy, num_slots=1, max_length=64)
    answers = submitted(engine, [[5, 6, 77, 8], [77, 6]])
    run_to_end(engine, [])
    assert str(answers[0]) == (
        "policy version 0 gives token 2 of the sequence the logprob -inf; only finite ones can train"
    )
    assert math.isfinite(answers[1][1])


def test_an_engine_that_fails_tells_whoever_waits_for_a_score(policy, monkeypatch) -> None:
    engine = Engine(policy, num_slots=1, max_length=64)
    answers = submitted(engine, [[5, 6]] * 2)

    def fail(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._decoder, "score", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.abort_all()
    assert {str(answer) for answer in answers.values()} == {"the engine ended before it was scored"}
    assert engine.is_idle


async def scored(url, all_ids, temperature=1.0):
    client = HttpInferenceClient(url)
    try:
        return await asyncio.gather(
            *(client.score(ids, temperature, f"s{index}") for index, ids in enumerate(all_ids))
        )
    finally:
        await client.close()


def test_over_http_the_values_are_the_trainers_and_the_books_stay_empty(serving, tmp_path) -> None:
    asked = sequences(16)
    with serving() as (url, policy):
        answers = asyncio.run(scored(url, asked, 0.8))
        health = httpx.get(f"{url}/health").json()
        for token_ids, logprobs in zip(asked, answers, strict=True):
            assert math.isnan(logprobs[0])
            expected = trainer_logprobs(policy, token_ids, 0.8)[1:]
            assert logprobs[1:] == near_logprobs(expected, policy)
    assert health["scored_tokens"] == sum(map(len, asked))
    assert health["sampled_tokens"] == health["running"] == health["waiting"] == 0
    assert [entry for entry in read_journal(tmp_path / "inference.jsonl") if entry.counts] == []
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert record["scored_tokens"] == sum(map(len, asked))


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"token_ids": [5] * 300}, 400, "a sequence of 300 tokens exceeds inference.max_model_len = 256"),
        ({"token_ids": []}, 400, "length >= 1"),
        ({"token_ids": [5], "temperature": 0}, 400, "temperature = 0.0"),
        ({"token_ids": [5], "max_tokens": 3}, 400, "max_tokens"),
        ({}, 400, "token_ids"),
    ],
)
def test_over_http_a_refusal_has_the_reason(serving, body, status, reason) -> None:
    with serving() as (url, _):
        answer = httpx.post(f"{url}/inference/v1/score", json=body)
    assert answer.status_code == status
    assert reason in answer.json()["error"]["message"]


def test_a_client_that_goes_away_takes_its_sequence_along(serving) -> None:
    """Long ones fill the engine; whoever waits behind them and leaves is never computed."""
    with serving(max_length=8192) as (url, _):

        async def run():
            async with aiohttp.ClientSession() as session:

                async def post(token_ids):
                    async with session.post(
                        f"{url}/inference/v1/score", json={"token_ids": token_ids}
                    ) as answer:
                        return answer.status

                async def health_once(is_so):
                    while True:
                        async with session.get(f"{url}/health") as answer:
                            health = await answer.json()
                        if is_so(health["waiting"], health["scored_tokens"] // 8192):
                            return health

                ahead = [asyncio.create_task(post([5] * 8192)) for _ in range(4)]
                await health_once(lambda waiting, done: waiting + done == 4)
                behind = [asyncio.create_task(post([6] * 3)) for _ in range(5)]
                await health_once(lambda waiting, done: waiting + done == 9)
                for task in behind:
                    task.cancel()
                assert await asyncio.gather(*ahead) == [200] * 4
                return await health_once(lambda waiting, done: waiting == 0)

        assert asyncio.run(run())["scored_tokens"] == 4 * 8192


def test_a_full_server_says_so(serving) -> None:
    refused = pytest.raises(InferenceError, match="answered 503: .*do not fit")
    with serving(max_length=4096, max_queued=1, num_slots=1) as (url, _), refused:
        asyncio.run(scored(url, [[5] * 4096] * 6))
