"""`pellucid ledger RUN`: where every sampled token went, whether any is missing, and which alarms rang.

The tokens of a run are shown as a tree of what goes on and what ends where, then in a table:

sampled by the engine      1,200  100.0%
├─ cancelled                 200   16.7%  given up while they were sampled
└─ to the orchestrator     1,000   83.3%
   ├─ zero_advantage         300   25.0%  an advantage of 0: nothing to learn from
   └─ to the trainer         700   58.3%
      └─ trained             700   58.3%  their gradient is in the weights

With `--rollout` it tells what became of one rollout, or of those of one group, and why.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from pellucid import export
from pellucid.config.tools import LedgerSettings
from pellucid.data.alarms import read_alarms
from pellucid.data.files import read_lines, step_folders
from pellucid.errors import DataError, LedgerError
from pellucid.launch.console import WIDTH, make_console
from pellucid.ledger import BESIDE, HANDS_ON, TAKES_IN, Flow, Report, Stage, State, reconcile
from pellucid.ledger.weights import read_weights_book
from pellucid.metrics import read_metrics
from pellucid.orchestrator.failures import BiasFinding, DropAudit
from pellucid.orchestrator.records import FILE

COLUMNS_PER_TABLE = 4
MAX_SHOWN_CHARACTERS = 200
MAX_SHOWN_REWARDS = 16
_NEXT = {Stage.INFERENCE: "to the orchestrator", Stage.ORCHESTRATOR: "to the trainer"}

T = TypeVar("T")


def run_ledger(settings: LedgerSettings) -> int:
    """0 if every sampled token is accounted for, 1 if one is missing; an alarm changes neither."""
    console = make_console(WIDTH)
    if settings.rollout is not None:
        stories = read_stories(settings.run, settings.rollout)
        if settings.as_json:
            print(orjson.dumps([story.as_json() for story in stories]).decode())
        else:
            for line in (line for story in stories for line in (*story.lines(), "")):
                console.print(line, highlight=False, soft_wrap=True)
        return 0
    report = reconcile(settings.run / "ledger")
    tallies = _tallies(report, settings.by)
    bias = _audit(settings.run) if settings.audit else []
    alarms = read_alarms(settings.run)
    weights = read_weights_book(settings.run / "ledger")
    if settings.as_json:
        findings = {
            "bias": [asdict(finding) for finding in bias],
            "alarms": [msgspec.to_builtins(alarm) for alarm in alarms],
            "weights": msgspec.to_builtins(weights),
        }
        by_step = {"steps": _steps_as_json(report)} if settings.by == "step" else {}
        print(orjson.dumps({**_as_json(report, tallies), **findings, **by_step}).decode())
    else:
        _print_flow(report, console)
        if settings.by == "step":
            console.print(_steps_table(report))
        else:
            _print_tallies([*tallies, _total(tallies)], console)
        biases = (f"bias: {finding}" for finding in bias)
        served = () if weights is None else (weights.line(),)
        for line in (*report.verdict(), *served, *biases, *(alarm.line() for alarm in alarms)):
            console.print(line, highlight=False, soft_wrap=True)
    return 0 if report.balanced else 1


# All tokens


def _print_flow(report: Report, console: Console) -> None:
    """Prints the tree; everything hangs on the last branch of what is above it."""
    stages = list(Stage)
    sampled = report.stages[Stage.INFERENCE][Flow.SAMPLED]
    lines = [("sampled by the engine", sampled, "")]
    for depth, stage in enumerate(stages):
        counts, indent = report.stages[stage], "   " * depth
        following = stages[depth + 1] if stage in HANDS_ON else None
        received = 0 if following is None else report.stages[following][TAKES_IN[following]]
        ends = [(state, counts[state]) for state in State if counts[state]]
        handed_on = counts[HANDS_ON[stage]] if stage in HANDS_ON else 0
        in_flight = 0
        if stage in report.running:
            in_flight = counts[TAKES_IN[stage]] - sum(tokens for _, tokens in ends) - handed_on
        if following in report.running:
            in_flight += handed_on - received
        if in_flight:
            ends.append((State.IN_FLIGHT, in_flight))
        for number, (state, tokens) in enumerate(ends, start=1):
            branch = "└─ " if following is None and number == len(ends) else "├─ "
            lines.append((f"{indent}{branch}{state.value}", tokens, state.meaning))
        if following is not None:
            lines.append((f"{indent}└─ {_NEXT[stage]}", received, ""))
    width, digits = max(len(label) for label, _, _ in lines), len(f"{max(line[1] for line in lines):,}")
    for label, tokens, meaning in lines:
        share = f"{tokens / sampled:7.1%}" if sampled else ""
        console.out(f"{label:<{width}}  {tokens:>{digits},} {share}  {meaning}".rstrip(), highlight=False)
    console.out("")


@dataclass(frozen=True, slots=True)
class Tally:
    """The tokens of one environment of one run, or of all of them together."""

    run: str
    env: str
    sampled: int
    states: Counter[str]
    beside: Counter[str]

    def as_json(self) -> dict[str, Any]:
        return {"sampled": self.sampled, "states": _present(self.states), "beside": dict(self.beside)}


def _present(counts: Counter[str]) -> dict[str, int]:
    """States in their order, without those that no token is in."""
    return {state.value: counts[state] for state in State if counts[state]}


def _tallies(report: Report, by: str) -> list[Tally]:
    """One per run and environment, or one per run."""
    parts = [
        Tally(run, env, report.sampled[run, env], states, report.beside[run, env])
        for (run, env), states in report.states.items()
    ]
    if by != "run":
        return parts
    runs = dict.fromkeys(part.run for part in parts)
    return [replace(_total([part for part in parts if part.run == run]), run=run) for run in runs]


def _total(parts: Sequence[Tally]) -> Tally:
    states = sum((part.states for part in parts), Counter[str]())
    beside = sum((part.beside for part in parts), Counter[str]())
    return Tally("", "all", sum(part.sampled for part in parts), states, beside)


def _print_tallies(tallies: Sequence[Tally], console: Console) -> None:
    """Prints a column per tally, the total last."""
    shown = _present(tallies[-1].states)
    for start in range(0, len(tallies), COLUMNS_PER_TABLE):
        columns = tallies[start : start + COLUMNS_PER_TABLE]
        table = Table("tokens", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        for each in columns:
            table.add_column(f"{each.env or '-'}\n{each.run}", justify="right", overflow="fold")
        for state in shown:
            shares = [f"{each.states[state] / each.sampled:.1%}" if each.sampled else "-" for each in columns]
            counts = [each.states[state] for each in columns]
            table.add_row(state, *map(_cell, counts, shares))
        table.add_section()
        table.add_row("sampled", *(_cell(each.sampled) for each in columns), style="bold")
        table.add_section()
        for flow in BESIDE:
            table.add_row(flow.value, *(_cell(each.beside[flow]) for each in columns), style="dim")
        console.print(table)


def _cell(tokens: int, share: str = "") -> str:
    """Only states have a share: context and padding are not sampled, but computed beside what is."""
    return f"{tokens:,} {share:>6}"


def _steps_table(report: Report) -> Table:
    """A line per step; tokens that the engine gave up are of no step."""
    shown = [state for state in State if any(counts[state] for counts in report.steps.values())]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for title in ("step", *(state.value.replace("_", "\n") for state in shown), "all"):
        table.add_column(title, justify="right", vertical="bottom")
    for step, counts in sorted(report.steps.items()):
        cells = [counts[state] for state in shown]
        table.add_row(str(step), *(f"{tokens:,}" for tokens in (*cells, sum(cells))))
    return table


def _steps_as_json(report: Report) -> list[dict[str, Any]]:
    return [{"step": step, "states": _present(counts)} for step, counts in sorted(report.steps.items())]


def _as_json(report: Report, tallies: Sequence[Tally]) -> dict[str, Any]:
    return {
        "balanced": report.balanced,
        "running": report.running,
        "all": _total(tallies).as_json(),
        "accounts": [{"run": each.run, "env": each.env, **each.as_json()} for each in tallies],
        "stages": {stage.value: dict(counts) for stage, counts in report.stages.items()},
        "differences": [
            {"run": run, "env": env, "where": difference.where, "tokens": difference.tokens}
            for difference in report.differences
            for run, env in [difference.account]
        ],
    }


# Saved rollouts


class AuditedRollout(msgspec.Struct):
    """The part of a saved rollout that tells whether what was dropped is like what was kept."""

    outcome: str
    env_name: str
    num_tokens: int
    reward: float | None = None


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


def _read_saved(run: Path, kind: type[T], *names: str) -> Iterator[T]:
    """Reads the saved rollouts of all steps in order; with `names`, those whose line has one of them.

    A last line that is still being written is left out.
    """
    decoder = msgspec.json.Decoder(kind)
    wanted = [name.encode() for name in names]
    for _, folder in sorted(step_folders(run / "rollouts").items()):
        for number, line in read_lines(folder / FILE):
            if not line.endswith(b"\n") or (wanted and not any(name in line for name in wanted)):
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                place = f"{folder / FILE}:{number}"
                raise DataError(f"{place} is not a saved rollout: {error}; copy the file again") from error


def _audit(run: Path) -> list[BiasFinding]:
    drops = DropAudit()
    for each in _read_saved(run, AuditedRollout):
        drops.add(each.outcome, each.env_name, each.num_tokens, each.reward)
    return drops.findings()


@dataclass(frozen=True, slots=True)
class Story:
    """One rollout from start to end: what it sampled, and why its tokens did or did not train."""

    rollout: SavedRollout
    group: list[float | None]
    """Rewards of all rollouts of its group."""

    states: dict[str, int]
    """Sampled tokens by ledger state, as far as known: an export tells what became of sent ones."""

    unknown: str = ""
    """Why it is not known what became of the others."""

    def as_json(self) -> dict[str, Any]:
        fields = {"group": self.group, "states": self.states, "unknown": self.unknown}
        return {**msgspec.to_builtins(self.rollout), **fields}

    def lines(self) -> Iterator[str]:
        rollout = self.rollout
        versions = Counter[int]()
        for turn in rollout.trajectory:
            for version, tokens in turn.policy_versions:
                versions[version] += tokens
        sampled_by = ", ".join(f"{version} ({tokens:,})" for version, tokens in sorted(versions.items()))
        yield (
            f"rollout {rollout.rollout_id} of {rollout.env_name}, example {rollout.example_id}, "
            f"group {rollout.group_id}"
        )
        yield (
            f"  sampled    {rollout.num_tokens:,} tokens in {len(rollout.trajectory)} "
            f"turn{'s' if len(rollout.trajectory) != 1 else ''}"
            + (f"; policy version (tokens): {sampled_by}" if versions else "")
            + (f"; stopped: {rollout.stop_reason}" if rollout.stop_reason else "")
        )
        for turn in rollout.trajectory:
            is_long = len(turn.text) > MAX_SHOWN_CHARACTERS
            yield f"             {turn.text[:MAX_SHOWN_CHARACTERS] + '…' if is_long else turn.text!r}"
        rewards = " ".join(map(_number, self.group[:MAX_SHOWN_REWARDS]))
        more = " …" if len(self.group) > MAX_SHOWN_REWARDS else ""
        yield f"  reward     {_number(rollout.reward)}; its group: {rewards}{more}"
        if rollout.advantage is not None:
            yield f"  advantage  {_number(rollout.advantage)}"
        if rollout.outcome == Flow.SENT:
            yield f"  outcome    sent to the trainer with the batch of step {rollout.step}"
        else:
            because = f": {rollout.reason}" if rollout.reason else ""
            yield f"  outcome    {rollout.outcome}{because} (settled at step {rollout.step})"
        if rollout.error:
            yield f"  error      {rollout.error}"
        for state, tokens in self.states.items():
            yield f"  tokens     {tokens:,} {state}: {State(state).meaning}"
        if self.unknown:
            yield f"  tokens     {self.unknown}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def read_stories(run: Path, name: str) -> list[Story]:
    """Reads the story of a rollout, or of each of a group; one that was sampled again has several."""
    if not (run / "rollouts").is_dir():
        raise LedgerError(f"{run} holds no saved rollouts; give the folder of an rl run")
    found = _read_saved(run, SavedRollout, name)
    chosen = [each for each in found if name in (each.rollout_id, each.group_id)]
    if not chosen:
        raise LedgerError(
            f"{run} has no rollout or group {name!r} among its saved rollouts; their ids are in "
            "rollouts/step_N/train_rollouts.jsonl. What is still being sampled is not there yet"
        )
    rewards: dict[tuple[int, str], list[float | None]] = {}
    for each in _read_saved(run, SavedRollout, *{each.group_id for each in chosen}):
        rewards.setdefault((each.step, each.group_id), []).append(each.reward)
    return [_tell(run, each, rewards[each.step, each.group_id]) for each in chosen]


def _tell(run: Path, rollout: SavedRollout, group: list[float | None]) -> Story:
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
    is_skipped = rollout.step in _skipped_steps(run)
    for record in records:
        sampled, trainable, masked = record["sampled"], record["loss_mask"], record["is_masked"]
        is_masked = np.zeros_like(trainable) if masked is None else masked.astype(np.bool_)
        states[State.UNTRAINABLE.value] += int((sampled & ~trainable).sum())
        if is_skipped:
            states[State.SKIPPED.value] += int(trainable.sum())
        else:
            states[State.MASKED.value] += int((trainable & is_masked).sum())
            states[State.TRAINED.value] += int((trainable & ~is_masked).sum())
    num_left, unknown = rollout.num_tokens - states.total(), ""
    if len(records) < len(rollout.sample_ids):
        unknown = f"{num_left:,} untrainable or truncated: samples without a trainable token are not exported"
    else:
        states[State.TRUNCATED.value] = num_left
    return Story(rollout, group, dict(+states), unknown)


def _skipped_steps(run: Path) -> set[int]:
    """Steps that moved no weights, by the trainer's metrics; an export is written before that is decided."""
    path = run / "metrics" / "trainer.jsonl"
    records = read_metrics(path) if path.exists() else ()
    return {record["step"] for record in records if record.get("skipped_steps")}
