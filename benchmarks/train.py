"""A whole training step against that of TRL's GRPO trainer: same weights, samples, loss and optimizer.

Both run in one process on one thread and take turns, step by step; the fastest step of each counts. Tokens
are those of the samples, prompts included, whether a side computes them once, several times or pads them.
The loss and the gradient norm of the first step have to agree, or there is nothing to compare.
"""

import math
from importlib.util import find_spec

import torch

from benchmarks.result import Result
from benchmarks.training import SHAPES, Steps, training_site
from pellucid.errors import DataError, MissingPackageError

NUM_STEPS = {"tiny": 30, "135M": 7}
AGREED, AGREEMENT = ("loss", "grad_norm"), 1e-3
"""Of the first step, relative."""


def run() -> list[Result]:
    if find_spec("trl") is None:
        raise MissingPackageError(
            "benchmark train compares with TRL, which is not installed here; run `make bench-train`, which "
            "makes an environment with it in .venv-trl and runs this benchmark there"
        )
    torch.set_num_threads(1)
    return [result for model in SHAPES for result in _compare(model)]


def _compare(model: str) -> list[Result]:
    from benchmarks.trl_steps import train_with_trl

    with training_site(model) as site:
        ours = {
            f"train, {model}{note}": site.training(f"ours{note}", share_prompts=not note)
            for note in ("", ", prompts not shared")
        }

        def our_turn() -> None:
            for training in ours.values():
                training.step()

        theirs = train_with_trl(
            site.weights, site.table, site.folder / "trl", num_steps=NUM_STEPS[model], between=our_turn
        )
    tokens, (first, *_) = site.table.num_tokens, ours.values()
    return [
        *(
            Result(
                what,
                tokens / training.steps.fastest_s,
                tokens / theirs.fastest_s,
                "tok/s",
                "TRL's GRPO trainer",
            )
            for what, training in ours.items()
        ),
        *(_agreed(model, quantity, first.steps, theirs) for quantity in AGREED),
    ]


def _agreed(model: str, quantity: str, ours: Steps, theirs: Steps) -> Result:
    own, other = (steps.reports[0][quantity] for steps in (ours, theirs))
    if not math.isclose(own, other, rel_tol=AGREEMENT):
        raise DataError(
            f"benchmark train, {model}: {quantity} of the first step is {own} here and {other} in TRL; the "
            "two do not train the same thing, so that their times say nothing"
        )
    return Result(f"train, {model}, first step's {quantity}", own, other, "", "TRL's, to be the same")
