"""Whatever the decoder takes packs, trains under every loss, exports and is booked without an exception."""

from collections import Counter
from itertools import cycle

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from benchmarks.fuzz_codec import LIMITS, make_batches, mutate
from pellucid.config import LossConfig
from pellucid.errors import PayloadError
from pellucid.export import TokenExporter
from pellucid.ledger import Flow, Journal, Stage, State
from pellucid.loss import LossInputs, loss_for
from pellucid.model import TokenOutput
from pellucid.packing import pack_batch
from pellucid.trainer.observer import StepObserver
from pellucid.trainer.step import LossResult, StepBatch, loss_weights
from pellucid.transport import Batch, decode_batch, encode_batch

LOSSES = {
    name: loss_for(TypeAdapter(LossConfig).validate_python({"type": name}))
    for name in ("dppo", "ppo_clip", "cispo", "gspo", "icepop", "tis")
}
REDUCTIONS = ("token", "sequence", "group")


def train_on(batch: Batch, folder, *, loss: str, reduction: str, format: str) -> None:
    """A step as the trainer makes it, with a made-up forward."""
    packed = pack_batch(batch.table, seq_len=60, max_tokens=100, pad_to_multiple_of=8)
    step = StepBatch(batch.step, packed, torch.device("cpu"), weights=loss_weights(packed, reduction))
    exporter, journal = TokenExporter(folder, format=format), Journal(folder / "trainer.jsonl", Stage.TRAINER)
    observer = StepObserver(step, exporter)
    generator = torch.Generator().manual_seed(0)
    for micro_batch in step.micro_batches:
        random = torch.rand(2, micro_batch.table.num_tokens, generator=generator)
        logprobs = (-8 * random[0]).requires_grad_()
        output = TokenOutput(logprobs, 3 * random[1])
        inputs = LossInputs.of(micro_batch.tokens, logprobs)
        mode = micro_batch.packed.kind.training_mode
        record = LOSSES[loss][mode](inputs).weighted(micro_batch.weights)
        assert record.token_loss.isfinite().all(), (loss, mode)
        result = LossResult(record.token_loss.sum() / step.denominator, inputs, record)
        observer.add(micro_batch, output, result)
        result.loss.backward()
        assert logprobs.grad is not None and logprobs.grad.isfinite().all(), (loss, mode)
    observer.complete()
    report = observer.report([observer.metrics()])
    observer.write_ledger(journal)
    exporter.finish(batch.step)
    exporter.close()
    assert exporter.num_lost == 0
    assert report["loss_tokens"] == packed.num_trainable
    counts = Counter[str]()
    for entry in journal.totals():
        counts.update(entry.counts)
    assert counts[Flow.RECEIVED.value] == batch.table.num_sampled
    assert sum(counts[state.value] for state in State) == batch.table.num_sampled


@pytest.mark.parametrize("loss", LOSSES)
def test_every_kind_of_batch_trains(loss, tmp_path) -> None:
    for index, batch in enumerate(make_batches(np.random.default_rng(0))):
        for format in ("jsonl", "parquet"):
            train_on(batch, tmp_path / f"{index}-{format}", loss=loss, reduction="token", format=format)


def test_whatever_the_decoder_takes_trains(tmp_path) -> None:
    payloads = [encode_batch(batch) for batch in make_batches(np.random.default_rng(5))]
    losses, reductions, formats = cycle(LOSSES), cycle(REDUCTIONS), cycle(("jsonl", "parquet", "jsonl"))
    num_taken = 0
    for case in range(700):
        generator = np.random.default_rng((5, case))
        original, other = (payloads[index] for index in generator.integers(0, len(payloads), 2))
        changed, _ = mutate(original, other, generator)
        try:
            batch = decode_batch(changed, sender="test", limits=LIMITS)
        except PayloadError:
            continue
        num_taken += 1
        train_on(
            batch,
            tmp_path / str(case),
            loss=next(losses),
            reduction=next(reductions),
            format=next(formats),
        )
    assert num_taken > 40
