"""A small run whose every sampled token is known beforehand, sent through the real orchestrator.

    environment   what it does                                                        shows
    answer        one turn; the reward is read off the text                           advantages, masks
    tools         a reply, a tool's response, a reply, another response, a reply;     turns in one sample,
                  in between a question that forgets the tool, whose reply is not     branches, loss masks,
                  to be trained                                                       tool tokens
    flat          one turn, always the same reward                                    no signal
    fragile       one turn; the reply of each group's first member makes it raise     members that failed

The run is stopped once, while groups are in flight, and resumed. A stand-in for the trainer publishes a new
policy version for every batch, without weights; `script` tells which groups wait for which version.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import pellucid.orchestrator
from pellucid.checks.oracle.training import ReferenceModel
from pellucid.checks.verify.script import (
    BROKEN,
    REPLY_TOKENS,
    ScriptedClient,
    ScriptedRequest,
    reward_of,
)
from pellucid.config import OrchestratorRunConfig, VerifyConfig
from pellucid.config.orchestrator import EnvConfig, SamplingConfig
from pellucid.data import Example
from pellucid.metrics import read_metrics
from pellucid.orchestrator import Environment, Orchestrator, Score, Session, SingleTurnEnvironment
from pellucid.orchestrator.chat import Message
from pellucid.orchestrator.records import FILE
from pellucid.transport import Batch, publish_folder, stable_steps
from pellucid.transport.spool import FilesystemReceiver, FilesystemSender
from pellucid.transport.weights import weights_folder

NUM_STEPS = 3
RESUMED_AT = 2
"""Batches before the orchestrator, and steps before the trainer, is stopped and resumed."""

GROUP_SIZE = 3
MAX_OFF_POLICY_STEPS = 1
TURNS_OF_STILLNESS = 100
"""Turns of the event loop; a rollout goes on, or another one starts, within a few."""

POLL_S = 0.01
STUCK_S = 5.0
"""A run that goes on without a batch or an answer for this long has lost groups that the script counts on.
Counted in polls, of which a process that gets no core makes fewer."""

TURNS_OF_A_SAMPLE = 8
"""At most: its prompt, replies and responses, none of them longer than the prompt and a reply."""

TOOL_RESPONSE = {"role": "tool", "content": "42"}
SECOND_RESPONSE = {"role": "tool", "content": "7"}
DOUBT = {"role": "user", "content": "Sure?"}


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
        called = after(example.messages, first, TOOL_RESPONSE)
        second = await session.respond(called)
        session.withdraw(await session.sample(after(example.messages, first, DOUBT)))
        await session.respond(after(called, second, SECOND_RESPONSE))
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

    folder: Path
    config: OrchestratorRunConfig
    requests: list[ScriptedRequest]
    batches: list[Batch]
    settled: list[dict[str, Any]]
    """Every rollout that was written down, also those that no batch has."""

    logged: Mapping[int, Mapping[str, Any]]
    """The orchestrator's metrics of each step."""


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
            "max_off_policy_steps": MAX_OFF_POLICY_STEPS,
            "pace_sampling": False,
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
        max_async_level=MAX_OFF_POLICY_STEPS,
        monitors={},
        resume=False,
    )
    assert isinstance(part, OrchestratorRunConfig)
    longest = max(part.inference.max_model_len, TURNS_OF_A_SAMPLE * (len(opening) + REPLY_TOKENS))
    inference = part.inference.model_copy(update={"max_model_len": longest})
    part = part.model_copy(update={"inference": inference})
    environments = {name: kind(seed=config.seed) for name, kind in ENVIRONMENTS.items()}
    client = ScriptedClient(model, temperature, tokenizer)
    sender = FilesystemSender(folder)
    with _quiet():
        first = Orchestrator(part, environments, tokenizer, client, sender)
        if asyncio.run(_interrupt(first, client, folder)):
            _publish(folder, RESUMED_AT)
            resumed = part.model_copy(update={"resume": True})
            asyncio.run(Orchestrator(resumed, environments, tokenizer, client, sender).run())
    receiver = FilesystemReceiver(folder)
    batches = [receiver.receive(step) for step in range(NUM_STEPS)]
    logged = {record["step"]: record for record in read_metrics(folder / "metrics" / "orchestrator.jsonl")}
    return Played(folder, part, client.requests, batches, _settled(folder), logged)


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


def _publish(folder: Path, version: int) -> None:
    """Announces a policy version; the client loads no weights."""
    publish_folder(weights_folder(folder, version), lambda target: None)


async def _is_still(client: ScriptedClient) -> bool:
    """Whether all that is in flight waits for a policy version: many turns of the loop bring no answer."""
    num_answered = len(client.requests)
    for turn in range(TURNS_OF_STILLNESS):
        await asyncio.sleep(POLL_S / 10 if turn % 2 else 0)  # a thread may have to go on
    return client.num_waiting > 0 and len(client.requests) == num_answered


async def _interrupt(orchestrator: Orchestrator, client: ScriptedClient, folder: Path) -> bool:
    """Runs it until it has sent `RESUMED_AT` batches and waits for groups that nobody answers.

    The version after each batch but the last is published. Returns False if the orchestrator came to its end.
    """
    running = asyncio.create_task(orchestrator.run())
    published = num_answered = num_polls = 0
    while not running.done() and not (published == RESUMED_AT and await _is_still(client)):
        if len(stable_steps(folder / "batches")) > published:
            published += 1
            if published < RESUMED_AT:
                _publish(folder, published)
        if len(client.requests) > num_answered:
            num_answered, num_polls = len(client.requests), 0
        elif num_polls * POLL_S > STUCK_S:
            client.lose_patience()
        num_polls += 1
        await asyncio.sleep(POLL_S)
    is_stopped = running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return is_stopped
