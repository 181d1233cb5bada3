"""Functions that decide, group by group, which rollouts may train.

A filter sees a whole group and its advantages, which are known by then and do not change: the rollouts that
are left keep what was computed with all of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pellucid.config import FilterConfig
from pellucid.config.imports import describe, load_function
from pellucid.data import Rollout
from pellucid.errors import ConfigError, UserCodeError


@dataclass(frozen=True, slots=True)
class FilterInputs:
    rollouts: Sequence[Rollout]
    """One group, of any size: those that did not fail."""

    advantages: Sequence[float]
    """One per rollout."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter function, and the checks on what it returns."""

    name: str
    function: Callable[[FilterInputs], Iterable[bool]]
    """Returns for each rollout whether it may train."""

    def __call__(self, inputs: FilterInputs) -> list[bool]:
        where = f"filter {self.name!r}, group {inputs.rollouts[0].group_id!r}"
        try:
            keeps = [bool(keep) for keep in self.function(inputs)]
        except Exception as error:
            raise UserCodeError(f"{where}: {describe(error)}") from error
        if len(keeps) != len(inputs.rollouts):
            raise ConfigError(
                f"{where}: {len(keeps)} answers for {len(inputs.rollouts)} rollouts; return one per rollout"
            )
        return keeps


def load_filter(config: FilterConfig) -> Filter:
    return Filter(config.import_path, load_function(config.import_path, config.kwargs, "orchestrator.filter"))
