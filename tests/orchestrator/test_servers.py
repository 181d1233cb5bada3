import asyncio
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from pellucid.errors import InferenceError
from pellucid.inference.client import UnreachableError
from pellucid.inference.fake import FakeInferenceClient
from pellucid.orchestrator import servers
from pellucid.orchestrator.servers import follow_weights, next_version
from pellucid.transport import publish_folder


class Picky(FakeInferenceClient):
    """Serves no folder that is not there, and refuses some that are."""

    def __init__(self, *refused: int) -> None:
        super().__init__(lambda prompt_ids, generator: [])
        self.refused = list(refused)

    async def update_weights(self, version: int, folder: Path) -> None:
        if version in self.refused:
            self.refused.remove(version)
            raise InferenceError(f"version {version} refused")
        if not folder.exists():
            raise InferenceError(f"{folder} is not a readable weight file")
        await super().update_weights(version, folder)


def publish(run_dir: Path, version: int) -> None:
    publish_folder(run_dir / f"step_{version}", lambda folder: None)


def follow(run_dir: Path, client: FakeInferenceClient, until: int, due: Collection[int] = ()) -> list[int]:
    """The versions announced until `until` is; while one is dealt with, nothing else is served."""
    announced: list[int] = []

    async def run() -> None:
        done = asyncio.Event()

        async def announce(version: int) -> None:
            announced.append(version)
            publish(run_dir, version + 1)
            await asyncio.sleep(5 * servers._POLL_S)
            assert client.updates[-1] == (version, run_dir / f"step_{version}")
            if version == until:
                done.set()

        following = asyncio.create_task(follow_weights(run_dir, client, announce, due.__contains__))
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait({following, waiting}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        for task in (following, waiting):
            task.cancel()
        for failed in await asyncio.gather(following, waiting, return_exceptions=True):
            if isinstance(failed, Exception):
                raise failed

    asyncio.run(run())
    return announced


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_RETRY_S", 0.01)


def test_the_newest_version_is_served_once(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        publish(tmp_path, version)
    client = Picky()
    assert follow(tmp_path, client, until=3) == [3]
    assert client.updates == [(3, tmp_path / "step_3")]


def test_a_version_is_found_though_the_folder_tells_no_time_of_change(tmp_path: Path) -> None:
    client = Picky()

    async def run() -> None:
        done = asyncio.Event()

        def publish_timeless(version: int) -> None:
            publish(tmp_path, version)
            os.utime(tmp_path, ns=(0, 0))

        async def announce(version: int) -> None:
            if version == 3:
                done.set()
            else:  # while it polls
                asyncio.get_running_loop().call_later(3 * servers._POLL_S, publish_timeless, version + 1)

        publish_timeless(1)
        following = asyncio.create_task(follow_weights(tmp_path, client, announce, lambda version: False))
        async with asyncio.timeout(120):
            await done.wait()
        following.cancel()

    asyncio.run(run())
    assert client.updates == [(version, tmp_path / f"step_{version}") for version in (1, 2, 3)]


def test_a_refused_version_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    publish(tmp_path, 1)
    assert follow(tmp_path, Picky(1, 1), until=1) == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "policy version 1 could not be served, trying again: version 1 refused"
    ] * 2


def test_a_version_that_vanishes_gives_way_to_the_next(tmp_path: Path) -> None:
    class Vanishing(Picky):
        async def update_weights(self, version: int, folder: Path) -> None:
            if version == 1:
                shutil.rmtree(folder)
                publish(tmp_path, 2)
            await super().update_weights(version, folder)

    publish(tmp_path, 1)
    assert follow(tmp_path, Vanishing(), until=2) == [2]


def test_three_refusals_in_a_row_are_the_end(tmp_path: Path) -> None:
    publish(tmp_path, 4)
    with pytest.raises(InferenceError, match="in 3 tries; policy version 4: version 4 refused"):
        follow(tmp_path, Picky(4, 4, 4), until=4)


def test_servers_that_are_gone_are_the_end_at_once(tmp_path: Path) -> None:
    """The client has waited for them already; files that are made anew would not bring them back."""

    class Gone(Picky):
        num_asked = 0

        async def update_weights(self, version: int, folder: Path) -> None:
            self.num_asked += 1
            raise UnreachableError("none of the inference servers can be reached")

    publish(tmp_path, 1)
    client = Gone()
    with pytest.raises(UnreachableError, match="^none of the inference servers can be reached$"):
        follow(tmp_path, client, until=1)
    assert client.num_asked == 1


def test_a_version_that_is_due_is_not_passed_over_and_the_next_waits_for_it(tmp_path: Path) -> None:
    """Each announcement publishes one more version, which is served once the announcement is over."""
    for version in (1, 2, 3, 4):
        publish(tmp_path, version)
    client = Picky()
    assert follow(tmp_path, client, until=6, due=(2, 3)) == [2, 3, 4, 5, 6]
    assert [version for version, _ in client.updates] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("published", "served", "due", "version"),
    [
        ([], 0, (), None),
        ([1, 2, 3], 3, (3,), None),
        ([1, 2, 3], 0, (), 3),
        ([48, 49, 50, 51], 48, (50,), 50),
        ([48, 49, 50, 51], 50, (50,), 51),
        ([50, 51], 49, (50, 51), 50),
    ],
)
def test_the_first_that_is_due_else_the_newest(
    published: list[int], served: int, due: tuple[int, ...], version: int | None
) -> None:
    assert next_version(published, served, due.__contains__) == version
