"""The stages of the orchestrator, from the chat template to its batches, each held to what was sampled."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.checks.oracle.conversation import (
    expected_batches,
    off_policy_levels,
    prompt_ids_of,
    response_ids_of,
)
from pellucid.checks.verify.books import check_orchestrator_books
from pellucid.checks.verify.differences import EPS, Differences
from pellucid.checks.verify.expected import NUM_TURNS, ExpectedRun, group_of, rollouts_of
from pellucid.checks.verify.scenario import (
    DOUBT,
    ENVIRONMENTS,
    NUM_STEPS,
    RESUMED_AT,
    SECOND_RESPONSE,
    TOOL_RESPONSE,
    after,
)
from pellucid.data import TokenTable
from pellucid.ledger import Flow, State


def check_rollouts(expected: ExpectedRun, differences: Differences) -> None:
    """Holds prompts, examples, samples, rewards, advantages and batches to what was sampled."""
    check_examples(expected, differences)
    check_settled(expected, differences)
    for step, table in enumerate(expected.tables):
        for rollout_id, rows in rollouts_of(table).items():
            where = f"step {step}, rollout {rollout_id}"
            check_prompts(expected, differences, rollout_id, table["example_id"][rows[0]], where)
            check_samples(expected, differences, rollout_id, table, rows, where)
    check_batches(expected, differences)
    check_orchestrator_books(expected, differences)
    check_batch_metrics(expected, differences)


def check_examples(expected: ExpectedRun, differences: Differences) -> None:
    """Looks for gaps: the examples of an environment are attempted from the first one on."""
    for name, kind in ENVIRONMENTS.items():
        first = {
            tuple(rollout.turns[0].prompt_ids)
            for rollout in expected.rollouts.values()
            if rollout.env_name == name
        }
        prompts = [
            prompt_ids_of(expected.tokenizer, kind(seed=0).example(index).messages)
            for index in range(len(first))
        ]
        missing = [index for index, prompt in enumerate(prompts) if tuple(prompt) not in first]
        differences.same("examples", [], missing, f"{name}: examples that nobody attempted")


def check_settled(expected: ExpectedRun, differences: Differences) -> None:
    """Holds what was written down of all rollouts, also of those that came too late for a batch."""
    numbers = Counter(each["rollout_id"] for each in expected.played.settled)
    repeated = sorted(rollout_id for rollout_id, number in numbers.items() if number > 1)
    differences.same("saved rollouts", [], repeated, "rollouts that are saved several times")
    for each in expected.played.settled:
        rollout_id, advantage = each["rollout_id"], each["advantage"]
        reason = each["reason"] if each["outcome"] == State.REJECTED else None
        differences.same("samples", None, reason, f"rollout {rollout_id}: why it was rejected")
        if rollout_id in expected.rollouts:
            _check_saved(expected, differences, each)
        if advantage is not None:
            found = each["num_tool_tokens"]
            tools = expected.num_tool_tokens(rollout_id)
            differences.same("samples", tools, found, f"rollout {rollout_id}: tokens of tools' responses")
            _check_advantage(expected, differences, rollout_id, advantage, f"rollout {rollout_id}")


def _check_saved(expected: ExpectedRun, differences: Differences, saved: Mapping[str, Any]) -> None:
    """Holds the fields of a saved rollout, of which at least one turn was answered."""
    rollout_id = saved["rollout_id"]
    rollout = expected.rollouts[rollout_id]
    has_failed, is_sent = rollout_id in expected.failed, saved["outcome"] == Flow.SENT
    is_whole = len(rollout.turns) == NUM_TURNS.get(rollout.env_name, 1)
    messages = ENVIRONMENTS[rollout.env_name](seed=0).example(int(saved["example_id"])).messages
    fields = {
        "group_id": group_of(rollout_id),
        "env_name": rollout.env_name,
        "messages": [dict(message) for message in messages],
        "reward": rollout.reward if is_whole and not has_failed else None,
        "sample_ids": [f"{rollout_id}-{index}" for index in range(len(rollout.samples))] if is_sent else [],
        "trajectory": [
            {
                "text": text,
                "num_prompt_tokens": len(turn.prompt_ids),
                "num_tokens": len(turn.reply_ids),
                "finish_reason": "stop",
                "policy_versions": [[turn.versions[0], len(turn.versions)]],
            }
            for turn, text in zip(rollout.turns, expected.texts(rollout.turns), strict=True)
        ],
    }
    for name, value in fields.items():
        differences.same("saved rollouts", value, saved[name], f"rollout {rollout_id}, {name}")
    differences.same(
        "saved rollouts", has_failed, bool(saved["error"]), f"rollout {rollout_id}: has an error"
    )


def _check_advantage(
    expected: ExpectedRun, differences: Differences, rollout_id: str, found: float, where: str
) -> None:
    if expected.knows_advantages:
        advantage = expected.advantage(rollout_id)
        differences.near("advantages", advantage, found, 16 * EPS * max(1.0, abs(advantage)), where)


def check_prompts(
    expected: ExpectedRun, differences: Differences, rollout_id: str, example_id: str, where: str
) -> None:
    rollout = expected.rollouts[rollout_id]
    messages = ENVIRONMENTS[rollout.env_name](seed=0).example(int(example_id)).messages
    first, *later = rollout.turns
    prompt = prompt_ids_of(expected.tokenizer, messages)
    differences.same("prompts", prompt, list(first.prompt_ids), f"{where}, turn 0")
    called = after(messages, "reply", TOOL_RESPONSE)
    goes_on = [(first, messages, TOOL_RESPONSE), (first, messages, DOUBT)]
    goes_on += [(turn, called, SECOND_RESPONSE) for turn in later[:1]]
    for number, (turn, (last, asked, response)) in enumerate(zip(later, goes_on, strict=False), 1):
        known = [*last.prompt_ids, *last.reply_ids]
        added = response_ids_of(expected.tokenizer, asked, known[-1], response)
        differences.same("prompts", known + added, list(turn.prompt_ids), f"{where}, turn {number}")


def check_samples(
    expected: ExpectedRun,
    differences: Differences,
    rollout_id: str,
    table: TokenTable,
    rows: Sequence[int],
    where: str,
) -> None:
    rollout = expected.rollouts[rollout_id]
    temperature = np.float32(expected.temperature)
    differences.same("samples", len(rollout.samples), len(rows), f"{where}: number of samples")
    for row, sample in zip(rows, rollout.samples, strict=False):
        tokens = slice(int(table.token_offsets[row]), int(table.token_offsets[row + 1]))
        sampled = slice(int(table.sampled_offsets[row]), int(table.sampled_offsets[row + 1]))
        chosen = [index for index, flag in enumerate(sample.is_sampled) if flag]
        columns: dict[str, tuple[Sequence[Any], NDArray[Any]]] = {
            "token_ids": (sample.token_ids, table["token_ids"][tokens]),
            "loss_mask": (sample.is_trainable, table["loss_mask"][tokens]),
            "sampled": (sample.is_sampled, table["sampled"][tokens]),
            "inference_logprobs": (
                [sample.logprobs[i] for i in chosen],
                table["inference_logprobs"][sampled],
            ),
            "policy_versions": ([sample.versions[i] for i in chosen], table["policy_versions"][sampled]),
        }
        for name, (wanted, found) in columns.items():
            differences.same("samples", list(wanted), found.tolist(), f"{where}, {name}")
        differences.same("rewards", np.float32(rollout.reward), table["reward"][row], where)
        differences.same("samples", rollout.env_name, table["env_name"][row], f"{where}, env_name")
        differences.same("samples", temperature, table["temperature"][row], f"{where}, temperature")
        _check_advantage(expected, differences, rollout_id, float(table["advantage"][row]), where)


def check_batches(expected: ExpectedRun, differences: Differences) -> None:
    """Holds batches to groups in the order in which they were finished: whole, and as many as fill them."""
    settings = expected.config.orchestrator
    batches, stale = expected_batches(
        expected.finished_groups(),
        batch_size=settings.batch_size,
        max_off_policy_steps=settings.max_off_policy_steps,
        num_batches=NUM_STEPS,
    )
    stale |= _cut_short(expected)
    found_stale = {each["group_id"] for each in expected.played.settled if each["outcome"] == State.STALE}
    differences.same("staleness", sorted(stale), sorted(found_stale), "stale groups")
    taken: Counter[str] = Counter()
    for step, table in enumerate(expected.tables):
        found = rollouts_of(table)
        taken.update(found.keys())
        groups = list(dict.fromkeys(map(group_of, found)))
        wanted = [member for group in groups for member in expected.trained_members(group)]
        differences.same("batches", sorted(wanted), sorted(found), f"step {step}: its rollouts")
        differences.same("batches", batches[step : step + 1], [groups], f"step {step}: its groups")
    repeated = {rollout_id: number for rollout_id, number in taken.items() if number > 1}
    differences.same("batches", {}, repeated, "rollouts in several batches")


def _cut_short(expected: ExpectedRun) -> set[str]:
    """Groups that were too old before their last rollout was back, which is when the run was stopped."""
    finished = {group.name for group in expected.finished_groups()}
    limit = RESUMED_AT - expected.config.orchestrator.max_off_policy_steps
    unfinished = {group_of(rollout_id) for rollout_id in expected.rollouts} - finished
    return {group for group in unfinished if expected.oldest(group) < limit}


def check_batch_metrics(expected: ExpectedRun, differences: Differences) -> None:
    """Holds what the orchestrator logs of rewards and off-policy levels to what was sampled."""
    for step, table in enumerate(expected.tables):
        logged = expected.played.logged.get(step, {})
        levels = [
            level
            for rollout_id in rollouts_of(table)
            for sample in expected.rollouts[rollout_id].samples
            for level in off_policy_levels(step, sample)
        ]
        rewards = [
            expected.rollouts[each["rollout_id"]].reward
            for each in expected.played.settled
            if each["step"] == step and each["reward"] is not None and _is_logged(each)
        ]
        means = {
            "off_policy_level/all/mean": statistics.fmean(levels),
            "off_policy_level/all/max": float(max(levels)),
            "reward/all/mean": statistics.fmean(rewards),
        }
        for name, value in means.items():
            found = logged.get(name, math.nan)
            differences.near("metrics of batches", value, found, 16 * EPS, f"step {step}, {name}")


def _is_logged(settled: Mapping[str, Any]) -> bool:
    """Metrics are of one process, which does not log what was settled before it started."""
    is_resumed = "." in settled["group_id"] or settled["outcome"] == Flow.SENT
    return settled["step"] != RESUMED_AT or is_resumed
