"""An engine that dies in the middle of its work: everybody gets an answer, and the cause is told."""

import asyncio
import errno
import re
import socket
import threading
from functools import partial

import httpx
import pytest

from engine_server import KEY, EngineServer
from full_disk import full_disk
from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.errors import InferenceError
from pellucid.inference.engine import Engine
from pellucid.inference.http import HttpInferenceClient
from pellucid.ledger import read_journal
from pellucid.model import load_policy
from pellucid.orchestrator import servers
from pellucid.transport.weights import publish_version, weights_folder, write_version

ENV = {"run": "run", "env": "env"}


class Exhausted(Engine):
    """Runs out of memory in its fourth step."""

    def step(self) -> None:
        if self.counts.decode_steps == 3:
            raise MemoryError("no more")
        super().step()


def asked(*request_ids: str) -> dict[str, object]:
    params = {"max_tokens": 100}
    return {
        "requests": [
            {
                "token_ids": [5, 6],
                "sampling_params": params,
                "account": ENV,
                "request_id": each,
                "compact": True,
            }
            for each in request_ids
        ]
    }


def test_every_waiter_gets_what_it_has_and_whoever_asks_later_the_cause(tiny_model, tmp_path) -> None:
    served = EngineServer(tiny_model, tmp_path, Exhausted, num_slots=2)

    async def run() -> tuple[httpx.Response, list[httpx.Response]]:
        async with served.client() as client:
            lines = await client.post("/inference/v1/generate_many", json=asked("r1", "r2", "waits"))
            body = {"version": 1, "folder": str(weights_folder(tmp_path, 1))}
            late = [
                await client.post("/inference/v1/generate_many", json=asked("r4")),
                await client.post("/v1/completions", json={"prompt": "abc"}),
                await client.post("/update_weights", json=body),
                await client.post("/abort", json={"request_ids": ["r1"]}),
            ]
            return lines, late

    served.thread.start()
    try:
        lines, late = asyncio.run(run())
    finally:
        served.thread.stop()
    answers = [httpx.Response(200, content=line).json()["completion"] for line in lines.text.splitlines()]
    assert [choice["finish_reason"] for choice in answers] == ["abort"] * 3
    assert sorted(len(choice["token_ids"]) for choice in answers) == [0, 3, 3]
    for response in late:
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the engine failed: MemoryError: no more"
    assert [str(failure) for failure in served.failures] == ["no more"]
    assert served.counts() == {"sampled": 6, "delivered": 6}


def test_books_that_cannot_be_written_take_the_server_down(tiny_model, tmp_path) -> None:
    """The journal is on a disk that is full: the first flush fails, and the last one, too."""
    served = EngineServer(tiny_model, tmp_path)

    async def run() -> httpx.Response:
        async with served.client() as client:
            while not served.failures:
                response = await client.post("/inference/v1/generate_many", json=asked("r1"))
            return response

    with full_disk():
        served.thread.start()
        try:
            asyncio.run(run())
        finally:
            served.thread.stop()
    (failure,) = served.failures
    assert isinstance(failure, OSError) and failure.errno == errno.EFBIG
    assert failure.filename == str(tmp_path / "inference.jsonl")


class StuckSink:
    """A tracker that does not let go."""

    def __init__(self) -> None:
        self.reached, self.may_go = threading.Event(), threading.Event()

    def log(self, step: int, values: object) -> None:
        self.reached.set()
        self.may_go.wait()

    def close(self) -> None:
        self.reached.set()
        self.may_go.wait()


def test_the_books_are_closed_before_the_metrics_which_may_hang(tiny_model, tmp_path, launcher) -> None:
    sink = StuckSink()
    served = EngineServer(tiny_model, tmp_path, sink=sink)

    async def run() -> None:
        async with served.client() as client:
            await client.post("/inference/v1/generate_many", json=asked("r1"))

    served.thread.start()
    asyncio.run(run())
    stopping = threading.Thread(target=served.thread.stop)
    stopping.start()
    sink.reached.wait()
    try:
        entries = list(read_journal(tmp_path / "inference.jsonl"))
        assert entries[-1].closed
        assert served.counts() == {"sampled": 100, "delivered": 100}
        assert launcher.doings() == ["closing its books", "closing its metrics"]
    finally:
        sink.may_go.set()
        stopping.join()


class Slow(Engine):
    """Its first step takes until it is told to end."""

    began, goes_on = threading.Event(), threading.Event()

    def step(self) -> None:
        self.began.set()
        self.goes_on.wait()
        super().step()


def test_a_client_that_goes_away_before_its_request_is_looked_at_harms_nobody(tiny_model, tmp_path) -> None:
    served = EngineServer(tiny_model, tmp_path, Slow)

    async def run() -> httpx.Response:
        async with served.client() as client:
            first = asyncio.ensure_future(
                client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "seed": 1})
            )
            await asyncio.to_thread(Slow.began.wait)
            gone = asyncio.ensure_future(client.post("/inference/v1/generate_many", json=asked("r1")))
            for _ in range(100):  # turns of the event loop, in which it gets as far as it can
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait([gone])
            Slow.goes_on.set()
            return await first

    served.thread.start()
    try:
        response = asyncio.run(run())
    finally:
        served.thread.stop()
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 2
    assert served.failures == []


def test_weights_that_stay_damaged_end_the_run_with_the_reason(
    serving, tiny_model, tmp_path, monkeypatch
) -> None:
    """Real server, client and files: the old version is served all along."""
    monkeypatch.setattr(servers, "_RETRY_S", 0.01)
    publish_version(
        tmp_path, 1, partial(write_version, load_policy(ModelConfig(name=str(tiny_model))).hf), keep=2
    )
    path = weights_folder(tmp_path, 1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    async def run(url: str) -> int:
        client = HttpInferenceClient(url, KEY)

        async def never(version: int) -> None:
            pytest.fail(f"version {version} is served")

        try:
            with pytest.raises(InferenceError) as refused:
                await servers.follow_weights(path.parent.parent, client, never, lambda version: False)
            assert re.fullmatch(
                rf"no weights could be served in 3 tries; policy version 1: \S+ answered 400: {path} is not "
                r"a readable weight file: .*; go on with --resume: a damaged file is made anew",
                str(refused.value),
            )
            return (await client.health()).policy_version
        finally:
            await client.close()

    with serving() as (url, _):
        assert asyncio.run(run(url)) == 0


def test_a_port_in_use_is_refused_before_the_model_is_loaded(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [
            "--model.name",
            "./no/such",
            "--output-dir",
            str(tmp_path),
            "--inference.port",
            str(port),
        ]
        assert main(["inference", *arguments]) == 2
    assert capsys.readouterr().err == (
        f"error: inference.port = {port} cannot be used on inference.host = 127.0.0.1 (Address already in "
        "use); choose another port\n"
    )
