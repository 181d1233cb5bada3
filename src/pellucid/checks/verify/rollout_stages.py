"""The stages of the orchestrator, from the chat template to its batches, each held to what was sampled.

`ExpectedRun` is the oracle's account of a scenario: it starts from what the client sampled, from the
settings, and from which rollouts are in which batch. Journals are read as JSON here, not by their own reader.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pellucid.checks.finding import EPS, Differences
from pellucid.checks.oracle.conversation import (
    Conversation,
    FinishedGroup,
    Sampled,
    advantages_of,
    end_of_messages,
    expected_batches,
    expected_samples,
    off_policy_levels,
    prompt_ids_of,
    response_ids_of,
    response_length_of,
    truncated,
)
from pellucid.checks.oracle.training import ReferenceSequence
from pellucid.checks.verify.scenario import (
    BROKEN,
    DOUBT,
    ENVIRONMENTS,
    FLAT_REWARD,
    FRESH_START,
    GROUP_SIZE,
    LENGTH,
    NUM_STEPS,
    RESUMED_AT,
    SECOND_RESPONSE,
    TOOL_RESPONSE,
    Played,
    after,
    fragile_reward_of,
    reward_of,
)
from pellucid.config import CustomAdvantageConfig
from pellucid.data import TokenTable, TrainingMode
from pellucid.ledger import Flow, State

NUM_TURNS = {"tools": 5}
"""Requests of a rollout, where it is not one."""

PLACES: Sequence[Mapping[str, Any]] = (
    {},
    {"messages": [TOOL_RESPONSE]},
    {"after": 0, "messages": [DOUBT], "sample": 1, "trainable": False},
    {"keeps": 1, "messages": [FRESH_START], "sample": 2, "trainable": False},
    {"after": 1, "messages": [SECOND_RESPONSE], "sample": 0},
)
"""The place in its conversation that is saved with each of these requests."""

SCHEMA = 2
"""Form of a saved rollout, as the documentation says."""

OTHER_FIELDS = {"rollout_id", "example_id", "outcome", "error", "advantage", "num_tool_tokens", "time_s"}
"""Fields of a saved rollout that are held elsewhere, or told by a clock."""


@dataclass(frozen=True)
class ExpectedRollout:
    """One rollout as it should be, from what the client sampled for it."""

    env_name: str
    turns: list[Sampled]
    texts: list[str]
    """The text of each turn's reply."""

    reward: float
    samples: list[Conversation]

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.reply_ids) for turn in self.turns)


class ExpectedRun:
    """Rollouts by their id, and the sequences of each step."""

    def __init__(self, played: Played, tokenizer: Any) -> None:
        self.played = played
        self.config = played.config
        self.tables = [batch.table for batch in played.batches]
        self.tokenizer = tokenizer
        self.temperature = played.config.orchestrator.sampling.temperature
        turns: dict[tuple[str, str], list[Sampled]] = {}
        for request in played.requests:
            known = turns.setdefault((request.rollout_id, request.env_name), [])
            is_withdrawn = request.env_name == "tools" and len(known) in (2, 3)
            known.append(replace(request.sampled, is_trainable=not is_withdrawn))
        self.rollouts = {rollout_id: self._rollout(env, known) for (rollout_id, env), known in turns.items()}
        self.failed = {
            rollout_id
            for rollout_id, rollout in self.rollouts.items()
            if rollout.env_name == "fragile" and BROKEN in rollout.texts[0]
        }

    @cached_property
    def steps(self) -> dict[str, int]:
        """The step of each rollout that a batch has."""
        return {each: step for step, table in enumerate(self.tables) for each in rollouts_of(table)}

    def _rollout(self, env_name: str, turns: list[Sampled]) -> ExpectedRollout:
        texts = [self.tokenizer.decode(turn.reply_ids, skip_special_tokens=True) for turn in turns]
        text = "".join(texts[:2])
        reward = {"flat": FLAT_REWARD, "fragile": fragile_reward_of(text)}.get(env_name, reward_of(text))
        return ExpectedRollout(env_name, turns, texts, reward, expected_samples(turns))

    @cached_property
    def seq_len(self) -> int:
        """Shorter than the longest sample that trains by two tokens: its last reply is cut within."""
        return max(int(table.lengths[table.trainable_lengths > 0].max()) for table in self.tables) - 2

    @property
    def knows_advantages(self) -> bool:
        """Whether the run's advantage function is one that the oracle has, too."""
        return not isinstance(self.config.orchestrator.advantage, CustomAdvantageConfig)

    def advantage(self, rollout_id: str) -> float:
        """The advantage of a rollout among its group, or the recorded one where a custom function made it."""
        if not self.knows_advantages:
            recorded = {each["rollout_id"]: each["advantage"] for each in self.played.settled}
            return float(recorded.get(rollout_id) or 0.0)
        members = self.members(group_of(rollout_id))
        rollouts = [self.rollouts[member] for member in members]
        settings = self.config.orchestrator.advantage.model_dump()
        advantages = advantages_of(
            settings["type"],
            [each.reward for each in rollouts],
            completion_tokens=[each.num_tokens for each in rollouts],
            tool_tokens=[self.num_tool_tokens(member) for member in members],
            num_turns=[len(each.turns) for each in rollouts],
            length_penalty=settings.get("length_penalty"),
        )
        return advantages[members.index(rollout_id)]

    def num_tool_tokens(self, rollout_id: str) -> int:
        """Tokens of the tools' responses that the last turn of a whole rollout saw."""
        return self._num_tool_tokens if self.rollouts[rollout_id].env_name == "tools" else 0

    @cached_property
    def _num_tool_tokens(self) -> int:
        messages = messages_of("tools", "0")
        called = after(messages, "reply", TOOL_RESPONSE)
        first = response_length_of(self.tokenizer, messages, TOOL_RESPONSE)
        return first + response_length_of(self.tokenizer, called, SECOND_RESPONSE)

    def finished_groups(self) -> list[FinishedGroup]:
        """Groups of which every request was answered, in the order of their last ones."""
        missing: dict[str, int] = {}
        finished = []
        for request in self.played.requests:
            group = group_of(request.rollout_id)
            num_turns = NUM_TURNS.get(request.env_name, 1)
            missing[group] = missing.get(group, GROUP_SIZE * num_turns) - 1
            if not missing[group]:
                finished.append(FinishedGroup(group, len(self.trained_members(group)), self.oldest(group)))
        return finished

    def oldest(self, group: str) -> int:
        """The oldest policy version among the tokens of a group that could train; of none, the newest one."""
        turns = (turn for member in self.members(group) for turn in self.rollouts[member].turns)
        return min((version for turn in turns for version in turn.versions), default=NUM_STEPS)

    def trained_members(self, group: str) -> list[str]:
        """The rollouts of a group that have a signal."""
        keeps_all = not self.config.orchestrator.drops_zero_advantages
        return [member for member in self.members(group) if keeps_all or self.advantage(member) != 0]

    def members(self, group: str) -> list[str]:
        """The rollouts of a group that an advantage compares: those that did not fail."""
        return [each for each in self.rollouts if group_of(each) == group and each not in self.failed]

    def table(self, step: int) -> TokenTable:
        """The batch of a step; after those of the orchestrator comes one to distil from."""
        return self.tables[step] if step < NUM_STEPS else self._distilled

    @cached_property
    def _distilled(self) -> TokenTable:
        """The first batch once more, its samples opd and sft in turn, with a teacher's logprobs."""
        table = self.tables[0]
        said = np.random.default_rng(0).uniform(-4.0, -0.1, table.num_tokens).astype(np.float32)
        said[~table["sampled"]] = np.nan
        modes = [TrainingMode.SFT if row % 2 else TrainingMode.OPD for row in range(table.num_sequences)]
        columns = {
            **{name: table[name] for name in table.columns},
            "training_mode": np.array([mode.value for mode in modes], object),
            "teacher_logprobs": said,
        }
        return TokenTable(table.lengths, columns)

    def conversations(self, step: int, seq_len: int) -> dict[tuple[str, int], Conversation]:
        """The samples of a step, by rollout and number of the sample, truncated."""
        return {
            (rollout_id, number): truncated(whole, seq_len)
            for rollout_id in rollouts_of(self.table(step))
            for number, whole in enumerate(self.rollouts[rollout_id].samples)
        }

    def sequences(self, step: int, seq_len: int) -> dict[tuple[str, int], ReferenceSequence]:
        """The same as they train."""
        found = {}
        rows = rollouts_of(self.table(step))
        for (rollout_id, number), sample in self.conversations(step, seq_len).items():
            is_sampled = np.array(sample.is_sampled)
            sequence = ReferenceSequence(
                sample.token_ids,
                np.array(sample.is_trainable),
                np.array(sample.logprobs),
                np.where(is_sampled, float(np.float32(self.advantage(rollout_id))), 0.0),
                np.full(len(is_sampled), float(np.float32(self.temperature))),
                group=group_of(rollout_id),
            )
            if step == NUM_STEPS and number < len(rows[rollout_id]):
                table, row = self._distilled, rows[rollout_id][number]
                start = int(table.token_offsets[row])
                teacher = table["teacher_logprobs"][start : start + len(is_sampled)].astype(np.float64)
                sequence = replace(sequence, mode=table["training_mode"][row], teacher=teacher)
            found[rollout_id, number] = sequence
        return found


def rollouts_of(table: TokenTable) -> dict[str, list[int]]:
    """Rows of each rollout of a batch, in its order."""
    found: dict[str, list[int]] = {}
    for row, rollout_id in enumerate(table["rollout_id"].tolist()):
        found.setdefault(rollout_id, []).append(row)
    return found


def group_of(rollout_id: str) -> str:
    """`g4.1-r2` -> `g4.1`."""
    return rollout_id.rpartition("-")[0]


def messages_of(env_name: str, example_id: str) -> Sequence[Any]:
    return ENVIRONMENTS[env_name](seed=0).example(int(example_id)).messages


def check_rollouts(expected: ExpectedRun, differences: Differences) -> None:
    """Holds everything from prompts to batches, books and metrics to what was sampled."""
    check_examples(expected, differences)
    check_requests(expected, differences)
    check_settled(expected, differences)
    for step, table in enumerate(expected.tables):
        for rollout_id, rows in rollouts_of(table).items():
            where = f"step {step}, rollout {rollout_id}"
            check_prompts(expected, differences, rollout_id, table["example_id"][rows[0]], where)
            check_samples(expected, differences, rollout_id, table, rows, where)
    check_batches(expected, differences)
    check_orchestrator_books(expected, differences)
    check_batch_metrics(expected, differences)
    check_snapshot(expected, differences)


def check_requests(expected: ExpectedRun, differences: Differences) -> None:
    """Holds what requests ask for to the settings; two of them never have the same seed."""
    config = expected.config
    limit, room = config.orchestrator.sampling.max_tokens, config.inference.max_model_len
    seeds: Counter[int | None] = Counter()
    for request in expected.played.requests:
        params, where = request.params, f"rollout {request.rollout_id}, a request"
        seeds[params.seed] += 1
        num_prompt = len(request.sampled.prompt_ids)
        differences.same("prompts", expected.temperature, params.temperature, f"{where}: temperature")
        differences.same("prompts", min(limit, room - num_prompt), params.max_tokens, f"{where}: max_tokens")
        ends = expected.tokenizer.eos_token_id in params.stop_token_ids and not params.stop
        differences.same("prompts", True, ends, f"{where}: ends at the end of a turn alone")
    repeated = sorted(str(seed) for seed, number in seeds.items() if number > 1 or seed is None)
    differences.same("prompts", [], repeated, "seeds that several requests have, or none")


def check_examples(expected: ExpectedRun, differences: Differences) -> None:
    """Looks for gaps: the examples of an environment are attempted from the first one on."""
    for name in ENVIRONMENTS:
        attempted = {
            tuple(rollout.turns[0].prompt_ids)
            for rollout in expected.rollouts.values()
            if rollout.env_name == name
        }
        missing = [
            index
            for index in range(len(attempted))
            if tuple(prompt_ids_of(expected.tokenizer, messages_of(name, str(index)))) not in attempted
        ]
        differences.same("examples", [], missing, f"{name}: examples that nobody attempted")


def check_settled(expected: ExpectedRun, differences: Differences) -> None:
    """Holds what was written down of all rollouts, also of those that came too late for a batch."""
    numbers = Counter(each["rollout_id"] for each in expected.played.settled)
    repeated = sorted(rollout_id for rollout_id, number in numbers.items() if number > 1)
    differences.same("saved rollouts", [], repeated, "rollouts that are saved several times")
    for saved in expected.played.settled:
        rollout_id, advantage = saved["rollout_id"], saved["advantage"]
        where = f"rollout {rollout_id}"
        reason = saved["reason"] if saved["outcome"] == State.REJECTED else None
        differences.same("samples", None, reason, f"{where}: why it was rejected")
        if rollout_id in expected.rollouts:
            known = _saved_fields(expected, saved)
            for name, value in known.items():
                found = saved.get(name)
                if name == "trajectory":
                    found = [_checked_fields(turn) for turn in saved[name]]
                differences.same("saved rollouts", value, found, f"{where}, {name}")
            has_failed = rollout_id in expected.failed
            differences.same("saved rollouts", has_failed, bool(saved["error"]), f"{where}: has an error")
            unknown = sorted(saved.keys() - known.keys() - OTHER_FIELDS)
            differences.same("saved rollouts", [], unknown, f"{where}: fields that nothing holds")
        if advantage is not None:
            num_tokens = expected.num_tool_tokens(rollout_id)
            found = saved["num_tool_tokens"]
            differences.same("samples", num_tokens, found, f"{where}: tokens of tools' responses")
            _check_advantage(expected, differences, rollout_id, advantage, where)


def _saved_fields(expected: ExpectedRun, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that follow from what was sampled; at least one turn of the rollout was answered."""
    rollout_id = saved["rollout_id"]
    rollout = expected.rollouts[rollout_id]
    is_sent = saved["outcome"] == Flow.SENT
    is_whole = len(rollout.turns) == NUM_TURNS.get(rollout.env_name, 1)
    has_reward = is_whole and rollout_id not in expected.failed
    messages = messages_of(rollout.env_name, saved["example_id"])
    sampling = expected.config.orchestrator.sampling
    is_measured = rollout.env_name == "answer" and has_reward
    return {
        "schema": SCHEMA,
        "step": expected.steps[rollout_id] if rollout_id in expected.steps else saved["step"],
        "group_id": group_of(rollout_id),
        "env_name": rollout.env_name,
        "messages": [dict(message) for message in messages],
        "reason": saved["error"] or "" if is_sent or rollout_id in expected.failed else saved["reason"],
        "reward": rollout.reward if has_reward else None,
        "metrics": {LENGTH: float(len(rollout.texts[0]))} if is_measured else {},
        "num_tokens": rollout.num_tokens,
        "stop_reason": "stop",
        "sampling_args": {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens},
        "sample_ids": [f"{rollout_id}-{index}" for index in range(len(rollout.samples))] if is_sent else [],
        "trajectory": [
            {
                "text": text,
                "num_prompt_tokens": len(turn.prompt_ids),
                "num_tokens": len(turn.reply_ids),
                "finish_reason": "stop",
                "policy_versions": [[turn.versions[0], len(turn.versions)]],
                **(PLACES[number] if len(rollout.turns) > 1 else {}),
            }
            for number, (turn, text) in enumerate(zip(rollout.turns, rollout.texts, strict=True))
        ],
    }


def _checked_fields(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved turn without its times."""
    return {name: value for name, value in turn.items() if name not in ("wait_s", "start_s")}


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
    messages = messages_of(rollout.env_name, example_id)
    first, *later = rollout.turns
    prompt = prompt_ids_of(expected.tokenizer, messages)
    differences.same("prompts", prompt, list(first.prompt_ids), f"{where}, turn 0")
    called = after(messages, "reply", TOOL_RESPONSE)
    continued = [(1, first, messages, TOOL_RESPONSE), (2, first, messages, DOUBT)]
    continued += [(4, turn, called, SECOND_RESPONSE) for turn in later[:1]]
    wanted = {3: prompt_ids_of(expected.tokenizer, [*messages, FRESH_START])}
    for number, last, asked, response in continued:
        added = response_ids_of(expected.tokenizer, asked, last.reply_ids[-1], response)
        wanted[number] = [*last.prompt_ids, *last.reply_ids, *added]
    for number, turn in enumerate(later, 1):
        differences.same("prompts", wanted.get(number), list(turn.prompt_ids), f"{where}, turn {number}")


def check_samples(
    expected: ExpectedRun,
    differences: Differences,
    rollout_id: str,
    table: TokenTable,
    rows: Sequence[int],
    where: str,
) -> None:
    rollout = expected.rollouts[rollout_id]
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
                [sample.logprobs[index] for index in chosen],
                table["inference_logprobs"][sampled],
            ),
            "policy_versions": (
                [sample.versions[index] for index in chosen],
                table["policy_versions"][sampled],
            ),
        }
        for name, (wanted, found) in columns.items():
            differences.same("samples", list(wanted), found.tolist(), f"{where}, {name}")
        differences.same("rewards", np.float32(rollout.reward), table["reward"][row], where)
        values = {"env_name": rollout.env_name, "temperature": np.float32(expected.temperature)}
        for name, value in values.items():
            differences.same("samples", value, table[name][row], f"{where}, {name}")
        spans, sampled_tokens = list(table["role_spans"][row]), np.array(sample.is_sampled)
        check_roles("samples", spans, sampled_tokens, differences, where)
        stop = end_of_messages(expected.tokenizer, messages_of(rollout.env_name, table["example_id"][row]))
        is_there = stop is None or stop in [span[2] for span in spans]
        differences.holds("samples", is_there, f"{where}, role_spans: no block ends with the prompt")
        _check_advantage(expected, differences, rollout_id, float(table["advantage"][row]), where)


def check_roles(
    stage: str,
    spans: Sequence[tuple[str, int, int]],
    is_sampled: NDArray[np.bool_],
    differences: Differences,
    where: str,
) -> None:
    """Holds blocks of a chat to one another: they follow one another from the first token on, and every reply
    is in one of the assistant's."""
    starts, stops = ([span[number] for span in spans] for number in (1, 2))
    differences.same(stage, [0, *stops[:-1]], starts, f"{where}, role_spans: starts")
    replies = np.flatnonzero(is_sampled & ~np.append(False, is_sampled[:-1])).tolist()
    ours = [(start, stop) for role, start, stop in spans if role == "assistant"]
    found = [reply for start, stop in ours for reply in replies if start <= reply < stop]
    differences.same(stage, replies, found, f"{where}, role_spans: replies in the assistant's blocks")
    differences.holds(stage, len(replies) <= len(ours), f"{where}, role_spans: too few blocks")


def check_batches(expected: ExpectedRun, differences: Differences) -> None:
    """Holds batches to groups in the order in which they were finished: whole, and as many as fill them."""
    settings = expected.config.orchestrator
    finished = expected.finished_groups()
    batches, stale = expected_batches(
        finished,
        batch_size=settings.batch_size,
        max_off_policy_steps=settings.max_off_policy_steps,
        num_batches=NUM_STEPS,
    )
    # Groups that were too old before their last rollout was back, which is when the run was stopped.
    unfinished = set(map(group_of, expected.rollouts)) - {group.name for group in finished}
    limit = RESUMED_AT - settings.max_off_policy_steps
    stale |= {group for group in unfinished if expected.oldest(group) < limit}
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


def read_entries(journal: Path) -> list[dict[str, Any]]:
    lines = journal.read_text().splitlines() if journal.exists() else ()
    return [json.loads(line) for line in lines]


def sum_counts(entries: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Adds the tokens of entries up, by environment and state."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        if entry.get("counts"):
            counts.setdefault(entry.get("env", ""), Counter()).update(entry["counts"])
    return {env: {what: num for what, num in totals.items() if num} for env, totals in counts.items()}


def check_orchestrator_books(expected: ExpectedRun, differences: Differences) -> None:
    """Holds the tokens of every outcome to what the client sampled for the rollouts that had it."""
    journal = expected.played.folder / "ledger" / "orchestrator.jsonl"
    wanted: dict[str, Counter[str]] = {}
    for saved in expected.played.settled:
        rollout_id, outcome = saved["rollout_id"], saved["outcome"]
        rollout = expected.rollouts.get(rollout_id)  # None: its request was given up
        num_tokens = 0 if rollout is None else rollout.num_tokens
        wanted.setdefault(saved["env_name"], Counter())[outcome] += num_tokens
        where = f"rollout {rollout_id}: its tokens"
        differences.same("books of batches", num_tokens, saved["num_tokens"], where)
        if rollout_id in expected.failed:
            where = f"rollout {rollout_id}, which failed: its outcome"
            differences.same("books of batches", State.FAILED_ROLLOUT.value, outcome, where)
    entries = read_entries(journal)
    marks = [entry["mark"] for entry in entries if entry.get("mark")]
    where = f"marks in {journal.name}, one for each snapshot that a resume may go back to"
    differences.same("books of batches", list(range(1, len(marks) + 1)), marks, where)
    found = sum_counts(entries)
    for env, counts in wanted.items():
        booked = {what: found.get(env, {}).get(what, 0) for what in counts}
        where = f"{env}: tokens by outcome in {journal.name}"
        differences.same("books of batches", dict(counts), booked, where)


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


def check_snapshot(expected: ExpectedRun, differences: Differences) -> None:
    """Holds the last snapshot, which a resume goes on from, to the groups that were started.

    MessagePack is read as such here, without the checksum before it.
    """
    path = expected.played.folder / "checkpoints" / "orchestrator.bin"
    found = msgspec.msgpack.decode(path.read_bytes()[4:])
    groups: dict[str, set[str]] = {}
    examples: dict[str, set[str]] = {}
    for saved in expected.played.settled:
        groups.setdefault(saved["env_name"], set()).add(saved["group_id"])
        examples.setdefault(saved["env_name"], set()).add(saved["example_id"])
    positions = {env: len(members) for env, members in examples.items()}
    names = {name.partition(".")[0]: name.endswith(".1") for members in groups.values() for name in members}
    resumed = sorted(int(name.removeprefix("g")) for name, is_resumed in names.items() if is_resumed)
    where = "numbers of the groups that were started after a resume"
    differences.same("snapshots", list(range(len(names)))[-len(resumed) :], resumed, where)
    share = sum(positions.values()) / len(ENVIRONMENTS)
    entries = read_entries(expected.played.folder / "ledger" / "orchestrator.jsonl")
    wanted = {
        "batches_sent": NUM_STEPS,
        "positions": positions,
        "num_groups": len(names),
        "generation": 1,
        "credits": {env: share - position for env, position in positions.items()},
        "mark": max(entry.get("mark") or 0 for entry in entries),
    }
    for name, value in wanted.items():
        differences.same("snapshots", value, found[name], f"{name} in {path.name}")


def _is_logged(settled: Mapping[str, Any]) -> bool:
    """Metrics are of one process, which does not log what was settled before it started."""
    is_resumed = "." in settled["group_id"] or settled["outcome"] == Flow.SENT
    return settled["step"] != RESUMED_AT or is_resumed
