"""The loop is the algorithm; `rl` and `sft` share it and differ in where batches come from.

    next_batch ──> forward ──> token losses ──> sum / denominator ──> backward     per micro batch
                                      │
                                      └──> metrics, ledger, export: read the record, never re-derive it
    update weights ──> publish them ──> log                                          per step

The denominator is the number of trainable tokens of the whole step, known before the first micro batch,
so that packing and the token cap cannot change the gradient. A step whose loss or gradient is not finite is
skipped: the next policy version has the same weights, and the step is recorded like any other.
"""

from pellucid.trainer.observer import StepObserver
from pellucid.trainer.run import Run
from pellucid.trainer.step import StepBatch


def train(run: Run) -> None:
    for step in run.steps():
        observer = accumulate(run, run.next_batch(step))
        update = run.update(observer)
        run.publish(step)
        run.finish(step, observer, update)
    run.close_books()
    run.save_model()


def accumulate(run: Run, batch: StepBatch, observer: StepObserver | None = None) -> StepObserver:
    """Adds the gradient of a step, or of a part of one, to the parameters; returns its observer."""
    observer = observer or run.observer(batch)
    with run.timed("compute", batch.step), run.balanced([batch]):
        for micro_batch in batch.micro_batches:
            output = run.forward(micro_batch)
            result = run.loss(micro_batch, output, batch.denominator)
            observer.add(micro_batch, output, result)  # an export writes it while the backward pass runs
            result.loss.backward()
        if batch.is_last:
            observer.complete()
    return observer
