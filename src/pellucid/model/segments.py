"""Attention of all sequences of a micro batch in one call, on a GPU: flash attention over segments of tokens.

A segment is a run of queries and the keys that they see. The last query stands at the last key, and a query
sees the keys up to its own place. The members of a family have their prefix in front of their keys:

    prefix 2, own [2, 1]     queries   a b X Y | Z             the prefix is part of the first member
                             keys      a b X Y | a b Z         keys and values of `a b` are selected twice

So no mask exists, no output is merged, and the number of calls does not depend on the number of sequences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data.tensors import to_device

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Family:
    """Sequences with a common prefix, laid out as the prefix, then the remaining tokens of each member."""

    prefix: int
    own: list[int]

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.own)

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one that it attends to, itself included."""
        own = sum(length * self.prefix + length * (length + 1) // 2 for length in self.own)
        return self.prefix * (self.prefix + 1) // 2 + own


class Segments(NamedTuple):
    """Segments of the tokens of a micro batch, in their order.

    prefix 2, own [2, 1]: queries [4, 1], keys [4, 3], selected [0, 1, 2, 3, 0, 1, 4]
    """

    queries: list[int]
    """Queries of each segment."""

    keys: list[int]
    """Keys of each segment."""

    selected: Indices | None
    """Token of each key; None: the keys are those of the queries."""


def segments_of(families: Sequence[Family]) -> Segments:
    """Cuts the tokens of families, which lie side by side, into one segment per member."""
    queries: list[int] = []
    keys: list[int] = []
    selected: list[Indices] = []
    start = 0
    for family in families:
        prefix = np.arange(start, start + family.prefix)
        start += family.prefix
        for index, own in enumerate(family.own):
            queries.append(own if index else family.prefix + own)
            keys.append(family.prefix + own)
            selected += [prefix, np.arange(start, start + own)]
            start += own
    is_shared = queries != keys
    return Segments(queries, keys, np.concatenate(selected) if is_shared else None)


class PlacedSegments(NamedTuple):
    """Segments as the kernel takes them, on its device."""

    query_starts: Tensor
    key_starts: Tensor
    selected: Tensor | None
    most_queries: int
    most_keys: int


def place(segments: Segments, device: torch.device) -> PlacedSegments:
    """Copies segments to the device, by one copy."""
    arrays: list[NDArray[Any]] = [
        np.cumsum([0, *lengths], dtype=np.int32) for lengths in (segments.queries, segments.keys)
    ]
    if segments.selected is not None:
        arrays.append(segments.selected)
    query_starts, key_starts, *selected = to_device(arrays, device)
    return PlacedSegments(
        query_starts,
        key_starts,
        selected[0] if selected else None,
        max(segments.queries),
        max(segments.keys),
    )


def takes_segments(query: Tensor) -> bool:
    """Returns whether flash attention has a kernel for these queries, [batch, heads, tokens, width].

    It has none for float32. On a CPU, other ways are faster.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type != "cpu" and is_half and query.shape[3] % 8 == 0 and query.shape[3] <= 256


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: PlacedSegments,
    scale: float | None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Attends within segments; queries, keys, values and the result are [1, heads, tokens, width].

    There may be fewer key heads than query heads. A query sees at most `window` keys, itself included.
    `sinks` has a logit for each query head, which takes its share of each softmax and gives nothing.
    `kernel` is torch's `varlen_attn`, or another function with its signature.
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if segments.selected is not None:
        k, v = (_select(tensor, segments.selected) for tensor in (k, v))
    places = (segments.query_starts, segments.key_starts, segments.most_queries, segments.most_keys)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    left = -1 if window is None else window - 1
    attended: Tensor
    if sinks is not None:
        attended = _Sunk.apply(q, k, v, sinks, places, scale, left)  # type: ignore[no-untyped-call]
    else:
        attended = (kernel or _flash_attention())(
            q, k, v, *places, scale=scale, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1]
        )
    return attended.transpose(0, 1)[None]


class _Sunk(torch.autograd.Function):
    """Flash attention with sinks, from that without: the kernel's log-sum-exp tells what a sink takes.

    With ℓ = log Σ e^s and the sink b, the output becomes o · σ(ℓ − b), the log-sum-exp ℓ' = log(e^ℓ + e^b).
    The kernel's backward pass takes both as they are: it makes of them the weights w = e^(s − ℓ'), and the
    gradients of scores w · (∂w − ∂o · o). The sink, whose value is zero, has −w_sink · (∂o · o).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        places: tuple[Tensor, Tensor, int, int],
        scale: float,
        left: int,
    ) -> Tensor:
        _flash_attention()  # registers the operations below
        ctx.options = [left == -1, scale, [left, 0]]
        ctx.most = places[2:]
        is_causal, _, window = ctx.options
        out, log_sums, random = torch.ops.torch_attn._varlen_attn(
            query, key, value, *places, is_causal, scale, window, query.shape[1] != key.shape[1]
        )
        of_sinks = sinks.float()[:, None]
        share = torch.sigmoid(log_sums - of_sinks)  # [heads, tokens]
        sunk: Tensor = (out * share.T[..., None]).to(out.dtype)
        log_sums = torch.logaddexp(log_sums, of_sinks)
        ctx.save_for_backward(query, key, value, sinks, sunk, log_sums, random, *places[:2])
        return sunk

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, log_sums, random, *starts = ctx.saved_tensors
        is_causal, scale, window = ctx.options
        gradient = gradient.contiguous()
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            gradient, query, key, value, out, log_sums, *starts, *ctx.most, is_causal, random, scale, window
        )
        weights = torch.exp(sinks.float()[:, None] - log_sums)
        of_sinks = -(weights * (gradient.float() * out.float()).sum(2).T).sum(1)
        return (*gradients, of_sinks.to(sinks.dtype), None, None, None)


def _flash_attention() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, which takes seconds

    return varlen_attn


def _select(rows: Tensor, selected: Tensor) -> Tensor:
    chosen: Tensor = _Selected.apply(rows, selected)  # type: ignore[no-untyped-call]
    return chosen


class _Selected(torch.autograd.Function):
    """Rows of a tensor, repeatedly; their gradients are added up in float32 at least."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, selected: Tensor) -> Tensor:
        ctx.save_for_backward(selected)
        ctx.shape = rows.shape
        return rows.index_select(0, selected)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (selected,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=gradient.device)
        return total.index_add_(0, selected, gradient.to(wide)).to(gradient.dtype), None
