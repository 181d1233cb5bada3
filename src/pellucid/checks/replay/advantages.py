"""Advantages again, from the saved rewards of all members of a group, dropped ones included."""

from collections.abc import Mapping, Sequence
from typing import Any

from pellucid.config import AdvantageConfig, DefaultAdvantageConfig
from pellucid.orchestrator.advantage import ScoredRollout, load_advantage


def replay_advantages(rollouts: Sequence[Mapping[str, Any]], config: AdvantageConfig) -> dict[str, float]:
    """By rollout id; those that failed, or whose group did, were never judged and have none."""
    judged = [rollout for rollout in rollouts if rollout["advantage"] is not None]
    advantages = load_advantage(config).compute([_scored(rollout) for rollout in judged])
    return {rollout["rollout_id"]: advantage for rollout, advantage in zip(judged, advantages, strict=True)}


def not_replayable(config: AdvantageConfig) -> str | None:
    """Why saved rollouts do not suffice, if they do not."""
    if isinstance(config, DefaultAdvantageConfig):
        penalty = config.length_penalty
        if penalty.type == "tokens" and penalty.tool_response_weight:
            return (
                "orchestrator.advantage.length_penalty weighs tool tokens, which saved rollouts do not have"
            )
    return None


def _scored(rollout: Mapping[str, Any]) -> ScoredRollout:
    return ScoredRollout(
        reward=rollout["reward"],
        completion_tokens_per_turn=[turn["num_tokens"] for turn in rollout["trajectory"]],
        tool_response_tokens=0,
        env_name=rollout["env_name"],
        example_id=rollout["example_id"],
        group_id=rollout["group_id"],
    )
