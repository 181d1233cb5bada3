"""Several servers as one, on fakes that die and come back."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from pellucid.data import Completion
from pellucid.inference.client import Account, SamplingParams, UnreachableError
from pellucid.inference.fake import FakeInferenceClient
from pellucid.inference.pool import ServerPool

ACCOUNT = Account("run", "env")


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
        self.policy_version = 0

    def switch_on(self) -> None:
        self._down = asyncio.Event()

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

    async def update_weights(self, version: int, folder: Path) -> None:
        self._check()
        await super().update_weights(version, folder)

    def _check(self) -> None:
        if self._down.is_set():
            raise UnreachableError("nobody answers")


def group_of(request_id: str) -> str:
    return request_id.partition("-")[0]


def pool_of(*servers: Server) -> ServerPool:
    return ServerPool({f"s{n}": server for n, server in enumerate(servers)}, group_of, ask_again_s=0.01)


async def ask(pool: ServerPool, request_id: str) -> Completion:
    return await pool.generate([5], SamplingParams(max_tokens=9), ACCOUNT, request_id)


def test_groups_spread_over_the_servers_and_stay() -> None:
    async def main() -> list[Counter[str]]:
        servers = Server(0.01), Server(0.01), Server(0.01)
        pool = pool_of(*servers)
        for _ in range(2):
            await asyncio.gather(*(ask(pool, f"g{group}-r{n}") for group in range(6) for n in range(4)))
        return [Counter(map(group_of, server.asked)) for server in servers]

    counts = asyncio.run(main())
    assert [len(each) for each in counts] == [2, 2, 2]
    assert all(set(each.values()) == {8} for each in counts)


def test_a_dead_server_is_left_out_and_comes_back_with_the_current_weights(caplog) -> None:
    async def main() -> None:
        first, second = Server(0.02), Server(0.02)
        pool = pool_of(first, second)
        await pool.update_weights(1, Path("w1"))
        asking = [asyncio.create_task(ask(pool, f"g{n}-r0")) for n in range(4)]
        await asyncio.sleep(0.005)
        first.switch_off()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(answer) for answer in answers].count(UnreachableError) == 2

        await pool.update_weights(2, Path("w2"))
        before = len(first.asked)
        await asyncio.gather(*(ask(pool, f"g{n}-r1") for n in range(4)))  # those of the dead server as well
        assert len(first.asked) == before and second.policy_version == 2

        first.switch_on()
        await asyncio.sleep(0.1)
        assert first.updates[-1] == (2, Path("w2"))
        completions = await asyncio.gather(*(ask(pool, f"h{n}-r0") for n in range(4)))
        assert len(first.asked) == before + 2
        assert {version for each in completions for version, _ in each.policy_versions} == {2}
        await pool.close()

    asyncio.run(main())
    assert "inference server s0 is left out: it went away" in caplog.text
    assert "inference server s0 is back" in caplog.text


def test_without_any_server_the_reason_names_them_all() -> None:
    async def main() -> None:
        servers = Server(), Server()
        pool = pool_of(*servers)
        for server in servers:
            server.switch_off()
        with pytest.raises(UnreachableError, match="none of the inference servers can be reached: s0, s1"):
            await pool.update_weights(1, Path("w1"))
        await pool.close()

    asyncio.run(main())


def test_aborts_reach_the_server_that_runs_the_request() -> None:
    async def main() -> list[str]:
        servers = Server(1.0), Server(1.0)
        pool = pool_of(*servers)
        asking = [asyncio.create_task(ask(pool, f"g{n}-r0")) for n in range(4)]
        await asyncio.sleep(0.01)
        await pool.abort([f"g{n}-r0" for n in range(4)])
        return [completion.finish_reason for completion in await asyncio.gather(*asking)]

    assert asyncio.run(main()) == ["abort"] * 4


def test_scoring_spreads_over_the_servers_and_leaves_out_one_that_is_gone() -> None:
    async def run() -> None:
        first, second = Server(), Server()
        pool = pool_of(first, second)
        try:
            scores = await asyncio.gather(*(pool.score([5, 6], 1.0, f"g{n}-r0") for n in range(4)))
            assert [score[1] for score in scores] == [math.log(0.5)] * 4
            assert first.num_scored == second.num_scored == 2
            first.switch_off()
            answers = await asyncio.gather(
                *(pool.score([5, 6], 1.0, f"g{n}-r1") for n in range(4)), return_exceptions=True
            )
            assert sum(isinstance(answer, UnreachableError) for answer in answers) >= 1
            num_scored = second.num_scored
            await pool.score([5, 6], 1.0, "g0-r2")
            assert second.num_scored == num_scored + 1
        finally:
            await pool.close()

    asyncio.run(run())
