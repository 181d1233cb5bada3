"""Images in the engine and over HTTP: as the trainer computes them, and never dropped without a word."""

import asyncio

import httpx
import numpy as np
import pytest
import torch

from engine_server import EngineServer, listening
from pellucid.config import ModelConfig
from pellucid.data import Completion
from pellucid.data.images import ImagePrompt, pack_images, unpack_images
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, GenerateRequest, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.http import HttpInferenceClient
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import load_policy
from pellucid.orchestrator.chat import ChatTemplate
from pictures import hf_logprobs, part, pixels, sample_of, sampled, user
from tolerance import near_logprobs


@pytest.fixture(scope="module")
def policy(vision_model):
    return load_policy(ModelConfig(name=str(vision_model)), max_length=256)


@pytest.fixture(scope="module")
def chat(vision_model):
    return ChatTemplate(load_tokenizer(str(vision_model)))


def test_the_engine_samples_from_what_hf_computes(policy, chat) -> None:
    """Texts, pictures and several of them side by side, equal prompts and equal ids with other pictures."""
    conversations = [
        user(pixels(0), "?"),
        user("no picture"),
        user(pixels(1), "?"),
        user(pixels(0), "?"),
        user("a", pixels(2), "b", pixels(0), "c"),
    ]
    prompts, completions = sampled(policy, chat, conversations, max_tokens=9)
    assert list(prompts[0]) == list(prompts[2]) == list(prompts[3])
    assert prompts[0].mm_tensors == prompts[3].mm_tensors != prompts[2].mm_tensors
    with torch.no_grad():
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = hf_logprobs(policy, sample_of(prompt, completion))[-9:]
            assert completion.logprobs == near_logprobs(expected, policy, len(prompt) + 9)


def test_equal_prompts_are_computed_once_and_other_pictures_are_other_prompts(policy, chat) -> None:
    """Ten that share a prompt, in four slots: late ones copy it from a row that still runs."""
    engine = Engine(policy, num_slots=4, max_length=256)
    done, prompts = {}, [chat.prompt(user(pixels(seed), "?")).token_ids for seed in (0, 0, 1, 0, 1, 0)]
    requests = [
        Request(
            list(prompt),
            SamplingParams(max_tokens=4 + 3 * index, seed=index),
            Account(),
            lambda completion, index=index: done.update({index: completion}),
            mm_tensors=prompt.mm_tensors,
        )
        for index, prompt in enumerate(prompts)
    ]
    run_to_end(engine, requests)
    assert engine.counts.prefill_tokens == 2 * (len(prompts[0]) - 1)
    assert engine.counts.shared_tokens == 4 * (len(prompts[0]) - 1)
    with torch.no_grad():
        for index, prompt in enumerate(prompts):
            number = len(done[index].token_ids)
            expected = hf_logprobs(policy, sample_of(prompt, done[index]))[-number:]
            assert done[index].logprobs == near_logprobs(expected, policy, len(prompt) + number)


def refusal(policy, token_ids, mm_tensors=b"") -> str:
    engine = Engine(policy, num_slots=1, max_length=256)
    refused = engine.refusals([GenerateRequest(token_ids, SamplingParams(), mm_tensors=mm_tensors)])
    request = Request(token_ids, SamplingParams(), Account(), print, mm_tensors=mm_tensors)
    with pytest.raises(InferenceError) as raised:
        engine.submit(request)
    assert str(raised.value) == str(refused[0])
    return str(refused[0])


def test_images_that_do_not_fill_their_places_are_refused(policy, chat, tiny_model) -> None:
    prompt = chat.prompt(user(pixels(0), "?")).token_ids
    ids, tensors = list(prompt), prompt.mm_tensors
    assert refusal(policy, ids) == "4 tokens of the prompt stand for images that are missing; send mm_tensors"
    assert refusal(policy, [5, 6], tensors).startswith("mm_tensors holds images of 4 tokens, and 0 tokens")
    assert refusal(policy, [101, *ids], tensors).startswith("mm_tensors holds images of 4 tokens, and 5")
    assert refusal(policy, [5, *4 * [101]], tensors) == (
        "the prompt ends with an image; let a token of text follow"
    )
    assert "is no safetensors payload" in refusal(policy, ids, b"pixels")
    empty = {name: np.zeros_like(each) for name, each in unpack_images(tensors).items()}
    assert "all exactly 0 in tile 0" in refusal(policy, ids, pack_images([empty]))
    text = load_policy(ModelConfig(name=str(tiny_model)))
    assert refusal(text, [5, 6], tensors) == (
        "the prompt has images, and the model takes text alone; leave them out"
    )
    with pytest.raises(InferenceError, match="only text can be scored"):
        Engine(policy, num_slots=1, max_length=256).check_scoring(ids, 1.0)


def test_a_model_in_rows_takes_no_images_in_the_engine(vision_model, chat) -> None:
    rows = load_policy(ModelConfig(name=str(vision_model)), max_length=64, layout="rows")
    prompt = chat.prompt(user(pixels(0), "?")).token_ids
    assert "its sequences go in rows" in refusal(rows, list(prompt), prompt.mm_tensors)


@pytest.fixture
def served(vision_model, tmp_path):
    server = EngineServer(vision_model, tmp_path)
    with listening(server.app) as url:
        yield url, server.policy


def test_a_group_gets_its_images_over_http(served, chat) -> None:
    """One prompt for four members, and the same ids with another picture, in one turn of the event loop."""
    url, policy = served
    prompts = [chat.prompt(user(pixels(seed), "?")).token_ids for seed in (0, 0, 0, 0, 1)]

    async def ask():
        client = HttpInferenceClient(url, "key")
        try:
            params = [SamplingParams(max_tokens=5, seed=seed) for seed in range(len(prompts))]
            calls = zip(prompts, params, strict=True)
            return await asyncio.gather(
                *(client.generate(*each, Account(), f"r{each[1].seed}") for each in calls)
            )
        finally:
            await client.close()

    with torch.no_grad():
        for prompt, completion in zip(prompts, asyncio.run(ask()), strict=True):
            assert isinstance(prompt, ImagePrompt)
            expected = hf_logprobs(policy, sample_of(prompt, completion))[-5:]
            assert completion.logprobs == near_logprobs(expected, policy, len(prompt) + 5)


def test_a_chat_takes_pictures_in_openais_form(served, chat) -> None:
    url, policy = served
    content = [part(pixels(0)), {"type": "text", "text": "how many?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 5,
        "seed": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    prompt = chat.prompt(user(pixels(0), "how many?")).token_ids
    assert answer["prompt_token_ids"] == list(prompt)
    (choice,) = answer["choices"]
    found = [each["logprob"] for each in choice["logprobs"]["content"]]
    taken = sample_of(prompt, Completion(choice["token_ids"], found, [(0, len(found))], "stop"))
    with torch.no_grad():
        expected = hf_logprobs(policy, taken)[-len(found) :]
    assert found == near_logprobs(expected, policy, taken.length)


@pytest.mark.parametrize(
    ("url", "message"),
    [("https://example.org/a.png", "nothing is fetched"), ("data:image/png;base64,aGk=", "cannot be read")],
)
def test_what_is_no_picture_is_refused_with_the_reason(served, url, message) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{served[0]}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_model_of_text_refuses_pictures(tiny_model, tmp_path) -> None:
    with listening(EngineServer(tiny_model, tmp_path).app) as url:
        body = {"messages": user(pixels(0), "?")}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "the messages have images, and only models of idefics3 and smolvlm take them"
    )
