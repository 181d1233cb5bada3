"""`pellucid verify --only model`: a model without a run, as trainer, engine and transformers compute it.

    layouts      packed or in rows, with shared prompts, over two ranks of context parallelism: logprobs and
                 gradient of each, against transformers' eager forward of each sequence alone
    sampled      the logprobs that the engine reports, against the trainer's
    leaked       a sequence that sees one token of another, which the first of these comparisons has to notice

All of it in float32 on the CPU, where rounding hides least.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from pellucid.checks.finding import EPS, Finding
from pellucid.checks.verify.shrink import model_to_verify
from pellucid.checks.verify.training_stages import Bounds
from pellucid.config import ModelConfig, VerifyConfig
from pellucid.config.trainer import SequenceLayout
from pellucid.errors import ModelError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import (
    ContextParallel,
    Layout,
    Policy,
    load_policy,
    packed_layout,
    shared_layout,
    token_logprobs,
)
from pellucid.model.load import context_length
from pellucid.model.policy import without_cache
from pellucid.model.rope import fix_frequencies

OWN, OTHER = (5, 17, 9), 31
"""Tokens of the members of a group behind their prompt, and of a sequence beside the group."""

PROMPT, MAX_PROMPT = 24, 1024
"""Tokens of the prompt, and its tokens at most where it has to be longer than a window."""

MAX_TOKENS = 24
TEMPERATURE = 0.8
NUM_RANKS = 2

_DIGITS = 8
"""Times that rounding may be as large as a last digit that is changed in every weight."""

_PATIENCE = timedelta(minutes=10)

Gradients = Mapping[str, Tensor]

logger = logging.getLogger(__name__)

_LAYOUT = (
    "the trainer computes another model than transformers does: sequences see each other, or windows, "
    "positions, experts or the head differ. Look at `pellucid.model.proof`, which chose the layout"
)
_ENGINE = (
    "the engine reports other logprobs than the trainer computes for the same tokens: another forward, or a "
    "cache that is wrong for this model. Look at the method that was logged, and `pellucid.inference.methods`"
)
_LEAK = (
    "a sequence that sees a token of another would go unnoticed: its logprobs change by less than rounding "
    "explains, so that the other findings say little. Are the weights of this model all but zero?"
)


def verify_model(config: VerifyConfig) -> list[Finding]:
    """Checks the configured model, or a small one like it where its weights are missing or too many."""
    with TemporaryDirectory() as folder:
        name, said = model_to_verify(config.model.name, Path(folder))
        logger.info("%s", said)
        context = context_length(ModelConfig(name=name))
        longest = min(config.trainer.model.seq_len, context or config.trainer.model.seq_len)
        return list(check_model(*load_both(name, longest, config.trainer.model.layout)))


def load_both(name: str, longest: int, layout: SequenceLayout = "auto") -> tuple[Policy, Any]:
    """Loads a model as the trainer does, for sequences of up to `longest` tokens, and by transformers."""
    from transformers import AutoModelForCausalLM

    policy = load_policy(
        ModelConfig(name=name),
        trainable=True,
        max_length=longest,
        device=torch.device("cpu"),
        layout=layout,
    )
    reference = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    fix_frequencies(reference, longest)
    return policy, reference.eval()


class GroupAndOther(NamedTuple):
    """A group of sequences that share a prompt, and one beside it."""

    each: list[Tensor]
    prompt: Tensor

    @classmethod
    def draw(cls, policy: Policy) -> "GroupAndOther":
        """Draws them at random, longer than windows as far as these are not too long."""
        config = policy.hf.config.get_text_config()
        window = max([*policy.windows.values(), getattr(config, "sliding_window", None) or 0])
        length = max(PROMPT, min(window + OTHER, MAX_PROMPT))
        generator = torch.Generator().manual_seed(5)
        prompt, other, *own = (
            torch.randint(0, policy.vocab_size, (each,), generator=generator)
            for each in (length, OTHER, *OWN)
        )
        return cls([*(torch.cat([prompt, each]) for each in own), other], prompt)

    @property
    def lengths(self) -> list[int]:
        return [len(each) for each in self.each]

    @property
    def token_ids(self) -> Tensor:
        return torch.cat(self.each)

    def layout(self, *, share: bool) -> Layout:
        if not share:
            return packed_layout(self.lengths)
        groups = ["group"] * len(OWN) + [""]
        return shared_layout(self.lengths, self.token_ids.numpy(), groups)

    def leaking_layout(self) -> Layout:
        """The last of the sequences sees the last token of the one before it, which predicts nothing."""
        *others, before, last = self.lengths
        leaking = packed_layout([*others, before - 1, last + 1])
        return replace(self.layout(share=False), plan=leaking.plan)


def check_model(policy: Policy, reference: Any) -> Iterator[Finding]:
    """Compares a policy with the same model of transformers, which attends by its eager code."""
    sequences = GroupAndOther.draw(policy)
    expected = [_alone(reference, each) for each in sequences.each]
    gradient = _gradient(reference, expected)
    comparison = _Comparison(policy, reference, sequences, torch.cat(expected).detach(), gradient)
    way = "packed" if policy.way == "packed" else "in rows"
    for name, layout in {
        way: sequences.layout(share=False),
        f"{way}, prompt shared": sequences.layout(share=True),
    }.items():
        found = computed(policy, sequences.each, layout)
        yield from comparison.findings(name, found, _gradient(policy.hf, found))
    yield from _check_context_parallel(policy, sequences, comparison)
    yield from _check_engine(policy, sequences, comparison.limit)
    with torch.no_grad():
        leaking = computed(policy, sequences.each, sequences.leaking_layout())
    change = comparison.gap(leaking)
    what = "one token of another sequence, planted: limit of logprobs ÷ their largest change"
    yield Finding("model", what, comparison.limit / change if change else math.inf, 1.0, _LEAK)


def computed(policy: Policy, sequences: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """Computes logprobs as the trainer does; first tokens, which have no prediction, are left out."""
    token_ids = torch.cat(list(sequences))
    positions = torch.cat([torch.arange(len(each)) for each in sequences])
    temperatures = torch.full((len(token_ids),), TEMPERATURE)
    logprobs = policy(token_ids, positions, temperatures, layout).logprobs
    return [part[1:] for part in logprobs.split([len(each) for each in sequences])]


class _Comparison:
    """Differences from what transformers computes, and their limits.

    Rounding in float32 explains what the number of terms on the way allows. Some families multiply it: delta
    nets solve triangular systems. So weights are changed by one in their last digit, and rounding explains up
    to eight times what transformers makes of that.
    """

    def __init__(
        self, policy: Policy, reference: Any, sequences: GroupAndOther, logprobs: Tensor, gradient: Gradients
    ) -> None:
        self._logprobs = logprobs
        self._gradient = gradient
        self._scale = max(float(each.abs().max()) for each in gradient.values())
        with _other_digits(reference):
            rounded = [_alone(reference, each) for each in sequences.each]
            off = self._off(_gradient(reference, rounded))
        bounds = Bounds.of(policy, max(sequences.lengths))
        scale = max(math.log(policy.vocab_size), float(logprobs.abs().max()))
        self.limit = max(bounds.logprob(scale), _DIGITS * self.gap(rounded))
        self._gradient_limit = max(bounds.gradient(len(logprobs), scale), _DIGITS * off)

    def gap(self, logprobs: Sequence[Tensor]) -> float:
        return float((torch.cat(list(logprobs)).detach() - self._logprobs).abs().max())

    def _off(self, gradient: Gradients) -> float:
        """Returns the largest difference of all, relative to the largest gradient; NaN fails."""
        if gradient.keys() != self._gradient.keys():
            return math.nan
        return (
            max(float((each - gradient[name]).abs().max()) for name, each in self._gradient.items())
            / self._scale
        )

    def findings(self, way: str, logprobs: Sequence[Tensor], gradient: Gradients) -> Iterator[Finding]:
        what = f"logprobs {way}, against transformers: largest difference"
        yield Finding("model", what, self.gap(logprobs), self.limit, _LAYOUT)
        what = f"gradient {way}, against transformers: relative difference"
        yield Finding("model", what, self._off(gradient), self._gradient_limit, _LAYOUT)


@contextmanager
def _other_digits(model: torch.nn.Module) -> Iterator[None]:
    """Context manager: every weight is off by one in its last digit, up or down."""
    generator = torch.Generator().manual_seed(7)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + (2 * up - 1) * EPS)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, own in zip(model.parameters(), before, strict=True):
                parameter.copy_(own)


def _alone(reference: Any, token_ids: Tensor) -> Tensor:
    logits = reference(input_ids=token_ids[None], **without_cache(reference)).logits[0, :-1]
    logprobs = token_logprobs(logits, torch.full((len(logits),), TEMPERATURE))
    return logprobs.gather(-1, token_ids[1:, None])[:, 0]


def _gradient(model: torch.nn.Module, logprobs: Sequence[Tensor]) -> Gradients:
    """The gradient of a sum in which every token has another weight; zeros where a parameter has none."""
    whole = torch.cat(list(logprobs))
    weights = torch.randn(len(whole), generator=torch.Generator().manual_seed(6))
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad((whole * weights).sum(), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }


def _check_context_parallel(
    policy: Policy, sequences: GroupAndOther, comparison: _Comparison
) -> Iterator[Finding]:
    way = f"over {NUM_RANKS} ranks of context parallelism"
    why = policy.why_rows
    if policy.way == "packed" and policy.num_heads % NUM_RANKS:
        why = f"it has {policy.num_heads} attention heads, which {NUM_RANKS} does not divide"
    if why:
        yield Finding.not_held("model", f"logprobs and gradient {way}", f"trainer.model.cp is refused: {why}")
        return
    layout = sequences.layout(share=True)

    def compute(context: ContextParallel) -> tuple[Tensor, Gradients]:
        found = computed(policy, sequences.each, layout.slice(context))
        return torch.cat(found).detach(), _gradient(policy.hf, found)

    (logprobs, first), *others = in_ranks(compute)
    total = {name: sum((gradient[name] for _, gradient in others), own) for name, own in first.items()}
    yield from comparison.findings(way, [logprobs], total)


def in_ranks(compute: Callable[[ContextParallel], Any]) -> list[Any]:
    """Runs ranks that share a micro batch, as threads that talk through gloo as processes do."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> Any:
        group = dist.ProcessGroup(store, rank, NUM_RANKS)
        backend = dist.ProcessGroupGloo(store, rank, NUM_RANKS, _PATIENCE)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return compute(ContextParallel(group, rank, NUM_RANKS))

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(run, range(NUM_RANKS)))


def _check_engine(policy: Policy, sequences: GroupAndOther, limit: float) -> Iterator[Finding]:
    """Samples after prompts of different lengths, two of them equal."""
    prompts = [sequences.prompt, sequences.prompt, sequences.each[0], sequences.each[-1][:7]]
    found: list[tuple[Tensor, Tensor]] = []

    def request(seed: int, prompt: Tensor) -> Request:
        def keep(completion: Any) -> None:
            whole = torch.cat([prompt, torch.tensor(completion.token_ids)])
            found.append((whole, torch.tensor(completion.logprobs)))

        params = SamplingParams(max_tokens=MAX_TOKENS - 3 * seed, seed=seed, temperature=TEMPERATURE)
        return Request(prompt.tolist(), params, Account(), keep)

    what = "logprobs of sampled tokens, engine against trainer: largest difference"
    try:
        engine = Engine(policy, num_slots=3, max_length=max(map(len, prompts)) + MAX_TOKENS)
    except ModelError as error:
        yield Finding.not_held("model", what, str(error))
        return
    run_to_end(engine, [request(seed, prompt) for seed, prompt in enumerate(prompts)])
    wholes = [whole for whole, _ in found]
    with torch.no_grad():
        trained = computed(policy, wholes, packed_layout([len(each) for each in wholes]))
    gaps = [
        float((own[-len(sampled) :] - sampled).abs().max())
        for own, (_, sampled) in zip(trained, found, strict=True)
    ]
    yield Finding("model", what, max(gaps), limit, _ENGINE)
