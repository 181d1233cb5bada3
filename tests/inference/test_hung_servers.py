"""Servers that hang and come back, over real HTTP: nothing waits for them, and no token is counted twice.

The engine is scripted, so that it can be stopped between two tokens; thread, books, routes and sockets are
the real ones.
"""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from engine_server import KEY, journal_counts
from pellucid.data import Completion
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import ConfigError, InferenceError
from pellucid.inference.client import Account, Expected, SamplingParams
from pellucid.inference.engine_thread import EngineThread
from pellucid.inference.http import HttpInferenceClient
from pellucid.inference.pool import ServerPool
from pellucid.inference.server import Server
from pellucid.inference.slots import Request, SlottedEngine, run_to_end
from pellucid.ledger import Journal, Stage
from pellucid.metrics import JsonlSink
from pellucid.model.tiny import character_tokenizer
from pellucid.transport.weights import weights_folder
from pellucid.transport.weights_pull import OfferClient, WeightsPuller

TOKENIZER = character_tokenizer()
ACCOUNT = Account("run", "env")
HANG_S = 0.4
NUM_TOKENS = 6


class ScriptedEngine(SlottedEngine[int]):
    """Samples token 7; a step takes `step_s`, or for ever while it is stuck."""

    def __init__(self, num_slots: int = 4, max_queued: int = 64) -> None:
        super().__init__(
            num_slots=num_slots, max_length=200, max_queued=max_queued, vocab_size=100, decode_text=None
        )
        self.step_s = 0.001
        self.free = threading.Event()
        self.free.set()
        self.num_steps = 0

    def step(self) -> None:
        time.sleep(self.step_s)
        self.free.wait()
        for request in list(self._waiting):
            slots = set(range(self.num_slots)) - self._running.keys()
            if slots:
                self._start(request, slots.pop())
        self.num_steps += 1
        running = list(self._running.values())
        self._take(running, [7] * len(running), [-1.0] * len(running))

    def update_weights(self, version: int, folder: Path) -> None:
        self.version = version

    def served_digests(self) -> dict[str, str]:
        return {}

    def _free(self, slot: int) -> None:
        """Holds nothing."""


class TricklingPuller(WeightsPuller):
    """Reads weights byte by byte, without end; the folder that it returns is empty."""

    def __init__(self) -> None:
        super().__init__(OfferClient("http://trainer:1", "key"), Path("nowhere"))
        self.may_end = threading.Event()

    def pull(self, version: int, *, is_served: bool = False) -> Path:
        with self._pulling:
            while not self.may_end.wait(HANG_S / 50):
                self.num_bytes += 1
        return Path("nowhere")


class FreezingServer:
    """A server that can be stopped anywhere, as by SIGSTOP, and goes on where it was."""

    def __init__(self, folder: Path, name: str, puller: WeightsPuller | None = None, **options: int) -> None:
        folder.mkdir(exist_ok=True)
        self.books = folder / f"{name}.jsonl"
        self.engine = ScriptedEngine(**options)
        self.thread = EngineThread(
            self.engine,
            Journal(self.books, Stage.INFERENCE),
            JsonlSink(folder / f"{name}_metrics.jsonl"),
            lambda error: None,
        )
        server = Server(
            *(self.engine, self.thread, TOKENIZER, "tiny", 200),
            **{"run_dir": folder, "host": "127.0.0.1", "key": KEY, "puller": puller},
        )
        self._app = server.app()
        self._awake = threading.Event()
        self._awake.set()
        self._only_answers = False
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self.asked.append(scope["path"])
        if not self._only_answers:
            await self._wake()

        async def send_awake(message: Any) -> None:
            await self._wake()
            await send(message)

        await self._app(scope, receive, send_awake)

    async def _wake(self) -> None:
        while not self._awake.is_set():
            await asyncio.sleep(0.005)

    def freeze(self) -> None:
        """Nothing is computed, taken in or sent."""
        self.engine.free.clear()
        self._awake.clear()

    def hold_answers(self) -> None:
        """The engine goes on, and no byte of an answer leaves."""
        self._only_answers = True
        self._awake.clear()

    def stick(self) -> None:
        """The engine never ends its step, while the server answers `/health`."""
        self.engine.free.clear()

    def recover(self) -> None:
        self.engine.free.set()
        self._awake.set()

    @contextmanager
    def listening(self) -> Iterator[str]:
        server = uvicorn.Server(uvicorn.Config(self, port=0, log_level="error", lifespan="on"))
        runner = threading.Thread(target=server.run)
        runner.start()
        try:
            while not server.started:
                time.sleep(0.002)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            self.recover()
            server.should_exit = True
            runner.join()

    @property
    def num_generates(self) -> int:
        return self.asked.count("/inference/v1/generate_many")


@asynccontextmanager
async def pool_of(*urls: str, weights_url: str = "", **options: Any) -> AsyncIterator[ServerPool]:
    expected = Expected("policy server", "tiny", fingerprint(TOKENIZER), 200, run="run-1")
    clients = {url: HttpInferenceClient(url, KEY, weights_url=weights_url) for url in urls}
    options = {"hang_s": HANG_S, "ask_again_s": 0.02, "patience_s": 30.0, **options}
    pool = ServerPool(clients, lambda request_id: request_id.partition("-")[0], expected, **options)
    try:
        await pool.wait_until_ready()
        async with asyncio.timeout(60):
            yield pool
    finally:
        await pool.close()


async def ask(pool: ServerPool, request_id: str, num_tokens: int = NUM_TOKENS) -> Completion:
    return await pool.generate([5], SamplingParams(max_tokens=num_tokens), ACCOUNT, request_id)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def assert_booked(*servers: FreezingServer, received: int) -> Counter[str]:
    """Every sampled token was delivered or cancelled, and what was delivered was received."""
    totals: Counter[str] = Counter()
    for server in servers:
        totals.update(journal_counts(server.books))
    assert totals["sampled"] == totals["delivered"] + totals["cancelled"], totals
    assert totals["delivered"] == received, totals
    return totals


@pytest.mark.parametrize("way", ["freeze", "hold_answers", "stick"])
def test_requests_of_a_hung_server_are_answered_by_another_and_counted_once(tmp_path: Path, way: str) -> None:
    """It hangs with requests that run, answers that it has not sent, and some that it has not read."""
    first, second = FreezingServer(tmp_path, "first"), FreezingServer(tmp_path, "second")

    async def main(urls: list[str]) -> int:
        async with pool_of(*urls) as pool:
            before = await asyncio.gather(*(ask(pool, f"a{n}-r0") for n in range(4)))
            for server in (first, second):
                server.engine.step_s = 0.02
            asking = [asyncio.create_task(ask(pool, f"b{n}-r{m}")) for n in range(4) for m in range(2)]
            sampled = first.engine.counts.sampled
            await until(lambda: sampled[ACCOUNT] >= 2 * NUM_TOKENS + 2)
            getattr(first, way)()
            late = [asyncio.create_task(ask(pool, f"c{n}-r0")) for n in range(4)]
            answers = await asyncio.gather(*asking, *late)
            assert {each.finish_reason for each in answers} == {"length"}
            num_asked = first.num_generates
            others = await asyncio.gather(*(ask(pool, f"d{n}-r0") for n in range(4)))
            assert first.num_generates == num_asked  # it is left out
            first.recover()
            await until(lambda: not pool._servers[0].is_out)
            after = await asyncio.gather(*(ask(pool, f"e{n}-r0") for n in range(4)))
            assert first.num_generates > num_asked  # and is back
            return sum(len(each.token_ids) for each in (*before, *answers, *others, *after))

    with first.listening() as one, second.listening() as other:
        received = asyncio.run(main([one, other]))
    assert received == 24 * NUM_TOKENS
    assert assert_booked(first, second, received=received)["cancelled"] > 0


def test_a_request_given_up_after_its_end_takes_no_slot_from_the_next() -> None:
    """Engines may number their slots: the answer that nobody took came from a slot that another has now."""
    engine, finished = ScriptedEngine(num_slots=1), []
    requests = [Request([5], SamplingParams(max_tokens=3), ACCOUNT, finished.append) for _ in range(2)]
    for request in requests:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.abandon(requests[0])
    run_to_end(engine, [])
    counts = engine.counts
    assert [completion.finish_reason for completion in finished] == ["length", "length"]
    assert (counts.sampled[ACCOUNT], counts.delivered[ACCOUNT], counts.cancelled[ACCOUNT]) == (6, 3, 3)


def test_a_slow_server_that_gets_on_is_never_interrupted(tmp_path: Path) -> None:
    server, idle = FreezingServer(tmp_path, "slow"), FreezingServer(tmp_path, "idle")
    server.engine.step_s = HANG_S / 4

    async def main(urls: list[str]) -> float:
        async with pool_of(*urls) as pool:
            started = time.monotonic()
            completion = await ask(pool, "a-r0", num_tokens=12)
            assert len(completion.token_ids) == 12
            return time.monotonic() - started

    with server.listening() as one, idle.listening() as other:
        assert asyncio.run(main([one, other])) > 2 * HANG_S
    assert (server.num_generates, idle.num_generates) == (1, 0)


def test_a_single_server_that_comes_back_answers_what_it_was_asked(tmp_path: Path, caplog: Any) -> None:
    """Nobody else could have taken it, so nothing was given up and nothing is sampled twice."""
    server = FreezingServer(tmp_path, "only")
    server.engine.step_s = 0.02

    async def main(url: str) -> int:
        async with pool_of(url) as pool:
            asking = [asyncio.create_task(ask(pool, f"a{n}-r0")) for n in range(3)]
            await until(lambda: server.engine.counts.sampled[ACCOUNT])
            server.freeze()
            await until(lambda: pool._servers[0].is_out)
            waiting = asyncio.create_task(ask(pool, "b-r0"))
            server.recover()
            answers = await asyncio.gather(*asking, waiting)
            return sum(len(each.token_ids) for each in answers)

    with server.listening() as url:
        received = asyncio.run(main(url))
    assert received == 4 * NUM_TOKENS
    assert assert_booked(server, received=received)["cancelled"] == 0
    assert "its /health has not answered for 0.4 s (orchestrator.server_timeout_s)" in caplog.text
    assert "is back, with the current weights" in caplog.text


@pytest.mark.parametrize("way", ["freeze", "stick"])
def test_a_weight_update_does_not_wait_for_a_hung_server(tmp_path: Path, way: str) -> None:
    first, second = FreezingServer(tmp_path, "first"), FreezingServer(tmp_path, "second")

    async def main(urls: list[str]) -> int:
        async with pool_of(*urls, hang_s=60.0) as pool:
            getattr(first, way)()
            hanging = asyncio.create_task(ask(pool, "a-r0"))  # to the first: nobody knows yet
            await until(lambda: first.num_generates)
            await pool.update_weights(1, weights_folder(tmp_path, 1))
            answers = [await ask(pool, f"b{n}-r0") for n in range(3)]
            assert [each.policy_versions for each in answers] == [[(1, NUM_TOKENS)]] * 3
            await pool.update_weights(2, weights_folder(tmp_path, 2))
            first.recover()
            answers += [await hanging]
            await until(lambda: first.engine.version == 2)
            assert first.num_generates == 1 and pool._servers[0].version in (1, 2)
            await until(lambda: pool._servers[0].version == 2)
            answers += await asyncio.gather(*(ask(pool, f"c{n}-r0") for n in range(4)))
            assert {each.policy_versions[-1][0] for each in answers[-4:]} == {2}
            assert first.num_generates > 1
            return sum(len(each.token_ids) for each in answers)

    with first.listening() as one, second.listening() as other:
        received = asyncio.run(main([one, other]))
    assert_booked(first, second, received=received)


def test_an_engine_that_hangs_while_weights_arrive_loses_its_requests_and_one_that_samples_keeps_them(
    tmp_path: Path, caplog: Any
) -> None:
    """Bytes of weights are no progress of an engine."""
    pullers = [TricklingPuller(), TricklingPuller()]
    first, second = (
        FreezingServer(tmp_path, name, puller)
        for name, puller in zip(("first", "second"), pullers, strict=True)
    )

    async def main(urls: list[str]) -> int:
        async with pool_of(*urls, weights_url="http://trainer:1", hang_s=2.0) as pool:
            updating = asyncio.create_task(pool.update_weights(1, weights_folder(tmp_path, 1)))
            await until(lambda: all(puller.is_pulling for puller in pullers))
            first.stick()
            second.engine.step_s = 0.1
            answers = await asyncio.gather(*(ask(pool, f"a{n}-r0") for n in range(4)))
            assert not updating.done() and pool._servers[0].is_out and not pool._servers[1].is_out
            first.recover()
            for puller in pullers:
                puller.may_end.set()
            await updating
            await until(lambda: [server.version for server in pool._servers] == [1, 1])
            return sum(len(each.token_ids) for each in answers)

    with first.listening() as one, second.listening() as other:
        received = asyncio.run(main([one, other]))
    assert received == 4 * NUM_TOKENS
    assert_booked(first, second, received=received)
    assert f"inference server {one} is left out: it answers, but has stood still" in caplog.text
    assert f"inference server {other} is left out" not in caplog.text


@pytest.mark.parametrize("is_known", [True, False])
def test_requests_of_a_hung_server_can_be_given_up_at_the_end_of_a_run(
    tmp_path: Path, is_known: bool
) -> None:
    """The server recovers after its client has gone: what it then delivers was received by nobody."""
    server = FreezingServer(tmp_path, "only")
    server.engine.step_s = 0.02

    async def main(url: str) -> None:
        async with pool_of(url, hang_s=HANG_S if is_known else 60.0) as pool:
            asking = [asyncio.create_task(ask(pool, f"a{n}-r0")) for n in range(3)]
            await until(lambda: server.engine.counts.sampled[ACCOUNT])
            server.freeze()
            if is_known:
                await until(lambda: pool._servers[0].is_out)
                await pool.abort([f"a{n}-r0" for n in range(3)])
                outcomes = await asyncio.gather(*asking, return_exceptions=True)
                assert all("does not answer" in str(each) for each in outcomes)
            else:
                for each in asking:
                    each.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    with server.listening() as url:
        started = time.monotonic()
        asyncio.run(main(url))
        assert time.monotonic() - started < 30
        server.recover()
        while server.engine.num_running or server.engine.num_waiting:
            time.sleep(0.005)
    assert_booked(server, received=0)


def test_a_pool_starts_with_the_servers_that_are_there_and_adds_the_others(
    tmp_path: Path, caplog: Any
) -> None:
    """One refuses connections, one accepts and never answers, one cannot even be connected to."""
    here, late = FreezingServer(tmp_path, "here"), FreezingServer(tmp_path, "late")
    late.freeze()

    async def main(url: str, later: str, gone: str, full: str) -> None:
        async with pool_of(url, later, gone, full) as pool:
            answers = await asyncio.gather(*(ask(pool, f"a{n}-r0") for n in range(4)))
            assert [len(each.token_ids) for each in answers] == [NUM_TOKENS] * 4
            assert late.num_generates == 0
            late.recover()
            await until(lambda: pool._servers[1].num_examined)
            await asyncio.gather(*(ask(pool, f"b{n}-r0") for n in range(4)))
            assert late.num_generates > 0

    with (
        here.listening() as url,
        late.listening() as later,
        socket.socket() as silent,
        socket.socket() as unused,
    ):
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        unused.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (unused, silent)]
        with socket.create_connection(("127.0.0.1", ports[1])):  # nobody else fits into its queue
            asyncio.run(main(url, later, *(f"http://127.0.0.1:{port}" for port in ports)))
    assert f"{later} is not there yet, so the run starts without it: its /health" in caplog.text
    assert caplog.text.count("is not there yet") == 3


def test_more_requests_than_a_server_holds_wait_and_none_fails(tmp_path: Path) -> None:
    """Three at a time, two more in its queue; somebody else uses it, too, so that it is full now and then."""
    server = FreezingServer(tmp_path, "small", num_slots=3, max_queued=2)
    server.engine.step_s = 0.002

    async def main(url: str) -> int:
        other = HttpInferenceClient(url, KEY)
        async with pool_of(url) as pool:
            asking = [asyncio.create_task(ask(pool, f"g{n}-r{m}")) for n in range(3) for m in range(5)]
            num_refused = 0
            while not num_refused:
                try:
                    await other.generate([5], SamplingParams(max_tokens=2), Account(), f"o{num_refused}")
                except InferenceError as error:
                    num_refused += "answered 503" in str(error)
            answers = await asyncio.gather(*asking)
            await other.close()
            return sum(len(each.token_ids) for each in answers)

    with server.listening() as url:
        received = asyncio.run(main(url))
    assert received == 15 * NUM_TOKENS
    assert assert_booked(server, received=received)["cancelled"] == 0


def test_a_full_server_is_asked_again_when_it_said_and_that_is_no_failure(tmp_path: Path) -> None:
    server = FreezingServer(tmp_path, "small", num_slots=1, max_queued=1)

    async def main(url: str) -> None:
        other = HttpInferenceClient(url, KEY)
        async with pool_of(url) as pool:
            server.stick()
            held = [
                asyncio.ensure_future(other.generate([5], SamplingParams(max_tokens=2), Account(), f"o{n}"))
                for n in range(2)
            ]
            await until(lambda: server.thread._num_open == 2)
            asking = asyncio.create_task(ask(pool, "a-r0"))
            await until(lambda: pool._servers[0].busy_until)
            server.recover()
            assert len((await asking).token_ids) == NUM_TOKENS
            await asyncio.gather(*held)
            await other.close()

    with server.listening() as url:
        asyncio.run(main(url))
    assert server.num_generates == 3  # of the other, refused, taken


def test_two_addresses_of_one_process_are_refused_with_both(tmp_path: Path) -> None:
    server = FreezingServer(tmp_path, "only")

    async def main(url: str, alias: str) -> str:
        claims: dict[str, str] = {}
        async with pool_of(url, claims=claims):
            teacher = ServerPool(
                {alias: HttpInferenceClient(alias, KEY)},
                str,
                Expected("teacher", "tiny", fingerprint(TOKENIZER), 200),
                claims=claims,
            )
            try:
                with pytest.raises(ConfigError) as refused:
                    await teacher.wait_until_ready()
            finally:
                await teacher.close()
            return str(refused.value)

    with server.listening() as url:
        alias = url.replace("127.0.0.1", "localhost")
        message = asyncio.run(main(url, alias))
    assert f"the policy server at {url} and the teacher at {alias} are the same process" in message
    assert "start a server for each" in message
