"""vLLM behind the server, asked by the client that the orchestrator uses."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.config.shared import LoraConfig
from pellucid.errors import InferenceError
from pellucid.guard import server_key
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.http import HttpInferenceClient
from pellucid.ledger import read_journal
from pellucid.metrics import read_metrics
from pellucid.model import Adapters, load_policy, packed_layout
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import ServedWeights, weights_folder, write_adapter, write_version
from tolerance import logprob_bound, near_logprobs

ENV = Account("run", "env")


@asynccontextmanager
async def connected(url: str, run_dir: Path) -> AsyncIterator[HttpInferenceClient]:
    client = HttpInferenceClient(url, server_key(run_dir, None))
    try:
        await client.wait_until_ready()
        yield client
    finally:
        await client.close()


def trainer_logprobs(policy, token_ids, temperature):
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        temperatures = torch.full((len(ids),), temperature)
        return policy(ids, torch.arange(len(ids)), temperatures, packed_layout([len(ids)])).logprobs


def changed(model, scale: float):
    """A policy with other weights."""
    policy = load_policy(ModelConfig(name=str(model)))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.hf.parameters():
            parameter += scale * torch.randn_like(parameter)
    return policy


async def worst_difference(client, policy, temperature: float, version: int) -> float:
    """Of the logprobs of ragged requests, more than there are slots, from the trainer's."""
    generator = random.Random(0)
    prompts = [[generator.randrange(5, 101) for _ in range(generator.randint(1, 60))] for _ in range(20)]
    answers = await asyncio.gather(
        *(
            client.generate(prompt, SamplingParams(temperature, 4 + index, index), ENV, f"{version}/{index}")
            for index, prompt in enumerate(prompts)
        )
    )
    for index, answer in enumerate(answers):
        assert answer.policy_versions == [(version, 4 + index)]
        assert (len(answer.token_ids), answer.finish_reason) == (4 + index, "length")
    return max(
        (
            trainer_logprobs(policy, [*prompt, *answer.token_ids], temperature or 1.0)[len(prompt) :]
            - torch.tensor(answer.logprobs)
        )
        .abs()
        .max()
        .item()
        for prompt, answer in zip(prompts, answers, strict=True)
    )


def rounding(policy) -> float:
    """Allowed of the above: sequences of up to 60 + 23 tokens, logprobs down to -20."""
    return logprob_bound(policy, 83, 20.0)


async def weights_change(client, model, tmp_path) -> None:
    before, after = load_policy(ModelConfig(name=str(model))), changed(model, 0.05)
    for temperature in (1.0, 0.6, 0.0):
        assert await worst_difference(client, before, temperature, 0) <= rounding(before)
    folder = weights_folder(tmp_path, 3)
    folder.mkdir(parents=True)
    write_version(after.hf, folder)
    await client.update_weights(3, folder)
    for temperature in (1.0, 0.6):
        assert await worst_difference(client, after, temperature, 3) <= rounding(after)
        assert await worst_difference(client, before, temperature, 3) > 0.1
    scored = await client.score([5, 6, 9, 40], 1.0, "score")
    assert scored[1:] == near_logprobs(trainer_logprobs(after, [5, 6, 9, 40], 1.0)[1:], after)


async def bad_weights_change_nothing(client, model, tmp_path) -> None:
    folder = weights_folder(tmp_path, 9)
    folder.mkdir()
    policy = changed(model, 0.0)
    del policy.hf.model.layers[1]
    write_version(policy.hf, folder)
    with pytest.raises(InferenceError, match="does not fit the model: lacks"):
        await client.update_weights(9, folder)
    policy = changed(model, 0.05)
    assert await worst_difference(client, policy, 1.0, 3) <= rounding(policy)


async def running_requests_go_on(client, model, tmp_path) -> None:
    folder = weights_folder(tmp_path, 4)
    folder.mkdir()
    write_version(changed(model, 0.02).hf, folder)
    running = asyncio.ensure_future(client.generate([7] * 5, SamplingParams(max_tokens=250), ENV, "long"))
    cut = asyncio.ensure_future(client.generate([8] * 5, SamplingParams(max_tokens=250), ENV, "cut"))
    while (await client.health()).running < 2:
        await asyncio.sleep(0.005)
    await client.update_weights(4, folder)
    await client.abort(["cut"])
    long, short = await running, await cut
    assert [version for version, _ in long.policy_versions] == [3, 4]
    assert (len(long.token_ids), long.finish_reason) == (250, "length")
    assert short.finish_reason == "abort" and len(short.token_ids) == len(short.logprobs) < 250


async def stops_where_it_is_told(client) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=30)
    whole = (await client.generate([9, 10, 11], asked, ENV, "whole")).token_ids
    token = whole[10]
    first = whole.index(token)
    answer = await client.generate(
        [9, 10, 11], SamplingParams(0.0, 30, stop_token_ids=[token]), ENV, "stopped"
    )
    assert (answer.token_ids, answer.finish_reason) == (whole[: first + 1], "stop")


async def refuses_with_reasons(client) -> None:
    with pytest.raises(InferenceError, match="exceeds inference.max_model_len = 256"):
        await client.generate([5] * 200, SamplingParams(max_tokens=57), ENV, "too long")
    with pytest.raises(InferenceError, match="temperature = 0.5; vLLM gives .* at temperature 1 only"):
        await client.score([5, 6], 0.5, "tempered")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_serves_what_the_trainer_publishes(vllm_server, vllm_model, tmp_path, num_workers) -> None:
    """One server for all of it: starting one takes ten seconds."""

    async def ask(url: str) -> None:
        async with connected(url, tmp_path) as client:
            await weights_change(client, vllm_model, tmp_path)
            await bad_weights_change_nothing(client, vllm_model, tmp_path)
            await running_requests_go_on(client, vllm_model, tmp_path)
            await stops_where_it_is_told(client)
            await refuses_with_reasons(client)

    with vllm_server(tmp_path, "--inference.vllm.tensor-parallel-size", str(num_workers)) as url:
        asyncio.run(ask(url))
    entries = list(read_journal(tmp_path / "ledger" / "inference.jsonl"))
    counts = sum((Counter(entry.counts) for entry in entries), Counter())
    assert entries[-1].closed
    # Seven rounds of 4 to 23 tokens, one of 250, one that was cut short, one of 30 and one that was stopped.
    assert (
        counts["delivered"] == counts["sampled"] > 7 * sum(range(4, 24)) + 250 + 30
        and not counts["cancelled"]
    )


async def ranks_are_told_apart(client, model, tmp_path) -> None:
    """Two groups of eight, a rank each; both ranks serve what was published."""
    before = {each.rank: each.sampled_tokens for each in (await client.health()).ranks}
    asked = [(f"demo/g{group}/g{group}-r{member}/0", group) for group in (1, 2) for member in range(4)]
    await asyncio.gather(
        *(
            client.generate([9 + group] * 40, SamplingParams(max_tokens=5 * group), ENV, name)
            for name, group in asked
        )
    )
    health = await client.health()
    assert [(each.rank, each.policy_version, each.running) for each in health.ranks] == [(0, 4, 0), (1, 4, 0)]
    assert sorted(each.sampled_tokens - before[each.rank] for each in health.ranks) == [20, 40]
    report = await client.served_weights()
    published = read_digests(weights_folder(tmp_path, 4)).tensors
    assert [(each.rank, each.policy_version) for each in report.ranks] == [(0, 4), (1, 4)]
    assert report.digests == report.ranks[0].digests == report.ranks[1].digests == published


def test_ranks_behind_one_address_serve_what_the_trainer_publishes(vllm_server, vllm_model, tmp_path) -> None:
    async def ask(url: str) -> None:
        async with connected(url, tmp_path) as client:
            await weights_change(client, vllm_model, tmp_path)
            await bad_weights_change_nothing(client, vllm_model, tmp_path)
            await running_requests_go_on(client, vllm_model, tmp_path)
            await ranks_are_told_apart(client, vllm_model, tmp_path)

    with vllm_server(tmp_path, "--inference.vllm.data-parallel-size", "2") as url:
        asyncio.run(ask(url))
    (last,) = list(read_metrics(tmp_path / "metrics" / "inference.jsonl"))[-1:]
    assert last["rank/0/sampled_tokens"] > 0 < last["rank/1/sampled_tokens"]


def test_an_adapter_takes_the_place_of_the_last(vllm_server, vllm_model, tmp_path) -> None:
    lora = LoraConfig(rank=4, alpha=8)

    def publish(version: int):
        """A policy with an adapter of its own, as the trainer publishes it."""
        folder = weights_folder(tmp_path, version)
        folder.mkdir(parents=True)
        torch.manual_seed(version)
        trained = load_policy(ModelConfig(name=str(vllm_model)), trainable=True)
        adapter = Adapters(trained, lora, num_slots=1)[0]
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.copy_(0.1 * torch.randn_like(parameter))
        write_adapter(adapter, adapter.config, str(vllm_model), folder)
        served = load_policy(ModelConfig(name=str(vllm_model)))
        ServedWeights(served.hf).load(folder)
        return served, folder

    async def ask(url: str) -> None:
        async with connected(url, tmp_path) as client:
            base = load_policy(ModelConfig(name=str(vllm_model)))
            assert await worst_difference(client, base, 0.8, 0) <= rounding(base)
            for version in (1, 2):
                policy, folder = publish(version)
                asked = SamplingParams(max_tokens=250)
                running = asyncio.ensure_future(client.generate([7] * 5, asked, ENV, f"long {version}"))
                while not (await client.health()).running:
                    await asyncio.sleep(0.005)
                await client.update_weights(version, folder)
                assert await worst_difference(client, policy, 0.8, version) <= rounding(policy)
                assert await worst_difference(client, base, 0.8, version) > 0.1
                long = await running
                assert [each for each, _ in long.policy_versions] == [version - 1, version]
                assert len(long.token_ids) == 250

    with vllm_server(tmp_path, "--model.lora.rank", "4", "--model.lora.alpha", "8") as url:
        asyncio.run(ask(url))


def test_an_adapter_of_the_head_is_refused(vllm_server, tmp_path) -> None:
    flags = ("--model.lora.rank", "4", "--model.lora.targets", '["lm_head"]')
    refused = pytest.raises(AssertionError, match=r"model.lora.targets names the head \(lm_head\)")
    with refused, vllm_server(tmp_path, *flags):
        pass
