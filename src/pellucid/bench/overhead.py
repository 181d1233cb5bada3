"""What a token export costs a training step, in two ways.

A step with the export against the same step without, taking turns in one process on one thread, the fastest
of each: this sees everything, but on a busy machine no finer than a few percent. And the mean step with the
export against itself without the time that training spends in calls of it: this is fine, but blind to what a
thread of the export takes from training.
"""

import time
from typing import Any, get_args

from pellucid.bench.result import Result
from pellucid.bench.training import SHAPES, Training, training_site
from pellucid.config.trainer import TokenExportConfig

FORMATS: tuple[str, ...] = get_args(TokenExportConfig.model_fields["format"].annotation)
NUM_STEPS = {"tiny": 100, "135M": 6}


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
        for _ in range(NUM_STEPS[model]):
            for each in (without, *exporting.values()):
                each.step()
    results = []
    for format, each in exporting.items():
        what, step_s, num_steps = f"overhead, {model}, {format}", each.steps.fastest_s, NUM_STEPS[model]
        results.append(Result(what, step_s, without.steps.fastest_s, "s/step", "no export"))
        mean_s, spent_s = sum(each.steps.times_s) / num_steps, clocks[format].spent_s / num_steps
        results.append(Result(f"{what}, its calls", mean_s, mean_s - spent_s, "s/step", "without the calls"))
    return results


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
