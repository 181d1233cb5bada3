"""The client that stands in for an engine: what it answers, and what it keeps.

It answers with the likeliest token and some unlikely ones, and reports logprobs that are off the model's by
chosen distances, so that tokens fall on both sides of a trust region. It keeps what it sampled: that, and
nothing that the orchestrator says, is what the oracle starts from.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pellucid.checks.oracle import ReferenceModel, Sampled
from pellucid.data import Completion
from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.fake import FakeInferenceClient

INTERRUPTED = "g4"
"""The group that is in flight when the orchestrator is stopped: nobody answers it."""

REPLY_TOKENS = 6
OFFSETS = (0.02, -0.4, 0.9, -0.03, 0.0, 1.5)
"""log μ − log π of the tokens of a reply, in turn; on the likeliest token μ is made far smaller or larger."""

REASONING = "<think>no</think>"
"""The start of a first reply that goes on to a tool: some chat templates would drop it from the history."""

BROKEN = "broken"
"""The start of a reply that makes the fragile environment raise."""


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
