"""`pellucid view RUN --terminal`: records, colours, outliers and the ledger on a machine without a browser.

    record 12 of 128, step 40 · reverse-text      reward 0.875   advantage +0.126   KL max 0.19
    user       <|im_start|>user⏎ …
    assistant  fmfteoa…                           backgrounds: mismatch KL; underlined: masked

Nothing of a run is taken for markup, and no control character reaches the terminal.
"""

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pellucid.data import TokenTable
from pellucid.data.plain import clip_middle
from pellucid.errors import DataError, printable
from pellucid.viewer.access import Exports, Records, RunFolder, trainable
from pellucid.viewer.lanes import PHASES, phase_of
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.summary import kl_domain, summarise
from pellucid.viewer.timeline import verdict
from pellucid.viewer.vocabulary import Text as TokenText
from pellucid.viewer.vocabulary import Vocabulary, open_vocabulary

RECORDS_SHOWN = 20
OUTLIERS_SHOWN = 10
MAX_TOKENS = 2_000
MAX_MESSAGE = 300
"""Characters of a message of a conversation; the middle of a longer one is left out."""

RAMP = ("#3b3228", "#67431c", "#a05a14", "#cf8428", "#f2b552", "#ffe9b8")
GLYPHS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def show(
    exports: Exports,
    *,
    tokenizer: str | None,
    record_index: int,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> None:
    """Prints the last step: its summary, its records, one record, its outliers; then the last conversation of
    several turns, the run's ledger, and the verdict on its time."""
    console = console or Console(markup=False, emoji=False)
    run = RunFolder.of(exports)
    vocabulary, note = open_vocabulary(tokenizer, run.model_folder(), trust_remote_code=trust_remote_code)
    lacks_tokens = not exports.steps()
    alarms = run.alarms()
    for line in (
        "" if lacks_tokens else note,
        run.lost_sequences(run.metrics()),
        *exports.warnings,
        *run.problems,
    ):
        if line:
            console.print(Text(printable(line), style="yellow"))
    for alarm in alarms:
        console.print(Text(alarm.line(), style="red"))
    if lacks_tokens:
        _print_without_tokens(console, run)
    else:
        _print_step(console, exports, run, vocabulary, record_index)
    _print_conversation(console, run)
    _print_ledger(console, run)
    _print_timeline(console, run)


def _print_without_tokens(console: Console, run: RunFolder) -> None:
    """Prints the last metrics and rollouts of a run that exported no tokens."""
    saved = run.rollouts()
    reason = saved.lacks() or f"No tokens were exported: `pellucid {run.kind} … --export` writes them."
    console.print(Text(reason, style="yellow"))
    metrics = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("metric", "step", "last"):
        metrics.add_column(title, justify="left" if title == "metric" else "right")
    for name, points in sorted(run.metrics().items()):
        metrics.add_row(Text(printable(name)), str(points[-1][0]), _short(points[-1][1]))
    console.print(metrics)
    rows = [row for step in list(saved.steps())[-1:] for row in saved.rows(step)]
    table = Table(title="the last rollouts", title_justify="left", box=None, header_style="dim")
    for title in ("step", "environment", "reward", "outcome", "reason", "reply"):
        table.add_column(title, overflow="fold")
    for row in rows[-RECORDS_SHOWN:]:
        reply = row["messages"][-1]["text"] if row["messages"] else ""
        words = (row["env"], _short(row["reward"]), row["outcome"], row["reason"], reply[-60:])
        table.add_row(str(row["step"]), *(Text(_plain(word)) for word in words))
    if rows:
        console.print(table)


def _print_conversation(console: Console, run: RunFolder) -> None:
    """Prints the last rollout of several turns, if the run has one in its last step."""
    saved = run.rollouts()
    rows = [row for step in list(saved.steps())[-1:] for row in saved.rows(step) if len(row["turns"]) > 1]
    if not rows:
        return
    row = rows[-1]
    words = (
        f"rollout {_plain(row['rollout'])}",
        f"{len(row['turns'])} turns",
        f"reward {_short(row['reward'])}",
    )
    title = Text(" · ".join([*words, _plain(row["outcome"])]))
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    turns = {turn["reply"]: (number, turn) for number, turn in enumerate(row["turns"])}
    for place, message in enumerate(row["messages"]):
        if place in turns:
            table.add_row("", Text(_turn_line(*turns[place]), style="dim"))
        calls = "".join(f" {name}({arguments})" for name, arguments, _ in message.get("calls", ()))
        text = calls.strip() or message["text"]
        table.add_row(Text(_plain(message["role"])), Text(_plain(clip_middle(text, MAX_MESSAGE))))
    for name, value in row["metrics"].items():
        weight = row["weights"].get(name)
        table.add_row("metric" if weight is None else "reward", Text(_plain(_part(name, value, weight))))
    if row["error"] or row["reason"]:
        table.add_row("reason", Text(_plain(row["error"] or row["reason"]), style="red"))
    console.print()
    console.print(table)


def _turn_line(number: int, turn: dict[str, Any]) -> str:
    """`turn 2 · 51 in, 12 out · engine 0.31 s · version 3 · stop`."""
    parts = [f"turn {number + 1}", f"{turn['prompt']:,} in, {turn['tokens']:,} out"]
    if turn["wait"] is not None:
        parts.append(f"engine {_short(turn['wait'])} s")
    versions = ", ".join(str(version) for version, _ in turn["versions"])
    before = "" if turn["after"] == number - 1 else "branch"
    if turn["keeps"] is not None:
        before = "history rewritten" if turn["keeps"] else "another conversation"
    return " · ".join([*parts, *filter(None, (versions and f"version {versions}", turn["stop"], before))])


def _part(name: str, value: float, weight: float | None) -> str:
    return f"{name} {_short(value)}" + ("" if weight is None else f" × {_short(weight)}")


def _print_step(
    console: Console, exports: Exports, run: RunFolder, vocabulary: Vocabulary, record_index: int
) -> None:
    step, records, batch, point = _newest(exports, record_index)
    console.print(_title(f"step {step}", len(records), point))
    is_skipped = run.is_skipped(step)
    if is_skipped:
        console.print(Text("skipped: its loss or gradient is not finite, no weights moved", style="yellow"))
    console.print(_records(batch))
    if record_index < batch.num_sequences:
        chosen = batch.select([record_index])
        scale = kl_domain(point["kl_p95"] or 0.0)
        console.print(
            Text(f"\nrecord {record_index} of {len(records)}", style="bold"),
            _tokens(chosen, vocabulary, scale),
        )
        console.print(_outliers(chosen, vocabulary, is_skipped=is_skipped))


def _newest(exports: Exports, record_index: int) -> tuple[int, Records, TokenTable, dict[str, Any]]:
    """The newest step that can be read, its records, the first of them in columns, and its numbers."""
    for step in reversed(exports.steps()):
        try:
            records = exports.records(step)
            if not records:
                raise DataError(f"step {step} holds no records")
            batch = records[: max(RECORDS_SHOWN, record_index + 1)].batch(_COLUMNS)
            return step, records, batch, summarise(step, exports.summary(step))["points"]["all"]
        except (DataError, OSError) as error:
            exports.warn(step, error)
    raise DataError(f"{exports.path} has no step that can be shown; {'; '.join(exports.warnings)}")


_COLUMNS = (
    "token_ids",
    "loss_mask",
    "env_name",
    "reward",
    "advantage",
    "mismatch_kl",
    "entropy",
    "is_masked",
    "prob_delta",
    "advantages",
    "role_spans",
    "group_id",
)


def _title(name: str, num_records: int, point: dict[str, Any]) -> Text:
    parts = [
        f"{num_records:,} records",
        f"{point['tokens']:,} tokens, {point['trainable']:,} trainable",
        f"reward {_short(point['reward'])}",
        f"mismatch KL mean {_short(point['kl_mean'])}, max {_short(point['kl_max'])}",
        f"entropy {_short(point['entropy'])}",
    ]
    return Text.assemble((name, "bold"), "  ", " · ".join(parts))


def _records(batch: TokenTable) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("#", "environment", "group", "reward", "adv.", "tokens", "trainable", "KL max", "masked"):
        table.add_column(title, justify="left" if title in ("environment", "group") else "right")
    chosen = trainable(batch)
    for row in range(min(RECORDS_SHOWN, batch.num_sequences)):
        span = slice(int(batch.token_offsets[row]), int(batch.token_offsets[row + 1]))
        kl, masked = batch.get("mismatch_kl"), batch.get("is_masked")
        known = np.empty(0) if kl is None else kl[span][chosen[span] & np.isfinite(kl[span])]
        table.add_row(
            str(row),
            Text(_plain(_at(batch, "env_name", row))),
            Text(_plain(_at(batch, "group_id", row))),
            _short(_at(batch, "reward", row)),
            _short(_at(batch, "advantage", row)),
            f"{batch.lengths[row]:,}",
            f"{int(chosen[span].sum()):,}",
            _short(float(known.max()) if len(known) else None),
            "–" if masked is None else str(int((masked[span] == 1).sum())),
        )
    return table


def _tokens(batch: TokenTable, vocabulary: Vocabulary, scale: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 2))
    chosen, kl, masked = trainable(batch), batch.get("mismatch_kl"), batch.get("is_masked")
    ids = batch["token_ids"]
    for role, start, end in RoleFinder(vocabulary).segments(batch)[0]:
        text = Text(overflow="fold")
        for index in range(start, min(end, MAX_TOKENS)):
            style = "dim"
            if chosen[index]:
                value = math.nan if kl is None else float(kl[index])
                style = _style(value, scale)
                if masked is not None and masked[index] == 1:
                    style += " underline"
            shown = visible(vocabulary.text(int(ids[index])))
            text.append(shown, style=style)
            if shown.endswith("⏎"):
                text.append("\n")
        table.add_row(Text(_plain(role) or "–", style="bold cyan"), text)
    if len(ids) > MAX_TOKENS:
        table.add_row("", Text(f"… and {len(ids) - MAX_TOKENS:,} more tokens", style="dim"))
    return table


def _outliers(batch: TokenTable, vocabulary: Vocabulary, *, is_skipped: bool) -> Table | str:
    kl = batch.get("mismatch_kl")
    if kl is None or not np.isfinite(kl[trainable(batch)]).any():
        return ""
    scores = np.where(trainable(batch) & np.isfinite(kl), kl, -np.inf)
    table = Table(title="outliers by mismatch KL", title_justify="left", box=None, header_style="dim")
    for title in ("token", "at", "KL", "Δ", "A", "state"):
        table.add_column(title, justify="left" if title in ("token", "state") else "right")
    for index in np.argsort(-scores, kind="stable")[:OUTLIERS_SHOWN].tolist():
        if not np.isfinite(scores[index]):
            break
        masked = batch.get("is_masked")
        state = "trainable" if masked is None else "masked" if masked[index] == 1 else "trained"
        state = "skipped" if is_skipped else state
        table.add_row(
            Text(visible(vocabulary.text(int(batch["token_ids"][index])))),
            str(index),
            _short(float(kl[index])),
            _short(_at(batch, "prob_delta", index)),
            _short(_at(batch, "advantages", index)),
            state,
        )
    return table


def _print_ledger(console: Console, run: RunFolder) -> None:
    ledger = run.ledger()
    if ledger is None:
        return
    if "error" in ledger:
        console.print(Text(printable(ledger["error"]), style="red"))
        return
    sampled = sum(account["sampled"] for account in ledger["accounts"])
    states: dict[str, int] = {}
    for account in ledger["accounts"]:
        for state, tokens in account["states"].items():
            states[state] = states.get(state, 0) + tokens
    table = Table(title="where every sampled token went", title_justify="left", box=None, show_header=False)
    for state, tokens in sorted(states.items(), key=lambda item: -item[1]):
        share = tokens / sampled if sampled else 0.0
        table.add_row(state, f"{tokens:,}", f"{100 * share:.1f} %", "█" * max(1, round(40 * share)))
    console.print()
    console.print(table)
    for line in ledger["verdict"]:
        console.print(Text(line, style="green" if ledger["balanced"] else "red"))


def _print_timeline(console: Console, run: RunFolder) -> None:
    """Prints the verdict, and what each part of the pipeline did with its time."""
    timeline = run.timeline()
    if timeline is None or (found := verdict(timeline)) is None:
        return
    console.print()
    console.print(Text("why it is not faster", style="italic"))
    console.print(Text(found.text))
    if timeline.is_approximate:
        console.print(Text("approximate: this run recorded durations per step, not spans", style="yellow"))
    on_path = timeline.path_shares(lambda segment: (segment.lane, phase_of(segment.name)))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("", "phase", "seconds", "share", "critical path"):
        table.add_column(title, justify="left" if title in ("", "phase") else "right")
    for lane in timeline.lanes.values():
        for phase, seconds in lane.seconds().most_common():
            path = on_path.get((lane.name, phase), 0.0)
            share = seconds / lane.lived_s if lane.lived_s else 0.0
            name = Text(printable(lane.name))
            table.add_row(
                name,
                PHASES[phase].label,
                f"{seconds:,.1f}",
                f"{100 * share:.0f} %",
                f"{100 * path:.0f} %" if path else "",
            )
    console.print(table)


def visible(text: TokenText) -> str:
    """Replaces invisible characters and those that move the cursor by glyphs, other bytes by hex."""
    if not isinstance(text, str):
        return "".join(f"⟨{byte:02X}⟩" for byte in text)
    return "".join(
        GLYPHS.get(character)
        or (character if unicodedata.category(character)[0] not in "CZ" else f"⟨U+{ord(character):04X}⟩")
        for character in text
    )


def _plain(value: Any) -> str:
    return "–" if value is None else visible(str(value)).replace("·", " ")


def _style(value: float, scale: Sequence[float]) -> str:
    if not math.isfinite(value):
        return "bold"
    low, high = scale
    share = math.log(max(value, low) / low) / math.log(high / low)
    place = min(len(RAMP) - 1, int(share * len(RAMP)))
    return f"{'#16181b' if place >= 3 else '#e9e7e2'} on {RAMP[place]}"


def _at(batch: TokenTable, name: str, index: int) -> Any:
    """Returns the value of a record or a token; None where the export has no such column."""
    values = batch.get(name)
    return None if values is None else values[index]


def _short(value: Any) -> str:
    return "–" if value is None or not math.isfinite(float(value)) else f"{float(value):.3g}"
