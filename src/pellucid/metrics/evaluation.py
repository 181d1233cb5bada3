"""The measures of an evaluation, and the names of its record. Pure.

    rewards of two examples, four attempts each; None: the attempt failed; passed from 1.0 on

    example 0   1.0   0.5   1.0   None      2 of 4 passed
    example 1   0.0   0.0   0.0   0.0       0 of 4 passed

    avg@4        2.5 / 7                              over the attempts that have a reward
    pass@1       (2/4 + 0) / 2           = 0.25
    pass@2       (1 − C(2,2)/C(4,2)) / 2 = 5/12       some of 2 attempts, drawn from the 4, passed
    pass@4       (1 + 0) / 2             = 0.5
    num_failed   1

An attempt that failed has no reward, and none is made up for it: it is left out of the average, and counts
as not passed.
"""

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

EVAL = "eval"
LINE_WIDTH = 100


def pass_at(num_drawn: int, *, num_passed: int, num_attempts: int) -> float:
    """Probability that `num_drawn` of the attempts, drawn without replacement, include one that passed.

    Unbiased for the same number of fresh attempts, unlike 1 − (1 − passed / attempts) ** drawn.
    """
    return 1.0 - comb(num_attempts - num_passed, num_drawn) / comb(num_attempts, num_drawn)


def measure(examples: Sequence[Sequence[float | None]], pass_reward: float) -> dict[str, float]:
    """Measures by name, of the rewards of every example; each has the same number of attempts."""
    num_attempts = len(examples[0])
    scored = [reward for rewards in examples for reward in rewards if reward is not None]
    num_passed = [
        sum(reward is not None and reward >= pass_reward for reward in rewards) for rewards in examples
    ]
    measures: dict[str, float] = {}
    if scored:
        measures[f"avg@{num_attempts}"] = sum(scored) / len(scored)
    drawn = 1
    while drawn <= num_attempts:
        chances = [pass_at(drawn, num_passed=passed, num_attempts=num_attempts) for passed in num_passed]
        measures[f"pass@{drawn}"] = sum(chances) / len(chances)
        drawn *= 2
    measures["num_failed"] = len(examples) * num_attempts - len(scored)
    return measures


def metric_name(name: str, measure: str) -> str:
    """`eval/reverse-text/avg@8`."""
    return f"{EVAL}/{name}/{measure}"


def evaluations_in(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the measures in a record of `metrics/eval.jsonl`, by environment; those that are finite."""
    found: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        if key.startswith(f"{EVAL}/") and isinstance(value, int | float):
            name, _, measured = key.removeprefix(f"{EVAL}/").rpartition("/")
            found.setdefault(name, {})[measured] = value
    return found


def average_in(measures: Mapping[str, float]) -> tuple[str, float] | None:
    """(`avg@8`, its value); None if no attempt has a reward."""
    return next((item for item in measures.items() if item[0].startswith("avg@")), None)


def evaluation_line(version: int, name: str, measures: Mapping[str, float]) -> str:
    """`eval   50  reverse-text  avg@8 0.812  pass@1 0.500  pass@8 0.750  12.3 tokens  3.2 s  1 failed`."""
    passes = [key for key in measures if key.startswith("pass@")]
    average = average_in(measures)
    parts = [f"{average[0]} {average[1]:.3f}" if average else "no reward"]
    parts += [f"{key} {measures[key]:.3f}" for key in dict.fromkeys([passes[0], passes[-1]])]
    if "completion_length" in measures:
        parts.append(f"{measures['completion_length']:.1f} tokens")
    parts.append(f"{measures['time_s']:.1f} s")
    if measures["num_failed"]:
        parts.append(f"{measures['num_failed']:.0f} failed")
    head, tail = f"{EVAL} {version:4d}  ", "".join(f"  {part}" for part in parts)
    return head + _clipped(name, LINE_WIDTH - len(head) - len(tail)) + tail


def _clipped(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 0)]}…"
