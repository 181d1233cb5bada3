"""The trainer's logprobs again, from the weights that a step was trained with, where they are still there.

They are computed in the precision that trained, in another packing perhaps, and on another machine: how far
they may be from the recorded ones follows from that precision and the model.

Step n trains policy version n: `weights/step_n`, or the checkpoint after n steps, or for step 0 the model
that the run began with.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from pellucid.checkpoint import STATE
from pellucid.checkpoint.state import read_model
from pellucid.config import TrainerPrecision
from pellucid.config.shared import ModelConfig
from pellucid.config.trainer import SequenceLayout
from pellucid.data.table import TokenTable, Values
from pellucid.data.tensors import to_tensors
from pellucid.errors import DataError
from pellucid.model import Layout, Policy, TokenOutput, load_policy
from pellucid.model.attention import AttentionPlan
from pellucid.model.head import MAX_LOGITS, token_logprobs
from pellucid.trainer.step import layout_of
from pellucid.transport import is_stable
from pellucid.transport.weights import ServedWeights, weights_folder

_EPS = float(torch.finfo(torch.float32).eps)

Forward = Callable[..., tuple[TokenOutput, Tensor]]
"""From the arguments of a policy to its output, and the hidden states that its head read."""


class Predicted(NamedTuple):
    """Values of each token, and how far from them a recorded one may be by rounding alone."""

    values: Values
    bounds: Values


class Predictor:
    """One policy that takes the weights of step after step, in ascending order."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        max_tokens: int,
        max_length: int | None = None,
        layout: SequenceLayout = "auto",
    ) -> None:
        """`max_tokens`, `max_length` and `layout` are the trainer's: what it computed depends on them."""
        self._folder = folder
        self._policy = load_policy(model, trainable=True, max_length=max_length, layout=layout)
        self._weights = ServedWeights(self._policy.hf)
        self._is_whole = model.lora is None
        self._max_tokens = max_tokens

    def predict(self, step: int, records: TokenTable) -> dict[str, Predicted] | None:
        """Logprobs and entropy of each token, in the precision that trained; None if the weights are gone."""
        if not self._load(step):
            return None
        dtype = _dtype_of(records)
        with torch.no_grad(), self._in(dtype) as forward:
            parts = [self._predict(records.select(rows), forward, dtype) for rows in self._chunks(records)]
        return {
            name: Predicted(*(np.concatenate(pieces) for pieces in zip(*each, strict=True)))
            for name in parts[0]
            if (each := [part[name] for part in parts])
        }

    def _load(self, step: int) -> bool:
        """Loads the weights of a step; False if they are gone. A model without adapters takes no checkpoint
        of one."""
        published = weights_folder(self._folder, step)
        checkpoint = self._folder / "checkpoints" / f"step_{step}"
        if is_stable(published):
            self._weights.load(published)
        elif is_stable(checkpoint) and self._is_whole:
            read_model(self._policy, checkpoint / STATE)
        else:
            return step == 0
        return True

    @contextmanager
    def _in(self, dtype: torch.dtype) -> Iterator[Forward]:
        """Makes a forward with parameters (not buffers) rounded to `dtype`, as mixed precision does it."""
        rounded = {name: each.to(dtype) for name, each in self._policy.named_parameters()}
        hidden: list[Tensor] = []
        compute = self._policy.hidden

        def keep(
            token_ids: Tensor, positions: Tensor, plan: AttentionPlan, embeddings: Tensor | None = None
        ) -> Tensor:
            states = compute(token_ids, positions, plan, embeddings)
            hidden.append(states[0])
            return states

        def forward(*arguments: Any) -> tuple[TokenOutput, Tensor]:
            output: TokenOutput = functional_call(self._policy, rounded, arguments)
            return output, hidden.pop()

        self._policy.hidden = keep  # type: ignore[method-assign]
        try:
            yield forward
        finally:
            self._policy.hidden = compute  # type: ignore[method-assign]

    def _chunks(self, records: TokenTable) -> Iterator[NDArray[np.int64]]:
        """As many records as fit under the cap of a micro batch, at least one."""
        start = 0
        while start < records.num_sequences:
            offsets = records.token_offsets
            fits = np.searchsorted(offsets, offsets[start] + self._max_tokens, "right") - 1
            stop = max(start + 1, int(fits))
            yield np.arange(start, stop)
            start = stop

    def _predict(self, records: TokenTable, forward: Forward, dtype: torch.dtype) -> dict[str, Predicted]:
        table, policy = _table(records), self._policy
        tokens = to_tensors(table, policy.device)
        temperatures = tokens["temperatures"]
        layout = layout_of(table, share_prompts=False).to(policy.device)
        output, hidden = forward(tokens["token_ids"], tokens.positions, temperatures, layout)
        norms, spreads = self._measure(hidden.float(), layout, temperatures)
        logits = norms * logit_bound(policy, dtype, length=int(table.lengths.max()))
        logprobs, entropy = output.logprobs.cpu().numpy(), output.entropy.cpu().numpy()
        return {
            "trainer_logprobs": Predicted(logprobs, logprob_bound(logprobs, logits, policy.vocab_size)),
            "entropy": Predicted(entropy, entropy_bound(entropy, spreads, logits, policy.vocab_size)),
        }

    def _measure(self, hidden: Tensor, layout: Layout, temperatures: Tensor) -> tuple[Values, Values]:
        """Measures per token the length of the hidden state that predicts it ÷ temperature, and the standard
        deviation of log p under p; both are 0 where nothing predicts."""
        head = self._policy.hf.get_output_embeddings()
        norms, spreads = torch.zeros_like(temperatures), torch.zeros_like(temperatures)
        rows = torch.arange(len(layout.predicted), device=hidden.device)
        for some in rows.split(max(1, MAX_LOGITS // self._policy.vocab_size)):
            tokens, states = layout.predicted[some], hidden[layout.predecessors[some]]
            logprobs = token_logprobs(head(states), temperatures[tokens])
            p = logprobs.exp()
            mean = (p * logprobs).sum(-1, keepdim=True)
            norms[tokens] = states.norm(dim=-1) / temperatures[tokens]
            spreads[tokens] = (p * (logprobs - mean) ** 2).sum(-1).sqrt()
        return norms.cpu().numpy(), spreads.cpu().numpy()


_ROUNDINGS = 16
"""Results of a layer that are rounded: two norms, queries, keys, values, two rotations, scores, softmax, the
weighted sum, the output, gate, up, activated product, down, and two sums with the residual stream."""

_DEVIATIONS = 6
"""One value in a billion lies further out by chance."""


def logit_bound(policy: Policy, dtype: torch.dtype, *, length: int) -> float:
    """How far the difference of two logits may change when rounding falls out otherwise: for a hidden state
    of length 1, at temperature 1, in sequences of up to `length` tokens.

    1. An operation is off by at most eps/2 of its result, by eps/√12 in the root mean square. In `dtype` that
       are `_ROUNDINGS` in each of L layers; sums run in float32 and round at each of their n terms. These
       errors are independent and add up like a random walk. Relative to the hidden state h they make

           η = √((16 · L · eps(dtype)² + n · eps(float32)²) / 12)

    2. That error points anywhere in the d dimensions of h. A logit is the product of h with a row w of the
       head, so it is off by η · |h| · |w| / √d in the root mean square; the longest row stands for all.
    3. The difference of two logits has two such errors, and there are two computations to compare, the
       recorded and this one: √2 · √2 = 2 times as much. Six standard deviations are allowed.

    A wrong weight, a wrong mask or another temperature moves logits by their own size, not by η of it.
    """
    head = policy.hf.get_output_embeddings().weight
    matrices = [each for each in policy.parameters() if each.ndim >= 2]
    num_layers = len(policy.layers)
    num_terms = sum(each.shape[-1] for each in matrices) + num_layers * length
    variance = _ROUNDINGS * num_layers * torch.finfo(dtype).eps ** 2 + num_terms * _EPS**2
    scale = float(head.norm(dim=1).max()) / math.sqrt(head.shape[1])
    return _DEVIATIONS * 2 * math.sqrt(variance / 12) * scale


def logprob_bound(logprobs: Values, logits: Values, vocab_size: int) -> Values:
    """How far each logprob may be off if differences of logits may by `logits`.

    With S = Σ exp(z_v - z) over the other tokens, p = 1 / (1 + S), and S changes by a factor of exp(±logits)
    at most. So log p changes by log(p + (1 - p) · exp(logits)) at most: hardly at all where p is close to 1.
    Beside that, the sum over the vocabulary and the subtractions around its logarithm round in float32.
    """
    p = np.exp(np.minimum(logprobs.astype(np.float64), 0))
    softmax = math.sqrt(vocab_size) + math.sqrt(8) * (np.abs(logprobs) + math.log(vocab_size))
    bounds: Values = np.log(p + (1 - p) * np.exp(logits)) + _DEVIATIONS * 2 * _EPS / math.sqrt(12) * softmax
    return bounds


def entropy_bound(entropy: Values, spreads: Values, logits: Values, vocab_size: int) -> Values:
    """How far each entropy may be off if differences of logits may by `logits`.

    Its derivative by the logits is -p (log p + H), so it changes by the product of two standard deviations
    under p at most: that of the change, which is half of `logits` or less, and that of log p, which is
    `spreads` and changes along. Beside that, sums over the vocabulary round in float32.
    """
    sums = math.sqrt(vocab_size) * (1 + np.abs(entropy))
    bounds: Values = logits / 2 * (spreads + logits / 2) + _DEVIATIONS * 2 * _EPS / math.sqrt(12) * sums
    return bounds


def _dtype_of(records: TokenTable) -> torch.dtype:
    """Exports of earlier versions do not say; float32 was all they were tested with."""
    names = set(records.get("precision", np.array([], object)).tolist()) - {None, ""}
    if unknown := names - set(get_args(TrainerPrecision)):
        raise DataError(f"the trainer computed in {sorted(unknown)[0]!r}, which is not known here")
    if len(names) > 1:
        raise DataError(f"the records of one step were computed in {' and '.join(sorted(names))}")
    dtype: torch.dtype = getattr(torch, names.pop() if names else "float32")
    return dtype


def _table(records: TokenTable) -> TokenTable:
    everywhere = np.ones(records.num_tokens, np.bool_)  # so that every token has its own temperature
    return TokenTable(
        records.lengths,
        {
            "token_ids": records["token_ids"].astype(np.uint32),
            "loss_mask": records["loss_mask"],
            "sampled": everywhere,
            "inference_logprobs": np.zeros(records.num_tokens, np.float32),
            "policy_versions": np.zeros(records.num_tokens, np.int32),
            "temperatures": records["temperatures"],
            "env_name": np.full(records.num_sequences, "replay", object),
        },
    )
