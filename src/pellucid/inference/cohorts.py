"""Decoding by transformers' own forward and caches, for models that attention plans are not proven for.

    prompt ──once──> prefix ──its row three times──> cohort of 3 ──> one forward per step, a token of each
                       └──────its row once─────────> cohort of 1, for a member that comes later

A cohort is sequences of equal length that start together, side by side in one batch. None of them is padded,
so layers that carry a state, convolutions and attention code of a model's own compute what they compute for
each sequence alone.

Invariants:
- A prefix never changes, and is kept as long as a row that starts with it.
- A row that is removed leaves its cohort before the next forward.
- What a model's cache cannot do is found out before the first request: see `choose_method`."""

import copy
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from pellucid.data.tensors import read_together, to_device
from pellucid.data.tokenizer import first_line
from pellucid.errors import ModelError
from pellucid.inference.decoder import Decoder, Prompt, Row
from pellucid.inference.slots import Scoring
from pellucid.model import ExpertRecorder, Policy, token_logprobs
from pellucid.model.policy import NOT_YET
from pellucid.model.proof import in_float32

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SideBySide:
    """Sequences of equal length, and what a model keeps of them."""

    num_rows: int
    length: int = 0
    kept: Any = None
    """The model's cache, by the name of its argument, or the token ids [rows, length]; None: no tokens."""


@dataclass(eq=False, slots=True)
class CohortRow(Row):
    prefix: SideBySide | None = None
    """The prompt that it starts with, without the last token, and others of the same length; None if that
    leaves no token."""

    place: int = 0
    """Row of its prompt in `prefix`."""

    is_removed: bool = False


@dataclass(eq=False, slots=True)
class _Cohort:
    rows: list[CohortRow]
    sequences: SideBySide | None = None
    """None before the first step."""


class CohortDecoder(Decoder[CohortRow]):
    def __init__(self, policy: Policy, recorder: ExpertRecorder | None) -> None:
        self._device = policy.device
        self._method = choose_method(policy)
        self.starts_together = self._method.is_batched
        self._recorder = recorder
        self._experts: list[Tensor] = []
        self._cohorts: list[_Cohort] = []
        self._new: list[CohortRow] = []

    def add(self, length: int) -> CohortRow:
        row = CohortRow(length)
        self._new.append(row)
        return row

    def remove(self, row: CohortRow) -> None:
        row.is_removed = True

    def copy_prefix(self, source: CohortRow, target: CohortRow, length: int) -> None:
        target.prefix, target.place = source.prefix, source.place

    def arrange(self) -> list[CohortRow]:
        for cohort in self._cohorts:
            self._drop_removed(cohort)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        together: defaultdict[tuple[int, ...], list[CohortRow]] = defaultdict(list)
        for row in self._new:
            if not row.is_removed:
                apart = () if self._method.is_batched else (id(row),)
                together[(row.length, id(row.prefix), *apart)].append(row)
        self._new.clear()
        self._cohorts += map(_Cohort, together.values())
        return [row for cohort in self._cohorts for row in cohort.rows]

    def _drop_removed(self, cohort: _Cohort) -> None:
        left = [index for index, row in enumerate(cohort.rows) if not row.is_removed]
        if len(left) < len(cohort.rows):
            cohort.rows = [cohort.rows[index] for index in left]
            if left and cohort.sequences is not None:
                cohort.sequences = self._method.take(cohort.sequences, left)

    def logits(
        self, prompts: Sequence[Prompt[CohortRow]], rows: Sequence[CohortRow], last_tokens: Sequence[int]
    ) -> Tensor:
        self._experts = self._prefill(prompts)
        (tokens,) = to_device([np.asarray(last_tokens, np.int64)[:, None]], self._device)
        found = []
        for cohort, own in zip(
            self._cohorts, tokens.split([len(cohort.rows) for cohort in self._cohorts]), strict=True
        ):
            if cohort.sequences is None:
                cohort.sequences = self._begin(cohort)
            found.append(self._method.extend(cohort.sequences, own))
            self._experts += self._recorded(len(own), 1)
        return torch.cat(found)

    def _prefill(self, prompts: Sequence[Prompt[CohortRow]]) -> list[Tensor]:
        """Computes prompts, those of equal length side by side; returns the experts of each."""
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            apart = () if self._method.is_batched else (index,)
            alike[(len(prompt.token_ids), *apart)].append(index)
        experts: dict[int, Tensor] = {}
        for (length, *_), indices in alike.items():
            prefix = SideBySide(len(indices))
            (ids,) = to_device([np.stack([prompts[index].token_ids for index in indices])], self._device)
            self._method.extend(prefix, ids)
            for part in self._recorded(len(indices), length):
                experts |= zip(indices, part.unflatten(0, (len(indices), length)), strict=True)
            for place, index in enumerate(indices):
                for row in prompts[index].rows:
                    row.prefix, row.place = prefix, place
        return [experts[index] for index in sorted(experts)]

    def _begin(self, cohort: _Cohort) -> SideBySide:
        prefix = cohort.rows[0].prefix
        if prefix is None:
            return SideBySide(len(cohort.rows))
        return self._method.take(prefix, [row.place for row in cohort.rows])

    def _recorded(self, num_rows: int, num_tokens: int) -> list[Tensor]:
        """Returns the experts of the last tokens of each row of the last forward, if they are recorded."""
        if self._recorder is None:
            return []
        by_row = self._recorder.last().unflatten(0, (num_rows, -1))
        return [by_row[:, -num_tokens:].flatten(0, 1)]

    def experts(self) -> Tensor:
        return torch.cat(self._experts)

    def score(self, scorings: Sequence[Scoring]) -> list[list[float]]:
        """Computes one sequence after the other."""
        return [self._score(each) for each in scorings]

    def _score(self, scoring: Scoring) -> list[float]:
        ids, temperatures = to_device(
            [
                np.asarray(scoring.token_ids, np.int64),
                np.full(len(scoring.token_ids) - 1, scoring.temperature, np.float32),
            ],
            self._device,
        )
        logprobs = token_logprobs(self._method.all_logits(ids)[:-1], temperatures)
        (found,) = read_together([logprobs.gather(-1, ids[1:, None])[:, 0]])
        return [math.nan, *found.tolist()]


class Method:
    """A way to compute the next logits of sequences side by side by a model's own forward."""

    def __init__(self, hf: Any, *, keeps_cache: bool, is_batched: bool, gives_positions: bool) -> None:
        """`keeps_cache`: the model's cache is used; else all tokens are computed anew, which no cache can
        get wrong. `is_batched`: rows of a cache may be many, repeated and dropped. `gives_positions`:
        positions are given; else the model counts them.
        """
        self.keeps_cache = keeps_cache
        self.is_batched = is_batched
        self.gives_positions = gives_positions
        self._hf = hf
        self._options = {"use_cache": keeps_cache}
        parameters = inspect.signature(hf.forward).parameters
        if "logits_to_keep" in parameters:
            self._options["logits_to_keep"] = 1
        self._takes_cache = [name for name in _CACHES if name in parameters]

    def __str__(self) -> str:
        batches = "members of a group side by side" if self.is_batched else "each sequence alone"
        return f"transformers' own forward {'and' if self.keeps_cache else 'without a'} cache, {batches}"

    def extend(self, sequences: SideBySide, token_ids: Tensor) -> Tensor:
        """Appends tokens [rows, tokens] to the sequences; returns the logits that follow the last."""
        options: dict[str, Any] = dict(self._options)
        if self.keeps_cache:
            options |= self._new_cache() if sequences.kept is None else sequences.kept
        elif sequences.kept is not None:
            token_ids = torch.cat([sequences.kept, token_ids], dim=1)
            sequences.length = 0
        first, sequences.length = sequences.length, sequences.length + token_ids.shape[1]
        if self.gives_positions:
            positions = torch.arange(first, sequences.length, device=token_ids.device)
            options["position_ids"] = positions.expand(sequences.num_rows, -1)
        output = self._hf(input_ids=token_ids, **options)
        sequences.kept = self._cache_after(output, options) if self.keeps_cache else token_ids
        logits: Tensor = output.logits[:, -1]
        return logits

    def _new_cache(self) -> dict[str, Any]:
        """Makes the cache that `generate` would give to the model; {} for one that makes its own."""
        if not self._takes_cache or not self._hf._supports_default_dynamic_cache():
            return {}
        return {self._takes_cache[0]: DynamicCache(config=self._hf.config.get_text_config(decoder=True))}

    def _cache_after(self, output: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        for name in self._takes_cache:
            cache = getattr(output, name, None)
            if cache is not None or name in given:
                return {name: given[name] if cache is None else cache}
        raise ModelError(f"{type(self._hf).__name__} has no cache that it takes and returns")

    def all_logits(self, token_ids: Tensor) -> Tensor:
        """Computes the logits that follow each token of one sequence."""
        logits: Tensor = self._hf(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    def take(self, sequences: SideBySide, rows: Sequence[int]) -> SideBySide:
        """Copies rows, in this order and possibly repeatedly."""
        if self.is_batched:
            (index,) = to_device([np.asarray(rows)], next(self._hf.parameters()).device)
            kept = _select(sequences.kept, index, sequences.num_rows)
        else:
            assert sequences.num_rows == len(rows) == 1
            kept = copy.deepcopy(sequences.kept)
        return SideBySide(len(rows), sequences.length, kept)


_CACHES = ("past_key_values", "cache_params", "state")
"""Names by which models take and return a cache."""


def _select(value: Any, rows: Tensor, num_rows: int) -> Any:
    """Copies a cache with these rows of all its tensors; raises ModelError where that is not known to be
    right: every tensor must begin with the rows."""
    if isinstance(value, Tensor):
        if value.dim() == 0 or (value.numel() == 0 and len(value) != num_rows):
            return value.clone()
        if len(value) != num_rows:
            raise ModelError(f"a tensor of its cache begins with {len(value)}, not with {num_rows} rows")
        return value.index_select(0, rows)
    of = partial(_select, rows=rows, num_rows=num_rows)
    if isinstance(value, list | tuple):
        return type(value)(map(of, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update((key, of(item)) for key, item in value.items())
        return copied
    if isinstance(value, Cache | CacheLayerMixin | LinearAttentionCacheLayerMixin) or type(
        value
    ).__name__.endswith("Cache"):
        copied = copy.copy(value)
        copied.__dict__.update((key, of(item)) for key, item in vars(value).items())
        return copied
    if value is None or isinstance(value, _CONSTANT):
        return value
    raise ModelError(f"its cache holds a {type(value).__name__}")


_CONSTANT = (bool, int, float, str, type, torch.dtype, torch.device, PreTrainedConfig)

_PROBED = 40
"""Tokens of a probed sequence: more than convolutions cover, and than the blocks of most sparse attention."""

_ROUNDINGS = 64
"""Rounding errors that add up in a layer: a product of 4,096 terms makes √4096 of them."""


@torch.inference_mode()
def choose_method(policy: Policy) -> Method:
    """Returns the fastest method whose logprobs are those of the model's own forward of each sequence alone.

    Three sequences are computed as `CohortDecoder` would: repeated, dropped, and taken up again from the same
    prefix. The last method computes every sequence alone and anew for each token: where it differs, a model
    is not causal. Raises ModelError then.
    """
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, policy.vocab_size, (3, _PROBED), generator=generator).to(policy.device)
    with _exact(policy):
        alone = [policy.hf(input_ids=row[None], use_cache=False).logits[0] for row in token_ids]
        expected = torch.stack([logits[-_COMPARED:] for logits in alone])
        for method in _methods(policy.hf):
            reason = _reason_against(method, token_ids, expected)
            if not reason:
                logger.info("%s samples by %s", type(policy.hf).__name__, method)
                return method
            logger.debug("not by %s: %s", method, reason)
    raise ModelError(
        f"{type(policy.hf).__name__} predicts a token differently once others follow it: {reason}; it is not "
        f"causal, so nothing can sample from it. {NOT_YET}"
    )


def _methods(hf: Any) -> Iterator[Method]:
    """Yields methods, the fastest first.

    A model that takes positions, but other ones than those in a sequence, counts them by what tokens are
    there: padding has none. A cache does not know that.
    """
    takes_positions = "position_ids" in inspect.signature(hf.forward).parameters
    for keeps_cache in (True, False):
        for is_batched in (True, False):
            yield Method(hf, keeps_cache=keeps_cache, is_batched=is_batched, gives_positions=takes_positions)
    if takes_positions:
        for is_batched in (True, False):
            yield Method(hf, keeps_cache=False, is_batched=is_batched, gives_positions=False)


def _exact(policy: Policy) -> AbstractContextManager[None]:
    is_float32 = all(each.dtype == torch.float32 for each in policy.parameters())
    return nullcontext() if is_float32 else in_float32(policy)


_COMPARED = 4
"""Tokens at the end of a probed sequence whose logprobs are compared."""


def _reason_against(method: Method, token_ids: Tensor, expected: Tensor) -> str:
    """Returns why a method is not right, or ""."""
    try:
        found = _probed(method, token_ids)
    except (
        ModelError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        return f"{type(error).__name__}: {first_line(error)}"
    num_layers = getattr(method._hf.config.get_text_config(), "num_hidden_layers", 1)
    scale = max(1.0, float(expected.abs().max()))
    limit = _ROUNDINGS * torch.finfo(torch.float32).eps * num_layers * scale
    gaps = (found.float().log_softmax(-1) - expected.float().log_softmax(-1)).abs().amax((1, 2))
    gap = float(gaps.median())  # rounding may send a token of one sequence to another expert
    return "" if gap <= limit else f"off by {gap:.2g} nats where rounding explains {limit:.1g}"


def _probed(method: Method, token_ids: Tensor) -> Tensor:
    """Returns the logits [sequences, tokens, vocabulary] of the last tokens, computed as requests are."""
    num_prompt = _PROBED - _COMPARED - 1
    if not method.is_batched:
        parts = []
        for row in token_ids[:, None]:
            prefix = SideBySide(1)
            method.extend(prefix, row[:, :num_prompt])
            _follow(method, method.take(prefix, [0]), row, num_prompt)
            parts.append(_follow(method, method.take(prefix, [0]), row, num_prompt))
        return torch.cat(parts)
    prefix = SideBySide(len(token_ids))
    method.extend(prefix, token_ids[:, :num_prompt])
    cohort = method.take(prefix, [0, 0, 1, 2])
    method.extend(cohort, token_ids[[0, 0, 1, 2], num_prompt : num_prompt + 1])
    left = _follow(method, method.take(cohort, [3, 1]), token_ids[[2, 0]], num_prompt + 1)
    late = _follow(method, method.take(prefix, [1]), token_ids[[1]], num_prompt)
    return torch.stack([left[1], late[0], left[0]])


def _follow(method: Method, sequences: SideBySide, token_ids: Tensor, first: int) -> Tensor:
    """Appends the tokens from `first` on, one by one; returns the logits after each of those compared."""
    found = [method.extend(sequences, token_ids[:, place, None]) for place in range(first, _PROBED)]
    return torch.stack(found[-_COMPARED:], dim=1)
