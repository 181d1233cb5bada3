"""Steps of one trainable sequence each, as tests export them, and what lies there afterwards."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from pellucid.data import TokenTable, TrainingSample
from pellucid.export import TokenExporter
from pellucid.loss import LossRecord
from pellucid.model import TokenOutput
from pellucid.trainer.observer import observed_values


def samples() -> TokenTable:
    return TokenTable.from_samples(
        [
            TrainingSample.from_turn([1], [2, 3], [-1.0, -2.0], env_name="a", completion_mask=False),
            TrainingSample.from_turn(
                [4], [5], [-1.0], env_name="b", group_id="g", role_spans=[["user", 0, 1]]
            ),
        ]
    ).pad_to(8)


def observed(num_tokens: int) -> dict[str, Any]:
    zeros = torch.zeros(num_tokens)
    return observed_values(TokenOutput(zeros, zeros), LossRecord(zeros, None))


def write_steps(
    exporter: TokenExporter, steps: Iterable[int], spoil: Callable[[], None] | None = None
) -> None:
    """Exports one sequence a step; `spoil` is called before the step 2 is written."""
    table = samples()
    for step in steps:
        if step == 2 and spoil is not None:
            spoil()
        exporter.add(table, observed(table.num_tokens), step=step, micro_step=0, denominator=1)
        exporter.finish(step)
        exporter.mark_stable(step)


def exported(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


NAMES = ("STABLE", "rank_0.jsonl", "summary.rank_0.json")
WHOLE_STEPS = [f"token_exports/step_{step}/{name}" for step in (0, 1) for name in NAMES]
