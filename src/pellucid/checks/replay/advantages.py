"""Advantages again, from the saved rewards of all members of a group, dropped ones included."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from pellucid.checks.oracle import advantages_of
from pellucid.config import AdvantageConfig, CustomAdvantageConfig, DefaultAdvantageConfig
from pellucid.config.orchestrator import ROLLOUT_FIELDS
from pellucid.data import Example, Rollout, Turn
from pellucid.errors import DataError
from pellucid.orchestrator.advantage import ScoredRollout, load_advantage


def replay_advantages(rollouts: Sequence[Mapping[str, Any]], config: AdvantageConfig) -> dict[str, float]:
    """By rollout id; those that failed, or whose group did, were never judged and have none."""
    judged = [rollout for rollout in rollouts if rollout["advantage"] is not None]
    try:
        scored = [_scored(rollout) for rollout in judged]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"a saved rollout lacks what its advantage follows from: {error!r}") from error
    advantages = load_advantage(config).compute(scored)
    return {rollout["rollout_id"]: advantage for rollout, advantage in zip(judged, advantages, strict=True)}


def judge_advantages(rollouts: Sequence[Mapping[str, Any]], config: AdvantageConfig) -> dict[str, float]:
    """Computes the same by the oracle; a custom function, which it does not know, is asked itself."""
    if isinstance(config, CustomAdvantageConfig):
        return replay_advantages(rollouts, config)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for rollout in rollouts:
        if rollout["advantage"] is not None:
            groups.setdefault(rollout["group_id"], []).append(rollout)
    settings = config.model_dump()
    found: dict[str, float] = {}
    for members in groups.values():
        advantages = advantages_of(
            settings["type"],
            [member["reward"] for member in members],
            completion_tokens=[sum(turn["num_tokens"] for turn in each["trajectory"]) for each in members],
            tool_tokens=[member.get("num_tool_tokens", 0) for member in members],
            num_turns=[len(member["trajectory"]) for member in members],
            length_penalty=settings.get("length_penalty"),
        )
        found |= {each["rollout_id"]: own for each, own in zip(members, advantages, strict=True)}
    return found


def not_replayable(rollouts: Sequence[Mapping[str, Any]], config: AdvantageConfig) -> str | None:
    """Why saved rollouts do not suffice, if they do not: earlier versions did not save tool tokens."""
    if isinstance(config, DefaultAdvantageConfig):
        penalty = config.length_penalty
        weighs_tools = penalty.type == "tokens" and penalty.tool_response_weight
        if weighs_tools and any("num_tool_tokens" not in rollout for rollout in rollouts):
            return (
                "orchestrator.advantage.length_penalty weighs tool tokens, which these rollouts do not have"
            )
    return None


def _scored(record: Mapping[str, Any]) -> ScoredRollout:
    turns = [
        Turn.without_tokens(
            text=turn["text"],
            num_prompt_tokens=turn["num_prompt_tokens"],
            num_tokens=turn["num_tokens"],
            finish_reason=turn["finish_reason"],
            policy_versions=[(version, count) for version, count in turn["policy_versions"]],
        )
        for turn in record["trajectory"]
    ]
    rollout = Rollout(
        record["rollout_id"],
        record["group_id"],
        Example(record["example_id"], record["messages"]),
        record["env_name"],
        record["sampling_args"].get("temperature", 1.0),
        turns,
        record["reward"],
        record["metrics"],
        state={
            name: orjson.dumps(value).decode() for name, value in record.items() if name not in ROLLOUT_FIELDS
        },
    )
    return replace(ScoredRollout.of(rollout), tool_response_tokens=record.get("num_tool_tokens", 0))
