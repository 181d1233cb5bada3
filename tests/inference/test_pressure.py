"""Clients that leave, crowd or dawdle: their slots go to others, and the server never grows without bound."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing

import httpx
import pytest
from msgspec.structs import replace

from engine_server import AUTHORIZED, JSON
from pellucid.config import ModelConfig
from pellucid.inference import entrance
from pellucid.inference.client import Account, GenerateManyRequest, GenerateRequest, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.entrance import MAX_BODY_BYTES
from pellucid.inference.http import HttpInferenceClient
from pellucid.inference.slots import QueueFullError
from pellucid.ledger import Journal, Stage, read_journal
from pellucid.ledger.journal import sum_entries
from pellucid.metrics import JsonlSink
from pellucid.model import load_policy

LONG = {"max_tokens": 4000, "temperature": 0}
GENERATE = {"token_ids": [5, 6], "sampling_params": LONG}
CHAT = {"messages": [{"role": "user", "content": "hello"}], **LONG}
ROUTES = {
    "generate": ("/inference/v1/generate", GENERATE),
    "generate_many": ("/inference/v1/generate_many", {"requests": [GENERATE] * 2}),
    "completions": ("/v1/completions", {"prompt": "abc", **LONG}),
    "completions, streamed": ("/v1/completions", {"prompt": "abc", "stream": True, **LONG}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", {"stream": True, **CHAT}),
}
"""None of these ends within the test: greedy decoding of the untrained model never stops."""


async def until(client, condition):
    while not condition(state := (await client.get("/health")).json()):
        await asyncio.sleep(0.005)
    return state


async def leave(call):
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_leaves_frees_its_slots_and_its_place_in_the_queue(serving, route) -> None:
    path, body = ROUTES[route]
    size = len(body.get("requests", [body]))

    async def run(url):
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            running, queued = (asyncio.ensure_future(client.post(path, json=body)) for _ in range(2))
            await until(
                client, lambda state: state["waiting"] == 2 * size - 1 and state["sampled_tokens"] > 3
            )
            await leave(queued)
            await until(client, lambda state: state["waiting"] == size - 1 and state["running"] == 1)
            await leave(running)
            return await until(client, lambda state: state["waiting"] == state["running"] == 0)

    with serving(num_slots=1, max_length=4096) as (url, _):
        state = asyncio.run(run(url))
    assert state["delivered_tokens"] == 0
    assert state["cancelled_tokens"] == state["sampled_tokens"] > 3


def test_a_client_that_leaves_between_two_lines_frees_the_rest(serving) -> None:
    short = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}

    async def run(url):
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            body = {"requests": [GENERATE, short, GENERATE]}
            async with client.stream("POST", "/inference/v1/generate_many", json=body) as response:
                line = await anext(response.aiter_lines())
                assert '"index":1' in line
                assert (await client.get("/health")).json()["running"] == 2
            return await until(client, lambda state: state["running"] == 0)

    with serving(max_length=4096) as (url, _):
        state = asyncio.run(run(url))
    assert state["delivered_tokens"] == 2
    assert state["cancelled_tokens"] == state["sampled_tokens"] - 2


@pytest.mark.parametrize("route", ROUTES)
def test_a_full_queue_refuses_and_says_when_to_come_back(serving, route) -> None:
    path, body = ROUTES[route]
    size = len(body.get("requests", [body]))

    async def run(url):
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            held = [asyncio.ensure_future(client.post(path, json=body)) for _ in range(2)]
            await until(client, lambda state: state["waiting"] + state["running"] == 2 * size)
            refused = await client.post(path, json=body)
            for call in held:
                await leave(call)
            await until(client, lambda state: state["running"] == 0)
            short = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
            return refused, await client.post("/inference/v1/generate", json=short)

    with serving(num_slots=1, max_queued=2 * size - 1, max_length=4096) as (url, _):
        refused, served = asyncio.run(run(url))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "queue_full"
    assert f"{size} more requests do not fit: {2 * size} of {2 * size} are open" in refused.text
    assert served.status_code == 200


def test_an_answer_takes_room_until_it_is_read(tiny_model, tmp_path) -> None:
    """Otherwise slow readers would pile up answers that nobody counts any more."""
    engine = Engine(load_policy(ModelConfig(name=str(tiny_model))), num_slots=1, max_length=64, max_queued=1)
    thread = EngineThread(
        engine,
        Journal(tmp_path / "inference.jsonl", Stage.INFERENCE),
        JsonlSink(tmp_path / "metrics.jsonl"),
        on_failure=lambda error: None,
    )
    asked = [GenerateRequest([5, 6], SamplingParams(max_tokens=4), Account())]

    async def run():
        async with aclosing(thread.generate(asked, tokens=True)) as slow:
            async with aclosing(thread.generate(asked, tokens=True)) as slower:
                num_read = len(await anext(slow))
                await anext(slower)
                while not engine.is_idle:
                    await asyncio.sleep(0.001)
                with pytest.raises(QueueFullError, match="1 more requests do not fit: 2 of 2 are open"):
                    await anext(thread.generate(asked))
            num_read += sum([len(events) async for events in slow])
            return num_read, [event async for events in thread.generate(asked) for event in events]

    thread.start()
    try:
        num_read, third = asyncio.run(run())
    finally:
        thread.stop()
    assert num_read == 5  # four tokens, and the end
    assert [len(completion.token_ids) for _, completion in third] == [4]


@pytest.mark.parametrize(
    "path",
    [*dict.fromkeys(path for path, _ in ROUTES.values()), "/update_weights", "/abort"],
)
def test_every_route_refuses_what_it_cannot_read(serving, path) -> None:
    with serving() as (url, _):
        for body in (b"", b"not json", b"[]", b"{}", b'{"a": \xff}', b"[" * 100_000):
            answer = httpx.post(url + path, content=body, headers=JSON | AUTHORIZED)
            assert answer.status_code == 400, body[:20]
            assert answer.json()["error"]["message"]
        large = httpx.post(url + path, content=b" " * (MAX_BODY_BYTES + 1), headers=JSON | AUTHORIZED)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        assert httpx.get(f"{url}/health").json()["status"] == "ok"


def test_a_completion_that_is_never_read_counts_as_cancelled(tiny_model, tmp_path) -> None:
    """The engine is done with both when the reader leaves: one was delivered, the later one to nobody."""
    engine = Engine(load_policy(ModelConfig(name=str(tiny_model))), num_slots=2, max_length=64, max_queued=2)
    books = tmp_path / "inference.jsonl"
    thread = EngineThread(
        engine,
        Journal(books, Stage.INFERENCE),
        JsonlSink(tmp_path / "metrics.jsonl"),
        on_failure=lambda error: None,
    )
    asked = [GenerateRequest([5, 6], SamplingParams(max_tokens=n), Account("run", "env")) for n in (2, 5)]

    async def run():
        async with aclosing(thread.generate(asked)) as reader:
            await anext(reader)
            while not engine.is_idle:
                await asyncio.sleep(0.001)

    thread.start()
    try:
        asyncio.run(run())
    finally:
        thread.stop()
    (total,) = sum_entries(read_journal(books))
    assert total.counts == {"sampled": 7, "delivered": 2, "cancelled": 5}


def test_a_long_prompt_of_a_large_group_fits_a_body(serving, monkeypatch) -> None:
    """Sent once per member it would not: 64 times 20,000 bytes, and the limit is 100,000 here."""
    monkeypatch.setattr(entrance, "MAX_BODY_BYTES", 100_000)

    async def run(url):
        client = HttpInferenceClient(url)
        try:
            params = [SamplingParams(max_tokens=2, seed=seed) for seed in range(64)]
            prompt = [7, 8] * 5_000
            calls = (client.generate(prompt, each, Account(), f"r{n}") for n, each in enumerate(params))
            return await asyncio.gather(*calls)
        finally:
            await client.close()

    with serving(max_length=10_240) as (url, _):
        completions = asyncio.run(run(url))
    assert [len(completion.token_ids) for completion in completions] == [2] * 64


def test_a_member_may_bring_a_prompt_of_its_own_and_needs_one(serving) -> None:
    short = {"sampling_params": {"max_tokens": 1, "temperature": 0}, "compact": True}
    with serving() as (url, _), httpx.Client(base_url=url) as client:
        body = {"token_ids": [5, 6], "requests": [short, {**short, "token_ids": [9, 9, 9]}]}
        mixed = client.post("/inference/v1/generate_many", json=body)
        alone = [
            client.post("/inference/v1/generate", json={**short, "token_ids": prompt}).json()["choices"][0]
            for prompt in ([5, 6], [9, 9, 9])
        ]
        without = client.post("/inference/v1/generate_many", json={"requests": [short]})
        again = [{**short, "token_ids": [9, 9, 9]}, short, {**short, "token_ids": [5, 6]}, short]
        repeated = client.post("/inference/v1/generate_many", json={"requests": again})
    lines = sorted((json.loads(line) for line in mixed.text.splitlines()), key=lambda line: line["index"])
    assert [line["completion"]["token_ids"] for line in lines] == [each["token_ids"] for each in alone]
    assert json.loads(without.text)["error"] == "the prompt is empty; send at least one token"
    answers = {
        each["index"]: each["completion"]["token_ids"] for each in map(json.loads, repeated.iter_lines())
    }
    own, other = (each["token_ids"] for each in alone)
    assert answers == {0: other, 1: other, 2: own, 3: own}  # without a common prompt, that of the one before


class CountingPrompt(list[int]):
    """A prompt that counts how often it is gone through."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.parametrize(("last_id", "reason"), [(6, None), (10_000, "the prompt has a token id outside 0")])
def test_a_prompt_that_a_group_shares_is_looked_at_once(serving, monkeypatch, last_id, reason) -> None:
    """For its smallest id, its largest, and, if it is computed, as an array; it was five times per member."""
    prompt = CountingPrompt([5, last_id])
    members = GenerateManyRequest.members
    monkeypatch.setattr(GenerateManyRequest, "members", lambda body: members(replace(body, token_ids=prompt)))
    short = {"sampling_params": {"max_tokens": 1}, "compact": True}
    with serving() as (url, _):
        body = {"token_ids": [5, last_id], "requests": [short] * 64}
        answer = httpx.post(f"{url}/inference/v1/generate_many", json=body)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(64))
    assert all(line.get("error", "").startswith(reason) if reason else "completion" in line for line in lines)
    assert prompt.num_passes == (2 if reason else 3)
