"""The processes that torchrun started, against one alone: the same batch, through the trainer's own path.

Every process takes part. The main one also has the subject, whose trainer is not sharded, and compares:

    all       pack ─> own micro batches ─> backward ─> gradients, summed over the processes and made whole
    main      the same batch alone ─> differences ─> findings, which all get
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pellucid.checks.finding import Finding
from pellucid.checks.verify.gradients import TOLERANCE, Gradients, difference, take_gradients
from pellucid.checks.verify.subject import Subject, build_quiet_run, with_model
from pellucid.config import VerifyConfig
from pellucid.data import TokenTable
from pellucid.trainer.batches import share_table
from pellucid.trainer.loop import accumulate
from pellucid.trainer.parallel import Processes
from pellucid.trainer.ranks import Ranks
from pellucid.trainer.run import Run


class BatchResult(NamedTuple):
    """Of one batch; the same in every process."""

    denominators: list[int]
    """Of each rank."""

    loss: float
    gradients: Gradients


def check_processes(config: VerifyConfig, ranks: Ranks, subject: Subject | None) -> Iterator[Finding]:
    """Called by all; only the main process has a subject."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        if config.model.name == config.model.DEMO:
            # transformers saves a model in the main process alone, and others may be on another machine.
            files = ranks.share(lambda: _files(Path(_of_main(subject).config.model.name)))
            for path, content in files.items():
                (folder / path).write_bytes(content)
            config = with_model(config, folder)
        if isinstance(ranks, Processes):
            ranks = replace(ranks, precision=None)  # the sums are checked, not the rounding of bfloat16
        run = build_quiet_run(config, folder, ranks)
        try:
            table = share_table(ranks, lambda: _of_main(subject).table)
            for way, batch, settings in _ways(table):
                together = _train(run, batch, settings)
                what = f"{ranks.num_processes} processes {way}"
                yield from ranks.share(partial(_compare, subject, batch, together, what))
        finally:
            run.close()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _of_main(subject: Subject | None) -> Subject:
    assert subject is not None, "only the main process compares"
    return subject


def _ways(table: TokenTable) -> Iterator[tuple[str, TokenTable, dict[str, Any]]]:
    """What is trained, and settings of the trainer. Ranks without a sequence have padding alone."""
    yield "as configured", table, {}
    yield "with a sequence at a time", table, {"micro_batch_max_tokens": 2}
    yield "with one sequence in all", table.select([0]), {}


def _train(run: Run, table: TokenTable, settings: dict[str, Any]) -> BatchResult:
    """A step without its update."""
    configured = run.config
    run.config = configured.model_copy(update=settings)
    batch = run.pack(0, table)
    run.config = configured
    observer = accumulate(run, batch)
    report = observer.report(run.ranks.gather(observer.metrics()))
    return BatchResult(run.ranks.gather(batch.denominator), report["loss"], take_gradients(run))


def _compare(subject: Subject | None, table: TokenTable, together: BatchResult, what: str) -> list[Finding]:
    run = _of_main(subject).run
    alone = _train(run, table, {})
    expected = max(1, table.truncate(run.config.model.seq_len).num_trainable)
    return [
        Finding(
            "processes",
            f"denominators, {what}: largest difference from the batch's trainable tokens",
            max(abs(own - expected) for own in together.denominators),
            0,
            f"the ranks divide by {', '.join(map(str, together.denominators))}; the batch has {expected} "
            "trainable tokens. With a per-rank denominator a token weighs more on a rank that has few: count "
            "those of the whole batch, on every rank",
        ),
        Finding(
            "processes",
            f"loss, {what}: relative difference",
            abs(together.loss - alone.loss) / max(abs(alone.loss), 1e-12),
            TOLERANCE,
            "the ranks' shares of the loss do not add up to that of one process: they divide by different "
            "numbers, or sequences are left out or trained twice. Look at the denominators, then at packing",
        ),
        Finding(
            "processes",
            f"gradient, {what}: relative difference",
            difference(alone.gradients, together.gradients),
            TOLERANCE,
            _explain(alone.gradients, together.gradients),
        ),
    ]


def _explain(expected: Gradients, found: Gradients) -> str:
    factor = _factor(expected, found)
    if factor and difference(expected, {name: value / factor for name, value in found.items()}) <= TOLERANCE:
        return (
            f"the gradient is {factor:.4g} times that of one process: it is averaged over processes where it "
            "has to be summed, or summed over processes that have the same share"
        )
    return (
        "the processes together have another gradient than one alone. If the loss differs, too, look at the "
        "denominators; if not, at how gradients are summed over processes, and over context-parallel slices"
    )


def _factor(expected: Gradients, found: Gradients) -> float:
    """What `expected` is to be multiplied with to come closest to `found`."""
    product = sum(float((expected[name] * found[name]).sum()) for name in expected)
    return product / max(sum(float(value.square().sum()) for value in expected.values()), 1e-30)
