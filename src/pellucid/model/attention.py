"""Attention through HF's registry: the model calls one registered function, a plan says who sees whom.

The plan travels as a keyword of the forward pass. There is no default: a forward without a plan raises,
because HF's own fallback for packed inputs silently attends across sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pellucid.errors import ModelError

ATTENTION = "pellucid"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux")


class AttentionPlan(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Queries, keys and values are [batch, heads, tokens, width]; so is the result."""


@dataclass(frozen=True, slots=True)
class Family:
    """Sequences with a common prefix, laid out as prefix, then what each member has of its own."""

    prefix: int
    own: list[int]

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.own)

    @property
    def num_pairs(self) -> int:
        """Of a token and one that it sees, itself included."""
        own = sum(length * self.prefix + length * (length + 1) // 2 for length in self.own)
        return self.prefix * (self.prefix + 1) // 2 + own


class SharedAttention:
    """Families side by side; a member sees the family's prefix and, causally, itself.

    prefix 2, own [2, 1]:   x . . . .
                            x x . . .
                            x x x . .
                            x x x x .
                            x x . . x
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self._sizes = [family.num_tokens for family in families]
        self._batches = [_MemberBatch(family) if family.prefix else None for family in families]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        key, value = repeat_heads(key, query), repeat_heads(value, query)
        parts = zip(*(torch.split(tensor, self._sizes, dim=2) for tensor in (query, key, value)), strict=True)
        outputs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            if members is None
            else members.attend(q, k, v, scale)
            for members, (q, k, v) in zip(self._batches, parts, strict=True)
        ]
        return torch.cat(outputs, dim=2)


class PackedAttention(SharedAttention):
    """Sequences side by side in one row; each attends causally to itself and to nothing else.

    lengths [3, 2]:   x . . . .
                      x x . . .
                      x x x . .
                      . . . x .
                      . . . x x
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__([Family(0, [length]) for length in lengths])


class _MemberBatch:
    """The members of one family as a batch, padded at the end, where causality hides the padding."""

    def __init__(self, family: Family) -> None:
        longest = max(family.own)
        columns = torch.arange(longest)
        lengths = torch.tensor(family.own)[:, None]
        starts = lengths.cumsum(0) - lengths
        self._prefix = family.prefix
        self._shape = (len(family.own), longest)
        self._rows = (starts + columns.minimum(lengths - 1)).flatten()
        self._valid = (columns < lengths).flatten().nonzero()[:, 0]
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        self._mask = torch.cat([torch.ones(longest, family.prefix, dtype=torch.bool), causal], dim=1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        first = slice(None), slice(None), slice(0, self._prefix)
        common = scaled_dot_product_attention(
            query[first], key[first], value[first], is_causal=True, scale=scale
        )
        output = scaled_dot_product_attention(
            self._batch(query),
            torch.cat([key[first].expand(self._shape[0], -1, -1, -1), self._batch(key)], dim=2),
            torch.cat([value[first].expand(self._shape[0], -1, -1, -1), self._batch(value)], dim=2),
            attn_mask=self._mask.to(query.device),
            scale=scale,
        )
        return torch.cat([common, self._unbatch(output)], dim=2)

    def _batch(self, tensor: Tensor) -> Tensor:
        """What members have of their own: [1, heads, tokens, width] -> [members, heads, longest, width]."""
        own = tensor[0, :, self._prefix :].index_select(1, self._rows.to(tensor.device))
        return own.view(own.shape[0], *self._shape, own.shape[2]).transpose(0, 1)

    def _unbatch(self, tensor: Tensor) -> Tensor:
        own = tensor.transpose(0, 1).flatten(1, 2).index_select(1, self._valid.to(tensor.device))
        return own[None]


def repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Key or value heads, repeated to as many as there are query heads (grouped-query attention)."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if plan is None:
        raise ModelError("forward without an attention plan; sequences would leak into each other")
    for option in _UNSUPPORTED:
        if options.get(option) is not None:
            raise ModelError(
                f"{type(module).__name__} asks for {option}; pellucid's attention does not have it yet"
            )
    output = plan.attend(module.layer_idx, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Makes `attn_implementation="pellucid"` known to transformers.

    The plan decides who sees whom. Without a mask function of the same name, HF builds no mask of its own.
    """
    AttentionInterface.register(ATTENTION, _attention)
