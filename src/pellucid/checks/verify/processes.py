"""The processes that torchrun started, against one alone: the same batch, through the trainer's own path.

Every process takes part. The main one also has the subject, whose trainer is not sharded, and compares:

    all       pack ─> own micro batches ─> backward ─> gradients, summed over the processes and made whole
    main      the same batch alone ─> differences ─> findings, which all get

Then all of them make one update and publish it, which the main one holds to the oracle: norm, clipping,
AdamW and the published weights that follow from the gradient of the processes.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pellucid.checks.finding import Differences, Finding
from pellucid.checks.oracle.training import AdamWState
from pellucid.checks.verify.gradients import (
    TOLERANCE,
    Gradients,
    difference,
    take_gradients,
    whole_gradients,
)
from pellucid.checks.verify.subject import Subject, build_quiet_run, updated
from pellucid.checks.verify.training_stages import (
    check_moved,
    norm_of,
    rate_of,
    read_weights,
    trained_weights,
    updated_weights,
)
from pellucid.config import VerifyConfig
from pellucid.data import TokenTable
from pellucid.trainer.loop import accumulate
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run
from pellucid.transport import Batch
from pellucid.transport.weights import weights_folder


class BatchResult(NamedTuple):
    """The result of training one batch; the same in every process."""

    denominators: list[int]
    """The denominator of each rank."""

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
            config = updated(config, model={"name": str(folder)})
        ranks = replace(ranks, precision=None)  # the sums are checked, not the rounding of bfloat16
        table = ranks.share(lambda: Batch("", 0, _of_main(subject).table)).table
        norm = ranks.share(lambda: norm_of(_train(_of_main(subject).run, table, {}).gradients))
        max_norm = min(config.trainer.optim.max_norm, norm / 2)  # gradients are clipped
        config = updated(config, trainer={"optim": {"max_norm": max_norm}})
        run = build_quiet_run(config, folder, ranks)
        try:
            for way, batch, settings in _ways(table):
                together = _train(run, batch, settings)
                what = f"{ranks.num_processes} processes {way}"
                yield from ranks.share(partial(_compare, subject, batch, together, what))
            whole, grad_norm = _update(run, table)
            yield from ranks.share(partial(_hold_update, subject, run, whole, grad_norm))
        finally:
            run.close()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _of_main(subject: Subject | None) -> Subject:
    assert subject is not None, "only the main process compares"
    return subject


def _ways(table: TokenTable) -> Iterator[tuple[str, TokenTable, dict[str, Any]]]:
    """Yields a batch and the settings that train it. Ranks without a sequence have padding alone."""
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
            max(abs(each - expected) for each in together.denominators),
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


def _update(run: Run, table: TokenTable) -> tuple[Gradients, float]:
    """Makes one step with its update, and publishes it as policy version 1; returns gradients and norm."""
    observer = accumulate(run, run.pack(0, table))
    gradients = whole_gradients(run)
    update = run.update(observer)
    run.publishes = True
    run.publish(0)
    run.finish_publishing()
    return gradients, update.grad_norm


def _hold_update(subject: Subject | None, run: Run, whole: Gradients, grad_norm: float) -> list[Finding]:
    """Holds norm and published weights to the oracle, from the weights that the subject still has."""
    before = {name: weight.double().cpu() for name, weight in trained_weights(_of_main(subject).run).items()}
    gradients = {name.removeprefix("hf."): gradient for name, gradient in whole.items()}
    norm, lr = norm_of(gradients), rate_of(run, 0)
    expected = updated_weights(run, before, gradients, AdamWState(), lr)
    published = read_weights(weights_folder(run.output_dir, 1))
    differences = Differences()
    for name, weight in expected.items():
        differences.holds("published", name in published, f"{name} is missing")
        if name in published:
            check_moved("published", before[name], weight, published[name], lr, differences, name)
    what = f"{run.ranks.num_processes} processes after one update"
    return [
        Finding(
            "processes",
            f"norm, {what}: relative difference",
            abs(grad_norm - norm) / max(norm, 1e-30),
            TOLERANCE,
            f"the norm is {grad_norm:.9g}, not {norm:.9g}: it is that of a process's own shard, or "
            "parameters are left out or counted twice",
        ),
        Finding(
            "processes",
            f"published weights, {what}: largest difference from the oracle's ÷ what rounding explains",
            differences.worst["published"],
            1.0,
            f"{differences.where['published']}. The gradient is held apart from this: look at clipping, at "
            "what each process updates of its shard, and at how shards are put together",
        ),
    ]


def _explain(expected: Gradients, found: Gradients) -> str:
    """Tells whether one factor brings `expected` to `found`."""
    product = sum(float((expected[name] * found[name]).sum()) for name in expected)
    factor = product / max(sum(float(value.square().sum()) for value in expected.values()), 1e-30)
    if factor and difference(expected, {name: value / factor for name, value in found.items()}) <= TOLERANCE:
        return (
            f"the gradient is {factor:.4g} times that of one process: it is averaged over processes where it "
            "has to be summed, or summed over processes that have the same share"
        )
    return (
        "the processes together have another gradient than one alone. If the loss differs, too, look at the "
        "denominators; if not, at how gradients are summed over processes, and over context-parallel slices"
    )
