import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pellucid.data import Completion
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient

ACCOUNT = Account("run", "env")


def count_up(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
    return [prompt_ids[-1] + offset for offset in range(1, 5)]


def draw(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
    return [generator.randrange(1000) for _ in range(6)]


def test_answers_what_the_policy_says() -> None:
    client = FakeInferenceClient(count_up)
    completion = asyncio.run(client.generate([7], SamplingParams(max_tokens=9), ACCOUNT, "a"))
    assert completion.token_ids == [8, 9, 10, 11]
    assert completion.policy_versions == [(0, 4)] and completion.finish_reason == "stop"
    assert client.sampled == client.delivered == {ACCOUNT: 4}


def test_max_tokens_cuts_the_answer() -> None:
    completion = asyncio.run(
        FakeInferenceClient(count_up).generate([7], SamplingParams(max_tokens=2), ACCOUNT, "a")
    )
    assert (completion.token_ids, completion.finish_reason) == ([8, 9], "length")


def test_the_seed_decides_tokens_and_logprobs() -> None:
    async def ask(*seeds: int) -> list[Completion]:
        client = FakeInferenceClient(draw)
        return [await client.generate([7], SamplingParams(seed=seed), ACCOUNT, "a") for seed in seeds]

    first, again, other = asyncio.run(ask(1, 1, 2))
    assert first == again != other
    assert all(-1 < logprob <= 0 for logprob in first.logprobs)


async def _sampled(client: FakeInferenceClient, num_tokens: int) -> None:
    while client.sampled.total() < num_tokens:
        await asyncio.sleep(0)


def test_running_requests_go_on_under_new_weights() -> None:
    async def update_midway() -> None:
        client = FakeInferenceClient(count_up)
        request = asyncio.create_task(client.generate([7], SamplingParams(), ACCOUNT, "a"))
        await _sampled(client, 2)
        await client.update_weights(3, Path("weights/step_3"))
        completion = await request
        assert completion.policy_versions == [(0, 2), (3, 2)]
        assert client.updates == [(3, Path("weights/step_3"))]

    asyncio.run(update_midway())


def test_abort_returns_what_there_is() -> None:
    async def abort_midway() -> None:
        client = FakeInferenceClient(count_up)
        requests = [
            asyncio.create_task(client.generate([7], SamplingParams(), ACCOUNT, name)) for name in "abc"
        ]
        await _sampled(client, 3)
        assert client.num_running == client.max_running == 3
        await client.abort(["a", "c", "unknown"])
        completions = await asyncio.gather(*requests)
        assert [completion.finish_reason for completion in completions] == ["abort", "stop", "abort"]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        assert client.sampled[ACCOUNT] == client.delivered[ACCOUNT] == num_tokens < 12
        assert client.num_running == 0
        later = await client.generate([7], SamplingParams(), ACCOUNT, "a")
        assert later.finish_reason == "stop"

    asyncio.run(abort_midway())


def test_an_injected_failure_delivers_nothing() -> None:
    client = FakeInferenceClient(count_up, fails=lambda generator: generator.random() < 1)
    with pytest.raises(InferenceError, match="injected failure after 4 tokens"):
        asyncio.run(client.generate([7], SamplingParams(), ACCOUNT, "a"))
    assert client.sampled == {ACCOUNT: 4} and not client.delivered and client.num_running == 0


def test_the_delay_is_the_requests() -> None:
    async def measure() -> float:
        started = asyncio.get_running_loop().time()
        await FakeInferenceClient(count_up, delay_s=lambda generator: 0.04).generate(
            [7], SamplingParams(), ACCOUNT, "a"
        )
        return asyncio.get_running_loop().time() - started

    assert asyncio.run(measure()) >= 0.04


def test_an_answer_that_nobody_waits_for_is_delivered_all_the_same() -> None:
    async def leave_while_the_answer_travels() -> None:
        client = FakeInferenceClient(count_up, transit_s=0.5)
        asking = asyncio.create_task(client.generate([7], SamplingParams(), ACCOUNT, "a"))
        while not client.delivered:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert client.sampled == client.delivered == {ACCOUNT: 4}

    asyncio.run(leave_while_the_answer_travels())


def test_an_abort_passes_over_a_request_that_has_not_arrived() -> None:
    async def abort_too_early() -> None:
        client = FakeInferenceClient(count_up, transit_s=0.02)
        request = asyncio.create_task(client.generate([7], SamplingParams(), ACCOUNT, "a"))
        await asyncio.sleep(0)
        await client.abort(["a"])
        assert (await request).finish_reason == "stop"

    asyncio.run(abort_too_early())


def test_two_running_requests_cannot_share_an_id() -> None:
    async def ask_twice() -> None:
        client = FakeInferenceClient(count_up)
        asking = [client.generate([7], SamplingParams(), ACCOUNT, "a") for _ in range(2)]
        first, second = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, Completion)
        assert isinstance(second, InferenceError) and "'a' is running already" in str(second)

    asyncio.run(ask_twice())


def test_greedy_requests_with_one_prompt_get_one_answer() -> None:
    client = FakeInferenceClient(lambda prompt_ids, generator: generator.sample(range(1000), k=8))

    async def answers(temperature: float) -> set[tuple[int, ...]]:
        params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(5)]
        calls = [client.generate([7], each, ACCOUNT, f"r{each.seed}") for each in params]
        return {tuple(completion.token_ids) for completion in await asyncio.gather(*calls)}

    assert len(asyncio.run(answers(0.0))) == 1
    assert len(asyncio.run(answers(0.7))) == 5
