"""A small run whose every sampled token is known beforehand, sent through the real orchestrator.

    environment   what it does                                                        shows
    answer        one turn; the reward is read off the text                           advantages, masks
    tools         a reply, a tool's response, a reply; then a question that forgets   turns in one sample,
                  the tool; its last reply is not to be trained                       branches, loss masks
    flat          one turn, always the same reward                                    no signal
    fragile       one turn; the reply of each group's first member makes it raise     members that failed

The run is stopped once, while a group is in flight, and resumed.

The client stands in for an engine. It answers with the likeliest token and some unlikely ones, and reports
logprobs that are off the model's by chosen distances, so that tokens fall on both sides of a trust region.
It keeps what it sampled: that, and nothing that the orchestrator says, is what the oracle starts from.
"""

import asyncio
import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

import pellucid.orchestrator
from pellucid.checks.oracle import ReferenceModel, Sampled
from pellucid.config import OrchestratorRunConfig, VerifyConfig
from pellucid.config.orchestrator import EnvConfig, SamplingConfig
from pellucid.data import Completion, Example
from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
from pellucid.orchestrator import Environment, Orchestrator, Score, Session, SingleTurnEnvironment
from pellucid.orchestrator.chat import Message
from pellucid.orchestrator.records import FILE
from pellucid.transport import Batch, stable_steps
from pellucid.transport.filesystem import FilesystemReceiver, FilesystemSender

NUM_STEPS = 3
RESUMED_AT = 2
"""Batches before the orchestrator, and steps before the trainer, is stopped and resumed."""

INTERRUPTED = "g4"
"""The group that is in flight when the orchestrator is stopped: nobody answers it."""

GROUP_SIZE = 3
REPLY_TOKENS = 6
OFFSETS = (0.02, -0.4, 0.9, -0.03, 0.0, 1.5)
"""log μ − log π of the tokens of a reply, in turn; on the likeliest token μ is made far smaller or larger."""

REASONING = "<think>no</think>"
"""The start of a first reply that goes on to a tool: some chat templates would drop it from the history."""

BROKEN = "broken"
"""The start of a reply that makes the fragile environment raise."""

TOOL_RESPONSE = {"role": "tool", "content": "42"}
DOUBT = {"role": "user", "content": "Sure?"}


def reward_of(text: str) -> float:
    """Reads a reward off a reply, so that a reply and its reward cannot be parted unnoticed."""
    return (sum(map(ord, text)) % 5) / 4


class OneReply(SingleTurnEnvironment):
    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"What follows {index}?"}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(reward_of(text))


class Flat(OneReply):
    def reward(self, example: Example, text: str) -> Score:
        return Score(0.1)


class Fragile(OneReply):
    def reward(self, example: Example, text: str) -> Score:
        if BROKEN in text:
            raise ValueError("a reply that this environment cannot read")
        return Score(fragile_reward_of(text))


class Tools(OneReply):
    async def rollout(self, example: Example, session: Session) -> Score:
        first = await session.respond(example.messages)
        second = await session.respond(after(example.messages, first, TOOL_RESPONSE))
        session.withdraw(await session.sample(after(example.messages, first, DOUBT)))
        return Score(reward_of(first + second))


def fragile_reward_of(text: str) -> float:
    """Never 0, so that a failed member whose reward is taken for 0 shows in its group's advantages."""
    return 0.5 + reward_of(text)


def after(messages: Sequence[Message], reply: str, response: Message) -> list[Message]:
    """The conversation once `reply` got a response."""
    return [*messages, {"role": "assistant", "content": reply}, response]


ENVIRONMENTS: dict[str, type[Environment]] = {
    "answer": OneReply,
    "tools": Tools,
    "flat": Flat,
    "fragile": Fragile,
}


@dataclass(frozen=True)
class ScriptedRequest:
    """One request as the client saw it."""

    env_name: str
    rollout_id: str
    sampled: Sampled


class ScriptedClient(FakeInferenceClient):
    def __init__(self, model: ReferenceModel, temperature: float, tokenizer: Any) -> None:
        super().__init__(lambda prompt_ids, generator: [])
        self._model = model
        self._temperature = temperature
        self._end_of_turn = int(tokenizer.eos_token_id)
        special = set(tokenizer.all_special_ids)
        self._ordinary = [number for number in range(min(256, len(tokenizer))) if number not in special]
        self._reasoning: list[int] = tokenizer(REASONING, add_special_tokens=False)["input_ids"]
        self._broken: list[int] = tokenizer(BROKEN, add_special_tokens=False)["input_ids"]
        self._silent = sorted(special - set(end_of_turn_ids(tokenizer)))[:1]
        self.requests: list[ScriptedRequest] = []
        self.is_interrupted = True
        """Whether the requests of `INTERRUPTED` wait until they are aborted."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        _, group, rollout_id, number = request_id.rsplit("/", 3)
        if self.is_interrupted and group == INTERRUPTED:
            return await self._wait_for_abort(request_id)
        generator = random.Random(request_id)
        reply = self._reply(prompt_ids, generator)
        if account.env == "tools" and number == "0":
            reply = [*self._reasoning, *reply]
        if account.env == "fragile" and rollout_id.endswith("-r0"):
            reply = [*self._broken, *reply]
        with torch.no_grad():
            logprobs, _ = self._model.logprobs([*prompt_ids, *reply], self._temperatures(prompt_ids, reply))
        log_pi = logprobs[len(prompt_ids) :].tolist()
        first = generator.randrange(len(OFFSETS))
        log_mu = [
            _off(own, OFFSETS[(first + number) % len(OFFSETS)], generator)
            for number, own in enumerate(log_pi)
        ]
        log_mu = np.array(log_mu, np.float32).astype(np.float64).tolist()
        sampled = Sampled(list(prompt_ids), reply, log_mu, [self.policy_version] * len(reply))
        self.requests.append(ScriptedRequest(account.env, rollout_id, sampled))
        self.sampled[account] += len(reply)
        self.delivered[account] += len(reply)
        return Completion(reply, log_mu, [(self.policy_version, len(reply))], "stop")

    async def _wait_for_abort(self, request_id: str) -> Completion:
        aborted = self._aborted[request_id] = asyncio.Event()
        await aborted.wait()
        return Completion([], [], [], "abort")

    def _reply(self, prompt_ids: Sequence[int], generator: random.Random) -> list[int]:
        """The likeliest token, unlikely ones, one that no text shows, and the end of the turn.

        Whoever tokenises the text again gets other tokens than were sampled.
        """
        with torch.no_grad():
            likely = self._model.likeliest(prompt_ids)
        others = generator.choices(self._ordinary, k=generator.randint(1, REPLY_TOKENS - 2))
        return [likely, *others, *self._silent, self._end_of_turn]

    def _temperatures(self, prompt_ids: Sequence[int], reply: Sequence[int]) -> Any:
        return np.full(len(prompt_ids) + len(reply), self._temperature)


def _off(log_pi: float, offset: float, generator: random.Random) -> float:
    """Moves a logprob by nearly half a unit of probability where there is room, else by `offset`."""
    pi = math.exp(log_pi)
    if pi > 0.5:
        return math.log(pi - 0.45) if generator.random() < 0.5 else math.log(min(0.99, pi + 0.005))
    if generator.random() < 0.25:
        return math.log(pi + 0.45)
    return min(log_pi + offset, -1e-3)


@dataclass(frozen=True)
class Played:
    """The outcome of a scenario: what was sampled, and the batches that it became."""

    config: OrchestratorRunConfig
    requests: list[ScriptedRequest]
    batches: list[Batch]
    settled: list[dict[str, Any]]
    """Every rollout that was written down, also those that no batch has."""


def sharp_temperature(model: ReferenceModel, prompt_ids: Sequence[int]) -> float:
    """Finds a temperature at which the likeliest token has more than half of the probability."""
    temperature = 1.5
    while model.top_probability(prompt_ids, temperature) < 0.7 and temperature > 1e-3:
        temperature /= 1.5
    return temperature


def play(config: VerifyConfig, folder: Path, tokenizer: Any, model: ReferenceModel) -> Played:
    """Runs the orchestrator of `config` on the scenario until it has sent `NUM_STEPS` batches.

    It is stopped and resumed once.
    """
    messages = OneReply(seed=0).example(0).messages
    opening = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    temperature = sharp_temperature(model, opening)
    own = config.orchestrator.model_copy(
        update={
            "env": tuple(
                EnvConfig(id=f"{__name__}:{kind.__name__}", name=name) for name, kind in ENVIRONMENTS.items()
            ),
            "eval": (),
            "filter": (),
            "teacher": None,
            "batch_size": GROUP_SIZE + 1,  # fewer than two groups have: a batch that is cut there splits one
            "token_batch_size": None,
            "rollouts_per_example": GROUP_SIZE,
            "max_inflight_rollouts": 2 * GROUP_SIZE,  # so that no kind of group gets far ahead of another
            "max_off_policy_steps": NUM_STEPS,
            "max_retries": 0,
            "tasks_per_minute": None,
            "sampling": SamplingConfig(temperature=temperature, max_tokens=REPLY_TOKENS),
        }
    )
    part = config.part(
        OrchestratorRunConfig,
        output_dir=folder,
        orchestrator=own.model_dump(),
        max_steps=NUM_STEPS,
        max_async_level=NUM_STEPS,
        monitors={},
        resume=False,
    )
    assert isinstance(part, OrchestratorRunConfig)
    environments = {name: kind(seed=config.seed) for name, kind in ENVIRONMENTS.items()}
    client = ScriptedClient(model, temperature, tokenizer)
    sender = FilesystemSender(folder)
    with _quiet():
        asyncio.run(_interrupt(Orchestrator(part, environments, tokenizer, client, sender), folder))
        client.is_interrupted = False
        resumed = part.model_copy(update={"resume": True})
        asyncio.run(Orchestrator(resumed, environments, tokenizer, client, sender).run())
    receiver = FilesystemReceiver(folder)
    batches = [receiver.receive(step) for step in range(NUM_STEPS)]
    return Played(part, client.requests, batches, _settled(folder))


def _settled(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"rollouts/*/{FILE}"))
    return [orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the orchestrator says of failed rollouts from the user, whose they are not."""
    logger = logging.getLogger(pellucid.orchestrator.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _interrupt(orchestrator: Orchestrator, folder: Path) -> None:
    """Runs it until it has sent `RESUMED_AT` batches; the next one waits for the interrupted group."""
    running = asyncio.create_task(orchestrator.run())
    while len(stable_steps(folder / "batches")) < RESUMED_AT and not running.done():
        await asyncio.sleep(0.01)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
