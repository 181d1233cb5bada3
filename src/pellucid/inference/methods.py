"""Ways to compute the next logits of sequences by a model's own forward, and which one is right for a model.

    all sequences in one batch        caches of any length are joined: padding precedes the shorter ones, and
                                      is seen by no layer: a mask hides it from attention, and prompts, whose
                                      states are kept, are computed without any
    members of a group in one batch   sequences of equal length that started together
    each sequence alone               where rows of a cache cannot be told apart
    without a cache                   where it gives other values than the model without one

Invariant: a method is used only for a model for which it was tried, when the engine starts; see
`choose_method`."""

import copy
import inspect
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from pellucid.data.tensors import to_device
from pellucid.data.tokenizer import first_line
from pellucid.errors import ModelError
from pellucid.inference.cache_rows import has_keys, join_rows, take_rows, trim
from pellucid.inference.limits import Limit, binding, limits_of, lowered
from pellucid.model import Policy
from pellucid.model.policy import NOT_YET, without_cache
from pellucid.model.proof import FORWARD_ERRORS, in_float32, rounding_limit

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SideBySide:
    """Sequences in one batch, and what a model keeps of them."""

    lengths: list[int]
    """Tokens of each sequence; those in one batch are of one length, unless they were joined."""

    kept: Any = None
    """The model's cache, by the name of its argument, or the token ids [rows, length]; None: no tokens."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1


class Method:
    """A way to compute the next logits of sequences side by side by a model's own forward."""

    def __init__(
        self, hf: Any, *, keeps_cache: bool, is_batched: bool, joins: bool, gives_positions: bool
    ) -> None:
        """`keeps_cache`: the model's cache is used; else all tokens are computed anew, which no cache can
        get wrong. `is_batched`: rows of a cache may be many, repeated and dropped. `joins`: rows of several
        caches become one batch, whatever their lengths. `gives_positions`: positions are given; else the
        model counts them.
        """
        self.keeps_cache = keeps_cache
        self.is_batched = is_batched
        self.joins = joins
        self.gives_positions = gives_positions
        self.config = hf.config.get_text_config()
        self.hf = hf
        self._options: dict[str, Any] = {"use_cache": keeps_cache}
        parameters = inspect.signature(hf.forward).parameters
        if "logits_to_keep" in parameters:
            self._options["logits_to_keep"] = 1
        self._takes_cache = [name for name in _CACHES if name in parameters]

    def __str__(self) -> str:
        batches = "each sequence alone"
        if self.is_batched:
            batches = "all sequences in one batch" if self.joins else "members of a group in one batch"
        return f"transformers' own forward {'and' if self.keeps_cache else 'without a'} cache, {batches}"

    def extend(self, sequences: SideBySide, token_ids: Tensor) -> Tensor:
        """Appends tokens [rows, tokens] to the sequences; returns the logits that follow the last."""
        options: dict[str, Any] = dict(self._options)
        starts = np.array(sequences.lengths)
        sequences.lengths = [length + token_ids.shape[1] for length in sequences.lengths]
        if self.keeps_cache:
            options |= self._new_cache() if sequences.kept is None else sequences.kept
        elif sequences.kept is not None:
            token_ids = torch.cat([sequences.kept, token_ids], dim=1)
            starts[:] = 0
        options |= self._places(sequences, starts, token_ids)
        output = self.hf(input_ids=token_ids, **options)
        sequences.kept = self._cache_after(output, options) if self.keeps_cache else token_ids
        logits: Tensor = output.logits[:, -1]
        return logits

    def _places(self, sequences: SideBySide, starts: NDArray[Any], token_ids: Tensor) -> dict[str, Tensor]:
        """Makes positions, and a mask that hides what precedes a sequence shorter than others."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.gives_positions:
            arrays["position_ids"] = starts[:, None] + np.arange(token_ids.shape[1])
        if sequences.is_ragged and has_keys(next(iter(sequences.kept.values()))):
            num_hidden = sequences.longest - np.array(sequences.lengths)
            arrays["attention_mask"] = (np.arange(sequences.longest) >= num_hidden[:, None]).astype(np.int64)
        return dict(zip(arrays, to_device(list(arrays.values()), token_ids.device), strict=True))

    def _new_cache(self) -> dict[str, Any]:
        """Makes the cache that `generate` would give to the model; {} for one that makes its own."""
        if not self._takes_cache or not self.hf._supports_default_dynamic_cache():
            return {}
        return {self._takes_cache[0]: DynamicCache(config=self.hf.config.get_text_config(decoder=True))}

    def _cache_after(self, output: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        for name in self._takes_cache:
            cache = getattr(output, name, None)
            if cache is not None or name in given:
                return {name: given[name] if cache is None else cache}
        raise ModelError(f"{type(self.hf).__name__} has no cache that it takes and returns")

    def take(self, sequences: SideBySide, rows: Sequence[int]) -> SideBySide:
        """Copies rows, in this order and possibly repeatedly."""
        if not self.is_batched:
            assert len(sequences.lengths) == len(rows) == 1
            return copy.deepcopy(sequences)
        (index,) = to_device([np.asarray(rows)], next(self.hf.parameters()).device)
        kept = take_rows(sequences.kept, index, len(sequences.lengths))
        taken = SideBySide([sequences.lengths[row] for row in rows], kept)
        if taken.longest < sequences.longest:
            for cache in kept.values():
                trim(cache, taken.longest)
        return taken

    def join(self, parts: Sequence[SideBySide]) -> SideBySide:
        kept = join_rows([part.kept for part in parts], [len(part.lengths) for part in parts])
        return SideBySide([length for part in parts for length in part.lengths], kept)


_CACHES = ("past_key_values", "cache_params", "state")
"""Names by which models take and return a cache."""

_PROBED = 156
"""Tokens of a probed sequence: more than layers take at a time (128), and more than most sparse attention."""

_LEAST = 40
"""Tokens of a probed sequence where the engine takes shorter ones alone."""

_BEYOND = 32
"""Tokens by which a probed sequence is longer than a limit that cannot be lowered."""

_LAST = 6
"""Tokens of a probed sequence that are computed one by one, from the cache."""

_APART, _SHORT = 7, 9
"""Tokens by which prompts that are joined differ in length, and tokens of one that comes late."""

_ERRORS = (ModelError, *FORWARD_ERRORS)
"""Errors of a model that is used in a way that it does not know."""


@torch.inference_mode()
def choose_method(policy: Policy, max_length: int) -> Method:
    """Returns the fastest method whose logprobs are those of the model's own forward of each sequence alone.

    Three sequences are computed as requests are: repeated, dropped, joined, taken up again, under limits that
    bind if they ever do in sequences of `max_length` tokens. The last method computes every sequence alone
    and anew for each token: where it differs, a model is not causal. Raises ModelError then.
    """
    name, reason = type(policy.hf).__name__, ""
    with _exact(policy), _binding_time_steps(policy.hf), ExitStack() as stack:
        with _in_its_dtype(name):
            low, length = _bound(policy, max_length)
            stack.enter_context(lowered(low))
            token_ids = _drawn(policy, length)
            alone = _alone(policy, token_ids)
        for method in _methods(policy.hf):
            probe = _Probe(method, token_ids)
            try:
                probe.run()
            except _ERRORS as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
            else:
                reason = probe.reason_against(alone)
            if not reason:
                break
            logger.debug("not by %s: %s", method, reason)
    if not reason:
        with _in_its_dtype(name):
            _Probe(method, token_ids).run()
        logger.info("%s samples by %s", name, method)
        return method
    raise ModelError(
        f"{name} predicts a token differently once others follow it ({reason}): it is not causal, so nothing "
        f"can sample from it; {NOT_YET}"
    )


def _bound(policy: Policy, max_length: int) -> tuple[list[Limit], int]:
    """Returns the limits to lower in a probe, and how many tokens it needs so that all others bind, too."""
    token_ids = _drawn(policy, max(_LEAST, min(_PROBED, max_length)))

    def compute() -> Tensor:
        return torch.stack(_alone(policy, token_ids))

    limits = limits_of(policy.hf, max_length)
    low = binding(limits, compute, lambda one, other: _difference(one, other) > _limit(policy.hf, [other]))
    needed = [min(each.largest + _BEYOND, max_length) for each in limits if each not in low]
    return low, max([token_ids.shape[1], *needed])


def _drawn(policy: Policy, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, policy.vocab_size, (3, length), generator=generator).to(policy.device)


def _alone(policy: Policy, token_ids: Tensor) -> list[Tensor]:
    """Computes the logits of each sequence alone, at the places that a probe looks at."""
    options: dict[str, Any] = without_cache(policy.hf)
    (places,) = to_device([np.array(_looked_at(token_ids.shape[1]))], policy.device)
    if takes_places := "logits_to_keep" in inspect.signature(policy.hf.forward).parameters:
        options["logits_to_keep"] = places
    rows = (policy.hf(input_ids=row[None], **options).logits[0] for row in token_ids)
    return [row if takes_places else row[places] for row in rows]


def _looked_at(length: int) -> list[int]:
    """Returns the places whose logits a probe compares, of sequences of `length` tokens."""
    return [*range(_SHORT, _SHORT + _LAST), *range(length - _LAST - 2 * _APART, length)]


def _methods(hf: Any) -> Iterator[Method]:
    """Yields methods, the fastest first.

    A model that takes positions, but other ones than those in a sequence, counts them by what tokens are
    there: padding has none. A cache does not know that.
    """
    takes_positions = "position_ids" in inspect.signature(hf.forward).parameters
    make = partial(Method, hf)
    for joins, is_batched in ((True, True), (False, True), (False, False)):
        yield make(keeps_cache=True, is_batched=is_batched, joins=joins, gives_positions=takes_positions)
    for gives_positions in {takes_positions: None, False: None}:
        for is_batched in (True, False):
            yield make(keeps_cache=False, is_batched=is_batched, joins=False, gives_positions=gives_positions)


@contextmanager
def _in_its_dtype(name: str) -> Iterator[None]:
    """Context manager: turns errors of a family's own code, which may not compute in bfloat16, into a
    ModelError."""
    try:
        yield
    except _ERRORS as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f'{name} cannot sample ({reason}); try model.dtype = "float32"') from error


@contextmanager
def _binding_time_steps(hf: Any) -> Iterator[None]:
    """Context manager: state-space layers with a least time step have one that every token falls below.

    Whether tokens fall below their own depends on the tokens, so those of a probe may all be above it, and
    not show that a cached step leaves it out.
    """
    limited = [module for module in hf.modules() if getattr(module, "time_step_limit", (0.0,))[0] > 0]
    own = [module.time_step_limit for module in limited]
    for module in limited:
        module.time_step_limit = (100.0, *module.time_step_limit[1:])
    try:
        yield
    finally:
        for module, limit in zip(limited, own, strict=True):
            module.time_step_limit = limit


def _exact(policy: Policy) -> AbstractContextManager[None]:
    is_float32 = all(each.dtype == torch.float32 for each in policy.parameters())
    return nullcontext() if is_float32 else in_float32(policy)


class _Probe:
    """Three sequences, computed by a method, and the logits that it gave on the way."""

    def __init__(self, method: Method, token_ids: Tensor) -> None:
        self._method = method
        self._token_ids = token_ids
        self._start = token_ids.shape[1] - _LAST
        self._seen: list[list[tuple[int, Tensor]]] = [[] for _ in token_ids]
        """Places of tokens, and the logits that followed them, for each sequence."""

    def run(self) -> None:
        if self._method.joins:
            self._run_joined()
        elif self._method.is_batched:
            self._run_batched()
        else:
            for row in range(len(self._token_ids)):
                prefix = self._prefix([row], self._start)
                self._step(self._method.take(prefix, [0]), [row], 1)
                self._step(self._method.take(prefix, [0]), [row], 6)

    def _run_batched(self) -> None:
        """A group of two and two others; two are dropped, and one starts late."""
        prefix = self._prefix([0, 1, 2], self._start)
        cohort = self._method.take(prefix, [0, 0, 1, 2])
        self._step(cohort, [0, 0, 1, 2], 1)
        self._step(self._method.take(cohort, [3, 1]), [2, 0], 5)
        self._step(self._method.take(prefix, [1]), [1], 6)

    def _run_joined(self) -> None:
        """Three lengths become one batch, the longest is dropped, and a shorter one comes."""
        apart = [self._method.take(self._prefix([row], self._start - _APART * row), [0]) for row in range(3)]
        batch = self._method.join(apart)
        self._step(batch, [0, 1, 2], 2)
        batch = self._method.take(batch, [2, 1, 2])
        self._step(batch, [2, 1, 2], 2)
        late = self._prefix([0], _SHORT)
        self._step(self._method.join([self._method.take(batch, [0, 1]), late]), [2, 1, 0], 3)

    def _prefix(self, rows: list[int], length: int) -> SideBySide:
        sequences = SideBySide([0] * len(rows))
        self._method.extend(sequences, self._token_ids[rows, :length])
        return sequences

    def _step(self, sequences: SideBySide, rows: list[int], num_steps: int) -> None:
        for _ in range(num_steps):
            places = sequences.lengths
            found = self._method.extend(sequences, self._token_ids[rows, places][:, None])
            for row, place, logits in zip(rows, places, found, strict=True):
                self._seen[row].append((place, logits))

    def reason_against(self, alone: Sequence[Tensor]) -> str:
        """Returns how far logprobs are from those of each sequence alone, or "" if rounding explains it."""
        row_of = {place: row for row, place in enumerate(_looked_at(self._token_ids.shape[1]))}
        gaps = [
            max(_difference(logits, own[row_of[place]]) for place, logits in seen)
            for seen, own in zip(self._seen, alone, strict=True)
        ]
        gap = statistics.median(gaps)  # rounding may send a token of one to another expert
        limit = _limit(self._method.hf, alone)
        return "" if gap <= limit else f"off by {gap:.2g} nats where rounding explains {limit:.1g}"


def _limit(hf: Any, logits: Sequence[Tensor]) -> float:
    """Returns the difference of logprobs, in nats, that rounding explains."""
    num_layers = getattr(hf.config.get_text_config(), "num_hidden_layers", 1)
    return rounding_limit(num_layers, max(1.0, *(float(each.abs().max()) for each in logits)))


def _difference(logits: Tensor, others: Tensor) -> float:
    return float((logits.float().log_softmax(-1) - others.float().log_softmax(-1)).abs().max())
