"""Several servers as one, on fakes that die and come back."""

import asyncio
import gc
import itertools
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pellucid.data import Completion
from pellucid.errors import ConfigError, InferenceError, WeightsError
from pellucid.inference.client import (
    Account,
    BusyError,
    Expected,
    Health,
    RankWeightsReport,
    SamplingParams,
    ServedWeightsReport,
    UnreachableError,
)
from pellucid.inference.fake import FakeInferenceClient
from pellucid.inference.pool import ServerPool
from pellucid.ledger.weights import WEIGHTS_BOOK, WeightsBook, read_weights_book
from pellucid.transport.digests import DIGESTS, PublishedDigests, write_digests

ACCOUNT = Account("run", "env")
RUN = "mine-0001"


def nine_tokens(prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
    return list(range(9))


class Server(FakeInferenceClient):
    """Can be switched off: whoever waits for it learns so at once, and it forgets its weights."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(nine_tokens, delay_s=lambda generator: delay_s)
        self.asked: list[str] = []
        self._down = asyncio.Event()

    def switch_off(self) -> None:
        self._down.set()
        self.restart()

    def switch_on(self) -> None:
        self._down = asyncio.Event()

    def restart(self) -> None:
        """Another process is there in no time, and nobody sees the gap."""
        self.server_id += "'"
        self.policy_version, self.run = 0, ""

    async def wait_until_ready(self) -> None:
        self._check()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        self._check()
        self.asked.append(request_id)
        answer = asyncio.create_task(super().generate(prompt_ids, params, account, request_id))
        down = asyncio.create_task(self._down.wait())
        await asyncio.wait({answer, down}, return_when=asyncio.FIRST_COMPLETED)
        down.cancel()
        if not answer.done():
            answer.cancel()
            raise UnreachableError("it went away")
        return answer.result()

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        self._check()
        return await super().score(token_ids, temperature, request_id)

    async def health(self) -> Health:
        self._check()
        return await super().health()

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        self._check()
        await super().update_weights(version, folder, run)

    def _check(self) -> None:
        if self._down.is_set():
            raise UnreachableError("nobody answers")


def group_of(request_id: str) -> str:
    return request_id.partition("-")[0]


def pool_of(
    *servers: Server,
    patience_s: float = 10.0,
    has_weights: bool = False,
    weights_book: WeightsBook | None = None,
    num_listed: Callable[[], float] = lambda: math.inf,
) -> ServerPool:
    expected = Expected("policy server", "m", "", 100, run=RUN, has_weights=has_weights)
    clients = {f"s{n}": server for n, server in enumerate(servers)}
    return ServerPool(
        clients,
        group_of,
        expected,
        weights_book=weights_book,
        num_listed=num_listed,
        ask_again_s=0.01,
        patience_s=patience_s,
    )


async def ready(*servers: Server, **options: Any) -> ServerPool:
    pool = pool_of(*servers, **options)
    await pool.wait_until_ready()
    return pool


def versions(completion: Completion) -> set[int]:
    return {version for version, _ in completion.policy_versions}


async def ask(pool: ServerPool, request_id: str) -> Completion:
    return await pool.generate([5], SamplingParams(max_tokens=9), ACCOUNT, request_id)


def test_groups_spread_over_the_servers_and_stay() -> None:
    async def main() -> list[Counter[str]]:
        servers = Server(0.01), Server(0.01), Server(0.01)
        pool = await ready(*servers)
        for _ in range(2):
            await asyncio.gather(*(ask(pool, f"g{group}-r{n}") for group in range(6) for n in range(4)))
        return [Counter(map(group_of, server.asked)) for server in servers]

    counts = asyncio.run(main())
    assert [len(each) for each in counts] == [2, 2, 2]
    assert all(set(each.values()) == {8} for each in counts)


def test_a_dead_server_is_left_out_and_comes_back_with_the_current_weights(caplog) -> None:
    async def main() -> None:
        first, second = Server(0.02), Server(0.02)
        pool = await ready(first, second)
        await pool.update_weights(1, Path("w1"))
        asking = [asyncio.create_task(ask(pool, f"g{n}-r0")) for n in range(4)]
        while len(first.asked) < 2:
            await asyncio.sleep(0)
        first.switch_off()
        answers = await asyncio.gather(*asking)
        assert [len(answer.token_ids) for answer in answers] == [9] * 4  # two of them from the other server
        assert (len(first.asked), len(second.asked)) == (2, 4)

        await pool.update_weights(2, Path("w2"))
        before = len(first.asked)
        await asyncio.gather(*(ask(pool, f"g{n}-r1") for n in range(4)))  # those of the dead server as well
        assert len(first.asked) == before and second.policy_version == 2

        first.switch_on()
        while len(first.updates) < 2:
            await asyncio.sleep(0.01)
        assert first.updates[-1] == (2, Path("w2")) and first.run == RUN
        completions = await asyncio.gather(*(ask(pool, f"h{n}-r0") for n in range(4)))
        assert len(first.asked) == before + 2
        assert {version for each in completions for version, _ in each.policy_versions} == {2}
        await pool.close()

    asyncio.run(main())
    assert "inference server s0 is left out: " in caplog.text
    assert "inference server s0 is back" in caplog.text


def test_a_server_that_says_it_is_full_gets_nobody_else_before_its_time() -> None:
    class Full(Server):
        async def generate(self, prompt_ids, params, account, request_id) -> Completion:
            self.asked.append(group_of(request_id))
            raise BusyError("full", 60.0)

    async def main() -> None:
        server = Full()
        server.max_concurrent = 1
        pool = await ready(server)
        asking = [asyncio.create_task(ask(pool, f"g{n}-r0")) for n in range(6)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.asked == ["g0"]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await pool.close()

    asyncio.run(main())


def test_without_any_server_the_reason_names_them_all() -> None:
    async def main() -> None:
        servers = Server(), Server()
        pool = await ready(*servers, patience_s=0.05)
        for server in servers:
            server.switch_off()
        with pytest.raises(
            UnreachableError,
            match="none of the inference servers can be reached, for 0.05 s: s0: nobody answers; s1",
        ):
            await pool.update_weights(1, Path("w1"))
        await pool.close()

    asyncio.run(main())


def test_aborts_reach_the_server_that_runs_the_request() -> None:
    async def main() -> list[str]:
        servers = Server(1.0), Server(1.0)
        pool = await ready(*servers)
        asking = [asyncio.create_task(ask(pool, f"g{n}-r0")) for n in range(4)]
        await asyncio.sleep(0.01)
        await pool.abort([f"g{n}-r0" for n in range(4)])
        return [completion.finish_reason for completion in await asyncio.gather(*asking)]

    assert asyncio.run(main()) == ["abort"] * 4


def test_aborts_reach_a_server_that_is_left_out_and_still_works() -> None:
    class Deaf(Server):
        async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
            raise InferenceError("these weights cannot be loaded")

    async def main() -> Completion:
        first, second = Deaf(600.0), Server()
        pool = await ready(first, second)
        asking = asyncio.create_task(ask(pool, "g0-r0"))
        while not first.num_running:
            await asyncio.sleep(0)
        await pool.update_weights(1, Path("w1"))
        await pool.abort(["g0-r0"])
        async with asyncio.timeout(120):
            completion = await asking
        await pool.close()
        return completion

    assert asyncio.run(main()).finish_reason == "abort"


def test_scoring_spreads_over_the_servers_and_leaves_out_one_that_is_gone() -> None:
    async def run() -> None:
        first, second = Server(), Server()
        pool = await ready(first, second)
        try:
            scores = await asyncio.gather(*(pool.score([5, 6], 1.0, f"g{n}-r0") for n in range(4)))
            assert [score[1] for score in scores] == [math.log(0.5)] * 4
            assert first.num_scored == second.num_scored == 2
            first.switch_off()
            await asyncio.gather(*(pool.score([5, 6], 1.0, f"g{n}-r1") for n in range(4)))
            assert (first.num_scored, second.num_scored) == (2, 6)
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_hung_teacher_is_not_waited_for() -> None:
    async def main() -> None:
        first, second = Server(), Server()
        clients = {"s0": first, "s1": second}
        expected = Expected("teacher", "m", "", 100)
        pool = ServerPool(clients, group_of, expected, ask_again_s=0.01, hang_s=0.1)
        await pool.wait_until_ready()
        first.hang()
        async with asyncio.timeout(30):
            scores = await asyncio.gather(*(pool.score([5, 6], 1.0, f"g{n}-r0") for n in range(4)))
        assert [score[1] for score in scores] == [math.log(0.5)] * 4 and second.num_scored == 4
        await pool.close()

    asyncio.run(main())


def test_new_groups_go_where_something_was_finished_and_the_rest_waits() -> None:
    """Each server decodes two together: four requests are there at a time, whoever hangs keeps its own."""

    async def main() -> None:
        slow, quick = Server(600.0), Server(0.001)
        slow.max_concurrent = quick.max_concurrent = 2
        slow.max_queued = quick.max_queued = 100
        pool = await ready(slow, quick)
        asking = [asyncio.create_task(ask(pool, f"g{n}-r0")) for n in range(40)]
        while quick.delivered.total() < 36 * 9:
            await asyncio.sleep(0.001)
        assert (len(slow.asked), slow.max_running) == (4, 4) and quick.max_running <= 4
        await pool.abort([f"g{n}-r0" for n in range(40)])
        assert [len((await each).token_ids) for each in asking].count(9) == 36
        await pool.close()

    asyncio.run(main())


def test_a_group_stays_together_even_if_it_is_larger_than_what_a_server_decodes() -> None:
    async def main() -> None:
        servers = Server(0.01), Server(0.01)
        for server in servers:
            server.max_concurrent, server.max_queued = 2, 100
        pool = await ready(*servers)
        await asyncio.gather(*(ask(pool, f"g{group}-r{n}") for group in range(4) for n in range(12)))
        homes = [set(map(group_of, server.asked)) for server in servers]
        assert not homes[0] & homes[1] and homes[0] | homes[1] == {"g0", "g1", "g2", "g3"}
        await pool.close()

    asyncio.run(main())


def test_a_request_that_takes_its_servers_down_is_given_up() -> None:
    class Poisoned(Server):
        async def generate(self, *arguments: Any) -> Completion:
            self.asked.append(arguments[-1])
            raise UnreachableError("it went away")

    async def main() -> None:
        server = Poisoned()
        pool = await ready(server)
        with pytest.raises(UnreachableError, match="given up after 3 tries, the last: it went away"):
            await ask(pool, "g0-r0")
        assert len(server.asked) == 3
        await pool.close()

    asyncio.run(main())


def test_a_server_that_restarts_unseen_gets_its_weights_again_and_its_tokens_are_refused(caplog) -> None:
    """A single one, between two requests: nothing failed, only the process behind the address is another."""

    async def main() -> None:
        server = Server()
        pool = await ready(server)
        await pool.update_weights(3, Path("w3"))
        assert versions(await ask(pool, "g0-r0")) == {3}
        server.restart()
        doubted = await ask(pool, "g0-r1")
        assert (doubted.finish_reason, versions(doubted), len(doubted.token_ids)) == ("refused", {0}, 9)
        again = await ask(pool, "g0-r2")  # waits until the server has been set right
        assert (again.finish_reason, versions(again)) == ("stop", {3})
        assert server.updates == [(3, Path("w3"))] * 2
        await pool.close()

    asyncio.run(main())
    assert "inference server s0 is left out: it was restarted" in caplog.text
    assert "inference server s0 is back, with the current weights" in caplog.text


def test_a_restart_is_noticed_at_an_update_too() -> None:
    async def main() -> None:
        server = Server(0.05)
        pool = await ready(server)
        await pool.update_weights(1, Path("w1"))
        server.restart()
        asked_too_early = asyncio.create_task(ask(pool, "g0-r0"))
        await asyncio.sleep(0.01)
        await pool.update_weights(2, Path("w2"))
        doubted = await asked_too_early
        assert doubted.finish_reason == "refused" and min(versions(doubted)) == 0
        assert versions(await ask(pool, "g0-r1")) == {2}
        assert server.updates == [(1, Path("w1")), (2, Path("w2"))]  # it was not left out for that
        await pool.close()

    asyncio.run(main())


def test_a_server_with_the_weights_of_another_run_is_refused_at_the_start() -> None:
    async def main() -> None:
        server = Server()
        await server.update_weights(400, Path("theirs"), "theirs-9")
        with pytest.raises(ConfigError) as refused:
            await ready(server)
        assert str(refused.value) == (
            "the policy server 'fake' at s0 serves policy version 400 of run 'theirs-9', not of this run, "
            "'mine-0001'; if that run is going on, give this one a server of its own; if not, restart the "
            "server"
        )

    asyncio.run(main())


@pytest.mark.parametrize("theirs", [7, 2])
def test_a_server_that_another_run_takes_over_ends_the_run(theirs: int) -> None:
    """Versions above and below this run's tell it, before the next update would."""

    async def main() -> None:
        server = Server()
        pool = await ready(server)
        await pool.update_weights(3, Path("w3"))
        watching = asyncio.create_task(pool.watch())
        await server.update_weights(theirs, Path("theirs"), "theirs-9")
        assert (await ask(pool, "g0-r0")).finish_reason == "refused"
        with pytest.raises(ConfigError, match=f"serves policy version {theirs} of run 'theirs-9', not of"):
            await watching
        await pool.close()

    asyncio.run(main())


def test_a_takeover_is_noticed_at_an_update_even_at_the_same_version() -> None:
    async def main() -> None:
        server = Server()
        pool = await ready(server)
        await pool.update_weights(3, Path("w3"))
        watching = asyncio.create_task(pool.watch())
        await server.update_weights(3, Path("theirs"), "theirs-9")
        updating = asyncio.create_task(pool.update_weights(4, Path("w4")))
        with pytest.raises(ConfigError, match="policy version 3 of run 'theirs-9'"):
            await watching
        assert server.updates[-1] == (3, Path("theirs"))  # theirs are left alone
        updating.cancel()
        await pool.close()

    asyncio.run(main())


def test_one_refused_server_of_several_does_not_end_the_run_and_may_come_back(caplog) -> None:
    async def main() -> None:
        first, second = Server(), Server()
        pool = await ready(first, second)
        watching = asyncio.create_task(pool.watch())
        first.model, first.vocabulary = "other", "other"
        await pool.update_weights(1, Path("w1"))
        for n in range(4):
            assert versions(await ask(pool, f"g{n}-r0")) == {1}
        assert not first.asked and len(second.asked) == 4 and not watching.done()
        first.vocabulary = ""
        while not first.updates:
            await asyncio.sleep(0.01)
        watching.cancel()
        await pool.close()

    asyncio.run(main())
    refusals = [record for record in caplog.records if "has another vocabulary" in record.getMessage()]
    assert len(refusals) == 1  # said once, however often it is asked


def test_older_weights_of_this_run_get_no_work_before_the_current_ones() -> None:
    """As after a resume: the server is still at a version that the run will make again."""

    async def main() -> None:
        server = Server()
        await server.update_weights(9, Path("gone"), RUN)
        pool = await ready(server, has_weights=True)
        asking = asyncio.create_task(ask(pool, "g0-r0"))
        await asyncio.sleep(0.02)
        assert not server.asked
        await pool.update_weights(5, Path("w5"))
        assert versions(await asking) == {5}
        await pool.close()
        with pytest.raises(ConfigError, match="of this run, which has published none"):
            await ready(server, has_weights=False)

    asyncio.run(main())


def publish(folder: Path, **digests: str) -> Path:
    folder.mkdir(exist_ok=True)
    write_digests(folder, PublishedDigests(digests))
    return folder


def test_a_server_with_other_weights_than_were_published_ends_the_run(tmp_path) -> None:
    async def main() -> None:
        server, book = Server(), WeightsBook(tmp_path / "weights.jsonl")
        pool = await ready(server, weights_book=book)
        watching = asyncio.create_task(pool.watch())
        await pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a", b="F32-0b"))
        assert book.metrics()["weights/verified"] == 1
        server.planted = {"b": "F32-77"}
        asking = asyncio.create_task(pool.update_weights(2, publish(tmp_path / "w2", a="F32-1a", b="F32-1b")))
        with pytest.raises(
            WeightsError, match="in policy version 2, b has digest F32-77 there and F32-1b as published"
        ):
            await watching
        asking.cancel()
        await pool.close()

    asyncio.run(main())


class Ranked(Server):
    """Two ranks behind one address, of which the second may serve something else, or another version."""

    def __init__(self) -> None:
        super().__init__()
        self.of_second: dict[str, str] = {}
        self.versions_behind = 0

    async def served_weights(self) -> ServedWeightsReport | None:
        report = await super().served_weights()
        version = report.policy_version
        ranks = [
            RankWeightsReport(0, version, report.digests),
            RankWeightsReport(1, version - self.versions_behind, {**report.digests, **self.of_second}),
        ]
        return ServedWeightsReport(version, report.run, report.digests, as_read=True, ranks=ranks)


def test_each_rank_of_a_server_has_a_line_in_the_book_of_weights(tmp_path) -> None:
    async def main() -> None:
        book = WeightsBook(tmp_path / WEIGHTS_BOOK)
        pool = await ready(Ranked(), weights_book=book)
        await pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a", b="F32-0b"))
        assert book.metrics()["weights/verified_as_read"] == 1
        await pool.close()

    asyncio.run(main())
    entries = [json.loads(line) for line in (tmp_path / WEIGHTS_BOOK).read_text().splitlines()]
    assert entries == [
        {"version": 1, "server": "s0", "published": 2, "as_read": 2, "rank": rank} for rank in (0, 1)
    ]
    assert read_weights_book(tmp_path).servers == ["s0"]


def test_a_rank_with_other_weights_than_were_published_ends_the_run_by_its_name(tmp_path) -> None:
    async def main() -> None:
        server = Ranked()
        pool = await ready(server, weights_book=WeightsBook(tmp_path / WEIGHTS_BOOK))
        watching = asyncio.create_task(pool.watch())
        server.of_second = {"b": "F32-77"}
        asking = asyncio.create_task(pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a", b="F32-0b")))
        with pytest.raises(
            WeightsError, match=r"s0 \(rank 1\) serves other weights .* b has digest F32-77 there"
        ):
            await watching
        asking.cancel()
        await pool.close()

    asyncio.run(main())


def test_a_server_with_a_rank_that_is_behind_gets_no_work(tmp_path) -> None:
    async def main() -> None:
        server = Ranked()
        pool = await ready(server)
        server.versions_behind = 1
        updating = asyncio.create_task(pool.update_weights(3, publish(tmp_path / "w3", a="F32-0a")))
        while not server.updates:
            await asyncio.sleep(0.01)
        asking = asyncio.create_task(ask(pool, "g0-r0"))
        while len(server.updates) < 3:
            await asyncio.sleep(0.01)
        assert not updating.done() and server.asked == []
        assert "serves policy version 2 and 3" in pool._reasons()
        server.versions_behind = 0
        await updating
        assert versions(await asking) == {3}
        await pool.close()

    asyncio.run(main())


class Balanced:
    """One address before several servers, which answer by turns."""

    def __init__(self, *servers: Server) -> None:
        self._turns = itertools.cycle(servers)
        self._latest = servers[0]

    @property
    def server_id(self) -> str:
        return self._latest.server_id

    def __getattr__(self, name: str) -> Any:
        self._latest = next(self._turns)
        return getattr(self._latest, name)


@pytest.mark.parametrize("num_servers", [2, 3])
def test_an_address_that_leads_to_several_servers_is_refused_with_the_remedy(tmp_path, num_servers) -> None:
    """A load balancer: new weights would reach one of the servers behind it."""

    async def main() -> None:
        pool = pool_of(Balanced(*(Server() for _ in range(num_servers))))
        with pytest.raises(
            ConfigError, match=r"s0 leads to several servers by turns .* each in inference.servers"
        ):
            await pool.wait_until_ready()
            updating = asyncio.create_task(pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a")))
            try:
                await pool.watch()
            finally:
                updating.cancel()
        await pool.close()

    asyncio.run(main())


def test_a_server_that_is_started_again_and_again_is_not_taken_for_several(tmp_path) -> None:
    async def main() -> None:
        server = Server()
        pool = await ready(server)
        await pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a"))
        for number in range(3):
            server.restart()
            assert versions(await ask(pool, f"g{number}-r0")) <= {0, 1}
            while server.policy_version != 1:
                await asyncio.sleep(0.01)
        await pool.close()

    asyncio.run(main())


def test_servers_read_a_version_before_they_are_told_to_serve_it(tmp_path) -> None:
    """One that takes much longer than the others is not waited for, and one that fails is no obstacle."""

    class Reader(Server):
        may_end: asyncio.Event | None = None

        async def fetch_weights(self, version: int) -> None:
            assert self.policy_version == version - 1
            if self.may_end is not None:
                await self.may_end.wait()
            await super().fetch_weights(version)

    class Broken(Server):
        async def fetch_weights(self, version: int) -> None:
            raise InferenceError("no room on the disk")

    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context["message"])
        )
        quick, slow = Reader(), Reader()
        pool = await ready(quick, slow, Broken(), Broken())
        await pool.update_weights(1, Path("w1"))
        while slow.policy_version != 1:
            await asyncio.sleep(0)
        slow.may_end = asyncio.Event()
        await pool.update_weights(2, Path("w2"))
        assert (quick.fetched, slow.fetched) == ([1, 2], [1])
        assert versions(await ask(pool, "g0-r0")) == {2}
        await pool.close()
        gc.collect()

    asyncio.run(main())
    assert not complaints  # of an error that nobody looked at


def test_weights_of_another_run_are_never_verified_even_if_they_are_the_same(tmp_path) -> None:
    """Another run takes the server over between the update and the report."""

    class TakenOver(Server):
        async def served_weights(self) -> ServedWeightsReport | None:
            await super().update_weights(1, publish(tmp_path / "theirs", a="F32-0a"), "theirs-9")
            return await super().served_weights()

    async def main() -> None:
        book = WeightsBook()
        pool = await ready(TakenOver(), weights_book=book)
        watching = asyncio.create_task(pool.watch())
        updating = asyncio.create_task(pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a")))
        with pytest.raises(ConfigError, match="policy version 1 of run 'theirs-9'"):
            await watching
        assert book.metrics() == {}
        updating.cancel()
        await pool.close()

    asyncio.run(main())


def test_a_server_that_comes_back_is_verified_again(tmp_path) -> None:
    async def main() -> None:
        server = Server()
        pool = await ready(server)
        watching = asyncio.create_task(pool.watch())
        await pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a"))
        server.switch_off()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(pool, "g0-r0")
        server.planted = {"a": "F32-77"}
        server.switch_on()
        with pytest.raises(WeightsError, match="in policy version 1, a has digest F32-77 there"):
            await watching
        await pool.close()

    asyncio.run(main())


def test_a_version_that_was_published_anew_is_compared_with_its_new_digests(tmp_path) -> None:
    """As after a resume of the trainer, while a server loads what it finds: whoever serves tries again."""

    class Late(Server):
        async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
            publish(folder, a="F32-1a")
            await super().update_weights(version, folder, run)

    async def main() -> None:
        pool = await ready(Late(), weights_book=WeightsBook(tmp_path / WEIGHTS_BOOK))
        folder = publish(tmp_path / "w1", a="F32-0a")
        with pytest.raises(InferenceError, match="policy version 1 was published anew meanwhile"):
            await pool.update_weights(1, folder)
        await pool.update_weights(1, folder)
        assert versions(await ask(pool, "g0-r0")) == {1}
        await pool.close()

    asyncio.run(main())
    assert not read_weights_book(tmp_path).unverified  # nothing is said of what was not certain


class Watched(Server):
    """Tells when it was examined."""

    num_reports = 0

    async def served_weights(self) -> ServedWeightsReport | None:
        self.num_reports += 1
        return await super().served_weights()

    async def examined(self, times: int) -> None:
        """Returns once it was examined that often more, and what came of it is known."""
        wanted = self.num_reports + times + 1
        while self.num_reports < wanted:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_server_that_knows_a_version_before_the_list_does_is_examined_again(tmp_path, is_sound) -> None:
    """As after a resume of a trainer that offers its versions over HTTP."""
    num_listed = 0

    async def main() -> None:
        nonlocal num_listed
        server, book = Watched(), WeightsBook(tmp_path / WEIGHTS_BOOK)
        pool = await ready(server, weights_book=book, num_listed=lambda: num_listed)
        watching = asyncio.create_task(pool.watch())
        folder = publish(tmp_path / "w1", a="F32-0a")
        server.planted = {"a": "F32-1a"}
        updating = asyncio.create_task(pool.update_weights(1, folder))
        for num in (0, 1):  # the first answer may have been under way
            num_listed = num
            await server.examined(times=2)
            assert not watching.done() and not updating.done() and not server.asked
        if is_sound:
            publish(folder, a="F32-1a")
        num_listed = 2
        if is_sound:
            with pytest.raises(InferenceError, match="policy version 1 was published anew meanwhile"):
                await updating
            await pool.update_weights(1, folder)
            assert versions(await ask(pool, "g0-r0")) == {1}
            assert not watching.done()
            watching.cancel()
        else:
            with pytest.raises(WeightsError, match="in policy version 1, a has digest F32-1a there"):
                await watching
            updating.cancel()
        await pool.close()

    asyncio.run(main())
    entries = (tmp_path / WEIGHTS_BOOK).read_text().splitlines()
    assert len(entries) == 1 and ("differs" in entries[0]) != is_sound


def test_a_version_that_is_withdrawn_while_it_is_compared_does_not_end_the_run(tmp_path) -> None:
    class Late(Server):
        async def served_weights(self) -> ServedWeightsReport | None:
            report = await super().served_weights()
            shutil.rmtree(tmp_path / "w1", ignore_errors=True)
            return report

    async def main() -> None:
        server, book = Late(), WeightsBook()
        server.planted = {"a": "F32-1a"}
        pool = await ready(server, weights_book=book)
        watching = asyncio.create_task(pool.watch())
        with pytest.raises(InferenceError, match="policy version 1 was withdrawn meanwhile"):
            await pool.update_weights(1, publish(tmp_path / "w1", a="F32-0a"))
        assert book.metrics() == {}
        await pool.update_weights(2, publish(tmp_path / "w2", a="F32-1a"))
        assert versions(await ask(pool, "g0-r0")) == {2}
        assert not watching.done()
        watching.cancel()
        await pool.close()

    asyncio.run(main())


def test_digests_that_cannot_be_read_are_read_again(tmp_path) -> None:
    async def main() -> None:
        server, book = Server(), WeightsBook()
        pool = await ready(server, weights_book=book)
        folder = publish(tmp_path / "w1", a="F32-0a")
        (folder / DIGESTS).write_bytes(b"{")
        with pytest.raises(InferenceError, match="w1/digests.json holds no digests"):
            await pool.update_weights(1, folder)
        assert not server.updates
        await pool.update_weights(1, publish(folder, a="F32-0a"))
        assert book.metrics()["weights/verified"] == 1
        await pool.close()

    asyncio.run(main())


def test_a_server_that_cannot_report_is_said_to_be_unverified_once(tmp_path, caplog) -> None:
    async def main() -> None:
        server, book = Server(), WeightsBook()
        server.reports_weights = False
        pool = await ready(server, weights_book=book)
        for version in (1, 2):
            await pool.update_weights(version, publish(tmp_path / f"w{version}", a="F32-0a"))
            assert versions(await ask(pool, f"g{version}-r0")) == {version}
        assert book.metrics() == {
            "weights/verified": 0,
            "weights/verified_as_read": 0,
            "weights/unverified_servers": 1,
        }
        await pool.close()

    asyncio.run(main())
    said = [record.getMessage() for record in caplog.records if "unverified" in record.getMessage()]
    assert said == [
        "policy version 1 is unverified on s0: it cannot report the digests of what it serves (said once)"
    ]


def test_a_request_that_waits_for_a_server_can_be_aborted() -> None:
    async def main() -> None:
        server = Server()
        pool = await ready(server)
        server.switch_off()
        waiting = asyncio.create_task(ask(pool, "g0-r1"))
        await asyncio.sleep(0.01)
        await pool.abort(["g0-r1"])
        with pytest.raises(InferenceError, match="aborted before a server took it"):
            await waiting
        await pool.close()

    asyncio.run(main())


def test_scores_of_a_restarted_teacher_count_once_it_has_been_examined() -> None:
    async def main() -> None:
        server = Server()
        await server.update_weights(40, Path("any"), "any run")
        pool = ServerPool({"s0": server}, group_of, Expected("teacher", "m", "", 100), ask_again_s=0.01)
        await pool.wait_until_ready()
        assert versions(await ask(pool, "g0-r0")) == {40}  # whatever it serves
        server.restart()
        with pytest.raises(InferenceError, match="s0 was restarted"):
            await pool.score([5, 6], 1.0, "g0-r1")
        assert (await pool.score([5, 6], 1.0, "g0-r2"))[1] == math.log(0.5)
        await pool.close()

    asyncio.run(main())
