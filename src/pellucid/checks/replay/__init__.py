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

from collections.abc import Iterable, Sequence
from typing import TypeVar

import orjson
from rich.console import Console
from rich.progress import track

from pellucid.checks.finding import Finding, findings_table
from pellucid.checks.replay.changes import change
from pellucid.checks.replay.checks import Checks, open_predictor, read_steps
from pellucid.checks.replay.recorded import RecordedRun
from pellucid.checks.replay.tokens import tokens_as_dict, tokens_table
from pellucid.checks.replay.what_if import WhatIf, what_if_table
from pellucid.config.imports import see_current_folder
from pellucid.config.tools import ReplaySettings
from pellucid.errors import DataError
from pellucid.export.batch import ColumnBatch, Values
from pellucid.launch.console import make_console

T = TypeVar("T")


def run_replay(settings: ReplaySettings) -> int:
    """0 if the record agrees with itself (or for a what-if), 1 if it does not."""
    if settings.trust_code:
        see_current_folder()
    run = RecordedRun.open(settings.run, trust_code=settings.trust_code)
    steps = run.steps(settings.step)
    console = make_console()
    if settings.changes:
        return _what_if(run, steps, settings, console)
    notes = [] if run.has_config else ["no configs/ beside the export: the default settings are assumed"]
    predictor = open_predictor(run, notes.append) if settings.weights else None
    if run.model is not None and not settings.weights:
        notes.append("logprobs were not recomputed: --weights does, with the run's model and weights")
    checks = Checks(run, predictor, notes)
    shown: tuple[ColumnBatch, dict[str, Values]] | None = None
    for number, step in _progress(read_steps(run, steps), len(steps)):
        shown = step, checks.add(number, step)
    if settings.sequence is not None and shown is not None:
        _check_sequence(settings.sequence, shown[0], settings)
    findings = checks.findings()
    failed = sum(not finding.passed for finding in findings)
    if settings.as_json:
        report = {
            "steps": steps,
            "agrees": not failed,
            "first_difference": _first_failed(findings),
            "findings": [finding.as_dict() for finding in findings],
            "notes": [*notes, *run.export.problems],
        }
        if settings.sequence is not None and shown is not None:
            report["tokens"] = tokens_as_dict(*shown, settings.sequence)
        print(orjson.dumps(report, option=orjson.OPT_SERIALIZE_NUMPY).decode())
        return 1 if failed else 0
    if first := _first_failed(findings):
        console.out(f"the first stage that differs: {first}", highlight=False)
    if settings.sequence is not None and shown is not None:
        console.print(tokens_table(*shown, settings.sequence))
    console.print(findings_table(findings))
    for note in (*notes, *run.export.problems):
        console.out(f"note: {note}", highlight=False)
    what = f"{len(steps):,} step{'s' if len(steps) != 1 else ''}"
    console.out(
        f"{what}: {len(findings) - failed} of {len(findings)} findings agree with the record", highlight=False
    )
    return 1 if failed else 0


def _first_failed(findings: Sequence[Finding]) -> str | None:
    return next((finding.check for finding in findings if not finding.passed), None)


def _what_if(run: RecordedRun, steps: Sequence[int], settings: ReplaySettings, console: Console) -> int:
    what_if = WhatIf(run, lambda own: change(own, settings.changes))
    for number, step in _progress(read_steps(run, steps), len(steps)):
        what_if.add(number, step)
    if settings.as_json:
        report = {"changes": list(settings.changes), **what_if.as_dict()}
        print(orjson.dumps(report, option=orjson.OPT_SERIALIZE_NUMPY).decode())
    else:
        console.print(what_if_table(what_if.totals(), len(steps)))
    return 0


def _check_sequence(index: int, step: ColumnBatch, settings: ReplaySettings) -> None:
    if index >= step.num_sequences:
        raise DataError(
            f"--sequence {index}: step {settings.step} has {step.num_sequences} records, numbered from 0"
        )


def _progress(items: Iterable[T], total: int) -> Iterable[T]:
    """A bar on a terminal; standard output stays free of it."""
    console = Console(stderr=True)
    return track(
        items, "replaying", total=total, console=console, transient=True, disable=not console.is_terminal
    )
