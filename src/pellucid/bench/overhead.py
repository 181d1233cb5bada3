"""What a token export costs: training steps with it against the same steps without.

Both take turns in one process on one thread; the fastest step of each counts.
"""

from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from pellucid.bench.result import Result
from pellucid.bench.shapes import MAKERS
from pellucid.bench.training import SHAPES, Training, draw_table
from pellucid.config import ModelConfig
from pellucid.model.load import vocab_size

FORMATS = ("jsonl",)
NUM_STEPS = {"tiny": 60, "135M": 5}


def run() -> list[Result]:
    return [result for model in SHAPES for result in _compare(model)]


def _compare(model: str) -> list[Result]:
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        weights = folder / "model"
        MAKERS[model](weights)
        table = draw_table(SHAPES[model], vocab_size(ModelConfig(name=str(weights))))

        def training(what: str, export: dict[str, str] | None) -> Training:
            experimental = {"token_export": export}
            return stack.enter_context(
                closing(Training(weights, table, folder / what, experimental=experimental))
            )

        without = training("without", None)
        exporting = {format: training(format, {"format": format}) for format in FORMATS}
        for _ in range(NUM_STEPS[model]):
            for each in (without, *exporting.values()):
                each.step()
    return [
        Result(
            f"overhead, {model}, {format} export",
            each.steps.fastest_s,
            without.steps.fastest_s,
            "s/step",
            "no export",
        )
        for format, each in exporting.items()
    ]
