"""The loop is the algorithm; `rl` and `sft` share it and differ in where batches come from.

    next_batch ──> forward ──> token losses ──> sum / denominator ──> backward     per micro batch
                                      │
                                      └──> metrics, ledger, export: read the record, never re-derive it
    optimizer.step ──> publish weights ──> log                                       per step

The denominator is the number of trainable tokens of the whole step, known before the first micro batch,
so that packing and the token cap cannot change the gradient.
"""

from pellucid.trainer.run import Run


def train(run: Run) -> None:
    for step in run.steps():
        batch = run.next_batch(step)
        observer = run.observer(batch)
        for micro_batch in batch.micro_batches:
            output = run.forward(micro_batch)
            result = run.loss(micro_batch, output, batch.denominator)
            result.loss.backward()
            observer.add(micro_batch, output, result)
        grad_norm = run.optimizer.step()
        run.publish(step)
        run.finish(step, observer, grad_norm)
    run.save_model()
