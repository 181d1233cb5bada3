"""Trainer and engine on the same tokens: sequences keep to themselves, and both sides agree on logprobs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.checks.verify.finding import Finding
from pellucid.checks.verify.gradients import gradients
from pellucid.checks.verify.subject import Subject
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import to_tensors
from pellucid.errors import DataError
from pellucid.trainer.run import Run
from pellucid.trainer.step import layout_of
from pellucid.transport.weights import publish_version, weights_folder

LOGPROB = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Largest difference of a logprob, by the engine's dtype; rounding is amplified at single tokens."""

MEAN_KL = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
UNMOVED = 1e-6
NUM_SWAPS = 3
FORCED_LR = 1e-3

Floats = NDArray[np.float32]


def check_leakage(subject: Subject) -> Iterator[Finding]:
    """Another first sequence, the same others: nothing of theirs may change."""
    table, run = subject.table, subject.run
    vocabulary = run.policy.vocab_size
    ids = table["token_ids"].copy()
    prompt, length = int(table.prompt_lengths[0]), int(table.lengths[0])
    ids[prompt:length] = (ids[prompt:length] + 1 + np.arange(length - prompt)) % vocabulary
    others = slice(length, None)
    for share in (False, True):
        before = logprobs_of(run, table, share=share)
        after = logprobs_of(run, _with(table, "token_ids", ids), share=share)
        yield Finding(
            "leakage",
            f"other sequences' logprobs, prompts {'shared' if share else 'not shared'}: largest change",
            float(np.abs(after[others] - before[others]).max()),
            UNMOVED,
            "a packed sequence sees the tokens of another: the attention mask lets them through. Look at the "
            "attention of this model, and at how sequence lengths reach it",
        )


def check_agreement(subject: Subject) -> Iterator[Finding]:
    yield from _agreement(subject, subject.samples, "as loaded")


def check_swaps(subject: Subject) -> Iterator[Finding]:
    """Weights that do not change stay; weights that change arrive."""
    module = subject.run.trained.module
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for _ in range(NUM_SWAPS):
        _train(subject, lr=0.0)
        _hand_over(subject)
    with torch.no_grad():
        moved = max(float((own - weights[name]).abs().max()) for name, own in module.named_parameters())
    yield Finding(
        "drift",
        f"weights after {NUM_SWAPS} steps and swaps at learning rate 0: largest change",
        moved,
        0.0,
        "a step at learning rate 0 changed the weights: weight decay that is not scaled by it, or something "
        "else that writes to them",
    )
    yield from _agreement(subject, subject.sample(seed=1), f"after {NUM_SWAPS} swaps at learning rate 0")
    for swap in range(NUM_SWAPS):
        _train(subject, lr=FORCED_LR)
        _hand_over(subject)
        findings = _agreement(subject, subject.sample(seed=2 + swap), f"after swap {swap + 1} of new weights")
        yield from (
            replace(finding, check="weights", meaning=f"{_STALE} {finding.meaning}") for finding in findings
        )


_STALE = (
    "once the trainer's weights change, the engine no longer agrees: it serves stale ones. Look at what "
    "`update_weights` loads, and from which version."
)


def _train(subject: Subject, *, lr: float) -> None:
    run = subject.run
    table = subject.table
    found = gradients(run, table, cap=table.num_tokens)
    for name, parameter in run.trained.module.named_parameters():
        parameter.grad = found[name]
    update = run.optimizer.step(lr=lr)
    if update.is_skipped:
        raise DataError(f"the gradient norm of the drawn samples is {update.grad_norm:g}: training diverges")


def _hand_over(subject: Subject) -> None:
    version = subject.run.optimizer.num_steps
    publish_version(subject.folder, version, subject.run.trained.write, keep=2)
    subject.engine.update_weights(version, weights_folder(subject.folder, version))


def _agreement(subject: Subject, samples: Sequence[TrainingSample], when: str) -> list[Finding]:
    table = TokenTable.from_samples(samples)
    trainer = logprobs_of(subject.run, table)[table["sampled"]].astype(np.float64)
    engine = table["inference_logprobs"].astype(np.float64)
    gap = trainer - engine
    dtype = next(subject.served.parameters()).dtype
    meaning = _explain(subject, table, engine)
    worst = int(np.abs(gap).argmax())
    return [
        Finding(
            "agreement",
            f"trainer and engine, {when}: largest difference of a logprob (token {worst} of {len(gap)})",
            float(np.abs(gap).max()),
            LOGPROB[dtype],
            meaning,
        ),
        Finding(
            "agreement",
            f"trainer and engine, {when}: mean mismatch KL",
            float((np.expm1(gap) - gap).mean()),
            MEAN_KL[dtype],
            meaning,
        ),
    ]


def _explain(subject: Subject, table: TokenTable, engine: NDArray[np.float64]) -> str:
    """Which single mistake would make both sides agree."""
    run, sampled = subject.run, table["sampled"]
    dense = table.dense("temperatures")
    guesses = {
        "They agree at temperature 1: one side does not divide the logits by the temperature.": logprobs_of(
            run, _with(table, "temperatures", np.ones_like(table["temperatures"]))
        )[sampled],
        "They agree at the inverse temperature: one side multiplies by it.": logprobs_of(
            run, _with(table, "temperatures", 1 / dense[sampled])
        )[sampled],
        "They agree when the trainer's values move on by one token: its labels are shifted.": (
            np.roll(logprobs_of(run, table), 1)[sampled]
        ),
        "They agree when the trainer's values move back by one token: the samples' logprobs are shifted.": (
            np.roll(logprobs_of(run, table), -1)[sampled]
        ),
    }
    now = float(np.abs(logprobs_of(run, table)[sampled] - engine).mean())
    for text, guess in guesses.items():
        if np.abs(guess - engine).mean() < 0.1 * now:
            return text
    return (
        "trainer and engine compute different probabilities for the same tokens. With the same weights that "
        "is another forward: dtype, attention, positions, or a model that is not the same on both sides; see "
        "docs/debug-mismatch.md"
    )


def logprobs_of(run: Run, table: TokenTable, *, share: bool = True) -> Floats:
    """The trainer's, of every token, all sequences packed into one row."""
    layout = layout_of(table, share_prompts=share)
    tokens = to_tensors(table, run.policy.device)
    with torch.no_grad():
        output = run.predict(tokens, layout.to(run.policy.device))
    values: Floats = output.logprobs.cpu().numpy()
    return values


def _with(table: TokenTable, name: str, values: NDArray[np.generic]) -> TokenTable:
    columns = {own: rows.array for own, rows in table.columns.items()}
    return TokenTable(table.lengths, {**columns, name: values})
