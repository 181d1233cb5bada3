"""One rollout from start to end: what it sampled, what became of it, why its tokens did or did not train."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from pellucid import export
from pellucid.checks.ledger.audit import decode_saved, rollout_lines
from pellucid.errors import DataError, LedgerError
from pellucid.ledger import MEANING, Flow, State
from pellucid.metrics import read_metrics

_SHOWN = 200


class SavedTurn(msgspec.Struct):
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None
    policy_versions: list[tuple[int, int]]


class SavedRollout(msgspec.Struct):
    step: int
    group_id: str
    rollout_id: str
    sample_ids: list[str]
    env_name: str
    example_id: str
    outcome: str
    reason: str
    error: str | None
    reward: float | None
    advantage: float | None
    num_tokens: int
    stop_reason: str | None
    trajectory: list[SavedTurn]


@dataclass(frozen=True, slots=True)
class Story:
    rollout: SavedRollout
    group: list[float | None]
    """Rewards of all rollouts of its group."""

    states: dict[str, int]
    """Sampled tokens by ledger state, as far as known: an export tells what became of sent ones."""

    unknown: str = ""
    """Why it is not known what became of the others."""

    def as_json(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self.rollout),
            **{key: value for key, value in asdict(self).items() if key != "rollout"},
        }


def stories_of(run: Path, name: str) -> list[Story]:
    """Reads the story of a rollout, or of each of a group; one that was sampled again has several."""
    if not (run / "rollouts").is_dir():
        raise LedgerError(f"{run} holds no saved rollouts; give the folder of an rl run")
    wanted = name.encode()
    decoder = msgspec.json.Decoder(SavedRollout)
    found = [decode_saved(decoder, place, line) for place, line in rollout_lines(run) if wanted in line]
    chosen = [each for each in found if name in (each.rollout_id, each.group_id)]
    if not chosen:
        raise LedgerError(
            f"{run} has no rollout or group {name!r} among its saved rollouts; their ids are in "
            "rollouts/step_N/train_rollouts.jsonl. What is still being sampled is not there yet"
        )
    groups = {each.group_id for each in chosen}
    peers: dict[tuple[int, str], list[float | None]] = {}
    for place, line in rollout_lines(run):
        if any(group.encode() in line for group in groups):
            each = decode_saved(decoder, place, line)
            peers.setdefault((each.step, each.group_id), []).append(each.reward)
    return [_story(run, each, peers[each.step, each.group_id]) for each in chosen]


def _story(run: Path, rollout: SavedRollout, group: list[float | None]) -> Story:
    if rollout.outcome != Flow.SENT:
        return Story(rollout, group, {rollout.outcome: rollout.num_tokens})
    try:
        reader = export.open(run)
    except DataError:
        reader = None
    if reader is None or rollout.step not in reader.steps:
        return Story(rollout, group, {}, "the run has no token export of that step")
    records = reader.step(rollout.step).where(rollout_id=rollout.rollout_id)
    states: Counter[str] = Counter()
    is_skipped = rollout.step in skipped_steps(run)
    for record in records:
        sampled, trainable = record["sampled"], record["loss_mask"]
        masked = record["is_masked"]
        is_masked = np.zeros_like(trainable) if masked is None else masked.astype(np.bool_)
        states[State.UNTRAINABLE.value] += int((sampled & ~trainable).sum())
        if is_skipped:
            states[State.SKIPPED.value] += int(trainable.sum())
            continue
        states[State.MASKED.value] += int((trainable & is_masked).sum())
        states[State.TRAINED.value] += int((trainable & ~is_masked).sum())
    num_left = rollout.num_tokens - states.total()
    if len(records) < len(rollout.sample_ids):
        return Story(
            rollout,
            group,
            dict(+states),
            f"{num_left:,} untrainable or truncated: samples without a trainable token are not exported",
        )
    states[State.TRUNCATED.value] = num_left
    return Story(rollout, group, dict(+states))


def skipped_steps(run: Path) -> set[int]:
    """Steps that moved no weights, by the trainer's metrics; an export is written before that is decided."""
    path = run / "metrics" / "trainer.jsonl"
    records = read_metrics(path) if path.exists() else ()
    return {record["step"] for record in records if record.get("skipped_steps")}


def print_stories(stories: list[Story], console: Console) -> None:
    for story in stories:
        for line in story_lines(story):
            console.print(line, highlight=False, soft_wrap=True)
        console.out("")


def story_lines(story: Story) -> list[str]:
    rollout = story.rollout
    versions = Counter[int]()
    for turn in rollout.trajectory:
        for version, tokens in turn.policy_versions:
            versions[version] += tokens
    sampled_by = ", ".join(f"{version} ({tokens:,})" for version, tokens in sorted(versions.items()))
    lines = [
        f"rollout {rollout.rollout_id} of {rollout.env_name}, example {rollout.example_id}, "
        f"group {rollout.group_id}",
        f"  sampled    {rollout.num_tokens:,} tokens in {len(rollout.trajectory)} "
        f"turn{'s' if len(rollout.trajectory) != 1 else ''}"
        + (f"; policy version (tokens): {sampled_by}" if versions else "")
        + (f"; stopped: {rollout.stop_reason}" if rollout.stop_reason else ""),
    ]
    for turn in rollout.trajectory:
        lines.append(f"             {_shortened(turn.text)!r}")
    lines.append(f"  reward     {_number(rollout.reward)}; its group: {_rewards(story.group)}")
    if rollout.advantage is not None:
        lines.append(f"  advantage  {_number(rollout.advantage)}")
    if rollout.outcome == Flow.SENT:
        lines.append(f"  outcome    sent to the trainer with the batch of step {rollout.step}")
    else:
        because = f": {rollout.reason}" if rollout.reason else ""
        lines.append(f"  outcome    {rollout.outcome}{because} (settled at step {rollout.step})")
    if rollout.error:
        lines.append(f"  error      {rollout.error}")
    for state, tokens in story.states.items():
        lines.append(f"  tokens     {tokens:,} {state}: {MEANING[State(state)]}")
    if story.unknown:
        lines.append(f"  tokens     {story.unknown}")
    return lines


def _rewards(rewards: list[float | None]) -> str:
    shown = " ".join(_number(reward) for reward in rewards[:16])
    return f"{shown} …" if len(rewards) > 16 else shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
