"""Weights by way of an object store: what the trainer puts there, and what others see of it."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import fsspec
import pytest
import torch
from torch import nn

from full_disk import full_disk
from pellucid.errors import ConfigError, TransportError
from pellucid.orchestrator.servers import OfferedVersionsList
from pellucid.transport import retract_folder, stable_steps, weights_store
from pellucid.transport.digests import DIGESTS, read_digests
from pellucid.transport.weights import publish_version, weights_folder, write_version
from pellucid.transport.weights_pull import RefusedError, WeightsPuller
from pellucid.transport.weights_store import StoredOffer, WeightsStore

FILE = "model.safetensors"
PATIENCE_S = 60.0


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path) -> Iterator[WeightsStore]:
    if request.param == "file":
        yield WeightsStore(f"file://{tmp_path}/store/")
        return
    url = f"memory://{uuid.uuid4().hex}"
    yield WeightsStore(url)
    fsspec.filesystem("memory").store.clear()


def publish(run_dir, version: int, *, deltas: bool = False) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 50).bfloat16()
    with torch.no_grad():
        model.weight[0, version] += 1
    publish_version(run_dir, version, partial(write_version, model), keep=2, deltas=deltas)


@contextmanager
def offering(run_dir, store: WeightsStore) -> Iterator[StoredOffer]:
    with closing(StoredOffer(run_dir, store)) as offer:
        offer.start()
        yield offer


def wait_for(store: WeightsStore, versions: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while sorted(store.versions()) != versions:
        assert time.monotonic() < deadline, store.versions()
        time.sleep(0.01)


def test_what_is_published_can_be_read_and_what_is_withdrawn_cannot(store, tmp_path) -> None:
    run_dir, puller = tmp_path / "trainer", WeightsPuller(store, tmp_path / "cache", patience_s=0.1)
    assert store.versions() == {}
    with offering(run_dir, store):
        for version in (1, 2, 3):
            publish(run_dir, version)
            wait_for(store, [1, 2, 3][max(0, version - 2) : version])
            folder = puller.pull(version)
            published = weights_folder(run_dir, version)
            assert (folder / FILE).read_bytes() == (published / FILE).read_bytes()
        with pytest.raises(RefusedError, match=r"has no /weights/step_1/digests.json, or it was withdrawn"):
            puller.pull(1)
    size = (weights_folder(run_dir, 3) / FILE).stat().st_size
    assert puller.num_bytes == 3 * size


def test_differences_and_the_rest_of_a_file_are_read_from_it(store, tmp_path) -> None:
    run_dir, puller = tmp_path / "trainer", WeightsPuller(store, tmp_path / "cache")
    with offering(run_dir, store) as offer:
        for version in (1, 2):
            publish(run_dir, version, deltas=True)
        offer.wait_until_quiet()
        content = (weights_folder(run_dir, 1) / FILE).read_bytes()
        target = tmp_path / "part"
        target.write_bytes(content[:1000])
        found: list[int] = []
        store.append(f"/weights/step_1/{FILE}", target, found.append)
        assert (target.read_bytes(), sum(found)) == (content, len(content) - 1000)
        puller.pull(1)
        before = puller.num_bytes
        folder = puller.pull(2)
        assert (folder / FILE).read_bytes() == (weights_folder(run_dir, 2) / FILE).read_bytes()
        assert puller.num_bytes - before == read_digests(weights_folder(run_dir, 2)).delta.num_bytes < 500


def test_a_full_disk_of_a_server_is_told_at_once_and_not_blamed_on_the_store(store, tmp_path) -> None:
    run_dir, puller = tmp_path / "trainer", WeightsPuller(store, tmp_path / "cache", patience_s=PATIENCE_S)
    with offering(run_dir, store) as offer:
        publish(run_dir, 1)
        offer.wait_until_quiet()
    with (
        full_disk(),
        pytest.raises(RefusedError, match=rf"{tmp_path}/cache/.*{FILE} .*File too large") as told,
    ):
        puller.pull(1)
    assert store.url not in str(told.value)
    assert (puller.pull(1) / FILE).read_bytes() == (weights_folder(run_dir, 1) / FILE).read_bytes()


def test_a_trainer_that_goes_on_lists_nothing_until_it_has_taken_back_what_it_redoes(store, tmp_path) -> None:
    run_dir = tmp_path / "trainer"
    with offering(run_dir, store):
        for version in (1, 2):
            publish(run_dir, version)
        wait_for(store, [1, 2])
    with closing(StoredOffer(run_dir, store)) as resumed:
        assert store.versions() == {}
        retract_folder(weights_folder(run_dir, 2))
        resumed.start()
        wait_for(store, [1])


def folders(store: WeightsStore) -> list[str]:
    """Returns the folders of versions that have files in the store."""
    found = store.files.find(store.path("/weights_files"))
    return sorted({path.split("/")[-2] for path in found})


def wait_for_folders(store: WeightsStore, expected: list[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while folders(store) != expected:
        assert time.monotonic() < deadline, folders(store)
        time.sleep(0.01)


def test_what_the_store_has_is_not_uploaded_again_and_what_was_withdrawn_goes(
    store, tmp_path, monkeypatch
) -> None:
    run_dir = tmp_path / "trainer"
    with offering(run_dir, store) as offer:
        for version in (1, 2):
            publish(run_dir, version)
        offer.wait_until_quiet()
    assert folders(store) == ["step_1", "step_2"]
    put: list[str] = []
    put_file = store.files.put_file
    monkeypatch.setattr(store.files, "put_file", lambda path, to: [put.append(path), put_file(path, to)])
    retract_folder(weights_folder(run_dir, 1))
    with offering(run_dir, store):
        wait_for(store, [2])
        wait_for_folders(store, ["step_2"])
        assert put == []
        publish(run_dir, 3)
        wait_for(store, [2, 3])
    assert {path.split("/")[-2] for path in put} == {"step_3"}


def test_a_version_that_was_published_anew_replaces_what_the_store_has(store, tmp_path) -> None:
    run_dir = tmp_path / "trainer"
    publish(run_dir, 1)
    digests = weights_folder(run_dir, 1) / DIGESTS
    for content in (digests.read_bytes(), digests.read_bytes() + b"\n"):
        digests.write_bytes(content)
        with offering(run_dir, store) as offer:
            offer.wait_until_quiet()
        assert store.digests(1) == content


def test_a_version_that_could_not_be_removed_is_removed_later(store, tmp_path, monkeypatch, caplog) -> None:
    run_dir, rm, failed = tmp_path / "trainer", store.files.rm, []

    def fail_once(path, recursive=False, maxdepth=None) -> None:
        if "step_" in path and not failed:
            failed.append(path)
            raise PermissionError("not now")
        rm(path, recursive=recursive, maxdepth=maxdepth)

    monkeypatch.setattr(store.files, "rm", fail_once)
    with offering(run_dir, store):
        for version in (1, 2, 3):
            publish(run_dir, version)
            wait_for(store, [1, 2, 3][max(0, version - 2) : version])
        wait_for_folders(store, ["step_2", "step_3"])
    assert len(failed) == 1 and "not now; trying again until it works" in caplog.text


def test_a_version_that_goes_while_it_is_read_is_tried_again(store, tmp_path) -> None:
    with (
        closing(StoredOffer(tmp_path, store)) as offer,
        pytest.raises(TransportError, match="policy version 7 was withdrawn meanwhile"),
    ):
        offer._upload(7)


def test_the_end_waits_while_files_arrive_and_not_for_what_has_ended(
    store, tmp_path, monkeypatch, caplog
) -> None:
    run_dir, put_file = tmp_path / "trainer", store.files.put_file
    monkeypatch.setattr(weights_store, "RESUME_S", 0.1)
    monkeypatch.setattr(store.files, "put_file", lambda path, to: [time.sleep(0.2), put_file(path, to)])
    publish(run_dir, 1)
    with closing(StoredOffer(run_dir, store)) as never_started:
        never_started.wait_until_quiet()
    assert f"{store.url} does not hold the last weights: what writes them has ended" in caplog.text
    with offering(run_dir, store) as offer:
        offer.wait_until_quiet()
        assert sorted(store.versions()) == [1]
        assert "could not be written to" not in caplog.text

        def fail(path, to) -> None:
            raise PermissionError("no more")

        monkeypatch.setattr(store.files, "put_file", fail)
        publish(run_dir, 2)
        offer.wait_until_quiet()
    assert "does not hold the last weights: it could not be written to for 0.1 s" in caplog.text


def test_the_orchestrators_list_is_that_of_the_store(store, tmp_path) -> None:
    run_dir, offered = tmp_path / "trainer", OfferedVersionsList(store, tmp_path / "seen")

    async def follow() -> None:
        following = asyncio.create_task(offered.follow())
        await offered.is_known.wait()
        publish(run_dir, 1)
        async with asyncio.timeout(PATIENCE_S):
            while stable_steps(tmp_path / "seen") != [1]:
                await asyncio.sleep(0.01)
        following.cancel()

    with offering(run_dir, store):
        asyncio.run(follow())
    assert read_digests(tmp_path / "seen" / "step_1") == read_digests(weights_folder(run_dir, 1))


def test_a_store_that_cannot_be_written_to_is_tried_again_and_said_once(tmp_path, caplog) -> None:
    store = WeightsStore(f"file://{tmp_path}/store")
    run_dir = tmp_path / "trainer"
    with offering(run_dir, store):
        (tmp_path / "store" / "weights_files").touch()  # where a folder has to be
        publish(run_dir, 1)
        deadline = time.monotonic() + PATIENCE_S
        while "trying again until it works" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (tmp_path / "store" / "weights_files").unlink()
        wait_for(store, [1])
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1
    with pytest.raises(TransportError, match=r"cannot be reached: \w+"):
        (tmp_path / "file").touch()
        StoredOffer(run_dir, WeightsStore(f"file://{tmp_path}/file/store"))


def test_a_url_that_nothing_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"weights.store = 'nosuch://bucket' cannot be used: ValueError"):
        WeightsStore("nosuch://bucket")
