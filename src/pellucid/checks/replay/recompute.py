"""Ratios, masks, losses and advantages again, from recorded logprobs, advantages and rewards.

`judge_losses` and `judge_advantages` ask the oracle about what was recorded; a custom function, which it does
not know, is called itself. `replay_losses` and `replay_advantages` call the functions of a run, also with
settings that the run did not have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from pellucid.checks.oracle.conversation import advantages_of
from pellucid.checks.oracle.losses import KNOWN, loss_weights_of, ratios_of, token_losses
from pellucid.config import AdvantageConfig, CustomAdvantageConfig, DefaultAdvantageConfig, LossConfig
from pellucid.config.orchestrator import OPTIONAL_ROLLOUT_FIELDS, ROLLOUT_FIELDS
from pellucid.data import Example, Rollout, TrainingMode, Turn
from pellucid.data.rows import Integers
from pellucid.data.schema import TOKEN_FIELDS
from pellucid.data.table import TokenTable, Values
from pellucid.data.tensors import TokenTensors
from pellucid.errors import DataError
from pellucid.loss import LossInputs, loss_for, sequence_weights
from pellucid.orchestrator.advantage import ScoredRollout, load_advantage

NEEDED = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
RATIOS = ("log_importance_ratio", "importance_ratio", "prob_delta", "mismatch_kl")
MASKS = ("is_masked", "is_masked_high", "is_masked_low")


def modes_of(step: TokenTable) -> Values:
    return step.get("training_mode", np.full(step.num_sequences, TrainingMode.RL.value, object))


def num_trainable(step: TokenTable) -> Integers:
    """Trainable tokens of each record."""
    counts = np.bincount(step.owners, step["loss_mask"], minlength=step.num_sequences)
    return counts.astype(np.int64)


def _groups_of(step: TokenTable) -> Values:
    return step.get("group_id", np.full(step.num_sequences, "", object))


def replay_losses(step: TokenTable, config: LossConfig | None) -> dict[str, Values]:
    """Computes `RATIOS`, `MASKS` and `token_loss` of each token of a step; NaN where there is none.

    Without a loss, the tokens of rl have ratios alone.
    """
    losses, modes = loss_for(config), modes_of(step)
    found = {name: np.full(step.num_tokens, np.nan, np.float32) for name in (*RATIOS, *MASKS, "token_loss")}
    for rows in _micro_batches(step):
        part = step.select(rows)
        columns = {
            field.name: torch.from_numpy(np.ascontiguousarray(part[field.name]))
            for field in TOKEN_FIELDS
            if field.name in part and not (field.optional and np.isnan(part[field.name]).all())
        }
        tokens = TokenTensors(part.lengths.tolist(), torch.empty(0), columns)  # no loss reads positions
        record = losses[modes[rows[0]]](LossInputs.of(tokens, columns["trainer_logprobs"]))
        for name, values in record.columns().items():
            if values is not None:
                found[name][step.tokens_of(rows)] = values.detach().numpy()
    if config is not None and config.reduction != "token":
        weights = np.ones(step.num_sequences, np.float32)
        chosen = np.flatnonzero(modes == TrainingMode.RL.value)
        groups = _groups_of(step)[chosen].tolist()
        weights[chosen] = sequence_weights(config.reduction, num_trainable(step)[chosen], groups)
        found["token_loss"] *= weights[step.owners]
    return found


def _micro_batches(step: TokenTable) -> Iterator[Integers]:
    """Yields the records of each as they were trained; a loss may look at all of them together."""
    zeros = np.zeros(step.num_sequences, np.int64)
    ranks, micro_steps = (step.get(name, zeros).tolist() for name in ("rank", "micro_step"))
    members: dict[tuple[int, int, str], list[int]] = {}
    for row, key in enumerate(zip(ranks, micro_steps, modes_of(step).tolist(), strict=True)):
        members.setdefault(key, []).append(row)
    for rows in members.values():
        yield np.array(rows, np.int64)


def judge_losses(step: TokenTable, config: LossConfig | None) -> tuple[dict[str, Values], NDArray[np.bool_]]:
    """Computes what `replay_losses` does, by the oracle's formulas in float64.

    Also returns which tokens lie so close to a bound of the trust region that float32 may decide otherwise.
    """
    replayed = replay_losses(step, config) if config is None or config.type not in KNOWN else None
    found = replayed or {
        name: np.full(step.num_tokens, np.nan, np.float64) for name in (*RATIOS, *MASKS, "token_loss")
    }
    undecided = np.zeros(step.num_tokens, np.bool_)
    modes = modes_of(step)
    reduction = "token" if config is None else config.reduction
    counts = num_trainable(step).tolist()
    weights = np.array(loss_weights_of(reduction, counts, _groups_of(step).tolist(), modes.tolist()))
    for mode in dict.fromkeys(modes.tolist()):
        if mode == TrainingMode.RL.value and replayed is not None:
            continue
        rows = np.flatnonzero(modes == mode)
        tokens, part = step.tokens_of(rows), step.select(rows)
        verdict = token_losses(
            mode,
            {} if config is None else config.model_dump(),
            log_pi=part["trainer_logprobs"],
            log_mu=part["inference_logprobs"],
            advantages=part["advantages"],
            trainable=part["loss_mask"].astype(np.bool_),
            lengths=part.lengths.tolist(),
            teacher=part.get("teacher_logprobs"),
        )
        found["token_loss"][tokens] = verdict.loss * weights[rows][part.owners]
        if mode == TrainingMode.SFT.value:
            continue
        for name, ratios in ratios_of(part["trainer_logprobs"], part["inference_logprobs"]).items():
            found[name][tokens] = ratios
        for name in MASKS:
            if (mask := getattr(verdict, name)) is not None:
                found[name][tokens] = mask
        if verdict.margin is not None:
            undecided[tokens] = verdict.margin < 64 * np.finfo(np.float32).eps
    return found, undecided


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
    """Computes the same by the oracle.

    Raises DataError if saved rollouts do not suffice: earlier versions did not save tool tokens.
    """
    if isinstance(config, CustomAdvantageConfig):
        return replay_advantages(rollouts, config)
    if isinstance(config, DefaultAdvantageConfig) and config.length_penalty.type == "tokens":
        are_missing = any("num_tool_tokens" not in rollout for rollout in rollouts)
        if config.length_penalty.tool_response_weight and are_missing:
            raise DataError(
                "orchestrator.advantage.length_penalty weighs tool tokens, which these rollouts do not have"
            )
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
        found |= dict(zip((member["rollout_id"] for member in members), advantages, strict=True))
    return found


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
            name: orjson.dumps(value).decode()
            for name, value in record.items()
            if name not in (*ROLLOUT_FIELDS, *OPTIONAL_ROLLOUT_FIELDS)
        },
    )
    return replace(ScoredRollout.of(rollout), tool_response_tokens=record.get("num_tool_tokens", 0))
