"""What a token export costs a training step, in two ways.

A step with the export against the same step without, taking turns in one process on one thread, the median
of each, or of a few steps the fastest: this sees everything, on a calm machine to about one percent of many
steps and to a few percent of a few. And the mean step with the export against itself without the time that
training spends in calls of it: this is fine, but blind to what the export's thread and process take from
training.
"""

import time
from collections import deque
from statistics import mean
from typing import Any, get_args

from benchmarks.result import Result
from benchmarks.training import SHAPES, Training, training_site
from pellucid.config.trainer import TokenExportConfig

FORMATS: tuple[str, ...] = get_args(TokenExportConfig.model_fields["format"].annotation)
NUM_STEPS = {"tiny": 300, "135M": 7}
MANY_STEPS = 50


def run() -> list[Result]:
    return [result for model in SHAPES for result in _compare(model)]


def _compare(model: str) -> list[Result]:
    with training_site(model) as site:
        without = site.training("without")
        exporting = {
            format: site.training(format, experimental={"token_export": {"format": format}})
            for format in FORMATS
        }
        clocks = {format: clock_export(each) for format, each in exporting.items()}
        turns = deque([without, *exporting.values()])
        for round in range(1 + NUM_STEPS[model]):
            for each in turns:
                each.step()
            turns.rotate()
            if not round:  # which starts the process that writes
                for clock in clocks.values():
                    clock.spent_s = 0.0
        spent_s = {format: clock.spent_s / NUM_STEPS[model] for format, clock in clocks.items()}
    results = []
    for format, each in exporting.items():
        what, mean_s = f"overhead, {model}, {format}", mean(each.steps.times_s[1:])
        results.append(Result(what, _step_s(each), _step_s(without), "s/step", "no export"))
        results.append(
            Result(f"{what}, its calls", mean_s, mean_s - spent_s[format], "s/step", "without the calls")
        )
    return results


def _step_s(training: Training) -> float:
    steps = training.steps
    return steps.typical_s if len(steps.times_s) >= MANY_STEPS else steps.fastest_s


class Clocked:
    """An object whose methods are timed."""

    def __init__(self, clocked: object) -> None:
        self._clocked = clocked
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._clocked, name)
        if not callable(attribute):
            return attribute

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return attribute(*arguments, **keywords)
            finally:
                self.spent_s += time.perf_counter() - started

        return timed


def clock_export(training: Training) -> Clocked:
    clocked: Any = Clocked(training.run.exporter)
    training.run.exporter = clocked
    return clocked  # type: ignore[no-any-return]
