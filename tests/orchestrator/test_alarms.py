"""The orchestrator's alarms: silent where an engine is honest, and what rings for which fault."""

import asyncio
import gc
import math
import random
import tracemalloc
from pathlib import Path
from typing import ClassVar

import pytest

from pellucid.data import Completion, Example, Rollout, TrainingSample, Turn
from pellucid.data.alarms import Alarm, read_alarms
from pellucid.inference.client import REFUSED, Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow
from pellucid.orchestrator import Score, SingleTurnEnvironment
from pellucid.orchestrator.alarms import OrchestratorAlarms, WatchedClient
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import publish_folder

CHANCES = [math.exp(-token / 8) for token in range(60)]
CHANCES = [chance / sum(CHANCES) for chance in CHANCES]
STOPS_AT_ONCE = 0
"""A first token after which a reply ends: such members are back before the others."""


class Drawing(FakeInferenceClient):
    """Draws first tokens with their chances, or from the likeliest few, and says what they are."""

    def __init__(self, *, top_k: int = 60, seeded: bool = True) -> None:
        super().__init__(lambda prompt, generator: [1])
        self._top_k = top_k
        self._seeded = seeded

    async def generate(self, prompt_ids, params, account, request_id) -> Completion:
        seed = params.seed if self._seeded else group_number(request_id)
        (token,) = random.Random(seed).choices(range(self._top_k), CHANCES[: self._top_k])
        if token != STOPS_AT_ONCE:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return Completion([token], [math.log(CHANCES[token])], [(self.policy_version, 1)], "stop")


def group_number(request_id: str) -> int:
    return int(request_id.split("/")[1].removeprefix("g"))


def watched(folder: Path, client: FakeInferenceClient) -> WatchedClient:
    return WatchedClient(client, OrchestratorAlarms(folder, lambda: 5, seed=0))


def rung(folder: Path) -> dict[str, Alarm]:
    return {alarm.name: alarm for alarm in read_alarms(folder)}


def sample_groups(client: WatchedClient, num_groups: int, size: int = 8) -> None:
    async def all_groups() -> None:
        for group in range(num_groups):
            prompt = [5, 6, group]
            requests = [
                client.generate(
                    prompt,
                    SamplingParams(seed=size * group + member),
                    Account(),
                    f"run/g{group}/g{group}-r{member}/0",
                )
                for member in range(size)
            ]
            await asyncio.gather(*requests)

    asyncio.run(all_groups())


def test_fair_first_tokens_are_silent_though_short_replies_are_back_first(tmp_path) -> None:
    sample_groups(watched(tmp_path, Drawing()), 400)
    assert rung(tmp_path) == {}


def test_first_tokens_of_the_likeliest_few_ring(tmp_path) -> None:
    sample_groups(watched(tmp_path, Drawing(top_k=8)), 150)
    alarm = rung(tmp_path)["first_tokens"]
    assert (alarm.step, alarm.threshold) == (5, 0.02)
    assert alarm.value > 0.1 and alarm.p_value < 1e-6
    assert "repeat more often" in alarm.statistic


def test_members_that_share_their_random_numbers_ring(tmp_path) -> None:
    sample_groups(watched(tmp_path, Drawing(seeded=False)), 20)
    assert "first_tokens" in rung(tmp_path)


@pytest.mark.parametrize("is_same", [True, False])
def test_members_that_come_one_after_the_other_count_if_their_prompts_are_the_same(tmp_path, is_same) -> None:
    client = watched(tmp_path, Drawing(seeded=False))

    async def all_groups() -> None:
        for number in range(20 * 8):
            group, member = divmod(number, 8)
            prompt = [5, 6, group if is_same else number]
            await client.generate(prompt, SamplingParams(), Account(), f"run/g{group}/g{group}-r{member}/0")

    asyncio.run(all_groups())
    assert ("first_tokens" in rung(tmp_path)) == is_same


def test_prompts_of_groups_that_are_back_are_not_kept(tmp_path) -> None:
    """4,096 groups are remembered: with prompts of 15,000 tokens these were 2 GB."""
    client = watched(tmp_path, Drawing())

    async def all_groups() -> None:
        for group in range(50):
            prompt = [1000 * group + place for place in range(1000)]
            await client.generate(prompt, SamplingParams(), Account(), f"run/g{group}/g{group}-r0/0")

    tracemalloc.start()
    try:
        asyncio.run(all_groups())
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 50 * 4000


def ask(client: WatchedClient, request_id: str = "run/g0/g0-r0/1") -> None:
    asyncio.run(client.generate([5], SamplingParams(), Account(), request_id))


class Claims(FakeInferenceClient):
    """Says these versions of its tokens."""

    def __init__(self, *versions: int, finish_reason: str = "stop") -> None:
        super().__init__(lambda prompt, generator: [1])
        self._versions, self._reason = versions, finish_reason

    async def generate(self, prompt_ids, params, account, request_id) -> Completion:
        runs = [(version, 1) for version in self._versions]
        return Completion([7] * len(runs), [-1.0] * len(runs), runs, self._reason)


@pytest.mark.parametrize(
    ("versions", "statistic", "value", "threshold"),
    [
        ((0,), "policy version of a reply that was asked of a newer one", 0, 2),
        ((2, 1), "policy version that follows a newer one in a reply", 1, 2),
        ((2, 3), "policy version of a reply, newer than any published", 3, 2),
    ],
)
def test_versions_that_cannot_be_ring(tmp_path, versions, statistic, value, threshold) -> None:
    client = watched(tmp_path, Claims(*versions))
    asyncio.run(client.update_weights(2, tmp_path))
    ask(client)
    alarm = rung(tmp_path)["served_versions"]
    assert (alarm.statistic, alarm.value, alarm.threshold) == (statistic, value, threshold)
    assert alarm.example == "request run/g0/g0-r0/1"


@pytest.mark.parametrize(
    "claims",
    [Claims(2, 2), Claims(), Claims(-1), Claims(0, finish_reason=REFUSED)],
    ids=["2", "no", "-1", "refused"],
)
def test_versions_that_can_be_are_silent(tmp_path, claims) -> None:
    client = watched(tmp_path, claims)
    asyncio.run(client.update_weights(2, tmp_path))
    ask(client)
    assert rung(tmp_path) == {}


def test_an_engine_that_resumed_by_itself_is_sound(tmp_path) -> None:
    """It serves what the run had published before the orchestrator has told it to."""
    publish_folder(tmp_path / "weights" / "step_7", lambda folder: None)
    ask(watched(tmp_path, Claims(7)))
    assert rung(tmp_path) == {}


def test_a_request_that_weights_overtake_is_sound(tmp_path) -> None:
    """It was sent to version 0, and goes on with 1."""

    class Slow(FakeInferenceClient):
        async def generate(self, prompt_ids, params, account, request_id) -> Completion:
            first = self.policy_version
            while self.policy_version == first:
                await asyncio.sleep(0)
            return Completion([7, 8], [-1.0, -1.0], [(first, 1), (self.policy_version, 1)], "stop")

    async def overtake() -> None:
        client = watched(tmp_path, Slow(lambda prompt, generator: [1]))
        request = asyncio.create_task(client.generate([5], SamplingParams(), Account(), "run/g0/g0-r0/1"))
        await asyncio.sleep(0)
        await client.update_weights(1, tmp_path)
        await request

    asyncio.run(overtake())
    assert rung(tmp_path) == {}


class Length(SingleTurnEnvironment):
    """Reward is the length of the answer."""

    num_calls = 0

    def example(self, index: int) -> Example:
        return Example(str(index), [])

    def reward(self, example: Example, text: str) -> Score:
        self.num_calls += 1
        return Score(len(text) / 10)


class Random(Length):
    repeatable_reward: ClassVar[bool] = False


class Slow(Length):
    heavy_reward: ClassVar[bool] = True


class Raising(Length):
    def reward(self, example: Example, text: str) -> Score:
        raise ValueError("once only")


def verdict(text: str, reward: float) -> Verdict:
    rollout = Rollout("g0-r0", "g0", Example("0", []), "length", 1.0, reward=reward)
    rollout.turns.append(Turn([5], Completion([6], [-1.0], [(0, 1)], "stop"), text))
    sample = TrainingSample.from_turn([5], [6], [-1.0], env_name="length", reward=reward)
    return Verdict(rollout, Flow.SENT, "", 0.5, [sample])


def judge(folder: Path, environment, *verdicts: Verdict) -> dict[str, float]:
    return OrchestratorAlarms(folder, lambda: 5, seed=0).judge_batch(verdicts, {"length": environment})


def test_the_reward_of_another_sample_rings(tmp_path) -> None:
    assert judge(tmp_path, Length(seed=0), verdict("abc", 0.7))["alarms/reward"] == 1
    alarm = rung(tmp_path)["reward"]
    assert alarm.value == pytest.approx(0.4)
    assert alarm.example == "rollout g0-r0 of length: 0.7 trains, 'abc' (str) scores 0.3"


def test_a_reward_that_is_the_same_again_is_silent(tmp_path) -> None:
    environment = Length(seed=0)
    assert judge(tmp_path, environment, verdict("abc", 0.3))["alarms/reward"] == 0
    assert environment.num_calls == 1


@pytest.mark.parametrize("kind", [Random, Slow, Raising])
def test_a_reward_that_cannot_be_asked_for_again_is_left_alone(tmp_path, kind) -> None:
    environment = kind(seed=0)
    assert judge(tmp_path, environment, verdict("abc", 0.7))["alarms/reward"] == 0
    assert environment.num_calls == 0
