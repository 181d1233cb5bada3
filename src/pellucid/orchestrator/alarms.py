"""The orchestrator's alarms: versions, first tokens and rewards; see docs/alarms.md.

- `WatchedClient` stands before the inference client and sees all answers, whatever becomes of them. A token
  cannot be of an older policy version than was served when its request was sent, nor of a newer one than was
  asked for when it came back.
- The members of a group start from one prompt. In the order in which they were asked for, each one's first
  token is a draw whose chance to repeat an earlier one is known: the logprobs of those say so.
- One rollout of each batch is scored again.
"""

import inspect
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pellucid.data import Completion, Rollout
from pellucid.data.alarms import Bell
from pellucid.data.images import has_pixels, tensors_of
from pellucid.data.plain import brief
from pellucid.data.rollout import NOT_OURS
from pellucid.inference.client import REFUSED, Account, InferenceClient, SamplingParams, group_of_request
from pellucid.metrics import MeanZeroTest
from pellucid.orchestrator.chat import copy_nested
from pellucid.orchestrator.environment import Environment, SingleTurnEnvironment, checked_score
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import stable_steps

log = logging.getLogger(__name__)

SERVED_VERSIONS, FIRST_TOKENS, REWARD = "served_versions", "first_tokens", "reward"

CAUSES = {
    SERVED_VERSIONS: "The versions that tokens name are not those that sampled them, so that staleness is "
    "counted wrong, or the engine does not load what it is told to. Look at its `update_weights`, and at the "
    "version that it writes to each token",
    FIRST_TOKENS: "The engine does not draw from the distribution whose logprobs it reports (top-k, top-p, a "
    "penalty, another temperature), or draws share their random numbers. Run `pellucid verify`",
    REWARD: "The reward is that of another sample, or depends on something else than the example and the "
    "answer (time, random numbers, earlier calls). If that is meant, set `repeatable_reward = False` in the "
    "environment",
}

FIRST_TOKENS_TOLERANCE = 0.02
"""Difference in the share of repeated first tokens that is no alarm: in bfloat16, the logprobs that members
of a group report for one prompt differ slightly."""

REWARD_TOLERANCE = 1e-6
"""Relative difference between two scores of one rollout that is no alarm: samples carry rewards in float32.
It is relative to the reward, or to 1 where the reward is smaller."""

_MIN_DRAWS, _DRAWS_SHARE = 32, 1 / 16
"""Draws that are judged together: so many, or this share of those before. Fewer looks are no less valid, and
a fault is found after at most 1/16 more draws."""

_MAX_GROUPS = 4096


class OrchestratorAlarms:
    def __init__(
        self, output_dir: Path, step: Callable[[], int], seed: int, weights: Path | None = None
    ) -> None:
        """`step` returns the step of the batch that is being sampled. `weights`: folder of the published
        versions."""
        self._bell = Bell(output_dir, CAUSES)
        self._weights = weights or output_dir / "weights"
        self._step = step
        self._random = random.Random(seed)
        self._first_tokens = MeanZeroTest(1.0, FIRST_TOKENS_TOLERANCE)
        self._draws: list[float] = []
        """Draws that have not been added to the test yet."""

        self._unrepeatable: set[str] = set()

    def check_versions(self, request_id: str, completion: Completion, served: int, asked: int) -> None:
        """`served`: the version that was loaded before the request was sent; `asked`: the newest that was
        asked for by the time of the answer."""
        versions = [version for version, _ in completion.policy_versions if version != NOT_OURS]
        if not versions or completion.finish_reason == REFUSED:
            return
        fall = next((pair for pair in pairwise(versions) if pair[1] < pair[0]), None)
        if fall is not None:
            what, value, threshold = "policy version that follows a newer one in a reply", fall[1], fall[0]
        elif versions[0] < served:
            what = "policy version of a reply that was asked of a newer one"
            value, threshold = versions[0], served
        elif versions[-1] > asked and versions[-1] > max(stable_steps(self._weights), default=0):
            what = "policy version of a reply, newer than any published"
            value, threshold = versions[-1], asked
        else:
            return
        self._bell.ring(SERVED_VERSIONS, self._step(), what, value, threshold, f"request {request_id}")

    def add_first_tokens(self, values: Sequence[float], group: str) -> None:
        """Adds draws: each value is 1 if the token repeats an earlier one, else 0, minus its probability."""
        self._draws += values
        test, draws = self._first_tokens, self._draws
        if len(draws) < max(_MIN_DRAWS, _DRAWS_SHARE * test.count):
            return
        self._draws = []
        test.add(len(draws), sum(draws), sum(draw * draw for draw in draws))
        if test.rings:
            often = "more" if test.mean > 0 else "less"
            self._bell.ring(
                FIRST_TOKENS,
                self._step(),
                f"first tokens of a group repeat {often} often than their logprobs say: share",
                test.mean,
                test.threshold,
                example=f"{test.count:,} first tokens; the last ones of {group}",
                p_value=test.p_value,
            )

    def judge_batch(
        self, verdicts: Sequence[Verdict], environments: Mapping[str, Environment]
    ) -> dict[str, float]:
        """Scores one rollout of a batch once more, and returns the metrics of all alarms."""
        self._check_reward(self._random.choice(verdicts), environments)
        return self._bell.metrics()

    def _check_reward(self, verdict: Verdict, environments: Mapping[str, Environment]) -> None:
        rollout = verdict.rollout
        environment = environments.get(rollout.env_name)
        if rollout.env_name in self._unrepeatable or environment is None or not verdict.samples:
            return
        if not has_pixels(rollout.example.messages):  # it comes from a snapshot
            return
        found = _reward_again(environment, rollout)
        if found is None:
            self._unrepeatable.add(rollout.env_name)
            return
        trained = float(verdict.samples[0].values.get("reward", math.nan))
        if not abs(trained - found) <= REWARD_TOLERANCE * max(1.0, abs(found)):
            self._bell.ring(
                REWARD,
                self._step(),
                "difference of a reward that trains from that of the same answer scored again",
                value=trained - found,
                threshold=REWARD_TOLERANCE,
                example=f"rollout {rollout.rollout_id} of {rollout.env_name}: {trained:g} trains, "
                f"{brief(rollout.turns[-1].text)} scores {found:g}",
            )


def _reward_again(environment: Environment, rollout: Rollout) -> float | None:
    """Scores the rollout once more; None if its reward cannot be repeated, or scoring raised."""
    if not isinstance(environment, SingleTurnEnvironment) or not can_repeat(environment):
        return None
    example = replace(rollout.example, messages=copy_nested(list(rollout.example.messages)))
    try:
        return checked_score(environment.reward(example, rollout.turns[-1].text), environment.reward).reward
    except Exception as error:  # of somebody's own code
        log.info("the reward of %s is not checked: scored again, it raises %r", rollout.env_name, error)
        return None


def can_repeat(environment: SingleTurnEnvironment) -> bool:
    """Whether the reward is a function of example and answer that costs little."""
    kind = type(environment)
    return (
        kind.rollout is SingleTurnEnvironment.rollout
        and kind.repeatable_reward
        and not (kind.heavy_reward or kind.requires_group_scoring or inspect.iscoroutinefunction(kind.reward))
    )


@dataclass(slots=True)
class _Group:
    """First replies of the members of a group, in the order in which they were asked for."""

    name: str
    temperature: float
    prompt_ids: Sequence[int] | None
    """The prompt that its members share; None while none of them is out: prompts may be long."""

    prompt_hash: int
    replies: list[tuple[int, float, int] | None] = field(default_factory=list)
    """First token, its logprob and its policy version, by request; None: not answered yet, or failed."""

    num_out: int = 0
    version: int | None = None
    known: set[int] = field(default_factory=set)
    """First tokens seen so far."""

    chance: float = 0.0
    """Probability that the next first token is one of `known`."""

    def take(self) -> list[float]:
        """Returns 1 or 0 for each token that was known or not, minus the probability of that.

        Tokens come in the order of the requests; the first, and those of other policy versions, are left out.
        """
        values = []
        for token, logprob, version in filter(None, self.replies):
            self.version = version if self.version is None else self.version
            if version != self.version:
                continue
            if self.known:
                values.append((token in self.known) - min(1.0, self.chance))
            if token not in self.known:
                self.known.add(token)
                self.chance += math.exp(logprob)
        self.replies.clear()
        return values


def _hash(prompt_ids: Sequence[int]) -> int:
    return hash((tuple(prompt_ids), tensors_of(prompt_ids)))


class WatchedClient:
    """An inference client that shows every answer to the alarms before it returns it."""

    def __init__(self, client: InferenceClient, alarms: OrchestratorAlarms) -> None:
        self._client = client
        self._alarms = alarms
        self._served = self._asked = 0
        self._groups: dict[str, _Group] = {}
        self.wait_until_ready, self.watch = client.wait_until_ready, client.watch
        self.score, self.abort, self.close = client.score, client.abort, client.close

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        served = self._served
        group = self._find_group(prompt_ids, params, request_id)
        if group is None:
            completion = await self._client.generate(prompt_ids, params, account, request_id)
        else:
            place = len(group.replies)
            group.replies.append(None)
            group.num_out += 1
            try:
                completion = await self._client.generate(prompt_ids, params, account, request_id)
                if completion.token_ids and completion.finish_reason != REFUSED:
                    first = completion.token_ids[0], completion.logprobs[0], completion.policy_versions[0][0]
                    group.replies[place] = first
            finally:
                group.num_out -= 1
                # Not while a request is running: which answers come back first depends on their tokens.
                if not group.num_out:
                    group.prompt_ids = None
                    if draws := group.take():
                        self._alarms.add_first_tokens(draws, group.name)
        versions = completion.policy_versions
        if len(versions) != 1 or not served <= versions[0][0] <= self._asked:
            self._alarms.check_versions(request_id, completion, served, self._asked)
        return completion

    async def update_weights(self, version: int, folder: Path) -> None:
        self._asked = max(self._asked, version)
        await self._client.update_weights(version, folder)
        self._served = version

    def _find_group(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> _Group | None:
        """Returns the group that this request adds a first token to; None if it adds to none."""
        if not request_id.endswith("/0") or params.temperature == 0:
            return None
        name = group_of_request(request_id)
        group = self._groups.get(name)
        if group is None:
            prompt_hash = _hash(prompt_ids)
            group = self._groups[name] = _Group(name, params.temperature, prompt_ids, prompt_hash)
            if len(self._groups) > _MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        elif group.temperature != params.temperature or (
            group.prompt_ids is not prompt_ids and group.prompt_hash != _hash(prompt_ids)
        ):
            return None
        group.prompt_ids = prompt_ids
        return group
