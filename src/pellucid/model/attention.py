"""Attention through HF's registry: the model calls one registered function, a plan says who sees whom.

The plan travels as a keyword of the forward pass. There is no default: a forward without a plan raises,
because HF's own fallback for packed inputs silently attends across sequences.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from pellucid.errors import ModelError

ATTENTION = "pellucid"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux")


class AttentionPlan(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Queries, keys and values are [batch, heads, tokens, width]; so is the result."""


class PackedAttention:
    """Sequences side by side in one row; each attends causally to itself and to nothing else.

    lengths [3, 2]:   x . . . .
                      x x . . .
                      x x x . .
                      . . . x .
                      . . . x x
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        key, value = repeat_heads(key, query), repeat_heads(value, query)
        parts = zip(
            *(torch.split(tensor, self._lengths, dim=2) for tensor in (query, key, value)), strict=True
        )
        outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for q, k, v in parts]
        return torch.cat(outputs, dim=2)


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
    """Makes `attn_implementation="pellucid"` known to transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan decides who sees whom; HF must not build a mask of its own."""
