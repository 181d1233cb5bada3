"""Who may ask the engine's server for what."""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_server import AUTHORIZED, KEY, EngineServer
from pellucid.config import ModelConfig
from pellucid.errors import ConfigError
from pellucid.guard import server_key
from pellucid.inference.client import UpdateWeightsRequest
from pellucid.model import load_policy
from pellucid.transport.weights import publish_version, weights_folder, write_version

IDS = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
BOOKED = {**IDS, "account": {"run": "somebody", "env": "e"}}
SAMPLING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/inference/v1/generate": IDS,
    "/inference/v1/generate_many": {"requests": [IDS]},
    "/inference/v1/score": {"token_ids": [5, 6]},
    "/abort": {"request_ids": ["r1"]},
}
KEYED: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": BOOKED,
    "/inference/v1/generate_many": {"requests": [IDS, BOOKED]},
    "/update_weights": {"version": 1, "folder": "somewhere"},
    "/abort": {"request_ids": ["r1"], "disown": True},
}
REBOUND = {"host": "evil.example:8000"}
FOREIGN = {"origin": "http://evil.example"}
Asks = Callable[[httpx.AsyncClient], Awaitable[Any]]


def ask(served: EngineServer, asks: Asks, **options: Any) -> Any:
    async def run() -> Any:
        async with served.client(**options) as client:
            return await asks(client)

    served.thread.start()
    try:
        return asyncio.run(run())
    finally:
        served.thread.stop()
        assert served.failures == []


def statuses(bodies: dict[str, dict[str, Any]], *all_headers: dict[str, str]) -> Asks:
    async def run(client: httpx.AsyncClient) -> list[int]:
        return [
            (await client.post(path, json=body, headers=headers)).status_code
            for path, body in bodies.items()
            for headers in all_headers
        ]

    return run


def test_on_this_machine_sampling_is_open_and_what_changes_a_run_needs_the_key(tiny_model, tmp_path) -> None:
    served = EngineServer(tiny_model, tmp_path)
    wrong = ({}, {"authorization": "Bearer none"}, {"authorization": f"Basic {KEY}"})

    async def asks(client: httpx.AsyncClient) -> tuple[list[int], list[httpx.Response], list[str]]:
        opened = await statuses(SAMPLING, *wrong)(client)
        closed = [
            await client.post(path, json=body, headers=headers)
            for path, body in KEYED.items()
            for headers in wrong
        ]
        shown = [
            (await client.get("/health", headers=headers)).json()["access"]
            for headers in (*wrong, AUTHORIZED, {"authorization": f"bearer {KEY}"})
        ]
        assert (await client.post("/inference/v1/generate", json=BOOKED, headers=AUTHORIZED)).is_success
        return opened, closed, shown

    opened, closed, shown = ask(served, asks, headers={})
    assert set(opened) == {200}
    for answer in closed:
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in answer.text
    assert shown == ["sampling"] * 3 + ["all"] * 2
    assert served.counts() == {"sampled": 2, "delivered": 2}


@pytest.mark.parametrize("headers", [{}, AUTHORIZED])
@pytest.mark.parametrize(
    ("web", "status"),
    [
        (REBOUND, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": ""}, 421),
        (FOREIGN, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
    ],
)
def test_a_page_of_another_site_is_refused_on_every_route(tiny_model, tmp_path, headers, web, status) -> None:
    """By the name that it has made to mean this machine, by its origin, or by what a form can send."""
    served = EngineServer(tiny_model, tmp_path)

    async def asks(client: httpx.AsyncClient) -> list[int]:
        found = await statuses(SAMPLING | KEYED, headers | web)(client)
        if status != 415:
            for path in ("/health", "/v1/models", "/nowhere"):
                found.append((await client.get(path, headers=headers | web)).status_code)
            found.append((await client.options("/update_weights", headers=headers | web)).status_code)
        return found

    assert set(ask(served, asks, headers={})) == {status}
    assert (served.engine.version, served.counts()) == (0, {})


@pytest.mark.parametrize("name", ["localhost", "localhost:8000", "127.0.0.1", "[::1]:8000", "LocalHost:1"])
def test_this_machine_has_several_names(tiny_model, tmp_path, name) -> None:
    served = EngineServer(tiny_model, tmp_path)
    own = {"host": name, "origin": f"http://{name}"}
    assert set(ask(served, statuses(SAMPLING, own), headers={})) == {200}


def test_beyond_loopback_everything_but_health_needs_the_key(tiny_model, tmp_path) -> None:
    served = EngineServer(tiny_model, tmp_path, host="0.0.0.0")

    async def asks(client: httpx.AsyncClient) -> tuple[list[int], list[int], list[str]]:
        refused = await statuses(SAMPLING | KEYED, {}, {"authorization": "Bearer none"})(client)
        refused += [(await client.get(path)).status_code for path in ("/v1/models", "/nowhere")]
        served_ones = await statuses(SAMPLING, AUTHORIZED)(client)
        found = [await client.get("/health", headers=headers) for headers in ({}, AUTHORIZED)]
        return refused, served_ones, [each.json()["access"] for each in found]

    refused, served_ones, access = ask(served, asks, headers={}, base_url="http://engine-a:8000")
    assert (set(refused), set(served_ones), access) == ({401}, {200}, ["none", "all"])


def test_without_the_key_requests_of_a_run_go_on(tiny_model, tmp_path) -> None:
    """Whoever asks outside of any run's books may end such requests, by whatever name."""
    served = EngineServer(tiny_model, tmp_path)
    long = {"sampling_params": {"max_tokens": 200, "temperature": 0}, "request_id": "same"}

    async def asks(client: httpx.AsyncClient) -> list[str]:
        calls = [
            asyncio.ensure_future(client.post("/inference/v1/generate", json=body | long))
            for body in (IDS, BOOKED)
        ]
        while (await client.get("/health")).json()["running"] < 2:
            await asyncio.sleep(0.001)
        await client.post("/abort", json={"request_ids": ["same"]}, headers={"authorization": ""})
        return [(await call).json()["choices"][0]["finish_reason"] for call in calls]

    assert ask(served, asks) == ["abort", "length"]


def published(model: Path, run_dir: Path, version: int) -> Path:
    policy = load_policy(ModelConfig(name=str(model)))
    publish_version(run_dir, version, partial(write_version, policy.hf), keep=9)
    return weights_folder(run_dir, version)


def into_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def into_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("turn", [into_fifo, into_link, into_folder])
def test_weights_are_regular_files(tiny_model, tmp_path, turn) -> None:
    """A FIFO would hold up the engine until somebody writes to it."""
    folder = published(tiny_model, tmp_path, 1)
    turn(folder / "model.safetensors")
    served = EngineServer(tiny_model, tmp_path)
    answer = ask(served, updating(1, folder))
    assert answer.status_code == 400
    assert "is not a readable weight file: " in answer.text and "it is not a regular file" in answer.text


def test_an_adapter_is_in_regular_files(tiny_model, tmp_path) -> None:
    folder = published(tiny_model, tmp_path, 1)
    os.mkfifo(folder / "adapter_config.json")
    answer = ask(EngineServer(tiny_model, tmp_path), updating(1, folder))
    assert answer.status_code == 400
    assert "it is not a regular file" in answer.text


def updating(version: int, folder: Path) -> Asks:
    async def run(client: httpx.AsyncClient) -> httpx.Response:
        body = UpdateWeightsRequest(version, str(folder))
        return await client.post("/update_weights", json={"version": body.version, "folder": body.folder})

    return run


def test_weights_are_those_of_the_servers_own_run(tiny_model, tmp_path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    folders = [published(tiny_model, other, 1), published(tiny_model, own, 1)]
    outside = weights_folder(own, 2)
    outside.symlink_to(weights_folder(other, 1))
    served = EngineServer(tiny_model, own)

    async def asks(client: httpx.AsyncClient) -> list[httpx.Response]:
        asked = [
            (1, folders[0]),
            (3, folders[1]),
            (2, outside),
            (1, own / "weights" / ".." / "weights" / "step_1"),
        ]
        return [await updating(version, folder)(client) for version, folder in [*asked, (1, folders[1])]]

    *refused, taken = ask(served, asks)
    for answer in refused[:3]:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "folder")
    assert refused[0].json()["error"]["message"] == (
        f"folder = '{folders[0]}' is not '{folders[1]}', where this server's run keeps policy version 1; "
        "start the server with the output_dir of the run that publishes it"
    )
    assert taken.json()["policy_version"] == 1


def test_a_folder_of_weights_on_another_disk_is_the_runs_own(tiny_model, tmp_path) -> None:
    """`weights` may be a link that the user has made."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").symlink_to(tmp_path / "scratch")
    folder = published(tiny_model, tmp_path / "run", 1)
    served = EngineServer(tiny_model, tmp_path / "run")
    assert ask(served, updating(1, folder.resolve())).json()["policy_version"] == 1


def test_a_run_has_one_key_whoever_comes_first(tmp_path) -> None:
    run_dir = tmp_path / "outputs" / "run"
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: server_key(run_dir, None), range(64)))
    (key,) = keys
    assert len(key) >= 43
    assert [path.name for path in run_dir.iterdir()] == ["key"]
    assert stat.S_IMODE((run_dir / "key").stat().st_mode) == 0o600
    assert server_key(run_dir, None) == key != server_key(tmp_path / "another", None)
    assert server_key(tmp_path / "elsewhere", run_dir / "key") == key
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_holds_no_key_is_refused_without_showing_it(tmp_path, caplog) -> None:
    path = tmp_path / "word"
    with pytest.raises(ConfigError, match=r"inference.key_file: .*word cannot be read \(No such file"):
        server_key(tmp_path, path)
    for content in (b"", b"short", b"two words, which are none", "schlüssel-schlüssel".encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as refused:
            server_key(tmp_path, path)
        assert "word" in str(refused.value) and (not content or content.decode() not in str(refused.value))
    path.write_text("a-key-that-everybody-can-read\n")
    path.chmod(0o644)
    assert server_key(tmp_path, path) == "a-key-that-everybody-can-read"
    assert f"{path} can be read by others; protect it: chmod 600 {path}" in caplog.text
    assert "a-key-that" not in caplog.text
