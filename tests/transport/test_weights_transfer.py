"""Versions that a trainer sends through vLLM's weight-transfer engine, with fakes of both of vLLM's sides."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fake_vllm import FakeCore
from pellucid.errors import InferenceError, TransportError
from pellucid.guard import weights_key
from pellucid.inference.arrival import Transfers, WeightsArrival
from pellucid.inference.client import UpdateWeightsRequest, offered_at
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.vllm_core import received
from pellucid.inference.vllm_engine import VllmEngine
from pellucid.ledger import Journal, Stage
from pellucid.metrics import Tee
from pellucid.transport.digests import read_digests
from pellucid.transport.weights import (
    digest_of,
    publish_version,
    weight_shapes,
    weights_folder,
    write_version,
)
from pellucid.transport.weights_offer import WeightsOffer
from pellucid.transport.weights_pull import OfferClient, WeightsPuller
from pellucid.transport.weights_transfer import (
    Endpoint,
    PublishedSource,
    Receiving,
    RefusedTransferError,
    TransferAsk,
    TransferCall,
    TransferSession,
    WeightsSender,
    why_no_transfer,
)

KEY = weights_key("the key of this run")
CPU = torch.device("cpu")
CALLS = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
OURS = ["init_weight_transfer_engine", "start_transfer", "receive_published", "finish_transfer"]


class FakeEngine:
    """vLLM's trainer side. The tensors go along with the call, as their digests."""

    def __init__(self, endpoint: Endpoint, session: TransferSession, source: PublishedSource) -> None:
        self._session, self._source = session, source
        session.init_weight_transfer_engine({"world_size": 1 + endpoint.num_workers, "rank_offset": 1})

    def send_weights(self) -> None:
        metas = self._source.metadata()
        found = {name: digest_of(tensor) for name, tensor in self._source}
        assert [each.name for each in metas] == list(found)
        self._session.start_weight_update()
        self._session.update_weights({"digests": found})
        self._session.finish_weight_update()

    def shutdown(self) -> None:
        pass


def sender(**options: Any) -> WeightsSender:
    return WeightsSender("nccl", CPU, **{"connect": FakeEngine, "reason_against": "", **options})


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def publish(tmp_path: Path, version: int, seed: int = 0) -> dict[str, str]:
    publish_version(tmp_path / "trainer", version, partial(write_version, model(seed)), keep=4)
    return read_digests(weights_folder(tmp_path / "trainer", version)).tensors


@contextmanager
def offering(tmp_path: Path, sends: WeightsSender | None) -> Iterator[OfferClient]:
    with closing(WeightsOffer(tmp_path / "trainer", "127.0.0.1", 0, KEY, sends)) as offer:
        offer.start()
        yield OfferClient(f"http://127.0.0.1:{offer.port}", KEY)


class Serving:
    """A server without its HTTP."""

    def __init__(self, tmp_path: Path, offer: OfferClient, name: str = "server") -> None:
        self.core = FakeCore()
        self.failures: list[BaseException] = []
        options = {"num_slots": 2, "max_length": 64, "max_queued": 8, "vocab_size": 100}
        self.engine = VllmEngine(self.core, **options)
        journal = Journal(tmp_path / f"{name}.jsonl", Stage.INFERENCE)
        self.thread = EngineThread(self.engine, journal, Tee([]), self.failures.append)
        self.offer = offer
        self.cache = tmp_path / name
        self.transfers = Transfers(self.engine, offer, "nccl", reason_against="")
        self.arrival = WeightsArrival(
            self.thread, tmp_path, WeightsPuller(offer, self.cache, patience_s=1), self.transfers
        )

    def update(self, *versions: int, run: str = "run", only_fetch: bool = False) -> None:
        async def ask() -> None:
            for version in versions:
                url = offered_at(self.offer.url, version)
                asked = UpdateWeightsRequest(version, url=url, run=run, only_fetch=only_fetch)
                await self.arrival.take(asked, self.engine.version)

        asyncio.run(ask())

    def __enter__(self) -> "Serving":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.stop()
        self.arrival.close()


def test_the_trainer_sends_what_it_published_and_nothing_is_pulled(tmp_path) -> None:
    digests = {version: publish(tmp_path, version, seed=version) for version in (1, 2)}
    with offering(tmp_path, sender()) as offer, Serving(tmp_path, offer) as server:
        for version in (1, 2):
            server.update(version, only_fetch=True)
            server.update(version)
            assert (server.engine.version, server.engine.served_digests()) == (version, digests[version])
    assert server.core.received == 2 * CALLS
    assert not server.cache.exists()


def test_a_version_is_sent_again_only_if_it_was_published_anew(tmp_path) -> None:
    """A run that was resumed publishes under the same numbers."""
    publish(tmp_path, 1, seed=1)
    with offering(tmp_path, sender()) as offer, Serving(tmp_path, offer) as server:
        server.update(1, 1)
        assert server.core.num_loaded == 1
        digests = publish(tmp_path, 1, seed=2)
        server.update(1)
        assert (server.core.num_loaded, server.engine.served_digests()) == (2, digests)


@pytest.mark.parametrize(
    ("sends", "reason"),
    [
        (None, 'the trainer refuses: the trainer has weights.transfer = "files"'),
        (lambda: sender(reason_against="there is no GPU here"), "the trainer refuses: there is no GPU here"),
    ],
)
def test_where_the_trainer_cannot_send_the_server_pulls_and_says_so_once(
    tmp_path, caplog, sends: Callable[[], WeightsSender] | None, reason
) -> None:
    digests = {version: publish(tmp_path, version, seed=version) for version in (1, 2)}
    with offering(tmp_path, sends and sends()) as offer, Serving(tmp_path, offer) as server:
        with caplog.at_level(logging.WARNING, "pellucid.inference.arrival"):
            server.update(1, 2)
        assert server.engine.served_digests() == digests[2] and server.core.received == []
    said = [each.getMessage() for each in caplog.records if each.name == "pellucid.inference.arrival"]
    assert said == [
        f'weights.transfer = "nccl" cannot be used, so this server reads weights from the trainer: {reason}'
    ]


def test_a_server_without_a_gpu_asks_for_nothing(tmp_path) -> None:
    assert why_no_transfer("nccl", has_gpu=False) == "there is no GPU here"
    assert "vLLM with a weight-transfer engine (0.32.0) is not installed here" in why_no_transfer(
        "nccl", has_gpu=True
    )
    assert not Transfers(VllmEngine, OfferClient("http://127.0.0.1:1", ""), "nccl").is_possible


def test_weights_that_break_off_end_the_server_and_the_next_one_is_served(tmp_path) -> None:
    """Nobody knows what the first one's workers have by then; it is started again, as another process."""
    digests = publish(tmp_path, 1)

    class Torn(FakeCore):
        def call_workers(self, method, arguments) -> dict[str, str]:
            if method == "update_weights":
                raise RuntimeError("a GPU fell off the bus")
            return super().call_workers(method, arguments)

    with offering(tmp_path, sender()) as offer:
        with Serving(tmp_path, offer, "first") as server:
            server.engine._core = Torn()
            with pytest.raises(RuntimeError, match="fell off the bus"):
                server.update(1)
            with pytest.raises(InferenceError, match="not known which are served"):
                server.engine.step()
        with Serving(tmp_path, offer, "again") as server:
            server.update(1)
            assert server.engine.served_digests() == digests


def asking(answers: list[TransferCall | OSError]) -> tuple[Receiving, list[TransferAsk]]:
    asked: list[TransferAsk] = []

    def post(ask: TransferAsk) -> TransferCall:
        asked.append(ask)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    return Receiving(post, "nccl", 1, retry_s=0.5, turn_s=0.5), asked


def test_an_answer_that_got_lost_is_asked_for_again_and_done_once() -> None:
    """The trainer keeps its calls: the same number of done ones gives the same next one."""
    session = TransferSession(TransferAsk("s", "nccl", 1))
    sending = threading.Thread(target=lambda: (session.start_weight_update(), session.end()))
    sending.start()
    first = TransferAsk("s", "nccl", 1)
    while session.next(first).method == "wait":
        pass
    assert session.next(first) == session.next(first) == TransferCall("start_weight_update")
    done = msgspec.structs.replace(first, num_done=1)
    session.next(done)
    sending.join()
    assert session.next(done) == session.next(done) == TransferCall("done")
    calls: list[str] = []
    lost = OSError("connection reset")
    receiving, asked = asking(
        [TransferCall("wait"), TransferCall("start_weight_update"), lost, TransferCall("done")]
    )
    receiving.carry_out(lambda method, arguments: calls.append(method))
    assert calls == ["start_weight_update"] and [each.num_done for each in asked] == [0, 0, 1, 1]


def test_a_trainer_that_is_gone_or_busy_or_was_restarted_is_not_waited_for() -> None:
    with pytest.raises(TransportError, match="the trainer cannot be reached: refused"):
        asking([OSError("refused")] * 100)
    with pytest.raises(TransportError, match="the trainer sends nothing for 0.5 s"):
        asking([TransferCall("wait")] * 100)
    with pytest.raises(RefusedTransferError, match="no GPU"):
        asking([TransferCall("refused", reason="no GPU")])
    stranger = TransferAsk("unknown", "nccl", 1, num_done=2)
    answer = sender().answer(Path("nowhere"), stranger, "127.0.0.1")
    assert answer.method == "broken" and "may have been restarted" in answer.reason


def test_one_server_is_served_at_a_time_and_one_that_waits_too_long_pulls(tmp_path, caplog) -> None:
    digests = publish(tmp_path, 1)
    reached, go_on = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def send_weights(self) -> None:
            reached.set()
            go_on.wait(30)
            super().send_weights()

    with (
        offering(tmp_path, sender(connect=Slow, turn_s=0.2)) as offer,
        Serving(tmp_path, offer, "first") as first,
        Serving(tmp_path, offer, "second") as second,
    ):
        serving = threading.Thread(target=first.update, args=(1,))
        serving.start()
        reached.wait(30)
        second.update(1)
        go_on.set()
        serving.join(30)
        assert first.engine.served_digests() == second.engine.served_digests() == digests
        assert (first.core.received, second.core.received) == (CALLS, [])
        assert second.transfers.is_possible, "the next version may come in time"
    assert "is read, and not sent by nccl: another server's transfer has lasted for 0.2 s" in caplog.text


def test_weights_of_another_shape_change_nothing_and_the_trainer_hears_why(tmp_path) -> None:
    publish(tmp_path, 1)
    ended: list[str] = []

    class Listening(FakeEngine):
        def __init__(self, endpoint, session, source) -> None:
            try:
                super().__init__(endpoint, session, source)
            except TransportError as error:
                ended.append(str(error))
                raise

    sends = sender(connect=Listening)
    folder = weights_folder(tmp_path / "trainer", 1)
    receiving = Receiving(lambda ask: sends.answer(folder, ask, "127.0.0.1"), "nccl", 1)
    shapes = weight_shapes(torch.nn.Linear(4, 2))
    with pytest.raises(TransportError, match=r"weight has shape \[2, 3\]; the model has \[2, 4\]"):
        received(receiving, shapes, lambda method, arguments: pytest.fail("nothing is called"))
    with sends._sending:  # the transfer has ended
        (reason,) = ended
    assert "what the trainer sends: weight has shape [2, 3]; the model has [2, 4]" in reason


def test_workers_do_what_the_trainer_calls_for_and_tensors_that_are_missing_are_noticed(tmp_path) -> None:
    digests = publish(tmp_path, 1)
    folder = weights_folder(tmp_path / "trainer", 1)

    def receive(loses: str) -> tuple[list[str], dict[str, str]]:
        called: list[str] = []

        def call(method, arguments) -> dict[str, str]:
            called.append(method)
            found = arguments.get("update_info", {}).get("digests", {})
            return {name: digest for name, digest in found.items() if name != loses}

        sends = sender()
        receiving = Receiving(lambda ask: sends.answer(folder, ask, "127.0.0.1"), "nccl", 3)
        return called, received(receiving, weight_shapes(model()), call)

    assert receive("") == ([*OURS, "shutdown_weight_transfer_engine"], digests)
    with pytest.raises(InferenceError, match=r"the trainer's weights came by half: \['bias'\] are missing"):
        receive("bias")


def test_handles_of_a_gpus_memory_travel_as_text() -> None:
    session = TransferSession(TransferAsk("s", "ipc", 1))
    handle = {"GPU-1": (torch.Tensor, b"\x00\xff", 3)}
    sending = threading.Thread(
        target=session.update_weights, args=({"names": ["a"], "ipc_handles": [handle]},)
    )
    sending.start()
    ask = TransferAsk("s", "ipc", 1)
    while (call := session.next(ask)).method == "wait":
        pass
    call = msgspec.json.decode(msgspec.json.encode(call), type=TransferCall)
    assert set(call.arguments["update_info"]) == {"names", "ipc_handles_pickled"}
    session.next(msgspec.structs.replace(ask, num_done=1))
    sending.join()
