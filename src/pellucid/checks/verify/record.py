"""Checks that columns arrive as they left, and that recorded token losses add up to the loss."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.checks.finding import Finding
from pellucid.checks.verify.gradients import batches_of
from pellucid.checks.verify.subject import Subject
from pellucid.data import COLUMNS, Axis
from pellucid.packing import pack_batch
from pellucid.transport import Batch, decode_batch, encode_batch


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Every prompt as text and back, and no id beyond the model's vocabulary."""
    tokenizer, limit = subject.tokenizer, subject.run.policy.vocab_size
    beyond = sum(token >= limit for prompt in subject.prompts for token in prompt)
    yield Finding(
        "tokenizer",
        "tokens of the prompts beyond the model's vocabulary",
        beyond,
        0,
        "the tokenizer belongs to another model; use the one that was saved with the weights",
    )
    changed = sum(
        tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) != prompt
        for prompt in subject.prompts
    )
    yield Finding(
        "tokenizer",
        "prompts that are other tokens once they were text",
        changed,
        0,
        "text and tokens are not the same to this tokenizer: what is tokenised again, such as a reply in a "
        "conversation, would not be what was sampled",
    )


def check_columns(subject: Subject) -> Iterator[Finding]:
    """Over the wire and into a micro batch, against what the samples were built from."""
    samples, sent = subject.samples, subject.table
    batch = decode_batch(encode_batch(Batch("verify", 0, sent)), sender="verify")
    longest = int(sent.lengths.max())
    packed = pack_batch(batch.table, seq_len=longest, max_tokens=sent.num_tokens)
    differing = set()
    for micro_batch in packed.micro_batches(0):
        table, offsets = micro_batch.table, micro_batch.table.token_offsets
        for position, index in enumerate(micro_batch.indices):
            rows = slice(offsets[position], offsets[position + 1])
            expected = samples[index].arrays, samples[index].values
            arrays = {name: array.array() for name, array in expected[0].items()}
            is_sampled = arrays["sampled"]
            found = {name: _on_axis(table.dense(name)[rows], name, is_sampled) for name in arrays}
            differing |= {name for name in arrays if not np.array_equal(found[name], arrays[name])}
            differing |= {name for name, value in expected[1].items() if table[name][position] != value}
    named = ", ".join(sorted(differing))
    yield Finding(
        "columns",
        "columns that a micro batch has other values of than the sample",
        len(differing),
        0,
        f"{named} arrived with other values than the samples had: columns are swapped, shifted or misaligned "
        "between orchestrator and trainer",
    )


def _on_axis(dense: NDArray[Any], name: str, is_sampled: NDArray[np.bool_]) -> NDArray[Any]:
    return dense[is_sampled] if COLUMNS[name].stored is Axis.SAMPLED else dense


def check_record(subject: Subject) -> Iterator[Finding]:
    """Compares the sum of the recorded token losses over the denominator with the loss that is optimised.

    Losses of both signs cancel out, so their absolute values are the measure: a float32 sum of n losses is
    off by up to √n roundings of these.
    """
    run, table = subject.run, subject.table
    [batch] = batches_of(run, table, cap=int(table.lengths.max()))
    recorded = optimised = absolute = 0.0
    for micro_batch in batch.micro_batches:
        result = run.loss(micro_batch, run.forward(micro_batch), batch.denominator)
        optimised += float(result.loss.detach().double())
        losses = result.record.token_loss.detach().double()
        recorded += float(losses.sum())
        absolute += float(losses.abs().sum())
    gap = abs(recorded / table.num_trainable - optimised) * table.num_trainable / max(absolute, 1e-12)
    yield Finding(
        "record",
        "sum of token losses ÷ trainable tokens against the loss: difference ÷ mean absolute token loss",
        gap,
        2 * math.sqrt(table.num_trainable) * torch.finfo(torch.float32).eps,
        "what is exported of the tokens does not add up to the loss that is optimised: it is divided by "
        "something else than the trainable tokens of the step, or has terms that no token carries",
    )
