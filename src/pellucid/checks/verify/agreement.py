"""Trainer and engine on the same tokens: sequences keep to themselves, and both sides agree on logprobs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.checks.finding import Finding
from pellucid.checks.verify.gradients import difference, gradients
from pellucid.checks.verify.subject import Subject
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tensors import to_tensors
from pellucid.errors import DataError
from pellucid.model import packed_layout
from pellucid.trainer.run import Run
from pellucid.trainer.step import layout_of
from pellucid.transport.weights import publish_version, weights_folder

LOGPROB = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Largest difference of a logprob, by the coarser dtype of both sides; single tokens amplify rounding."""

MEAN_KL = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
UNMOVED = 1e-6
NUM_SWAPS = 3
NUM_DRAWS = 2048
MAX_SURPRISE = 9.0
NUM_GREEDY = 16
FORCED_LR = 1e-3

Floats = NDArray[np.float32]

_STALE = (
    "once the trainer's weights change, the engine no longer agrees: it serves stale ones. Look at what "
    "`update_weights` loads, and from which version. "
)
_CACHED = (
    "while requests of the old weights run, the engine disagrees about new ones with the same prompt: keys "
    "and values of a prompt are used again that were computed before the swap. Look at the prefix cache. "
)
_DIFFERENT = (
    "trainer and engine compute different probabilities for the same tokens. With the same weights that is "
    "another forward: dtype, attention, positions, or a model that is not the same on both sides; see "
    "docs/debug-mismatch.md"
)


_ROUNDED = (
    "in the precision that trains, the gradient differs by more than rounding explains. Look at what runs "
    "there alone: flash attention on a GPU (`pellucid.model.segments`), and the cast of the weights"
)
_ROUNDINGS = 16
"""Numbers that a layer rounds to bfloat16 on the way of a token, forward; backward there are as many."""


def check_precision(subject: Subject) -> Iterator[Finding]:
    """Compares gradients in the precision that trains with those in float32, and trainer with engine in it.

    Roundings are off by eps/√12 in the root mean square, and add up like a random walk over the layers,
    forward and back. Six standard deviations are allowed. Those of float32 are 65,536 times smaller.
    """
    run, table = subject.run, subject.table
    if run.ranks.precision is None:
        why = "this configuration trains in float32, which all other checks are about"
        yield Finding.not_held("precision", "gradients in bfloat16", why)
        return
    ways: dict[str, dict[str, Any]] = {
        "each sequence alone": {"cap": 2, "share": False},
        "all in one": {"cap": table.num_tokens, "share": False},
        "prompts shared": {"cap": table.num_tokens, "share": True},
    }
    expected = gradients(run, table, cap=table.num_tokens, share=False)
    num_roundings = 2 * _ROUNDINGS * len(run.policy.layers)
    limit = 6 * math.sqrt(num_roundings / 12) * torch.finfo(torch.bfloat16).eps
    run.policy.compute_dtype = torch.bfloat16
    try:
        for way, how in ways.items():
            what = f"gradient in bfloat16, {way}, against float32: relative difference"
            gap = difference(expected, gradients(run, table, **how))
            yield Finding("precision", what, gap, limit, _ROUNDED)
        yield from _agreement(subject, subject.samples, "the trainer in bfloat16", "precision")
    finally:
        run.policy.compute_dtype = None


def check_leakage(subject: Subject) -> Iterator[Finding]:
    """Another first sequence, the same others: nothing of theirs may change."""
    table, run = subject.table, subject.run
    ids = table["token_ids"].copy()
    prompt, length = int(table.prompt_lengths[0]), int(table.lengths[0])
    ids[prompt:length] = (ids[prompt:length] + 1 + np.arange(length - prompt)) % run.policy.vocab_size
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
        moved = max(float((each - weights[name]).abs().max()) for name, each in module.named_parameters())
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
        samples = subject.sample(seed=2 + swap)
        yield _check_versions(samples, subject.run.optimizer.num_steps, f"after swap {swap + 1}")
        yield from _agreement(subject, samples, f"after swap {swap + 1} of new weights", "weights", _STALE)
    subject.linger()
    _train(subject, lr=FORCED_LR)
    _hand_over(subject)
    samples = subject.sample(seed=2 + NUM_SWAPS)
    yield from _agreement(subject, samples, "after a swap under requests", "weights", _CACHED)


def _check_versions(samples: Sequence[TrainingSample], version: int, when: str) -> Finding:
    versions = TokenTable.from_samples(samples)["policy_versions"]
    others = versions[versions != version].tolist()
    named = sorted(set(others))
    return Finding(
        "weights",
        f"tokens sampled {when} that name another policy version",
        len(others),
        0,
        f"the engine serves policy version {version}, but its tokens say {named}: staleness is counted "
        "wrong. Look at the version that `update_weights` sets, and at what a completion reports",
    )


def check_experts(subject: Subject) -> Iterator[Finding]:
    """Records that name other experts: with router replay the trainer has to follow them."""
    run, table = subject.run, subject.table
    if run.policy.replay is None:
        yield Finding.not_held(
            "experts",
            "experts that the trainer goes to",
            "trainer.enable_router_replay = false: its routers choose for themselves; set it to true for a "
            "model with experts",
        )
        return
    others = (table["routed_experts"] + 1) % run.policy.replay.shape.num_experts
    changed = _with(table, "routed_experts", others.astype(table["routed_experts"].dtype))
    moved = np.abs(logprobs_of(run, changed) - logprobs_of(run, table))
    per_sequence = np.maximum.reduceat(moved, table.token_offsets[:-1])
    yield Finding(
        "experts",
        "sequences whose logprobs stay when the recorded experts of all their tokens are exchanged",
        int((per_sequence <= UNMOVED).sum()),
        0,
        "the trainer does not go where the record says: its routers choose for themselves, though "
        "trainer.enable_router_replay is on. Look at what reaches the routers' hooks",
    )


def check_sampling(subject: Subject) -> Iterator[Finding]:
    """Draws many tokens after one prompt and compares how often each comes with its probability.

    A chi-squared test over the tokens that are expected at least five times; all others are one class. Its
    p-value is below 1e-9 for a sound engine once in a billion runs.
    """
    with torch.no_grad():
        prompt = torch.tensor(subject.prompts[0], device=subject.served.device)
        layout = packed_layout([len(prompt)], np.ones(len(prompt), np.bool_)).to(prompt.device)
        hidden = subject.served.hidden(
            prompt[None], torch.arange(len(prompt), device=prompt.device)[None], layout.plan
        )
        logits = subject.served.logits(hidden[0, -1]).double()
    expected = NUM_DRAWS * (logits / subject.temperature).softmax(-1).cpu()
    drawn = subject.draw(NUM_DRAWS)
    tokens = torch.tensor([token for completion in drawn for token in completion.token_ids])
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    is_common = expected >= 5
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    wanted = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    statistic = ((observed - wanted).square() / wanted.clamp(min=1e-9)).sum()
    freedom = torch.tensor(max(1, len(wanted) - 1), dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom / 2, statistic / 2))
    yield Finding(
        "sampling",
        f"{NUM_DRAWS:,} tokens drawn after one prompt, against their probabilities: −log10 of the p-value",
        -math.log10(max(p_value, 1e-300)),
        MAX_SURPRISE,
        "the engine does not draw from the distribution whose logprobs it reports: something reshapes it "
        "(top-k, top-p, a penalty, another temperature), or draws share their random numbers",
    )
    yield _check_greedy(subject, logits.log_softmax(-1).cpu())
    stopped = subject.draw(1, stop_token_ids=range(len(expected)))
    wrong = [each.finish_reason for each in drawn if each.finish_reason != "length"]
    wrong += [each.finish_reason for each in stopped if each.finish_reason != "stop"]
    yield Finding(
        "sampling",
        "completions of max_tokens = 1 with another finish reason than length, or stop at a stop token",
        len(wrong),
        0,
        f"a finish reason is {' or '.join(sorted(set(wrong)))} where it is not: an answer that was cut "
        "counts as finished, or the other way round. Rewards, filters and stop rates are misled",
    )


def _check_greedy(subject: Subject, logprobs: Tensor) -> Finding:
    """Draws at temperature 0, where logprobs are those of temperature 1, as evaluations do."""
    drawn = subject.draw(NUM_GREEDY, temperature=0.0)
    gaps = [
        max(float(logprobs.max() - logprobs[token]), abs(float(logprobs[token]) - logprob))
        for completion in drawn
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return Finding(
        "sampling",
        f"{NUM_GREEDY} tokens drawn at temperature 0, against the likeliest: largest difference of a logprob",
        max(gaps),
        LOGPROB[next(subject.served.parameters()).dtype],
        "at temperature 0 the engine does not take the likeliest token, or reports another logprob than that "
        "of temperature 1: evaluations are not greedy",
    )


def _train(subject: Subject, *, lr: float) -> None:
    run, table = subject.run, subject.table
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


def _agreement(
    subject: Subject, samples: Sequence[TrainingSample], when: str, check: str = "agreement", hint: str = ""
) -> list[Finding]:
    table = TokenTable.from_samples(samples)
    trainer = logprobs_of(subject.run, table)[table["sampled"]].astype(np.float64)
    engine = table["inference_logprobs"].astype(np.float64)
    gap = trainer - engine
    worst, largest = int(np.abs(gap).argmax()), float(np.abs(gap).max())
    mean_kl = float((np.expm1(gap) - gap).mean())
    dtype = subject.run.policy.compute_dtype or next(subject.served.parameters()).dtype
    meaning = hint + _explain(subject, table, engine)
    what = f"trainer and engine, {when}:"
    token = f"token {worst} of {len(gap)}"
    return [
        Finding(check, f"{what} largest difference of a logprob ({token})", largest, LOGPROB[dtype], meaning),
        Finding(check, f"{what} mean mismatch KL", mean_kl, MEAN_KL[dtype], meaning),
    ]


def _explain(subject: Subject, table: TokenTable, engine: NDArray[np.float64]) -> str:
    """Finds the single mistake that would make both sides agree."""
    run, temperatures = subject.run, table.dense("temperatures")[table["sampled"]]
    logprobs = logprobs_of(run, table)
    guesses = {
        "They agree at temperature 1: one side does not divide the logits by the temperature.": logprobs_of(
            run, _with(table, "temperatures", np.ones_like(table["temperatures"]))
        ),
        "They agree at the inverse temperature: one side multiplies by it.": logprobs_of(
            run, _with(table, "temperatures", 1 / temperatures)
        ),
        "They agree when the trainer's values move on by one token: its labels are shifted.": np.roll(
            logprobs, 1
        ),
        "They agree when the trainer's values move back by one token: the samples' logprobs are shifted.": (
            np.roll(logprobs, -1)
        ),
    }
    now = float(np.abs(logprobs[table["sampled"]] - engine).mean())
    for text, guess in guesses.items():
        if np.abs(guess[table["sampled"]] - engine).mean() < 0.1 * now:
            return text
    return _DIFFERENT


def logprobs_of(run: Run, table: TokenTable, *, share: bool = True) -> Floats:
    """The trainer's, of every token, all sequences packed into one row."""
    layout = layout_of(table, share_prompts=share)
    tokens = to_tensors(table, run.policy.device)
    with torch.no_grad():
        output = run.predict(tokens, layout.to(run.policy.device))
    values: Floats = output.logprobs.cpu().numpy()
    return values


def _with(table: TokenTable, name: str, values: NDArray[np.generic]) -> TokenTable:
    columns = {each: table[each] for each in table.columns}
    return TokenTable(table.lengths, {**columns, name: values})
