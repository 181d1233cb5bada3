"""`pellucid replay`: what a run recorded of its tokens, computed again and compared.

    off-policy    exported versions against max_off_policy_steps, and against the levels that were logged
    rewards       those of the saved rollouts, in every record and token
    advantages    from the saved rewards of each group, in every record and token
    ratios        from recorded logprobs
    masks         from ratios and advantages, by the run's own loss
    losses        the same, token by token
    ledger        what the trainer booked as trained and masked, from the exported masks
    weights       with --weights: the trainer's logprobs, from the weights of the step where they are left
    record        trainable tokens against the denominator
    loss          the sum of token losses ÷ denominator against what was logged
    learning rate from the schedule, against what was logged

With `--set` it answers what other settings would have done with the same tokens.

Who replays a run may not have made it: no code that its settings name is run, and no model or checkpoint is
loaded, unless that is asked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pellucid.checks.finding import findings_table
from pellucid.checks.replay.checks import Checks, record_name
from pellucid.checks.replay.recompute import MASKS
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.checks.replay.what_if import WhatIf, what_if_table
from pellucid.config.imports import see_current_folder
from pellucid.config.tools import ReplaySettings
from pellucid.data.table import TokenTable, Values
from pellucid.errors import ConfigError, DataError, ModelError
from pellucid.export import FIELDS
from pellucid.launch.console import make_console

if TYPE_CHECKING:
    from pellucid.checks.replay.weights import Predictor

_SHOWN = {
    "inference_logprobs": "log μ",
    "trainer_logprobs": "log π",
    "advantages": "A",
    "importance_ratio": "r",
    "prob_delta": "π − μ",
    "is_masked": "masked",
    "token_loss": "loss",
}


def run_replay(settings: ReplaySettings) -> int:
    """0 if the record agrees with itself (or for a what-if), 1 if it does not."""
    if settings.trust_code:
        see_current_folder()
    run = RecordedRun.open(settings.run, trust_code=settings.trust_code)
    steps = run.steps(settings.step)
    console = make_console()
    if settings.changes:
        what_if = WhatIf(run, settings.changes)
        for number, step in _read_steps(run, steps):
            what_if.add(number, step)
        if settings.as_json:
            _print_json({"changes": list(settings.changes), **what_if.as_dict()})
        else:
            console.print(what_if_table(what_if.totals(), len(steps)))
        return 0
    notes = [] if run.has_config else ["no configs/ beside the export: the default settings are assumed"]
    predictor = _open_predictor(run, notes) if settings.weights else None
    if run.model is not None and not settings.weights:
        notes.append("logprobs were not recomputed: --weights does, with the run's model and weights")
    checks = Checks(run, predictor, notes)
    tokens: Table | dict[str, Any] | None = None
    for number, step in _read_steps(run, steps):
        recomputed = checks.add(number, step)
        if settings.sequence is not None:
            if settings.sequence >= step.num_sequences:
                raise DataError(
                    f"--sequence {settings.sequence}: step {settings.step} has {step.num_sequences} records, "
                    "numbered from 0"
                )
            if settings.as_json:
                tokens = _tokens_as_dict(step, recomputed, settings.sequence)
            else:
                tokens = _tokens_table(step, recomputed, settings.sequence)
    findings = checks.findings()
    failed = [finding for finding in findings if not finding.passed]
    notes += run.export.problems
    if settings.as_json:
        report = {
            "steps": steps,
            "agrees": not failed,
            "first_difference": failed[0].check if failed else None,
            "findings": [finding.as_dict() for finding in findings],
            "notes": notes,
        }
        _print_json(report if tokens is None else {**report, "tokens": tokens})
        return 1 if failed else 0
    if failed:
        console.out(f"the first stage that differs: {failed[0].check}", highlight=False)
    if isinstance(tokens, Table):
        console.print(tokens)
    console.print(findings_table(findings))
    for note in notes:
        console.out(f"note: {note}", highlight=False)
    what = f"{len(steps):,} step{'s' if len(steps) != 1 else ''}"
    num_passed = len(findings) - len(failed)
    console.out(f"{what}: {num_passed} of {len(findings)} findings agree with the record", highlight=False)
    return 1 if failed else 0


def _open_predictor(run: RecordedRun, notes: list[str]) -> "Predictor | None":
    """Loads the run's model, if that is possible here."""
    if run.folder is None or run.model is None:
        return None
    if run.trainer.enable_router_replay:
        notes.append("logprobs were not recomputed: the experts that were replayed are not in the export")
        return None
    from pellucid.checks.replay.weights import Predictor  # and transformers: seconds, which --weights costs

    try:
        settings = run.trainer.model
        return Predictor(run.folder, run.model, run.trainer.max_tokens, settings.seq_len, settings.layout)
    except (ModelError, ConfigError) as error:
        notes.append(f"logprobs were not recomputed: {error}")
        return None


def _read_steps(run: RecordedRun, steps: Sequence[int]) -> Iterable[tuple[int, TokenTable]]:
    """Reads step after step, with a bar on a terminal; standard output stays free of it."""
    names = [each.name for each in FIELDS if each.name != "role_spans"]

    def read() -> Iterator[tuple[int, TokenTable]]:
        for number in steps:
            yield number, run.export.step(number).batch(names)

    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    return track(read(), "replaying", len(steps), console=console, transient=True, disable=is_hidden)


def _print_json(report: Mapping[str, Any]) -> None:
    print(orjson.dumps(report, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def _tokens_table(step: TokenTable, recomputed: Mapping[str, Values], row: int) -> Table:
    """Recorded values; a recomputed one is put beside it where the two differ in the digits shown."""
    table = Table(box=None, header_style="bold", title_justify="left", padding=(0, 1))
    table.title = record_name(step, row)
    for title in ("token", "id", "trainable", *_SHOWN.values()):
        table.add_column(title, justify="right")
    start, stop = int(step.token_offsets[row]), int(step.token_offsets[row + 1])
    for token in range(start, stop):
        is_trainable = step["loss_mask"][token]
        cells = [str(token - start), str(step["token_ids"][token]), "yes" if is_trainable else ""]
        for name in _SHOWN:
            recorded = _cell(name, step[name][token]) if name in step else "-"
            again = _cell(name, recomputed[name][token]) if name in recomputed else recorded
            cells.append(recorded if recorded == again else f"{recorded} ≠ {again}")
        table.add_row(*cells, style=None if is_trainable else "dim")
    return table


def _tokens_as_dict(step: TokenTable, recomputed: Mapping[str, Values], row: int) -> dict[str, Any]:
    start, stop = int(step.token_offsets[row]), int(step.token_offsets[row + 1])
    recorded = {
        name: step[name][start:stop] if step.is_per_token(name) else step[name][row] for name in step.columns
    }
    return {
        "recorded": recorded,
        "recomputed": {name: values[start:stop] for name, values in recomputed.items()},
    }


def _cell(name: str, value: Any) -> str:
    if np.isnan(value):
        return "-"
    if name in MASKS:
        return "yes" if value == 1 else ""
    return f"{value:.4f}"
