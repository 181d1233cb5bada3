"""The server as the official client sees it."""

import asyncio
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch

from engine_server import JSON
from pellucid.data.tokenizer import load_tokenizer
from pellucid.inference.entrance import MAX_BODY_BYTES
from pellucid.model import packed_layout
from tolerance import near_logprobs

HELLO = [{"role": "user", "content": "hello"}]
HELLO_IN_TEMPLATE = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def client_of(serving):
    @contextmanager
    def connect(**options):
        with (
            serving(**options) as (url, policy),
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=None) as client,
        ):
            client.policy = policy
            yield client

    return connect


def health(client):
    return httpx.get(str(client.base_url.join("/health"))).json()


def wait_until_idle(client):
    while (state := health(client))["running"] or state["waiting"]:
        time.sleep(0.01)
    return state


def trainer_logprobs(policy, prompt_ids, token_ids):
    ids = torch.tensor([*prompt_ids, *token_ids])
    with torch.no_grad():
        output = policy(ids, torch.arange(len(ids)), torch.ones(len(ids)), packed_layout([len(ids)]))
    return output.logprobs[len(prompt_ids) :].tolist()


def test_chat_samples_from_the_template_with_the_trainers_logprobs(client_of, tiny_model) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    with client_of() as client:
        answer = client.chat.completions.create(
            model="models/tiny",
            messages=HELLO,
            max_completion_tokens=20,
            seed=3,
            logprobs=True,
            top_logprobs=0,
            user="me",
            metadata={"run": "1"},
            extra_body={"return_token_ids": True},
        )
        (choice,) = answer.choices
        assert answer.object == "chat.completion"
        assert choice.message.role == "assistant"
        assert tokenizer.decode(answer.prompt_token_ids) == HELLO_IN_TEMPLATE
        assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert choice.policy_versions == [[0, len(choice.token_ids)]]
        assert [each.token for each in choice.logprobs.content] == [
            tokenizer.decode([token]) for token in choice.token_ids
        ]
        assert bytes(choice.logprobs.content[0].bytes).decode() == choice.logprobs.content[0].token
        expected = trainer_logprobs(client.policy, answer.prompt_token_ids, choice.token_ids)
        found = [each.logprob for each in choice.logprobs.content]
        assert found == near_logprobs(expected, client.policy, answer.usage.total_tokens)
        assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
        assert answer.usage.completion_tokens == len(choice.token_ids)


def test_an_answer_goes_back_into_the_conversation(client_of) -> None:
    with client_of() as client:
        first = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, seed=1)
        said = first.choices[0].message
        # One token per character and per marker.
        added = len(f"{said.content}$\n") + len("^user\nab$\n^assistant\n")
        parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        for message in (said, said.model_dump()):
            answer = client.chat.completions.create(
                model="tiny", messages=[*HELLO, message, parts], max_tokens=1
            )
            assert answer.usage.prompt_tokens == first.usage.prompt_tokens + added


def test_a_chat_without_a_limit_may_fill_the_models_length(client_of) -> None:
    with client_of(max_length=64) as client:
        answer = client.chat.completions.create(model="", messages=HELLO, temperature=0)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == 64


def test_completion_from_text_and_from_ids(client_of) -> None:
    with client_of() as client:
        options = {"model": "tiny", "max_tokens": 6, "seed": 5, "logprobs": 0}
        by_text = client.completions.create(
            prompt="abc", extra_body={"return_token_ids": True}, **options
        ).choices[0]
        by_ids = client.completions.create(prompt=by_text.prompt_token_ids, **options).choices[0]
        assert by_text.text == by_ids.text
        expected = trainer_logprobs(client.policy, by_text.prompt_token_ids, by_text.token_ids)
        assert by_ids.logprobs.token_logprobs == near_logprobs(expected, client.policy)


@pytest.mark.parametrize("seed", [7, -1])
def test_choices_of_a_seed_differ_and_are_reproducible(client_of, seed) -> None:
    with client_of() as client:

        def texts(n):
            answer = client.completions.create(model="", prompt="ab", max_tokens=12, n=n, seed=seed)
            return [choice.text for choice in answer.choices]

        together = texts(4)
        assert len(set(together)) == 4
        assert texts(4) == together
        assert texts(1) == together[:1]


def test_streamed_chat_is_the_unstreamed_chat(client_of) -> None:
    with client_of() as client:
        options = {
            "model": "tiny",
            "messages": HELLO,
            "max_tokens": 15,
            "n": 3,
            "seed": 11,
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
        }
        whole = client.chat.completions.create(**options)
        with client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **options
        ) as stream:
            chunks = list(stream)
        *parts, last = chunks
        assert last.choices == []
        assert last.usage == whole.usage
        assert all(part.usage is None for part in parts)
        assert parts[0].prompt_token_ids == whole.prompt_token_ids
        assert len({chunk.id for chunk in chunks}) == 1
        for expected in whole.choices:
            mine = [part.choices[0] for part in parts if part.choices[0].index == expected.index]
            assert [each.delta.role for each in mine] == ["assistant"] + [None] * (len(mine) - 1)
            assert "".join(each.delta.content or "" for each in mine) == expected.message.content
            assert [token for each in mine for token in each.token_ids] == expected.token_ids
            logprobs = [entry.logprob for each in mine for entry in each.logprobs.content]
            at_once = [entry.logprob for entry in expected.logprobs.content]
            assert logprobs == near_logprobs(at_once, client.policy, whole.usage.total_tokens)
            assert [each.finish_reason for each in mine[-2:]] == [None, expected.finish_reason]


def test_streamed_completion_comes_token_by_token(client_of) -> None:
    with client_of() as client:
        options = {"model": "tiny", "prompt": "abc", "max_tokens": 10, "seed": 2}
        whole = client.completions.create(**options).choices[0]
        with client.completions.create(stream=True, **options) as stream:
            chunks = [chunk.choices[0] for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [chunk.text for chunk in chunks[:-1]] == list(whole.text)
        assert chunks[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string_and_ids_stay_whole(client_of, stream) -> None:
    with client_of() as client:
        options = {
            "model": "tiny",
            "prompt": "abc",
            "max_tokens": 12,
            "seed": 2,
            "extra_body": {"return_token_ids": True},
        }
        free = client.completions.create(**options).choices[0]
        assert len(free.text) >= 6
        stop = [free.text[3:5]]
        answer = client.completions.create(stop=stop, stream=stream, **options)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == free.text[: free.text.index(stop[0])]
        assert [token for choice in choices for token in choice.token_ids] == free.token_ids[:5]
        assert choices[-1].finish_reason == "stop"


def test_models(client_of) -> None:
    with client_of() as client:
        (card,) = client.models.list().data
        assert (card.id, card.object, card.max_model_len) == ("models/tiny", "model", 256)
        assert client.models.retrieve("tiny") == card
        with pytest.raises(openai.NotFoundError, match="this server has 'models/tiny'"):
            client.models.retrieve("other")


REFUSED = [
    ({"top_p": 0.9}, "top_p = 0.9 is not supported: tokens are drawn from the model's own distribution"),
    ({"presence_penalty": 0.5}, "presence_penalty = 0.5 is not supported"),
    ({"frequency_penalty": -1}, "frequency_penalty = -1 is not supported"),
    ({"logit_bias": {"5": 10}}, r'logit_bias = {"5":10} is not supported'),
    ({"extra_body": {"top_k": 20}}, "top_k = 20 is not supported"),
    ({"extra_body": {"min_p": 0.1}}, "min_p = 0.1 is not supported"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools = .* does not offer it"),
    ({"response_format": {"type": "json_object"}}, "response_format = "),
    ({"logprobs": True, "top_logprobs": 3}, "top_logprobs = 3 is not supported: only the sampled token"),
    ({"extra_body": {"temprature": 0.5}}, "unknown field `temprature`"),
    ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options needs stream = true"),
    ({"temperature": -1}, r"Expected `float` >= 0.0 - at `\$.temperature`"),
    ({"n": 0}, r"Expected `int` >= 1 - at `\$.n`"),
    ({"max_tokens": 0}, r"Expected `int` >= 1 - at `\$.max_tokens`"),
    ({"max_tokens": 999}, "exceeds inference.max_model_len = 256"),
    ({"max_tokens": 999, "stream": True}, "exceeds inference.max_model_len = 256"),
    ({"stop": [""]}, r"length >= 1 - at `\$.stop\[0\]`"),
    ({"stop": ["x"] * 17}, r"length <= 16 - at `\$.stop`"),
    ({"stop": "x" * 1001}, r"length <= 1000 - at `\$.stop`"),
    ({"messages": []}, "length >= 1"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "missing required field `image_url`",
    ),
    ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "x"}]}, "unknown field `tool_call_id`"),
]


def test_what_is_not_served_is_refused_with_the_reason(client_of) -> None:
    with client_of() as client:
        for options, reason in REFUSED:
            with pytest.raises(openai.BadRequestError, match=reason) as refused:
                client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **options})
            assert refused.value.type == "invalid_request_error"
        assert health(client)["sampled_tokens"] == 0


def test_neutral_values_are_accepted(client_of) -> None:
    with client_of() as client:
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=1,
            top_p=1,
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            stop=None,
            seed=None,
            extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
        )


def test_errors_have_their_class_and_shape(client_of) -> None:
    with client_of() as client:
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here") as wrong:
            client.completions.create(model="gpt-4", prompt="abc")
        assert (wrong.value.code, wrong.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: Not Found"):
            client.embeddings.create(model="tiny", input="abc")
        with pytest.raises(openai.APIStatusError, match="GET /v1/completions: Method Not Allowed") as method:
            client.get("/completions", cast_to=object)
        assert method.value.status_code == 405
        with pytest.raises(openai.APIStatusError, match=f"exceeds {MAX_BODY_BYTES} bytes") as large:
            client.completions.create(model="tiny", prompt="a" * MAX_BODY_BYTES)
        assert (large.value.status_code, large.value.code) == (413, "request_too_large")
        deep = httpx.post(f"{client.base_url}completions", content=b"[" * 100_000, headers=JSON)
        assert deep.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_back(client_of, stream) -> None:
    with client_of(num_slots=1, max_queued=2) as client:
        with pytest.raises(openai.InternalServerError, match="4 more requests do not fit: 0 of 3") as full:
            client.completions.create(model="tiny", prompt="abc", max_tokens=200, n=4, stream=stream)
        assert full.value.status_code == 503
        assert full.value.response.headers["retry-after"] == "1"
        assert wait_until_idle(client)["sampled_tokens"] == 0
        assert client.completions.create(model="tiny", prompt="abc", n=3).choices


def test_a_client_that_leaves_a_stream_frees_its_slots(client_of) -> None:
    with client_of(num_slots=1, max_length=4096) as client:
        with client.completions.create(
            model="tiny", prompt="abc", max_tokens=4000, n=3, temperature=0, stream=True
        ) as stream:
            for _ in range(3):
                next(stream)
            assert health(client)["waiting"] == 2
        state = wait_until_idle(client)
        assert state["delivered_tokens"] == 0
        assert 3 <= state["cancelled_tokens"] == state["sampled_tokens"] < 4000
        assert client.completions.create(model="tiny", prompt="abc", max_tokens=2).choices
        assert health(client)["running"] == 0


def test_a_client_that_leaves_before_its_stream_began_leaves_the_queue(client_of) -> None:
    with client_of(num_slots=1, max_length=4096) as client:
        options = {"model": "tiny", "prompt": "abc", "max_tokens": 4000, "temperature": 0, "stream": True}
        with client.completions.create(**options) as stream:
            next(stream)
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.1).completions.create(**options)
            while health(client)["waiting"]:
                time.sleep(0.01)
            assert health(client)["running"] == 1
        wait_until_idle(client)


def test_256_clients_share_64_slots(serving) -> None:
    async def ask(client, number):
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=4, seed=number, stream=True
        )
        async with stream:
            return [chunk.choices[0].finish_reason async for chunk in stream][-1]

    async def ask_all(url):
        patient = httpx.Timeout(600.0)  # by default 5 s to connect, which 256 clients may take on busy cores
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=patient
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(256)))

    with serving(num_slots=64) as (url, _):
        reasons = asyncio.run(ask_all(url))
        state = httpx.get(f"{url}/health").json()
    assert len(reasons) == 256
    assert set(reasons) <= {"stop", "length"}
    assert state["sampled_tokens"] == state["delivered_tokens"] >= 256
