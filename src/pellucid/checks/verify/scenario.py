"""A small run whose every sampled token is known beforehand, sent through the real orchestrator.

    environment   what it does                                                        shows
    answer        one turn; the reward is read off the text                           advantages, masks
    tools         a reply, a tool's response, a reply, another response, a reply;     turns in one sample,
                  in between a question that forgets the tool, and one that forgets   branches, loss masks,
                  all replies, whose own replies are not to be trained                tool tokens, places
    flat          one turn, always the same reward                                    no signal
    fragile       one turn; the reply of each group's first member makes it raise     members that failed

A client stands in for the engine. It answers with the likeliest token and some unlikely ones, chosen such
that a reply earns the reward that its member of the group should have. It reports logprobs that are off the
model's by chosen distances, so that tokens fall on both sides of a trust region. It keeps what it sampled:
that, and nothing that the orchestrator says, is what the oracle starts from.

The run is stopped once, while groups are in flight, and resumed. A stand-in for the trainer publishes a new
policy version for every batch, without weights. Some answers wait for a policy version, so that the groups
come back as follows:

    g0, g3         version 0                                             batch 0
    g1             version 0, and after its first turn version 1         batch 1, one step old in part
    g4             version 0, but its last member waits for version 2    stale once batch 1 is formed
    g5             version 1                                             batch 1
    g7 and later   version 2, which is published after the resume        in flight when the run is stopped
    g2, g6         no signal
"""

import asyncio
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

import pellucid.orchestrator
from pellucid.checks.oracle.conversation import Sampled, prompt_ids_of
from pellucid.checks.oracle.training import ReferenceModel
from pellucid.checks.verify.subject import updated
from pellucid.config import OrchestratorRunConfig, VerifyConfig
from pellucid.config.orchestrator import EnvConfig, SamplingConfig
from pellucid.data import Completion, Example
from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient
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
TURNS_OF_STILLNESS = 400
"""Turns of the event loop; a rollout goes on, or another one starts, within a few, or after a write to a busy
disk."""

POLL_S = 0.01
STUCK_S = 5.0
"""A run that goes on without a batch or an answer for this long has lost groups that the script counts on.
Counted in polls, of which a process that gets no core makes fewer."""

TURNS_OF_A_SAMPLE = 8
"""At most: its prompt, replies and responses, none of them longer than the prompt and a reply."""

REPLY_TOKENS = 6
OFFSETS = (0.02, -0.4, 0.9, -0.03, 0.0, 1.5)
"""log μ − log π of the tokens of a reply, in turn; on the likeliest token μ is made far smaller or larger."""

LEAST_LOGPROB = -16.0
"""log μ of a token is at least this, however sure of another the model is: an update may make the token
likely, and a ratio of e⁴⁰ would leave nothing of a step but the rounding of one token."""

REASONING = "<think>no</think>"
"""The start of a first reply that goes on to a tool: some chat templates would drop it from the history."""

BROKEN = "broken"
"""The start of a reply that makes the fragile environment raise."""

LENGTH = "length"
"""A metric of the environment `answer`: characters of the reply."""

FLAT_REWARD = 0.1
REWARDS = (1.0, 0.25, 1.0)
"""Rewards of the members of a group: the best come twice, so that a length penalty tells them apart, and no
advantage is 0."""

MAX_DRAWS = 200
"""Replies that are drawn for one that earns the wanted reward."""

TOOL_RESPONSE = {"role": "tool", "content": "42"}
SECOND_RESPONSE = {"role": "tool", "content": "7"}
DOUBT = {"role": "user", "content": "Sure?"}
FRESH_START = {"role": "user", "content": "Again!"}


def reward_of(text: str) -> float:
    """Reads a reward off a reply, so that a reply and its reward cannot be parted unnoticed."""
    return (sum(map(ord, text)) % 5) / 4


def fragile_reward_of(text: str) -> float:
    """Never 0, so that a failed member whose reward is taken for 0 shows in its group's advantages."""
    return 0.5 + reward_of(text)


def after(messages: Sequence[Message], reply: str, response: Message) -> list[Message]:
    """The conversation once `reply` got a response."""
    return [*messages, {"role": "assistant", "content": reply}, response]


class OneReply(SingleTurnEnvironment):
    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"What follows {index}?"}])

    def reward(self, example: Example, text: str) -> Score:
        return Score(reward_of(text), {LENGTH: float(len(text))})


class Flat(OneReply):
    def reward(self, example: Example, text: str) -> Score:
        return Score(FLAT_REWARD)


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
        session.withdraw(await session.sample([*example.messages, FRESH_START]))
        await session.respond(after(called, second, SECOND_RESPONSE))
        return Score(reward_of(first + second))


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
    params: SamplingParams


class ScriptedClient(FakeInferenceClient):
    def __init__(self, model: ReferenceModel, temperature: float, tokenizer: Any) -> None:
        super().__init__(lambda prompt_ids, generator: [])
        self._model = model
        self._temperature = temperature
        self._end_of_turn = int(tokenizer.eos_token_id)
        special = set(tokenizer.all_special_ids)
        self._ordinary = [number for number in range(min(256, len(tokenizer))) if number not in special]
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._silent = sorted(special - set(end_of_turn_ids(tokenizer)))[:1]
        self._given_up: set[str] = set()
        self._is_patient = True
        self.requests: list[ScriptedRequest] = []
        """Those that were answered, in order."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        _, group, rollout_id, turn = request_id.rsplit("/", 3)
        if not await self._is_served(earliest_version(group, rollout_id, int(turn)), request_id):
            return Completion([], [], [], "abort")
        generator = random.Random(request_id)
        opening = ""
        wanted: float | None = None
        if account.env == "tools" and turn == "0":
            opening, wanted = REASONING, 0.0
        elif turn == ("1" if account.env == "tools" else "0"):
            opening = BROKEN if account.env == "fragile" and rollout_id.endswith("-r0") else ""
            wanted = REWARDS[int(rollout_id.rpartition("-r")[2])]
        reply = self._reply(prompt_ids, opening, wanted, generator)
        temperatures = np.full(len(prompt_ids) + len(reply), self._temperature)
        with torch.no_grad():
            logprobs, _ = self._model.logprobs([*prompt_ids, *reply], temperatures)
        first = generator.randrange(len(OFFSETS))
        moved = [
            move_logprob(log_pi, OFFSETS[(first + number) % len(OFFSETS)], generator)
            for number, log_pi in enumerate(logprobs[len(prompt_ids) :].tolist())
        ]
        log_mu = np.array(moved, np.float32).astype(np.float64).tolist()
        sampled = Sampled(list(prompt_ids), reply, log_mu, [self.policy_version] * len(reply))
        self.requests.append(ScriptedRequest(account.env, rollout_id, sampled, params))
        self.sampled[account] += len(reply)
        self.delivered[account] += len(reply)
        return Completion(reply, log_mu, [(self.policy_version, len(reply))], "stop")

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a policy version."""
        return len(self._aborted)

    async def _is_served(self, version: int, request_id: str) -> bool:
        """Waits until the policy version is; False if the request was aborted before."""
        while self._waits_for(version) and request_id not in self._given_up:
            woken = self._aborted[request_id] = asyncio.Event()
            await woken.wait()
            del self._aborted[request_id]
        return not self._waits_for(version)

    def _waits_for(self, version: int) -> bool:
        return self._is_patient and self.policy_version < version

    def lose_patience(self) -> None:
        """Answers from now on whatever the version: a run with a fault may never get to the one it is."""
        self._is_patient = False
        self._wake()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._given_up |= set(request_ids)
        await super().abort(request_ids)

    async def update_weights(self, version: int, folder: Path, run: str = "") -> None:
        await super().update_weights(version, folder, run)
        self._wake()

    def _wake(self) -> None:
        for woken in self._aborted.values():
            woken.set()

    def _reply(
        self, prompt_ids: Sequence[int], opening: str, wanted: float | None, generator: random.Random
    ) -> list[int]:
        """An opening, the likeliest token, unlikely ones, one that no text shows, and the end of the turn.

        Whoever tokenises the text again gets other tokens than were sampled. `wanted`: the text's reward.
        """
        with torch.no_grad():
            start = [*self._encode(opening), self._model.likeliest(prompt_ids)]
        for _ in range(MAX_DRAWS):
            others = generator.choices(self._ordinary, k=generator.randint(1, REPLY_TOKENS - 2))
            reply = [*start, *others, *self._silent, self._end_of_turn]
            if wanted is None or reward_of(self._decode(reply)) == wanted:
                break
        return reply


def earliest_version(group: str, rollout_id: str, turn: int) -> int:
    """The policy version that a request waits for."""
    number = int(group.removeprefix("g").partition(".")[0])
    if number >= 7 or rollout_id == "g4-r2":
        return 2
    return 1 if number >= 5 or (group == "g1" and turn > 0) else 0


def move_logprob(log_pi: float, offset: float, generator: random.Random) -> float:
    """Moves a logprob by nearly half a unit of probability where there is room, else by `offset`."""
    pi = math.exp(log_pi)
    if pi > 0.5:
        return math.log(pi - 0.45) if generator.random() < 0.5 else math.log(min(0.99, pi + 0.005))
    if generator.random() < 0.25:
        return math.log(pi + 0.45)
    return max(LEAST_LOGPROB, min(log_pi + offset, -1e-3))


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


def play(config: VerifyConfig, folder: Path, tokenizer: Any, model: ReferenceModel) -> Played:
    """Runs the orchestrator of `config` on the scenario until it has sent `NUM_STEPS` batches.

    It is stopped and resumed once. At its temperature the likeliest token has more than half of the
    probability.
    """
    opening = prompt_ids_of(tokenizer, OneReply(seed=0).example(0).messages)
    temperature = 1.5
    while model.top_probability(opening, temperature) < 0.7 and temperature > 1e-3:
        temperature /= 1.5
    orchestrator = updated(
        config.orchestrator,
        env=tuple(
            EnvConfig(id=f"{__name__}:{kind.__name__}", name=name) for name, kind in ENVIRONMENTS.items()
        ),
        eval=(),
        filter=(),
        teacher=None,
        batch_size=GROUP_SIZE + 1,  # fewer than two groups have: a batch that is cut there splits one
        token_batch_size=None,
        rollouts_per_example=GROUP_SIZE,
        max_inflight_rollouts=2 * GROUP_SIZE,  # so that no kind of group gets far ahead of another
        max_off_policy_steps=MAX_OFF_POLICY_STEPS,
        pace_sampling=False,
        max_retries=0,
        tasks_per_minute=None,
        sampling=SamplingConfig(temperature=temperature, max_tokens=REPLY_TOKENS),
    )
    part = config.part(
        OrchestratorRunConfig,
        output_dir=folder,
        orchestrator=orchestrator.model_dump(),
        max_steps=NUM_STEPS,
        max_async_level=MAX_OFF_POLICY_STEPS,
        monitors={},
        resume=False,
    )
    assert isinstance(part, OrchestratorRunConfig)
    longest = max(part.inference.max_model_len, TURNS_OF_A_SAMPLE * (len(opening) + REPLY_TOKENS))
    part = updated(part, inference={"max_model_len": longest})
    environments = {name: kind(seed=config.seed) for name, kind in ENVIRONMENTS.items()}
    client = ScriptedClient(model, temperature, tokenizer)
    sender = FilesystemSender(folder)
    with _quiet():
        first = Orchestrator(part, environments, tokenizer, client, sender)
        if asyncio.run(_interrupt(first, client, folder)):
            _publish(folder, RESUMED_AT)
            resumed = updated(part, resume=True)
            asyncio.run(Orchestrator(resumed, environments, tokenizer, client, sender).run())
    receiver = FilesystemReceiver(folder)
    paths = sorted(folder.glob(f"rollouts/*/{FILE}"))
    return Played(
        folder,
        part,
        client.requests,
        batches=[receiver.receive(step) for step in range(NUM_STEPS)],
        settled=[orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()],
        logged={each["step"]: each for each in read_metrics(folder / "metrics" / "orchestrator.jsonl")},
    )


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
