"""The processes that torchrun started, against one alone: the same batch, through the trainer's own path.

Every process takes part. The main one also has the subject, whose trainer is not sharded, and compares:

    all       pack ─> own micro batches ─> backward ─> gradients, summed over the processes and made whole
    main      the same batch alone ─> differences ─> findings, which all get

Then all of them make one update and publish it, which the main one holds to the oracle: norm, clipping,
AdamW and the published weights that follow from the gradient of the processes.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pellucid.checks.finding import Finding
from pellucid.checks.oracle.training import AdamWState
from pellucid.checks.verify.differences import Differences
from pellucid.checks.verify.gradients import (
    TOLERANCE,
    Gradients,
    difference,
    take_gradients,
    whole_gradients,
)
from pellucid.checks.verify.subject import Subject, build_quiet_run, with_model
from pellucid.checks.verify.training_stages import (
    check_moved,
    rate_of,
    read_weights,
    trained_weights,
    updated_weights,
)
from pellucid.config import VerifyConfig
from pellucid.data import TokenTable
from pellucid.trainer.batches import share_table
from pellucid.trainer.loop import accumulate
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run
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
            config = with_model(config, folder)
        ranks = replace(ranks, precision=None)  # the sums are checked, not the rounding of bfloat16
        table = share_table(ranks, lambda: _of_main(subject).table)
        config = _clipping(config, ranks.share(lambda: _norm_alone(_of_main(subject))))
        run = build_quiet_run(config, folder, ranks)
        try:
            for way, batch, settings in _ways(table):
                together = _train(run, batch, settings)
                what = f"{ranks.num_processes} processes {way}"
                yield from ranks.share(partial(_compare, subject, batch, together, what))
            updated = _update(run, table)
            yield from ranks.share(partial(_hold_update, subject, run, updated))
        finally:
            run.close()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _of_main(subject: Subject | None) -> Subject:
    assert subject is not None, "only the main process compares"
    return subject


def _norm_alone(subject: Subject) -> float:
    gradients = _train(subject.run, subject.table, {}).gradients
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _clipping(config: VerifyConfig, norm: float) -> VerifyConfig:
    """The configuration with gradients of this norm clipped."""
    optim = config.trainer.optim
    clipping = optim.model_copy(update={"max_norm": min(optim.max_norm, norm / 2)})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"optim": clipping})})


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


class Updated(NamedTuple):
    """One update of all processes together."""

    gradients: Gradients
    grad_norm: float


def _update(run: Run, table: TokenTable) -> Updated:
    """Makes one step with its update, and publishes it as policy version 1."""
    observer = accumulate(run, run.pack(0, table))
    gradients = whole_gradients(run)
    update = run.update(observer)
    run.publishes = True
    run.publish(0)
    return Updated(gradients, update.grad_norm)


def _hold_update(subject: Subject | None, run: Run, updated: Updated) -> list[Finding]:
    """Holds norm and published weights to the oracle, from the weights that the subject still has."""
    before = {name: weight.double().cpu() for name, weight in trained_weights(_of_main(subject).run).items()}
    gradients = {name.removeprefix("hf."): each.double().cpu() for name, each in updated.gradients.items()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    lr = rate_of(run, 0)
    expected = updated_weights(run, before, gradients, AdamWState(), lr)
    published = read_weights(weights_folder(run.output_dir, 1))
    differences = Differences()
    for name, weight in expected.items():
        if name in published:
            check_moved("published", before[name], weight, published[name], lr, differences, name)
        else:
            differences.add("published", math.inf, f"{name} is missing")
    what = f"{run.ranks.num_processes} processes after one update"
    return [
        Finding(
            "processes",
            f"norm, {what}: relative difference",
            abs(updated.grad_norm - norm) / max(norm, 1e-30),
            TOLERANCE,
            f"the norm is {updated.grad_norm:.9g}, not {norm:.9g}: it is that of a process's own shard, or "
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
    """Computes the factor that brings `expected` closest to `found`."""
    product = sum(float((expected[name] * found[name]).sum()) for name in expected)
    return product / max(sum(float(value.square().sum()) for value in expected.values()), 1e-30)
