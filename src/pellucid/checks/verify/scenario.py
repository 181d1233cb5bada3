"""A small run whose every sampled token is known beforehand, sent through the real orchestrator.

    environment   what it does                                                        shows
    answer        one turn; the reward is read off the text                           advantages, masks
    tools         a reply, a tool's response, a reply; then a question that forgets   turns in one sample,
                  the tool; its last reply is not to be trained                       branches, loss masks
    flat          one turn, always the same reward                                    no signal
    fragile       one turn; the reply of each group's first member makes it raise     members that failed

The run is stopped once, while a group is in flight, and resumed.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import pellucid.orchestrator
from pellucid.checks.oracle import ReferenceModel
from pellucid.checks.verify.script import BROKEN, REPLY_TOKENS, ScriptedClient, ScriptedRequest
from pellucid.config import OrchestratorRunConfig, VerifyConfig
from pellucid.config.orchestrator import EnvConfig, SamplingConfig
from pellucid.data import Example
from pellucid.orchestrator import Environment, Orchestrator, Score, Session, SingleTurnEnvironment
from pellucid.orchestrator.chat import Message
from pellucid.orchestrator.records import FILE
from pellucid.transport import Batch, stable_steps
from pellucid.transport.filesystem import FilesystemReceiver, FilesystemSender

NUM_STEPS = 3
RESUMED_AT = 2
"""Batches before the orchestrator, and steps before the trainer, is stopped and resumed."""

GROUP_SIZE = 3
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
