"""The engine over HTTP, with the real server, client and sockets."""

import asyncio
import json
import os
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import aiohttp
import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine_server import JSON, KEY, journal_counts, listening
from pellucid.config import ModelConfig
from pellucid.data import Completion, PackedArray
from pellucid.errors import InferenceError
from pellucid.inference.client import (
    Account,
    GenerateManyLine,
    GenerateManyRequest,
    GenerateRequest,
    SamplingParams,
)
from pellucid.inference.http import HttpInferenceClient
from pellucid.metrics import read_metrics
from pellucid.model import PackedAttention, load_policy, packed_layout
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import publish_version, weights_folder, write_version
from tolerance import near_logprobs

ENV = Account("run", "env")


@contextmanager
def connected(url):
    """Runs coroutines with a client in one event loop."""
    with asyncio.Runner() as runner:

        async def make():
            return HttpInferenceClient(url, KEY)

        client = runner.run(make())
        try:
            yield runner, client
        finally:
            runner.run(client.close())


async def sample(client, *asked) -> Completion:
    return await client.generate(*asked)


def ledger_of(tmp_path):
    return journal_counts(tmp_path / "inference.jsonl")


def test_generate_gives_the_trainers_logprobs(serving, tmp_path) -> None:
    with serving() as (url, policy), connected(url) as (runner, client):

        async def run():
            await client.wait_until_ready()
            params = [SamplingParams(max_tokens=20, seed=seed) for seed in range(32)]
            calls = (client.generate([5, 6, 7], each, ENV, f"r{each.seed}") for each in params)
            return await asyncio.gather(*calls)

        completions = runner.run(run())
        for completion in completions:
            ids = torch.tensor([5, 6, 7, *completion.token_ids])
            with torch.no_grad():
                layout = packed_layout([len(ids)])
                output = policy(ids, torch.arange(len(ids)), torch.ones(len(ids)), layout)
            assert completion.logprobs == near_logprobs(output.logprobs[3:], policy, len(ids))
            assert completion.policy_versions == [(0, 20)]
    counts = ledger_of(tmp_path)
    assert counts == {"sampled": 640, "delivered": 640}


def published(tiny_model, tmp_path, version):
    """The folder of a policy version that differs from the served one, and its weights."""
    other = load_policy(ModelConfig(name=str(tiny_model)))
    with torch.no_grad():
        next(other.parameters()).mul_(2.0)
    publish_version(tmp_path, version, partial(write_version, other.hf), keep=2)
    return weights_folder(tmp_path, version), other


def test_weight_update_changes_version_and_values(serving, tiny_model, tmp_path) -> None:
    with serving() as (url, policy), connected(url) as (runner, client):
        folder, other = published(tiny_model, tmp_path, 7)

        async def run():
            params = SamplingParams(max_tokens=3)
            before = await client.generate([5, 6], params, ENV, "r1")
            await client.update_weights(7, folder)
            return before, await client.generate([5, 6], params, ENV, "r1")

        before, after = runner.run(run())
        assert (before.policy_versions, after.policy_versions) == ([(0, 3)], [(7, 3)])
        assert torch.equal(next(policy.parameters()), next(other.parameters()))
        (outgoing,) = read_metrics(tmp_path / "metrics.jsonl")
        assert (outgoing["step"], outgoing["sampled_tokens"]) == (0, 3)


def test_the_version_that_is_served_already_is_not_loaded_again(serving, tiny_model, tmp_path) -> None:
    """Not even if it were gone: a resumed run asks for what the engine began with."""
    with serving() as (url, _), connected(url) as (runner, client):
        folder, _ = published(tiny_model, tmp_path, 7)
        runner.run(client.update_weights(7, folder))
        runner.run(sample(client, [5, 6], SamplingParams(max_tokens=3), ENV, "r1"))
        shutil.rmtree(folder)
        runner.run(client.update_weights(7, folder))
        assert runner.run(client.health()).policy_version == 7
        assert list(read_metrics(tmp_path / "metrics.jsonl")) == []
    (whole,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (whole["step"], whole["sampled_tokens"]) == (7, 3)


def test_a_version_made_anew_is_loaded_again_and_health_tells_whose_it_is(
    serving, tiny_model, tmp_path
) -> None:
    """The same number, published once more after a resume: by its date, and by its run."""
    with serving() as (url, policy), connected(url) as (runner, client):
        assert runner.run(client.health()).run == ""
        folder, _ = published(tiny_model, tmp_path, 7)
        runner.run(client.update_weights(7, folder, "mine-1"))
        with torch.no_grad():
            next(policy.parameters()).zero_()
        runner.run(client.update_weights(7, folder, "mine-1"))
        assert next(policy.parameters()).abs().sum() == 0  # it was not loaded again
        os.utime(folder / "STABLE", ns=(0, 1))
        runner.run(client.update_weights(7, folder, "mine-1"))
        assert next(policy.parameters()).abs().sum() > 0
        health = runner.run(client.health())
        assert (health.policy_version, health.run) == (7, "mine-1")


def test_a_server_reports_the_digests_of_what_it_serves(serving, tiny_model, tmp_path) -> None:
    """Of its tensors as they are now: a bit that flips after the load shows."""
    with serving() as (url, policy), connected(url) as (runner, client):
        folder, _ = published(tiny_model, tmp_path, 7)
        runner.run(client.update_weights(7, folder, "mine-1"))
        report, digests = runner.run(client.served_weights()), read_digests(folder)
        assert (report.policy_version, report.run, report.as_read) == (7, "mine-1", False)
        assert report.digests == digests.tensors
        name, parameter = list(policy.hf.named_parameters())[3]
        with torch.no_grad():
            parameter.view(torch.int32).view(-1)[5] ^= 1
        report = runner.run(client.served_weights())
        assert {each for each in digests.tensors if report.digests[each] != digests.tensors[each]} == {name}
        assert httpx.get(f"{url}/weights").status_code == 401


def test_a_server_that_does_not_know_of_digests_reports_none() -> None:
    with listening(Starlette()) as url, connected(url) as (runner, client):
        assert runner.run(client.served_weights()) is None


def test_every_answer_tells_which_process_gave_it(serving, tmp_path) -> None:
    with serving() as (url, _), connected(url) as (runner, client):
        first = runner.run(client.health()).server_id
        client.server_id = ""
        runner.run(sample(client, [5, 6], SamplingParams(max_tokens=3), ENV, "r1"))
        assert client.server_id == first != ""
        assert httpx.get(f"{url}/nowhere").headers["x-pellucid-server-id"] == first
    (tmp_path / "inference.jsonl").unlink()
    with serving() as (url, _), connected(url) as (runner, client):
        assert runner.run(client.health()).server_id != first


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def overwrite(path):
    path.write_bytes(b"not a weight file" * 100)


def lose_a_tensor(path):
    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "is not a readable weight file"),
        (cut_short, "is not a readable weight file"),
        (overwrite, "is not a readable weight file"),
        (lose_a_tensor, r"does not fit the model: lacks \['model.norm.weight'\]"),
    ],
)
def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving(
    serving, tiny_model, tmp_path, damage, reason
) -> None:
    folder, _ = published(tiny_model, tmp_path, 1)
    damage(folder / "model.safetensors")
    with serving() as (url, _), connected(url) as (runner, client):

        def greedy():
            return runner.run(sample(client, [5, 6], SamplingParams(0.0, max_tokens=8), ENV, "r1"))

        before = greedy()
        with pytest.raises(InferenceError, match=f"400: .*step_1.*{reason}"):
            runner.run(client.update_weights(1, folder))
        assert greedy() == before
        assert before.policy_versions == [(0, 8)]
        assert runner.run(client.health()).policy_version == 0


def test_abort_returns_what_there_is(serving) -> None:
    with serving() as (url, _), connected(url) as (runner, client):

        async def run():
            call = client.generate([5, 6], SamplingParams(max_tokens=250), ENV, "r1")
            running = asyncio.ensure_future(call)
            while (await client.health()).sampled_tokens < 3:
                await asyncio.sleep(0.005)
            await client.abort(["another", "r1"])
            return await running

        completion = runner.run(run())
        assert completion.finish_reason == "abort"
        assert 3 <= len(completion.token_ids) < 250


def test_a_client_that_goes_away_frees_its_slot(serving, tmp_path) -> None:
    with serving(num_slots=1) as (url, _), connected(url) as (runner, client):

        async def run():
            call = client.generate([5, 6], SamplingParams(max_tokens=250), ENV, "r1")
            running = asyncio.ensure_future(call)
            while (await client.health()).sampled_tokens < 3:
                await asyncio.sleep(0.005)
            running.cancel()
            while (await client.health()).running:
                await asyncio.sleep(0.005)
            return await client.generate([5, 6], SamplingParams(max_tokens=2), ENV, "r1")

        assert len(runner.run(run()).token_ids) == 2
    counts = ledger_of(tmp_path)
    assert counts["delivered"] == 2
    assert counts["sampled"] == counts["delivered"] + counts["cancelled"]


def test_answers_that_reached_nobody_count_as_cancelled_once(serving, tmp_path) -> None:
    """One that was delivered into the void, one that runs, and one that is still to come."""

    async def run(client):
        await client.generate([5, 6], SamplingParams(max_tokens=4), ENV, "kept")
        await client.generate([5, 6], SamplingParams(max_tokens=5), ENV, "void")
        runs = asyncio.ensure_future(client.generate([5, 6], SamplingParams(max_tokens=250), ENV, "runs"))
        while (await client.health()).sampled_tokens < 4 + 5 + 3:
            await asyncio.sleep(0.005)
        for _ in range(2):
            await client.disown(["void", "runs", "late"])
        runs.cancel()
        late = await client.generate([5, 6], SamplingParams(max_tokens=6), ENV, "late")
        assert (late.finish_reason, late.token_ids) == ("abort", [])

    with serving() as (url, _), connected(url) as (runner, client):
        runner.run(run(client))
    counts = ledger_of(tmp_path)
    assert counts["delivered"] == 4
    assert counts["cancelled"] == counts["sampled"] - 4 >= 5 + 3


def test_health_tells_what_the_server_holds(serving) -> None:
    with serving(num_slots=3, max_queued=5) as (url, _), connected(url) as (runner, client):
        health = runner.run(client.health())
    assert (health.max_concurrent, health.max_queued, health.updating) == (3, 5, False)


def post(url, path, body):
    async def run():
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + path, data=body, headers=JSON) as response,
        ):
            return response.status, await response.json()

    return asyncio.run(run())


def test_requests_from_outside_a_run_are_not_in_its_books(serving, tmp_path) -> None:
    with serving() as (url, _):
        assert post(url, "/v1/completions", b'{"prompt": "abc", "max_tokens": 4}')[0] == 200
    assert ledger_of(tmp_path) == {}


def test_completions(serving) -> None:
    with serving() as (url, _):
        body = (
            b'{"prompt": "abc", "max_tokens": 4, "n": 2, "seed": 1, "logprobs": 1, "return_token_ids": true}'
        )
        status, answer = post(url, "/v1/completions", body)
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        first = answer["choices"][0]
        assert len(first["token_ids"]) == len(first["logprobs"]["token_logprobs"])
        sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": sampled,
            "total_tokens": 3 + sampled,
        }
        again = post(url, "/v1/completions", body)[1]
        assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]


def greedy_ids(policy, prompt_ids, num_tokens):
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            positions = torch.arange(len(ids))
            hidden = policy.hidden(torch.tensor([ids]), positions[None], PackedAttention([len(ids)]))
            ids.append(int(policy.logits(hidden[0, -1]).argmax()))
    return ids[len(prompt_ids) :]


@pytest.mark.parametrize("stream", [False, True])
def test_temperature_zero_takes_the_likeliest_token_on_every_route(serving, stream) -> None:
    options = {"temperature": 0, "max_tokens": 8, "return_token_ids": True, "stream": stream}
    with serving() as (url, policy), connected(url) as (runner, client):
        sampled = runner.run(sample(client, [5, 6, 7], SamplingParams(0.0, max_tokens=8), ENV, "r1"))
        assert sampled.token_ids == greedy_ids(policy, [5, 6, 7], 8)
        # There is no distribution at temperature 0; logprobs are those of the model as it is.
        ids = torch.tensor([5, 6, 7, *sampled.token_ids])
        with torch.no_grad():
            plain = policy(ids, torch.arange(11), torch.ones(11), packed_layout([11])).logprobs[3:]
        assert sampled.logprobs == near_logprobs(plain, policy, 11)
        for path, asked in (
            ("/v1/completions", {"prompt": [5, 6, 7]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            found = httpx.post(url + path, json=asked | options)
            chunks = [found.json()] if not stream else events_of(found.text)
            choices = [chunk["choices"][0] for chunk in chunks]
            prompt_ids = choices[0].get("prompt_token_ids") or chunks[0]["prompt_token_ids"]
            token_ids = [token for choice in choices for token in choice["token_ids"]]
            assert token_ids == greedy_ids(policy, prompt_ids, 8)


def events_of(text):
    """The chunks of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"not json", "invalid"),
        (b'{"token_ids": []}', "the prompt is empty; send at least one token"),
        (b'{"token_ids": ["a"]}', "Expected `int`, got `str`"),
        (b'{"token_ids": [5], "sampling_params": {"top_p": 0.9}}', "unknown field `top_p`"),
        (
            b'{"token_ids": [5], "sampling_params": {"max_tokens": 999}}',
            "exceeds inference.max_model_len = 256",
        ),
        (b'{"token_ids": [5000]}', "outside 0"),
    ],
)
def test_bad_requests_get_400_with_the_reason(serving, body, reason) -> None:
    with serving() as (url, _):
        status, answer = post(url, "/inference/v1/generate", body)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_an_unreachable_server_is_an_inference_error() -> None:
    with (
        connected("http://127.0.0.1:9") as (runner, client),
        pytest.raises(InferenceError, match="cannot be reached"),
    ):
        runner.run(client.health())


def test_calls_that_travel_together_are_answered_one_by_one(serving, tmp_path) -> None:
    """A group's calls share a request; one that is refused, and one that is cut short, are nobody else's."""
    with serving() as (url, _), connected(url) as (runner, client):

        async def run():
            params = [SamplingParams(max_tokens=4, seed=seed) for seed in range(6)]
            params += [SamplingParams(max_tokens=9999), SamplingParams(max_tokens=250, seed=7)]
            calls = [
                asyncio.ensure_future(client.generate([5, 6, 7], each, ENV, f"r{index}"))
                for index, each in enumerate(params)
            ]
            short = await asyncio.gather(*calls[:6])
            assert not calls[7].done()
            await client.abort(["r7"])
            return short, await asyncio.gather(*calls[6:], return_exceptions=True)

        short, (refused, cut) = runner.run(run())
    assert [len(completion.token_ids) for completion in short] == [4] * 6
    assert isinstance(refused, InferenceError) and "exceeds inference.max_model_len" in str(refused)
    assert cut.finish_reason == "abort"
    counts = ledger_of(tmp_path)
    assert counts["sampled"] == counts["delivered"] == 24 + len(cut.token_ids)


def test_calls_of_one_turn_share_a_request_and_each_prompt_is_sent_once() -> None:
    """Two groups of two go together; a prompt of 200,000 tokens, more than fits with others, goes alone."""
    bodies: list[list[GenerateRequest]] = []

    async def answer(http: HttpRequest) -> Response:
        body = msgspec.json.decode(await http.body(), type=GenerateManyRequest)
        bodies.append(body.requests)
        said = [Completion([len(each.token_ids)], [-0.5], [(0, 1)], "stop") for each in body.members()]
        lines = [msgspec.json.encode(GenerateManyLine(index, each)) for index, each in enumerate(said)]
        return Response(b"\n".join(lines) + b"\n")

    app = Starlette(routes=[Route("/inference/v1/generate_many", answer, methods=["POST"])])
    prompts = [[5] * 3, [6] * 4, [7] * 200_000]
    with listening(app) as url, connected(url) as (runner, client):

        async def run():
            members = enumerate(prompts + prompts)
            calls = [client.generate(each, SamplingParams(), ENV, f"r{i}") for i, each in members]
            return [completion.token_ids for completion in await asyncio.gather(*calls)]

        assert runner.run(run()) == [[3], [4], [200_000]] * 2
    sent = [[(each.request_id, len(each.token_ids)) for each in body] for body in bodies]
    assert sorted(sent) == [[("r0", 3), ("r3", 0), ("r1", 4), ("r4", 0)], [("r2", 200_000), ("r5", 0)]]


def test_greedy_takes_the_likeliest_token_beside_requests_that_sample(serving) -> None:
    with serving() as (url, policy), connected(url) as (runner, client):

        async def run():
            await client.wait_until_ready()
            params = [SamplingParams(temperature=t, max_tokens=12, seed=s) for t in (0, 1) for s in range(4)]
            calls = [client.generate([5, 6, 7], each, ENV, f"r{i}") for i, each in enumerate(params)]
            return await asyncio.gather(*calls)

        completions = runner.run(run())
        greedy = completions[0]
        assert [each.token_ids for each in completions[:4]] == [greedy.token_ids] * 4
        assert len({tuple(each.token_ids) for each in completions[4:]}) == 4
        ids = torch.tensor([5, 6, 7, *greedy.token_ids])
        with torch.no_grad():
            plan = packed_layout([len(ids)]).plan
            logits = policy.logits(policy.hidden(ids[None], torch.arange(len(ids))[None], plan)[0, 2:-1])
        assert logits.argmax(-1).tolist() == greedy.token_ids
        assert greedy.logprobs == near_logprobs(logits.log_softmax(-1).amax(-1), policy, len(ids))


def test_what_an_engine_says_of_its_tokens_arrives_whole() -> None:
    """Experts and further columns, too: a line of `generate_many` is the completion itself."""
    experts = PackedArray(b"\x03\x05", (1, 1, 2), "uint8")
    said = Completion([5, 6], [-0.5, -1.25], [(3, 1), (4, 1)], "stop", experts, columns={"extra": [0.5, 2.0]})
    line = msgspec.json.encode(GenerateManyLine(1, said))
    assert msgspec.json.decode(line, type=GenerateManyLine) == GenerateManyLine(1, said)
