"""The client that stands in for an engine: what it answers, and when, and what it keeps.

It answers with the likeliest token and some unlikely ones, chosen such that a reply earns the reward that its
member of the group should have. It reports logprobs that are off the model's by chosen distances, so that
tokens fall on both sides of a trust region. It keeps what it sampled: that, and nothing that the orchestrator
says, is what the oracle starts from.

Some answers wait for a policy version, so that the groups of a run come back as follows:

    g0, g3         version 0                                             batch 0
    g1             version 0, and after its first turn version 1         batch 1, one step old in part
    g4             version 0, but its last member waits for version 2    stale once batch 1 is formed
    g5             version 1                                             batch 1
    g7 and later   version 2, which is published after the resume        in flight when the run is stopped
    g2, g6         no signal
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pellucid.checks.oracle.conversation import Sampled
from pellucid.checks.oracle.training import ReferenceModel
from pellucid.data import Completion
from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient

REPLY_TOKENS = 6
OFFSETS = (0.02, -0.4, 0.9, -0.03, 0.0, 1.5)
"""log μ − log π of the tokens of a reply, in turn; on the likeliest token μ is made far smaller or larger."""

LEAST_LOGPROB = -40.0
"""log μ of a token is at least this, however sure of another the model is: below −44 samples are rejected."""

REASONING = "<think>no</think>"
"""The start of a first reply that goes on to a tool: some chat templates would drop it from the history."""

BROKEN = "broken"
"""The start of a reply that makes the fragile environment raise."""

REWARDS = (1.0, 0.25, 1.0)
"""Rewards of the members of a group: the best come twice, so that a length penalty tells them apart, and no
advantage is 0."""

MAX_DRAWS = 200
"""Replies that are drawn for one that earns the wanted reward."""


def reward_of(text: str) -> float:
    """Reads a reward off a reply, so that a reply and its reward cannot be parted unnoticed."""
    return (sum(map(ord, text)) % 5) / 4


def earliest_version(group: str, rollout_id: str, turn: int) -> int:
    """The policy version that a request waits for."""
    number = int(group.removeprefix("g").partition(".")[0])
    if number >= 7 or rollout_id == "g4-r2":
        return 2
    return 1 if number >= 5 or (group == "g1" and turn > 0) else 0


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
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
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
        wanted = None
        opening: list[int] = []
        if account.env == "tools" and turn == "0":
            opening, wanted = self._reasoning, 0.0
        elif turn == ("1" if account.env == "tools" else "0"):
            opening = self._broken if account.env == "fragile" and rollout_id.endswith("-r0") else []
            wanted = REWARDS[int(rollout_id.rpartition("-r")[2])]
        reply = self._reply(prompt_ids, opening, wanted, generator)
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
        self,
        prompt_ids: Sequence[int],
        opening: Sequence[int],
        wanted: float | None,
        generator: random.Random,
    ) -> list[int]:
        """An opening, the likeliest token, unlikely ones, one that no text shows, and the end of the turn.

        Whoever tokenises the text again gets other tokens than were sampled. `wanted`: the text's reward.
        """
        with torch.no_grad():
            likely = self._model.likeliest(prompt_ids)
        for _ in range(MAX_DRAWS):
            others = generator.choices(self._ordinary, k=generator.randint(1, REPLY_TOKENS - 2))
            reply = [*opening, likely, *others, *self._silent, self._end_of_turn]
            if wanted is None or reward_of(self._decode(reply)) == wanted:
                break
        return reply

    def _temperatures(self, prompt_ids: Sequence[int], reply: Sequence[int]) -> Any:
        return np.full(len(prompt_ids) + len(reply), self._temperature)


def _off(log_pi: float, offset: float, generator: random.Random) -> float:
    """Moves a logprob by nearly half a unit of probability where there is room, else by `offset`."""
    pi = math.exp(log_pi)
    if pi > 0.5:
        return math.log(pi - 0.45) if generator.random() < 0.5 else math.log(min(0.99, pi + 0.005))
    if generator.random() < 0.25:
        return math.log(pi + 0.45)
    return max(LEAST_LOGPROB, min(log_pi + offset, -1e-3))
