"""Attention with windows, soft caps and sinks, segment by segment, where no kernel has them: on a CPU.

The last query of a segment stands at its last key. Under a window, work grows with the window and not with
the square of the length, by three calls per segment. With a window of 3, and blocks of 2 queries:

    keys        0 1 2 3 4 5 6 7
    head        x . .                  queries that reach the first key: causal, without a mask
                x x .
                x x x
    blocks        x x x .              all in one call, under one mask; keys are views that overlap
                  . x x x
                      x x x .
                      . x x x
    tail                  x x x        the queries that are left
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pellucid.model.segments import Segments


def attend_ruled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends within segments; queries, keys, values and the result are [1, heads, tokens, width].

    There are as many key heads as query heads. A rule is that of `model/attention.py: Rule`.
    """
    if segments.selected is not None:
        selected = torch.from_numpy(segments.selected).to(key.device)
        key, value = key.index_select(2, selected), value.index_select(2, selected)

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if softcap is None and sinks is None:
            return _attend_by_kernel(q, k, v, scale, window)
        return _attend_by_products(q, k, v, scale, window, softcap, sinks)

    outputs = []
    parts = (query.split(segments.queries, 2), key.split(segments.keys, 2), value.split(segments.keys, 2))
    for q, k, v in zip(*parts, strict=True):
        num_queries, num_keys = q.shape[2], k.shape[2]
        if window is None or window >= num_keys:
            outputs.append(attend(q, k, v, None))
            continue
        first = num_keys - num_queries  # key at which the first query stands
        num_head = min(max(0, window - first), num_queries)
        if num_head:
            stop = first + num_head
            outputs.append(attend(q[:, :, :num_head], k[:, :, :stop], v[:, :, :stop], None))
        size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, window // 4))
        num_blocks, num_tail = divmod(num_queries - num_head, size)
        start = first + num_head - window + 1  # first key that is still seen
        if num_blocks:
            seen = slice(start, start + window - 1 + num_blocks * size)
            blocks = q[0, :, num_head : num_head + num_blocks * size].unflatten(1, (num_blocks, size))
            keys, values = (
                tensor[0, :, seen].unfold(1, window - 1 + size, size).permute(1, 0, 3, 2) for tensor in (k, v)
            )
            found = attend(blocks.transpose(0, 1), keys, values, window)
            outputs.append(found.transpose(0, 1).flatten(1, 2)[None])
        if num_tail:
            seen = slice(start + num_blocks * size, None)
            outputs.append(attend(q[:, :, -num_tail:], k[:, :, seen], v[:, :, seen], window))
    return torch.cat(outputs, dim=2)


_SMALLEST_BLOCK = 32
_LARGEST_BLOCK = 512
"""Queries of a block: a quarter of the window, so that a quarter is computed in vain; within these bounds."""


def _attend_by_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    if window is None and q.shape[2] == k.shape[2]:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = q.new_zeros(q.shape[2], k.shape[2]).masked_fill_(_hidden(q, k, window), -torch.inf)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _attend_by_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes scores in full; the softmax is in float32 whatever the dtype of the queries."""
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(_hidden(q, k, window), -torch.inf)
    if sinks is not None:
        of_sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_sinks], dim=3)
    weights = scores.softmax(3)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


def _hidden(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """Makes the matrix [queries, keys] that is True where a query does not see a key."""
    keys = torch.arange(k.shape[2], device=q.device)
    places = keys[k.shape[2] - q.shape[2] :, None]
    is_future = keys > places
    return is_future if window is None else is_future | (keys <= places - window)
