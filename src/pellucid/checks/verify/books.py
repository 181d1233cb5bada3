"""The ledgers of the scripted run, and what its checkpoints keep, held to what was sampled.

Journals and checkpoints are read as JSON here, not by their own readers.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_model
from pellucid.checks.oracle.conversation import Conversation
from pellucid.checks.verify.differences import Differences
from pellucid.checks.verify.expected import ExpectedRun
from pellucid.checks.verify.training_stages import TrainedStep, check_weights
from pellucid.ledger import Flow, State
from pellucid.trainer.run import Run
from pellucid.transport import stable_steps
from pellucid.transport.weights import weights_folder

Counts = dict[str, dict[str, int]]
"""Tokens by environment and state."""


def _entries(journal: Path) -> Iterator[dict[str, Any]]:
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        if entry.get("counts"):
            yield entry


def _summed(entries: Iterator[dict[str, Any]]) -> Counts:
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        counts.setdefault(entry.get("env", ""), Counter()).update(entry["counts"])
    return {env: {what: tokens for what, tokens in own.items() if tokens} for env, own in counts.items()}


def check_orchestrator_books(expected: ExpectedRun, differences: Differences) -> None:
    """Holds the tokens of every outcome to what the client sampled for the rollouts that had it."""
    journal, wanted = expected.played.folder / "ledger" / "orchestrator.jsonl", Counts()
    for each in expected.played.settled:
        rollout = expected.rollouts.get(each["rollout_id"])  # None: its request was given up
        num_tokens = 0 if rollout is None else sum(len(turn.reply_ids) for turn in rollout.turns)
        own = wanted.setdefault(each["env_name"], {})
        own[each["outcome"]] = own.get(each["outcome"], 0) + num_tokens
        differences.same(
            "books of batches", num_tokens, each["num_tokens"], f"rollout {each['rollout_id']}: its tokens"
        )
        if each["rollout_id"] in expected.failed:
            where = f"rollout {each['rollout_id']}, which failed: its outcome"
            differences.same("books of batches", State.FAILED_ROLLOUT.value, each["outcome"], where)
    marks = [mark for line in journal.read_text().splitlines() if (mark := json.loads(line).get("mark"))]
    where = f"marks in {journal.name}, which a resume goes back to"
    differences.same("books of batches", sorted({abs(mark) for mark in marks}), marks, where)
    found = _summed(_entries(journal))
    for env, own in wanted.items():
        booked = {what: found.get(env, {}).get(what, 0) for what in own}
        differences.same("books of batches", own, booked, f"{env}: tokens by outcome in {journal.name}")


def check_trainer_books(
    step: TrainedStep,
    whole: Mapping[tuple[str, int], Conversation],
    journal: Path,
    differences: Differences,
) -> None:
    """Holds what the trainer books of a step to the oracle's masks; `whole`: its samples, not truncated."""
    wanted: dict[str, Counter[State | Flow]] = {}
    for key, conversation in step.conversations.items():
        sampled, trainable = np.array(conversation.is_sampled), np.array(conversation.is_trainable)
        num_received = sum(whole[key].is_sampled)
        own = wanted.setdefault(step.rollouts[key[0]].env_name, Counter())
        own[Flow.RECEIVED] += num_received
        own[State.TRUNCATED] += num_received - int(sampled.sum())
        own[State.UNTRAINABLE] += int((sampled & ~trainable).sum())
        own[State.TRAINED] += int(trainable.sum())
        own[Flow.CONTEXT] += int((~sampled).sum())
    undecided = 0
    for each in step.of_tokens():
        if each.losses.is_masked is not None:
            num_masked = int((each.losses.is_masked & each.sequence.trainable).sum())
            own = wanted[step.rollouts[each.key[0]].env_name]
            own[State.MASKED] += num_masked
            own[State.TRAINED] -= num_masked
            undecided += int((each.sequence.trainable & ~each.decided).sum())
    found = _summed(each for each in _entries(journal) if each.get("step", 0) == step.number)
    for env, counts in wanted.items():
        for what, tokens in counts.items():
            allowed = 0.5 + (undecided if what in (State.MASKED, State.TRAINED) else 0)
            where = f"{step.where}, {env}: {what.value} tokens in {journal.name}"
            differences.near("books of steps", tokens, found.get(env, {}).get(what.value, 0), allowed, where)


def check_checkpoints(run: Run, due: list[int], journal: Path, differences: Differences) -> None:
    """Holds a run that is over to the checkpoints that are due; leaves it with the last one's weights."""
    parent = run.output_dir / "checkpoints"
    differences.same("checkpoint", due, stable_steps(parent), "steps after which there is one")
    for step in stable_steps(parent):
        folder = parent / f"step_{step}"
        progress = json.loads((folder / "progress.json").read_bytes())
        where = f"checkpoint {step}"
        differences.same("checkpoint", step, progress["step"], f"{where}: steps that are trained")
        booked = _summed(each for each in _entries(journal) if each.get("step", 0) < step)
        kept = _summed(iter(progress["ledger"]))
        differences.same("checkpoint", booked, kept, f"{where}: its ledger, against {journal.name}")
        last = {each.get("step", 0) for each in progress["ledger"]}
        differences.same("checkpoint", {step - 1}, last, f"{where}: the last step of its ledger")
        published = weights_folder(run.output_dir, step)
        if published.exists():
            read_model(run.trained.module, folder / STATE)
            check_weights("checkpoint", run, published, differences, where)
