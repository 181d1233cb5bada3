"""Weights that are read from the trainer, on loopback: cut, damaged, withdrawn, by many, by strangers."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from torch import nn

from pellucid.errors import TransportError
from pellucid.guard import weights_key
from pellucid.transport import retract_folder, stable_steps, weights_offer
from pellucid.transport.digests import digest_of_bytes
from pellucid.transport.punctual import PunctualProtocol
from pellucid.transport.weights import (
    ServedWeights,
    named_weights,
    publish_version,
    weights_folder,
    write_version,
)
from pellucid.transport.weights_offer import RESUME_S, Leases, WeightsOffer
from pellucid.transport.weights_pull import OfferClient, RefusedError, WeightsPuller

KEY = weights_key("the key of this run")
FILE = "model.safetensors"


def model(seed: int) -> nn.Module:
    """4 MB, which no buffer of a connection holds."""
    torch.manual_seed(seed)
    return nn.ModuleDict({"first": nn.Linear(1000, 500), "second": nn.Linear(500, 1000, bias=False)})


@pytest.fixture
def offer(tmp_path) -> Iterator[WeightsOffer]:
    with closing(WeightsOffer(tmp_path / "trainer", "127.0.0.1", 0, KEY)) as offer:
        yield offer


def publish(tmp_path: Path, version: int, offer: WeightsOffer | None = None, keep: int = 4) -> nn.Module:
    weights = model(version)
    options = {} if offer is None else {"is_read": offer.leases.holds}
    publish_version(tmp_path / "trainer", version, partial(write_version, weights), keep=keep, **options)
    return weights


def puller(tmp_path: Path, port: int, name: str = "cache", patience_s: float = 30.0) -> WeightsPuller:
    client = OfferClient(f"http://127.0.0.1:{port}", KEY)
    return WeightsPuller(client, tmp_path / name, patience_s=patience_s)


def assert_serves(folder: Path, published: nn.Module) -> None:
    served = model(0)
    ServedWeights(served).load(folder)
    for name, tensor in named_weights(published).items():
        assert torch.equal(named_weights(served)[name], tensor)


class Link:
    """A port in front of another; of each connection it lets the next of `budgets` bytes of answers through.

    Connections without a budget are not cut.
    """

    def __init__(self, port: int, budgets: list[int]) -> None:
        self._port, self._budgets = port, budgets
        self.received: list[int] = []
        """Bytes of the answers of each connection that were let through."""
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut = threading.Event()
        """Set once a connection was cut."""
        self.may_go_on = threading.Event()
        """Connections wait for it after a cut."""
        self.may_go_on.set()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        if self.cut.is_set():
            self.may_go_on.wait()
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            request = b""
            while b"\r\n\r\n" not in request:
                if not (part := client.recv(65536)):
                    return
                request += part
            server.sendall(request)
            self.requests.append(request)
            is_file = FILE.encode() in request
            left = self._budgets.pop(0) if is_file and self._budgets else 1 << 60
            passed = 0
            with contextlib.suppress(OSError):
                while left and (chunk := server.recv(min(left, 65536))):
                    client.sendall(chunk)
                    left, passed = left - len(chunk), passed + len(chunk)
            self.received.append(passed)
            if not left:
                self.cut.set()

    def close(self) -> None:
        self.may_go_on.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def linked(offer: WeightsOffer, budgets: list[int]) -> Iterator[Link]:
    link = Link(offer.port, budgets)
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        yield link
    finally:
        link.close()
        thread.join()


def test_a_version_arrives_as_it_was_published_and_once(tmp_path, offer) -> None:
    published = publish(tmp_path, 7)
    reader = puller(tmp_path, offer.port)
    assert sorted(reader.offer.versions()) == [7]
    folder = reader.pull(7)
    assert folder == tmp_path / "cache" / "step_7"
    assert_serves(folder, published)
    num_bytes = reader.num_bytes
    assert num_bytes == (folder / FILE).stat().st_size
    assert reader.pull(7) == folder
    assert reader.num_bytes == num_bytes


def test_a_transfer_that_is_cut_goes_on_where_it_was(tmp_path, offer) -> None:
    """Twice cut, the file is transferred once; only the heads of the answers come again."""
    published = publish(tmp_path, 1)
    with linked(offer, [1_000_000, 1_500_000]) as link:
        reader = puller(tmp_path, link.port)
        assert_serves(reader.pull(1), published)
        starts = [
            int(line.partition(b"bytes=")[2].partition(b"-")[0])
            for request in link.requests
            for line in request.split(b"\r\n")
            if line.lower().startswith(b"range")
        ]
    assert 990_000 < starts[0] < 1_000_000 < 2_400_000 < starts[1] < 2_500_000
    assert reader.num_bytes == (tmp_path / "cache" / "step_1" / FILE).stat().st_size


def test_a_reader_that_was_started_again_goes_on_where_the_last_one_was(tmp_path, offer) -> None:
    published = publish(tmp_path, 1)
    with linked(offer, [1_000_000]) as link:
        link.may_go_on.clear()
        first = WeightsPuller(
            OfferClient(f"http://127.0.0.1:{link.port}", KEY, silence_s=0.2),
            tmp_path / "cache",
            patience_s=0.3,
        )
        with pytest.raises(TransportError, match=r"given up after 0.3 s: .*step_1/model.safetensors"):
            first.pull(1)
    second = puller(tmp_path, offer.port)
    assert_serves(second.pull(1), published)
    assert first.num_bytes + second.num_bytes == (tmp_path / "cache" / "step_1" / FILE).stat().st_size


@pytest.mark.parametrize(
    ("place", "what"),
    [(-1, "second.weight"), (2_000_000, "first.weight"), (20, "the head of model.safetensors")],
)
def test_a_wrong_byte_is_named_and_the_file_fetched_anew(tmp_path, offer, place, what) -> None:
    published = publish(tmp_path, 3)
    path = weights_folder(tmp_path / "trainer", 3) / FILE
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[place] ^= 16
    path.write_bytes(damaged)
    reader = puller(tmp_path, offer.port)
    expected = (
        rf"policy version 3 of http://127.0.0.1:\d+: {what} arrived with digest \S+ and was published with"
    )
    with pytest.raises(TransportError, match=expected):
        reader.pull(3)
    assert stable_steps(tmp_path / "cache") == []
    path.write_bytes(sound)
    assert_serves(reader.pull(3), published)


@pytest.mark.parametrize("size", [None, 1000])
def test_a_version_that_is_damaged_in_the_cache_is_fetched_anew_by_the_next_process(
    tmp_path, offer, caplog, size
) -> None:
    published = publish(tmp_path, 3)
    path = puller(tmp_path, offer.port).pull(3) / FILE
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 16
    path.write_bytes(damaged[:size])
    again = puller(tmp_path, offer.port)
    assert_serves(again.pull(3), published)
    assert "policy version 3 is fetched anew: " in caplog.text
    num_bytes = again.num_bytes
    again.pull(3)
    assert again.num_bytes == num_bytes == path.stat().st_size


def test_several_servers_read_at_once_while_the_trainer_publishes(tmp_path, offer) -> None:
    published = publish(tmp_path, 1)
    readers = [puller(tmp_path, offer.port, f"cache_{number}") for number in range(3)]
    with ThreadPoolExecutor(len(readers)) as threads:
        reading = [threads.submit(reader.pull, 1) for reader in readers]
        publish(tmp_path, 2, offer)
        for each in reading:
            assert_serves(each.result(), published)


def test_a_version_that_is_being_read_stays_until_it_is(tmp_path, offer) -> None:
    """Its reader's connection is cut, and goes on after the trainer has published three more."""
    published = publish(tmp_path, 1, offer, keep=1)
    with linked(offer, [1_000_000]) as link, ThreadPoolExecutor(1) as threads:
        link.may_go_on.clear()
        reading = threads.submit(puller(tmp_path, link.port).pull, 1)
        assert link.cut.wait(60)
        for version in (2, 3, 4):
            publish(tmp_path, version, offer, keep=1)
        assert stable_steps(tmp_path / "trainer" / "weights") == [1, 4]
        link.may_go_on.set()
        assert_serves(reading.result(), published)


def test_a_version_that_was_withdrawn_in_the_middle_is_given_up_at_once(tmp_path, offer) -> None:
    publish(tmp_path, 1)
    with linked(offer, [1_000_000]) as link, ThreadPoolExecutor(1) as threads:
        link.may_go_on.clear()
        reading = threads.submit(puller(tmp_path, link.port).pull, 1)
        assert link.cut.wait(60)
        retract_folder(weights_folder(tmp_path / "trainer", 1))
        link.may_go_on.set()
        with pytest.raises(
            RefusedError, match="404: policy version 1 has no model.safetensors, or was withdrawn"
        ):
            reading.result()


def test_who_asks_while_another_is_answered_is_told_all_versions(tmp_path, offer, monkeypatch) -> None:
    """The first is at its last version when the second begins."""
    for version in range(1, 5):
        publish(tmp_path, version)
    at_last, has_begun, first_has_all = (threading.Event() for _ in range(3))
    calls = itertools.count(1)

    def slowly(content: bytes) -> str:
        match next(calls):
            case 4:
                at_last.set()
                assert has_begun.wait(60)
            case 5:
                has_begun.set()
                assert first_has_all.wait(60)
        return digest_of_bytes(content)

    monkeypatch.setattr(weights_offer, "digest_of_bytes", slowly)
    client = OfferClient(f"http://127.0.0.1:{offer.port}", KEY, silence_s=60)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.versions)
        assert at_last.wait(60)
        publish(tmp_path, 1)
        second = threads.submit(client.versions)
        found = first.result()
        first_has_all.set()
    assert sorted(found) == sorted(second.result()) == [1, 2, 3, 4]


def test_a_lease_ends_a_minute_after_the_last_byte() -> None:
    now = 100.0
    leases = Leases(lambda: now)
    first, second = leases.open(), leases.open()
    leases.extend(first, 7, RESUME_S)
    now += 50
    leases.extend(second, 7, RESUME_S)
    leases.extend(first, 7, 5.0)  # it has the file
    now += 59
    assert leases.holds(7) and not leases.holds(8)
    now += 2
    assert not leases.holds(7)


def test_a_version_that_was_published_anew_is_fetched_again_and_two_are_kept(tmp_path, offer) -> None:
    reader = puller(tmp_path, offer.port)
    for version in (1, 2, 3):
        publish(tmp_path, version)
        reader.pull(version)
    assert stable_steps(tmp_path / "cache") == [2, 3]
    anew = model(30)
    publish_version(tmp_path / "trainer", 3, partial(write_version, anew), keep=4)
    assert_serves(reader.pull(3), anew)


@pytest.mark.parametrize("key", ["", weights_key("another key"), "the key of this run"])
def test_who_shows_another_key_gets_nothing(tmp_path, offer, key) -> None:
    publish(tmp_path, 1)
    url = f"http://127.0.0.1:{offer.port}"
    with pytest.raises(RefusedError, match="401: .*weights.key_file"):
        WeightsPuller(OfferClient(url, key), tmp_path / "cache").pull(1)
    with pytest.raises(RefusedError, match="401"):
        OfferClient(url, key).versions()
    path = f"/weights/step_{'7' * 5000}/digests.json"
    assert httpx.get(url + path, headers={"authorization": f"Bearer x{key}"}).status_code == 401


def test_nothing_but_files_of_versions_is_offered(tmp_path, offer) -> None:
    publish(tmp_path, 1)
    folder = weights_folder(tmp_path / "trainer", 1)
    (folder / "secret").write_text("word")
    (tmp_path / "trainer" / "key").write_text("word")
    publish_version(tmp_path / "elsewhere", 77, partial(write_version, model(77)), keep=4)
    folder.with_name("step_77").symlink_to(weights_folder(tmp_path / "elsewhere", 77))
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{offer.port}", headers=headers) as client:
        statuses = [
            client.get(f"/weights/{path}").status_code
            for path in (
                "step_1/secret",
                "step_1/..%2F..%2Fkey",
                "step_1/STABLE",
                "step_2/digests.json",
                "step_1",
                f"step_{'7' * 5000}/digests.json",
                "step_77/digests.json",
            )
        ]
        assert statuses == [404] * 7
        assert list(msgspec.json.decode(client.get("/weights").content)["versions"]) == ["1"]
        assert client.get("/weights", headers={"origin": "http://evil.example"}).status_code == 403
        assert client.get("/weights", headers={"host": "evil.example"}).status_code == 421
        part = client.get(f"/weights/step_1/{FILE}", headers={"range": "bytes=8-15"})
        assert (part.status_code, part.content) == (206, (folder / FILE).read_bytes()[8:16])
        (folder / FILE).rename(folder / "moved")
        (folder / FILE).symlink_to(folder / "moved")
        assert client.get(f"/weights/step_1/{FILE}").status_code == 404


def test_whoever_connects_and_asks_nothing_is_cut_off(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(PunctualProtocol, "head_s", 0.1)
    with closing(WeightsOffer(tmp_path / "trainer", "127.0.0.1", 0, KEY)) as offer:
        for first in (b"", b"GET /weights HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", offer.port), timeout=60) as connection:
                connection.sendall(first)
                assert connection.recv(1) == b""


def test_a_trainer_that_is_away_is_waited_for(tmp_path) -> None:
    published = publish(tmp_path, 1)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    reader = puller(tmp_path, port)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(reader.pull, 1)
        with closing(WeightsOffer(tmp_path / "trainer", "127.0.0.1", port, KEY)):
            assert_serves(reading.result(), published)


def test_at_its_end_a_trainer_waits_until_the_orchestrator_needs_no_more(tmp_path, offer) -> None:
    client = OfferClient(f"http://127.0.0.1:{offer.port}", KEY)
    client.versions()
    waiting = threading.Thread(target=offer.wait_until_quiet)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    client.versions(is_done=True)
    waiting.join(60)
    assert not waiting.is_alive()
