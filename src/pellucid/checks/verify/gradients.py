"""One batch, on its way into micro batches, packed and spread in many ways: nothing of it may change.

Prompts survive text, columns arrive as they left, recorded token losses add up to the loss, and the gradient
does not depend on packing or on the number of ranks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pellucid.checks.finding import Finding
from pellucid.checks.verify.subject import Subject
from pellucid.data import COLUMNS, Axis, TokenTable
from pellucid.model import Policy
from pellucid.packing import pack_batch
from pellucid.trainer.loop import accumulate
from pellucid.trainer.run import Run
from pellucid.trainer.step import StepBatch, loss_weights
from pellucid.transport import Batch, decode_batch, encode_batch

TOLERANCE = 1e-5
PADDING = 16
CHUNK = 7
"""Tokens whose logits are computed at a time: a divisor of few batches, so that the last chunk is smaller."""

Gradients = dict[str, Tensor]

_PACKING = (
    "the gradient depends on how sequences are packed. Either a sequence sees its neighbours (look at "
    "`leakage`), or something is divided per micro batch instead of by the trainable tokens of the step"
)
_CHUNKS = (
    "the head computes something else in chunks than at once. Look at `pellucid.model.head`: which rows a "
    "chunk has, and what it adds to the gradients of hidden states and weight"
)
_RANKS = (
    "the gradient depends on the number of ranks. Every rank has to divide by the trainable tokens of the "
    "whole batch, not by its own (a per-rank denominator), and gradients are summed over ranks, not averaged"
)


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Every prompt as text and back, and no id beyond the model's vocabulary."""
    tokenizer, limit = subject.tokenizer, subject.run.policy.vocab_size
    yield Finding(
        "tokenizer",
        "tokens of the prompts beyond the model's vocabulary",
        sum(token >= limit for prompt in subject.prompts for token in prompt),
        0,
        "the tokenizer belongs to another model; use the one that was saved with the weights",
    )
    texts = [tokenizer.decode(prompt) for prompt in subject.prompts]
    again = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    yield Finding(
        "tokenizer",
        "prompts that are other tokens once they were text",
        sum(ids != prompt for ids, prompt in zip(again, subject.prompts, strict=True)),
        0,
        "text and tokens are not the same to this tokenizer: what is tokenised again, such as a reply in a "
        "conversation, would not be what was sampled",
    )


def check_columns(subject: Subject) -> Iterator[Finding]:
    """Over the wire and into a micro batch, against what the samples were built from."""
    sent = subject.table
    batch = decode_batch(encode_batch(Batch("verify", 0, sent)), sender="verify")
    packed = pack_batch(batch.table, seq_len=int(sent.lengths.max()), max_tokens=sent.num_tokens)
    differing = set()
    for micro_batch in packed.micro_batches(0):
        table, offsets = micro_batch.table, micro_batch.table.token_offsets
        for position, index in enumerate(micro_batch.indices):
            rows, sample = slice(offsets[position], offsets[position + 1]), subject.samples[index]
            arrays = {name: array.array() for name, array in sample.arrays.items()}
            for name, expected in arrays.items():
                found = table.dense(name)[rows]
                if COLUMNS[name].stored is Axis.SAMPLED:
                    found = found[arrays["sampled"]]
                if not np.array_equal(found, expected):
                    differing.add(name)
            differing |= {name for name, value in sample.values.items() if table[name][position] != value}
    named = ", ".join(sorted(differing))
    yield Finding(
        "columns",
        "columns that a micro batch has other values of than the sample",
        len(differing),
        0,
        f"{named} arrived with other values than the samples had: columns are swapped, shifted or misaligned "
        "between orchestrator and trainer",
    )


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


def check_packing(subject: Subject) -> Iterator[Finding]:
    table, run = subject.table, subject.run
    longest, total = int(table.lengths.max()), table.num_tokens
    alone = gradients(run, table, cap=2, share=False)
    padded = {"cap": total, "share": False, "multiple": total + PADDING}
    ways: dict[str, dict[str, Any]] = {
        "all in one": {"cap": total, "share": False},
        "prompts shared": {"cap": total, "share": True},
        "half the tokens at a time": {"cap": max(longest, total // 2), "share": False},
        "a quarter at a time": {"cap": max(longest, total // 4), "share": True},
        f"with {PADDING} tokens of padding": padded,
    }
    for way, how in ways.items():
        yield _compared("packing", way, alone, gradients(run, table, **how), _PACKING)
    yield _check_padding(run, table, padded)
    yield from _check_chunks(run, table, alone)
    backwards = table.select(np.arange(table.num_sequences)[::-1])
    yield _compared("packing", "in reverse order", alone, gradients(run, backwards, cap=total), _PACKING)


def _check_padding(run: Run, table: TokenTable, padded: dict[str, Any]) -> Finding:
    """Looks at token losses: a model may know padding so well that it leaves no gradient."""
    [batch] = batches_of(run, table, **padded)
    of_samples = of_padding = 0.0
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            losses = run.loss(micro_batch, run.forward(micro_batch), batch.denominator).record.token_loss
            num_tokens = int(table.lengths[micro_batch.packed.indices].sum())
            of_samples += float(losses[:num_tokens].abs().sum())
            of_padding += float(losses[num_tokens:].abs().sum())
    return Finding(
        "packing",
        f"losses of {PADDING} tokens of padding ÷ those of all others",
        of_padding / max(of_samples, 1e-12),
        0.0,
        "padding has a loss: its tokens count as trainable. Look at the loss mask of what fills it up",
    )


def _check_chunks(run: Run, table: TokenTable, alone: Gradients) -> Iterator[Finding]:
    """Has the head compute the logits of a few tokens at a time, as it does where a vocabulary is large."""
    how: dict[str, Any] = {"cap": table.num_tokens, "share": False}
    [batch] = batches_of(run, table, **how)
    entropies = []
    for max_logits in (run.policy.max_logits, CHUNK * run.policy.vocab_size):
        with _chunked(run.policy, max_logits), torch.no_grad():
            entropies.append(torch.cat([run.forward(each).entropy for each in batch.micro_batches]))
    with _chunked(run.policy, CHUNK * run.policy.vocab_size):
        found = gradients(run, table, **how)
    yield _compared("packing", f"logits of {CHUNK} tokens at a time", alone, found, _CHUNKS)
    yield Finding(
        "packing",
        f"entropy, logits of {CHUNK} tokens at a time: largest difference",
        float((entropies[0] - entropies[1]).abs().max()),
        TOLERANCE * math.log(run.policy.vocab_size),
        _CHUNKS,
    )


@contextmanager
def _chunked(policy: Policy, max_logits: int | None) -> Iterator[None]:
    before, policy.max_logits = policy.max_logits, max_logits
    try:
        yield
    finally:
        policy.max_logits = before


def check_ranks(subject: Subject) -> Iterator[Finding]:
    """Ranks one after the other in this process; with unequal numbers of trainable tokens on each."""
    table, run = subject.table, subject.run
    cap = int(table.lengths.max())
    alone = gradients(run, table, cap=cap)
    for num_ranks in (2, 4, table.num_sequences + 1):
        together = gradients(run, table, cap=cap, num_ranks=num_ranks)
        yield _compared("ranks", f"{num_ranks} ranks against 1", alone, together, _RANKS)


def batches_of(
    run: Run, table: TokenTable, *, cap: int, share: bool = True, multiple: int = 1, num_ranks: int = 1
) -> list[StepBatch]:
    """One step, as each rank would train it."""
    packed = pack_batch(
        table,
        seq_len=run.config.model.seq_len,
        max_tokens=cap,
        num_ranks=num_ranks,
        pad_to_multiple_of=multiple,
        share_prompts=share,
        in_rows=run.policy.way == "rows",
    )
    weights = loss_weights(packed, run.config.loss.reduction)
    return [StepBatch(0, packed, run.policy.device, rank, weights) for rank in range(num_ranks)]


def gradients(run: Run, table: TokenTable, **how: Any) -> Gradients:
    """The sum over all ranks, as the optimizer would see it; `how` as for `batches_of`."""
    batches = batches_of(run, table, **how)
    with run.balanced(batches):
        for batch in batches:
            accumulate(run, batch)
    return take_gradients(run)


def take_gradients(run: Run) -> Gradients:
    """Returns the gradients that are there, whole; afterwards there are none."""
    found = whole_gradients(run)
    run.trained.module.zero_grad(set_to_none=True)
    return found


def whole_gradients(run: Run) -> Gradients:
    """The gradients that are there, whole where the model is sharded; every process takes part."""
    found = {}
    for name, parameter in run.trained.module.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def _compared(check: str, way: str, expected: Gradients, found: Gradients, meaning: str) -> Finding:
    what = f"gradient, {way}: relative difference"
    return Finding(check, what, difference(expected, found), TOLERANCE, meaning)


def difference(expected: Gradients, found: Gradients) -> float:
    """Largest of all, relative to the largest gradient; NaN where there is nothing to compare."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    if scale == 0 or expected.keys() != found.keys():
        return math.nan
    return max(float((expected[name] - found[name]).abs().max()) for name in expected) / scale
