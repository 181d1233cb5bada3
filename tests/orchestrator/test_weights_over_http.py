"""Trainer, server and orchestrator that share no folder: what each sees of the weights."""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from engine_server import AUTHORIZED, KEY, EngineServer, listening
from pellucid.config import ModelConfig
from pellucid.data.tokenizer import fingerprint, load_tokenizer
from pellucid.errors import ConfigError
from pellucid.guard import weights_key
from pellucid.inference.client import Account, Expected, SamplingParams, group_of_request
from pellucid.inference.http import HttpInferenceClient
from pellucid.inference.pool import ServerPool
from pellucid.ledger.weights import WEIGHTS_BOOK, WeightsBook, read_weights_book
from pellucid.model import Policy, load_policy
from pellucid.orchestrator.servers import LAST_WORD_S, OfferedVersionsList, follow_weights
from pellucid.transport import retract_folder, stable_steps
from pellucid.transport.digests import DIGESTS, PublishedDigests, read_digests, write_digests
from pellucid.transport.weights import publish_version, weights_folder, write_version
from pellucid.transport.weights_offer import WeightsOffer
from pellucid.transport.weights_pull import OfferClient, WeightsPuller


@pytest.fixture
def offer(tmp_path) -> Iterator[WeightsOffer]:
    with closing(WeightsOffer(tmp_path / "trainer", "127.0.0.1", 0, weights_key(KEY))) as offer:
        offer.start()
        yield offer


def client(offer: WeightsOffer, key: str = KEY) -> OfferClient:
    return OfferClient(f"http://127.0.0.1:{offer.port}", weights_key(key))


def publish(tiny_model: Path, tmp_path: Path, version: int) -> Policy:
    """Publishes the model with its weights scaled by the version."""
    policy = load_policy(ModelConfig(name=str(tiny_model)))
    with torch.no_grad():
        next(policy.parameters()).mul_(1 + version)
    publish_version(tmp_path / "trainer", version, partial(write_version, policy.hf), keep=2)
    return policy


def test_a_run_without_a_common_folder_serves_and_verifies_what_is_published(
    tiny_model, tmp_path, offer
) -> None:
    puller = WeightsPuller(client(offer), tmp_path / "server" / "cache")
    (tmp_path / "server").mkdir()
    served = EngineServer(tiny_model, tmp_path / "server", puller=puller)
    book = WeightsBook(tmp_path / "orchestrator" / "ledger" / WEIGHTS_BOOK)
    offered = OfferedVersionsList(client(offer), tmp_path / "orchestrator" / "weights_offered")
    expected = Expected(
        "policy server", str(tiny_model), fingerprint(load_tokenizer(str(tiny_model))), 16, run="mine-1"
    )
    announced: list[int] = []

    async def orchestrate(url: str) -> None:
        http = HttpInferenceClient(url, KEY, weights_url=f"http://127.0.0.1:{offer.port}")
        pool = ServerPool(
            {url: http},
            group_of_request,
            expected,
            weights_book=book,
            num_listed=lambda: offered.num_listed,
            ask_again_s=0.05,
        )
        came = asyncio.Event()

        async def announce(version: int) -> None:
            announced.append(version)
            came.set()

        await pool.wait_until_ready()
        folder = tmp_path / "orchestrator" / "weights_offered"
        services = [
            asyncio.create_task(each)
            for each in (
                offered.follow(),
                pool.watch(),
                follow_weights(folder, pool, announce, lambda _: False),
            )
        ]
        try:
            for version in (1, 2, 3):
                published = await asyncio.to_thread(publish, tiny_model, tmp_path, version)
                while version not in announced:
                    came.clear()
                    waiting = asyncio.create_task(came.wait())
                    done, _ = await asyncio.wait([*services, waiting], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                    for each in done - {waiting}:
                        each.result()
                answer = await pool.generate(
                    [5, 6], SamplingParams(max_tokens=2), Account("run", "env"), "g-r"
                )
                assert answer.policy_versions == [(version, 2)]
                ours, theirs = next(published.parameters()), next(served.policy.parameters())
                assert torch.equal(ours, theirs)
        finally:
            for each in services:
                each.cancel()
            await asyncio.gather(*services, return_exceptions=True)
            await pool.close()

    with listening(served.app) as url:
        asyncio.run(orchestrate(url))
        assert stable_steps(tmp_path / "server" / "cache") == [2, 3]
        health = httpx.get(f"{url}/health").json()
        assert health["fetched_bytes"] == puller.num_bytes > 0
    assert announced == [1, 2, 3]
    assert offered.num_listed > 0
    assert book.metrics()["weights/verified"] == 1
    assert read_weights_book(tmp_path / "orchestrator" / "ledger").num_verified == 3
    assert not (tmp_path / "server" / "weights").exists()


def test_a_server_reads_from_the_address_that_it_was_started_with_alone(tiny_model, tmp_path, offer) -> None:
    puller = WeightsPuller(client(offer), tmp_path / "cache")
    with listening(EngineServer(tiny_model, tmp_path, puller=puller).app) as url:
        for body in (
            {"version": 1, "url": "http://evil.example/weights/step_1"},
            {"version": 1, "folder": str(tmp_path / "trainer" / "weights" / "step_1")},
        ):
            answer = httpx.post(f"{url}/update_weights", json=body, headers=AUTHORIZED)
            assert answer.status_code == 400
            assert "where this server's run offers policy version 1" in answer.json()["error"]["message"]
    assert puller.num_bytes == 0


def test_the_list_of_versions_is_what_the_trainer_offers(tmp_path, offer, caplog) -> None:
    offered = OfferedVersionsList(client(offer), tmp_path / "seen")

    def publish_digests(version: int, **digests: str) -> None:
        def write(folder: Path) -> None:
            write_digests(folder, PublishedDigests(digests))

        publish_version(tmp_path / "trainer", version, write, keep=9)

    publish_digests(1, a="F32-0a")
    publish_digests(2, a="F32-1a")
    offered._update()
    assert stable_steps(tmp_path / "seen") == [1, 2]
    assert sorted(path.name for path in (tmp_path / "seen" / "step_2").iterdir()) == ["STABLE", DIGESTS]
    retract_folder(weights_folder(tmp_path / "trainer", 1))
    publish_digests(2, a="F32-2a")
    publish_digests(3, a="F32-3a")
    offered._update()
    assert stable_steps(tmp_path / "seen") == [2, 3]
    assert read_digests(tmp_path / "seen" / "step_2").tensors == {"a": "F32-2a"}


@pytest.mark.parametrize("is_away", [True, False])
def test_a_version_that_is_served_stays_while_the_trainer_is_away_or_refuses_it(
    tiny_model, tmp_path, offer, is_away
) -> None:
    puller = WeightsPuller(client(offer), tmp_path / "cache", patience_s=0.1)
    served = EngineServer(tiny_model, tmp_path, puller=puller)
    publish(tiny_model, tmp_path, 1)

    def update(version: int, run: str) -> int:
        asked = {"version": version, "url": f"{puller.offer.url}/weights/step_{version}", "run": run}
        return httpx.post(f"{url}/update_weights", json=asked, headers=AUTHORIZED).status_code

    with listening(served.app) as url:
        assert update(1, "mine-1") == 200
        if is_away:
            offer.close()
        else:
            retract_folder(weights_folder(tmp_path / "trainer", 1))
        assert update(1, "mine-1") == 200
        assert update(1, "theirs-1") >= 400
        assert update(2, "mine-1") >= 400
        assert (served.engine.version, served.thread.run) == (1, "mine-1")


def test_a_trainer_that_starts_late_is_told_that_no_more_weights_are_needed(tmp_path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    offered = OfferedVersionsList(
        OfferClient(f"http://127.0.0.1:{port}", weights_key(KEY)), tmp_path / "seen"
    )

    async def finish() -> None:
        finishing = asyncio.create_task(offered.finish())
        await asyncio.sleep(0)
        with closing(WeightsOffer(tmp_path / "trainer", "127.0.0.1", port, weights_key(KEY))) as offer:
            offer.start()
            await finishing
            await asyncio.to_thread(offer.wait_until_quiet)

    started = time.monotonic()
    asyncio.run(finish())
    assert time.monotonic() - started < LAST_WORD_S
    asyncio.run(offered.finish(patience_s=0.01))  # nobody is there any more


def test_a_trainer_with_another_key_ends_the_run_and_one_that_is_away_does_not(
    tmp_path, offer, caplog
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(ConfigError, match="401: .*weights.key_file"):
        asyncio.run(OfferedVersionsList(client(offer, "another key"), tmp_path / "seen").follow())
    away = OfferedVersionsList(OfferClient("http://127.0.0.1:1", weights_key(KEY)), tmp_path / "seen")

    async def follow() -> None:
        async with asyncio.timeout(0.5):
            await away.follow()

    with pytest.raises(TimeoutError):
        asyncio.run(follow())
    said = [
        record.getMessage() for record in caplog.records if "asking until it answers" in record.getMessage()
    ]
    assert len(said) == 1 and not away.num_listed
