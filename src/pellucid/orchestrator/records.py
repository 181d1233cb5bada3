"""The orchestrator's records for people: saved rollouts, metrics, log lines, `metrics/progress.json`.

`train_rollouts.jsonl` and `eval_rollouts.jsonl` in `rollouts/step_N` have one JSON object per rollout,
whatever became of it. Rollouts are appended as they are settled, whole lines at a time, so that a long wait
for a batch can be looked into; `STABLE` says that the rollouts of a step that trains are complete. Those of
an evaluation are under the policy version that was evaluated; one that is evaluated again, because the run
was stopped before its record, replaces them.

Rewards in the metrics are those of every scored rollout settled since the last batch, filtered ones included,
so that the curve does not depend on the filter.

`progress.json` says what happens between two batches, and why rollouts do not train. It is replaced every
other second, and goes once the last batch is sent, or the orchestrator ends:

    {"step": 7, "num_ready": 12, "num_running": 64, "waits_for_weights": false,
     "outcomes": {"zero_advantage": 480, "failed_rollout": 32}, "zero_advantage_reward": 0.0,
     "first_failure": "rollout g3-r0 of math, failed_rollout: ValueError: no answer"}
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from pellucid.data import NOT_OURS, Rollout, TokenTable, Turn
from pellucid.data.files import (
    append_whole,
    read_lines,
    read_whole,
    replace_file,
    require_own,
    step_folders,
    sync,
)
from pellucid.data.images import without_pixels
from pellucid.data.plain import clip_middle, printable
from pellucid.errors import DataError
from pellucid.ledger import Flow, State
from pellucid.ledger.journal import lost_as
from pellucid.metrics import Mean, MetricSet, Moments, NamedMoments, Sum
from pellucid.orchestrator.failures import EMPTY, LOST, describe_loss, is_dropped, is_partial
from pellucid.orchestrator.verdict import Verdict
from pellucid.transport import MARKER

FILE = "train_rollouts.jsonl"
EVAL_FILE = "eval_rollouts.jsonl"
Groups = Sequence[Sequence[Verdict]]

SCHEMA = 2
"""Form of a saved rollout; those of form 1, or without one, have neither conversations nor times."""

PROGRESS_FILE = "progress.json"

_LINE_WIDTH = 100 - len("12:34:56 INFO ")
_BRIEF_S = 0.05  # a shorter time outside of the engine is not worth its bytes in every line
_UNREMARKABLE = (State.ZERO_ADVANTAGE, State.FILTERED, State.CANCELLED)
_WORDS = {
    State.FAILED_ROLLOUT.value: "failed",
    State.DROPPED_GROUP.value: "dropped with their group",
}
_COUNTS = (
    "errored_rollouts",
    "empty_rollouts",
    "filtered_rollouts",
    "lost_rollouts",
    "dropped_groups",
    "partial_groups",
    "zero_advantage_groups",
)


class RolloutLog:
    """One of the two files of saved rollouts, one step at a time."""

    def __init__(
        self, run_dir: Path, sampling_args: Mapping[str, Mapping[str, Any]], *, evaluates: bool = False
    ) -> None:
        """`sampling_args` by environment."""
        self._parent = run_dir / "rollouts"
        self._sampling_args = sampling_args
        self._evaluates = evaluates
        self._folder: Path | None = None
        self._unsynced: set[Path] = set()

    def append(self, step: int, groups: Sequence[Sequence[Verdict]]) -> None:
        lines = b"".join(
            orjson.dumps(
                rollout_record(step, verdict, self._sampling_args.get(verdict.rollout.env_name, {})),
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for group in groups
            for verdict in group
        )
        folder = self._parent / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (EVAL_FILE if self._evaluates else FILE)
        require_own(path)
        with path.open("wb" if self._evaluates and folder != self._folder else "ab", buffering=0) as file:
            append_whole(file, lines)
        if not self._evaluates:
            self._unsynced.add(path)
        self._folder = folder

    def sync(self) -> None:
        """Returns once what was appended would survive a power failure."""
        while self._unsynced:
            sync(self._unsynced.pop())

    def finish_step(self) -> None:
        """Marks the step that was appended to, if any, as complete."""
        if self._folder is not None:
            (self._folder / MARKER).touch()
            self._folder = None


def saved_bytes(run_dir: Path, start: int) -> dict[int, int]:
    """Returns the file lengths of the saved rollouts of step `start` and, in a resumed run, of later ones."""
    lengths: dict[int, int] = {}
    for step in count(start):
        path = run_dir / "rollouts" / f"step_{step}" / FILE
        if not path.exists():
            break
        lengths[step] = path.stat().st_size
    return lengths


def cut_rollouts(run_dir: Path, start: int, lengths: Mapping[int, int]) -> None:
    """Truncates the saved rollouts of step `start` and later ones to `lengths`; see `saved_bytes`."""
    for step, folder in step_folders(run_dir / "rollouts").items():
        path = folder / FILE
        if step in lengths or step >= start:
            require_own(path)
        if step in lengths and path.exists():
            os.truncate(path, min(lengths[step], path.stat().st_size))
        elif step >= start:
            path.unlink(missing_ok=True)


def discard_rollouts(run_dir: Path, steps: Iterable[int], trained: Collection[int]) -> None:
    """Marks the rollouts that were sent in these steps as the ledger does, and reopens the steps."""
    for step in steps:
        folder = run_dir / "rollouts" / f"step_{step}"
        path = folder / FILE
        if path.exists():
            require_own(path)
            records = [_parsed(path, number, line) for number, line in read_lines(path)]
            for record in records:
                if record["outcome"] == Flow.SENT.value:
                    record |= {"outcome": lost_as(step, trained), "reason": "its batch did not survive"}
            replace_file(path, b"".join(orjson.dumps(record) + b"\n" for record in records))
            (folder / MARKER).unlink(missing_ok=True)


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}:{number} is damaged: {error}; delete that line") from error
    if not isinstance(record, dict) or "outcome" not in record:
        raise DataError(f"{path}:{number} is not a saved rollout; delete that line")
    return record


def rollout_record(step: int, verdict: Verdict, sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    rollout = verdict.rollout
    trajectory, end_s = _trajectory(rollout.turns)
    # Turns of a snapshot that an earlier version wrote say nothing about their conversation.
    is_traced = all(turn.sample is not None for turn in rollout.turns if turn.num_tokens)
    record = {
        "schema": SCHEMA if is_traced else 1,
        "step": step,
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "sample_ids": [sample.values["sample_id"] for sample in verdict.samples],
        "env_name": rollout.env_name,
        "example_id": rollout.example.example_id,
        "outcome": verdict.outcome.value,
        "reason": verdict.reason,
        "error": rollout.error,
        "reward": rollout.reward,
        "advantage": verdict.advantage,
        "metrics": rollout.metrics,
        "num_tokens": rollout.num_sampled,
        "num_tool_tokens": rollout.num_tool_tokens,
        "stop_reason": rollout.stop_reason,
        "messages": without_pixels(rollout.example.messages),
        "trajectory": trajectory,
        "sampling_args": sampling_args,
    }
    if rollout.weights:
        record["weights"] = rollout.weights
    if abs(rollout.time_s - end_s) >= _BRIEF_S:
        record["time_s"] = round(rollout.time_s, 3)
    return record | {column: orjson.Fragment(text) for column, text in rollout.state.items()}


def _trajectory(turns: Sequence[Turn]) -> tuple[list[dict[str, Any]], float]:
    """Returns the turns as they are saved, and the second of the attempt at which the last one ends.

    A turn goes on from the one before, keeps all of its messages, adds none, is in the same sample, trains
    and starts when that one ends, unless it says otherwise (`after`, `keeps`, `messages`, `sample`,
    `trainable`, `start_s`). The first goes on from the messages of the example, in sample 0.
    """
    records = []
    sample: int | None = 0
    end_s = 0.0
    for number, turn in enumerate(turns):
        trace = turn.trace
        record: dict[str, Any] = {
            "text": turn.text,
            "num_prompt_tokens": turn.num_prompt_tokens,
            "num_tokens": turn.num_tokens,
            "finish_reason": turn.finish_reason,
            "policy_versions": turn.policy_versions,
            "wait_s": round(trace.wait_s, 3),
        }
        if abs(trace.start_s - end_s) >= _BRIEF_S:
            record["start_s"] = round(trace.start_s, 3)
        if trace.after != number - 1:
            record["after"] = trace.after
        if trace.keeps is not None:
            record["keeps"] = trace.keeps
        if trace.messages:
            record["messages"] = orjson.Fragment(trace.messages_json)
        if trace.tool_calls:
            record["tool_calls"] = orjson.Fragment(trace.tool_calls)
        if turn.sample != sample:
            record["sample"] = turn.sample
        if not turn.trainable:
            record["trainable"] = False
        sample, end_s = turn.sample, record.get("start_s", end_s) + record["wait_s"]
        records.append(record)
    return records, end_s


def zero_metrics(env_names: Sequence[str]) -> MetricSet:
    """Returns the counts of a step for which nothing is settled yet."""
    metrics = MetricSet()
    for name in _COUNTS:
        for scope in ("all", *env_names):
            metrics.add(f"{name}/{scope}", Sum(0))
    return metrics


def add_groups(metrics: MetricSet, groups: Groups, size: int) -> None:
    """Adds settled groups; `size` is the number of rollouts of a whole one."""
    for verdicts in groups:
        outcomes = {verdict.outcome for verdict in verdicts}
        is_flat = {State.ZERO_ADVANTAGE} <= outcomes <= {State.ZERO_ADVANTAGE, State.FAILED_ROLLOUT}
        for scope in ("all", verdicts[0].rollout.env_name):
            metrics.add(f"dropped_groups/{scope}", Sum(is_dropped(verdicts)))
            metrics.add(f"partial_groups/{scope}", Sum(is_partial(verdicts, size)))
            metrics.add(f"zero_advantage_groups/{scope}", Sum(is_flat))
            for verdict in verdicts:
                _add_rollout(metrics, scope, verdict)
        for verdict in verdicts:
            rollout = verdict.rollout
            if verdict.outcome is State.FAILED_ROLLOUT:
                metrics.add(f"error/{rollout.error_type}/count", Sum(1))
            elif rollout.reward is not None:
                for name, value in rollout.metrics.items():
                    metrics.add(f"metrics/{rollout.env_name}/{name}", Mean(value, 1))


def _add_rollout(metrics: MetricSet, scope: str, verdict: Verdict) -> None:
    rollout = verdict.rollout
    metrics.add(f"lost_rollouts/{scope}", Sum(verdict.outcome in LOST))
    metrics.add(f"filtered_rollouts/{scope}", Sum(verdict.outcome is State.FILTERED))
    if verdict.outcome is State.FAILED_ROLLOUT:
        name = "empty_rollouts" if rollout.error_type == EMPTY else "errored_rollouts"
        metrics.add(f"{name}/{scope}", Sum(1))
    elif rollout.reward is not None:
        metrics.add(f"reward/{scope}", NamedMoments.of_one(rollout.reward))
        metrics.add(f"completion_length/{scope}", Moments.of_one(rollout.num_sampled))


def step_line(step: int, values: Mapping[str, float]) -> str:
    """`step    7  reward 0.812  128 rollouts  4.2k tokens  off-policy 0.6  1.4 s, 0.2 waiting  3 lost`."""
    num_lost = values["lost_rollouts/all"]
    level = values.get("off_policy_level/all/mean")  # absent if the policy sampled none of the tokens
    off_policy = "" if level is None else f"off-policy {level:.1f}  "
    return (
        f"step {step:4d}  reward {values['reward/all']:.3f}  {values['batch_rollouts']:.0f} rollouts  "
        f"{values['batch_tokens'] / 1000:.1f}k tokens  {off_policy}"
        f"{values['time/batch_s']:.1f} s, {values['time/wait_weights_s']:.1f} waiting"
        + (f"  {num_lost:.0f} lost" if num_lost else "")
    )


def sample_line(step: int, rollout: Rollout) -> str:
    """`step    7  g54-r2  reward 0.750  "Reverse: stone" → "enots" (6 tokens, stop)`, in 100 columns."""
    content = rollout.example.messages[-1].get("content") if rollout.example.messages else None
    if isinstance(content, list):  # of parts; what is no text is shown as it is
        texts = [part.get("text", part) if isinstance(part, Mapping) else part for part in content]
        content = " ".join(map(str, texts))
    end = f"({rollout.num_sampled} tokens, {rollout.stop_reason})"
    start = f"step {step:4d}  {rollout.rollout_id}  reward {rollout.reward or 0.0:.3f}  "
    room = _LINE_WIDTH - len(f'{start}"" → "" {end}')
    asked = shorten("" if content is None else str(content), room // 2)
    said = shorten(rollout.turns[-1].text if rollout.turns else "", room - len(asked))
    return f'{start}"{asked}" → "{said}" {end}'


def shorten(text: str, width: int) -> str:
    """On one line, without control characters; the middle of a long text is left out."""
    return clip_middle(printable(" ".join(text.split())), width)


def waiting_line(step: int, groups: Groups) -> str:
    """`step    7  no batch yet; settled: 250 zero_advantage, 6 failed_rollout`."""
    outcomes = Counter(verdict.outcome.value for verdicts in groups for verdict in verdicts)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return f"step {step:4d}  no batch yet; settled: {counts}"


def add_off_policy_levels(metrics: MetricSet, step: int, table: TokenTable) -> None:
    """Adds the off-policy level of every token that the policy sampled; raises if one is negative."""
    is_ours = table["policy_versions"] != NOT_OURS
    levels = (step - table["policy_versions"])[is_ours]
    if levels.size and levels.min() < 0:
        raise DataError(
            f"the batch of step {step} has tokens of policy version {step - int(levels.min())}, which only a "
            "later batch makes: they are of another run's weights; give this run an inference server of its "
            "own, and go on with --resume"
        )
    # Names are compared once per sequence: sorting those of all tokens would hold up every other thread.
    names, which = np.unique(table["env_name"], return_inverse=True)
    owners = np.repeat(which, np.diff(table.sampled_offsets))[is_ours]
    scopes = [("all", levels), *((name, levels[owners == index]) for index, name in enumerate(names))]
    for scope, chosen in scopes:
        if chosen.size:
            squares = np.square(chosen, dtype=np.float64).sum()
            moments = Moments.of(chosen.size, float(chosen.sum()), float(squares), float(chosen.max()))
            metrics.add(f"off_policy_level/{scope}", moments)


class BatchProgress(msgspec.Struct):
    """The batch that is being sampled, and the rollouts settled since the last one that do not train."""

    step: int = 0
    num_ready: int = 0
    """Rollouts that wait for the batch to be full."""

    num_running: int = 0
    waits_for_weights: bool = False
    outcomes: dict[str, int] = {}
    """Rollouts that do not train, by their state in the ledger."""

    zero_advantage_reward: float | None = None
    """Mean reward of those without a signal."""

    first_failure: str = ""

    def add(self, groups: Iterable[Sequence[Verdict]]) -> "BatchProgress":
        for verdict in (verdict for verdicts in groups for verdict in verdicts if not verdict.is_sent):
            state = verdict.outcome.value
            number = self.outcomes[state] = self.outcomes.get(state, 0) + 1
            if verdict.outcome is State.ZERO_ADVANTAGE:
                mean, reward = self.zero_advantage_reward or 0.0, verdict.rollout.reward or 0.0
                self.zero_advantage_reward = mean + (reward - mean) / number
            elif not self.first_failure and verdict.outcome not in _UNREMARKABLE:
                self.first_failure = describe_loss(verdict)
        return self

    def lines(self) -> list[str]:
        """For the console: `step 7: 12 rollouts ready, 64 running; do not train: 480 without a signal, …`.

        None before the first rollout starts and after the last is back.
        """
        if not (self.num_ready or self.num_running or self.outcomes or self.waits_for_weights):
            return []
        waits = "; waits for newer weights" if self.waits_for_weights else ""
        line = f"step {self.step}: {self.num_ready:,} rollouts ready, {self.num_running:,} running{waits}"
        if not self.outcomes:
            return [line]
        most_first = sorted(self.outcomes.items(), key=lambda outcome: -outcome[1])
        reasons = ", ".join(f"{number:,} {self._words(state)}" for state, number in most_first)
        lines = [f"{line}; do not train: {reasons}"]
        if self.first_failure:
            lines.append(f"  the first that failed or was dropped: {self.first_failure}")
        return lines

    def _words(self, state: str) -> str:
        if state == State.ZERO_ADVANTAGE.value and self.zero_advantage_reward is not None:
            return f"without a signal (equal rewards in a group, mean {self.zero_advantage_reward:.3f})"
        return _WORDS.get(state, state)


def progress_path(run_dir: Path) -> Path:
    return run_dir / "metrics" / PROGRESS_FILE


def write_progress(run_dir: Path, progress: BatchProgress) -> None:
    """Replaces the file. A full disk is no error here: this file is no record of the run."""
    with suppress(OSError):
        replace_file(progress_path(run_dir), msgspec.json.encode(progress))


def remove_progress(run_dir: Path) -> None:
    with suppress(OSError):
        progress_path(run_dir).unlink(missing_ok=True)


def read_progress(path: Path) -> BatchProgress | None:
    """None if there is nothing that can be read: before the first rollout, once the last batch is sent."""
    try:
        return msgspec.json.decode(read_whole(path), type=BatchProgress)
    except (OSError, DataError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
