"""Requests that are too long, too slow or never come: they cost others nothing, and the server little."""

import asyncio
import json
import socket
import threading
import tracemalloc
from contextlib import suppress
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine_server import AUTHORIZED, JSON, EngineServer
from pellucid.data.tokenizer import byte_tokenizer, load_tokenizer
from pellucid.inference.entrance import Intake, RequestError
from pellucid.inference.openai import text_prompt
from pellucid.inference.slots import QueueFullError
from pellucid.transport.punctual import MAX_HEAD_BYTES, PunctualProtocol

CORPUS = ["the cat sat on the mat   and the mat sat on the cat", "aaaa" * 40, " " * 64, "ab" * 50, "éèê ça"]


@cache
def tokenizer_of(kind: str) -> Any:
    """Tokenizers that differ in what they do to spaces, accents and words that they do not know."""
    if kind == "bytes":
        return byte_tokenizer()
    if kind == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "BPE over the whole text":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"])
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = ["bytes", "byte-level BPE", "BPE over the whole text", "words"]
PIECES = ["a", "b", "ab", "the ", "cat", " ", "    ", "\n", "e\u0301", "é", "世", "🙂", "x" * 30, "sat on"]


@settings(max_examples=100)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 200)), max_size=12),
    st.integers(1, 40),
)
def test_a_prompt_is_refused_only_if_it_is_too_long(kind, pieces, max_tokens) -> None:
    tokenizer = tokenizer_of(kind)
    text = "".join(piece * count for piece, count in pieces)
    token_ids = tokenizer.encode(text)
    try:
        assert text_prompt(tokenizer, text, max_tokens) == token_ids
    except RequestError as refused:
        assert len(token_ids) > max_tokens
        assert refused.code == "context_length_exceeded"


class Watched:
    """A tokenizer that notes how much it is given, and by whom; `held` texts wait until they are let go."""

    def __init__(self, tokenizer: Any, held: str = "") -> None:
        self._tokenizer = tokenizer
        self._held = held
        self.lengths: list[int] = []
        self.threads: set[str] = set()
        self.holding: threading.Thread | None = None
        self.came, self.goes_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        if text:
            self.lengths.append(len(text))
            self.threads.add(threading.current_thread().name.rpartition("_")[0])
        if self._held and self._held in text:
            self.holding = threading.current_thread()
            self.came.set()
            assert self.goes_on.wait(60)
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_on_a_text_is_that_of_a_few_prompts(kind) -> None:
    """At 4 MB a chat took 28 s, and at 30 MB 6 GB."""
    watched = Watched(tokenizer_of(kind))
    for text in ("the cat " * 1_000_000, "世" * 4_000_000):
        with pytest.raises(
            RequestError, match="the prompt exceeds inference.max_model_len = 50: its first|it h"
        ):
            text_prompt(watched, text, 50)
    assert sum(watched.lengths) <= 10_000


def test_texts_are_tokenized_beside_the_event_loop_and_short_ones_pass_long_ones(
    tiny_model, tmp_path
) -> None:
    watched = Watched(load_tokenizer(str(tiny_model)), held="a" * 10_000)
    served = EngineServer(tiny_model, tmp_path, tokenizer=watched, max_length=60_000)
    watched.threads.clear()

    def chat(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}

    async def run() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        async with served.client() as client:
            long = asyncio.ensure_future(client.post("/v1/chat/completions", json=chat("a" * 100_000)))
            await asyncio.to_thread(watched.came.wait)
            health = await client.get("/health")
            short = await client.post("/v1/chat/completions", json=chat("hello"))
            watched.goes_on.set()
            return health, short, await long

    served.thread.start()
    try:
        health, short, long = asyncio.run(run())
    finally:
        served.thread.stop()
    assert (health.status_code, short.status_code, long.status_code) == (200, 200, 400)
    assert "exceeds inference.max_model_len = 60000" in long.json()["error"]["message"]
    assert watched.threads == {"short-prompts", "long-prompts"}


def test_nobody_waits_for_a_prompt_when_the_server_ends(tiny_model, tmp_path) -> None:
    """Python joins threads that are no daemons before it exits."""
    watched = Watched(load_tokenizer(str(tiny_model)), held="hello")
    served = EngineServer(tiny_model, tmp_path, tokenizer=watched)

    async def run() -> None:
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        lifespan = asyncio.create_task(served.app({"type": "lifespan"}, inbox.get, outbox.put))
        await inbox.put({"type": "lifespan.startup"})
        assert await outbox.get() == {"type": "lifespan.startup.complete"}
        async with served.client() as client:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
            chat = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await asyncio.to_thread(watched.came.wait)
            await inbox.put({"type": "lifespan.shutdown"})
            assert await outbox.get() == {"type": "lifespan.shutdown.complete"}
            chat.cancel()
        await lifespan

    asyncio.run(run())
    assert watched.holding is not None and watched.holding.is_alive()
    watched.goes_on.set()
    assert watched.holding.daemon


NUM_OBJECTS = 200_000
CHAT = "/v1/chat/completions"
MANY = {
    "messages": (
        CHAT,
        '"messages":[%s]',
        '{"role":"user","content":""}',
        "it has 200001 objects, and no more",
    ),
    "parts": (
        CHAT,
        '"messages":[{"role":"user","content":[%s]}]',
        '{"type":"text","text":""}',
        "it has 200003 objects, and no more than 65536",
    ),
    "stop strings": (CHAT, '"stop":[%s]', '"a"', "stop has 800001 bytes; no more than 131072"),
    "harmless": (CHAT, '"metadata":[%s]', "[]", "missing required field `messages`"),
    "prompt": ("/v1/completions", '"prompt":[%s]', "9", "max_model_len = 256: it has 200000 tokens"),
    "members": (
        "/inference/v1/generate_many",
        '"requests":[%s]',
        "{}",
        "200002 objects and lists; no more than",
    ),
    "token ids": ("/inference/v1/score", '"token_ids":[%s]', "9", "200000 values; no more than 65792"),
    "request ids": ("/abort", '"request_ids":[%s]', '"a"', "200000 values; no more than 65792"),
}
"""Path, field, one of its many values, and why it is refused."""


@pytest.mark.parametrize("kind", MANY)
def test_many_small_objects_are_refused_before_they_are_made(tiny_model, tmp_path, kind) -> None:
    """30 MB of `[],` held up everybody for 49 s and took 1.3 GB; as many members over a minute."""
    path, field, one, reason = MANY[kind]
    body = f"{{{field % ','.join([one] * NUM_OBJECTS)}}}".encode()
    watched = Watched(load_tokenizer(str(tiny_model)))
    served = EngineServer(tiny_model, tmp_path, tokenizer=watched)
    watched.lengths.clear()

    async def run() -> httpx.Response:
        async with served.client(headers=AUTHORIZED | JSON) as client:
            return await client.post(path, content=body)

    served.thread.start()
    tracemalloc.start()
    try:
        refused = asyncio.run(run())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        served.thread.stop()
    assert (refused.status_code, watched.lengths) == (400, [])
    assert reason in refused.json()["error"]["message"]
    assert peak_bytes < 6 * len(body) + 2**20


def sending(*parts: bytes, ends: bool = False) -> HttpRequest:
    """A request whose body comes in these parts, and then ends or does not."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    return HttpRequest({"type": "http", "method": "POST", "headers": []}, receive)


def test_a_body_that_never_ends_is_given_up() -> None:
    async def run() -> None:
        async with Intake(body_s=0.05).body(sending(b"{")):
            raise AssertionError("there is no end")

    with pytest.raises(RequestError, match="did not arrive within 0.05 s") as late:
        asyncio.run(run())
    assert late.value.status == 408


def test_bodies_on_their_way_are_bounded_together() -> None:
    async def run() -> bytes:
        intake = Intake(max_bodies_bytes=10)
        async with intake.body(sending(b"12345", b"67", ends=True)) as first:
            assert first == b"1234567"
            with pytest.raises(QueueFullError, match="more than 10 bytes are on their way"):
                async with intake.body(sending(b"1234", ends=True)):
                    raise AssertionError("there is no room")
            async with intake.body(sending(b"123", ends=True)):
                pass
        async with intake.body(sending(b"1234567890", ends=True)) as later:
            return later

    assert asyncio.run(run()) == b"1234567890"


class Hasty(PunctualProtocol):
    head_s = 0.3

    def connection_made(self, transport: Any) -> None:
        self.timeout_keep_alive = 0.3
        super().connection_made(transport)


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def test_whoever_connects_and_asks_nothing_is_cut_off(serving) -> None:
    with serving(Hasty) as (url, _):
        address = "127.0.0.1", int(url.rpartition(":")[2])
        asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        for first in (b"", b"GET /hea", asked, asked + b"\r\n", asked + b"\r\nGET /hea"):
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(first)
                answer = until_closed(connection)
            assert answer.startswith(b"HTTP/1.1 200 OK") == (b"\r\n\r\n" in first)
        with httpx.Client(base_url=url) as client:
            assert [client.get("/health").status_code for _ in range(3)] == [200] * 3


def test_a_head_without_an_end_is_cut_off(serving) -> None:
    with serving() as (url, _):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as connection:
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 4 * MAX_HEAD_BYTES)
            assert until_closed(connection) == b""
        large = {"token_ids": [5] * 100_000}
        refused = httpx.post(
            f"{url}/inference/v1/score", content=json.dumps(large)
        )  # refused before it is read
        assert refused.status_code == 415
