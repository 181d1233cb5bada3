"""Rows of the caches of transformers' models: taken, repeated, and joined with those of other sequences.

A cache is an object that holds tensors, in lists, dicts and further objects. Each begins with the rows.
Keys and values of shorter sequences are padded at their start, where a mask hides it. States have no length:

    keys      a a a a     states    A          joined from caches of 4 and of 2 tokens
              . . b b               B

Whatever is not known to be right raises ModelError: then a model's sequences go on apart, or alone."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from pellucid.errors import ModelError

_JOINED = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers whose tensors are keys, values and states, and nothing else that grows."""

_CONSTANT = (bool, int, float, str, type, torch.dtype, torch.device, PreTrainedConfig)


def take_rows(value: Any, rows: Tensor, num_rows: int) -> Any:
    """Copies a cache with these of its `num_rows` rows, in this order and possibly repeatedly."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows) if _has_rows(value, num_rows) else value.clone()
    of = partial(take_rows, rows=rows, num_rows=num_rows)
    return _mapped(value, [value], lambda values: of(*values))


def join_rows(values: Sequence[Any], num_rows: Sequence[int]) -> Any:
    """Makes one cache of several, with the rows of the first, then those of the second, …"""
    first = values[0]
    if isinstance(first, Tensor):
        return _joined(values, num_rows)
    if isinstance(first, Cache):
        _check_joined(first)
    return _mapped(first, values, partial(join_rows, num_rows=num_rows))


def trim(cache: Any, length: int) -> None:
    """Drops padding that no row has any more: keeps the last `length` keys and values."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.get_seq_length() > length:
            layer.keys, layer.values = (each[:, :, -length:] for each in (layer.keys, layer.values))
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = length


def has_keys(cache: Any) -> bool:
    return any(isinstance(layer, DynamicLayer) for layer in cache.layers)


def _mapped(first: Any, values: Sequence[Any], of: Any) -> Any:
    """Makes something like `first` with `of` applied to what all values hold in the same place."""
    if isinstance(first, list | tuple):
        return type(first)(of(each) for each in zip(*values, strict=True))
    if isinstance(first, dict):
        copied = copy.copy(first)
        copied.update((key, of([value[key] for value in values])) for key in first)
        return copied
    if isinstance(first, Cache | CacheLayerMixin | LinearAttentionCacheLayerMixin) or type(
        first
    ).__name__.endswith("Cache"):
        copied = copy.copy(first)
        for key in vars(first):
            own = [getattr(value, key) for value in values]
            copied.__dict__[key] = max(own) if key == "cumulative_length" else of(own)
        return copied
    if (first is None or isinstance(first, _CONSTANT)) and all(value == first for value in values):
        return first
    raise ModelError(f"its cache holds a {type(first).__name__}, and it is not known how to copy it")


def _has_rows(tensor: Tensor, num_rows: int) -> bool:
    """Returns whether a tensor has anything of the rows; raises ModelError if it may, in another place."""
    if tensor.dim() and len(tensor) == num_rows:
        return True
    if tensor.dim() and tensor.numel():
        raise ModelError(f"a tensor of its cache begins with {len(tensor)}, not with {num_rows} rows")
    return False


def _check_joined(cache: Cache) -> None:
    if type(cache) is not DynamicCache or any(type(layer) not in _JOINED for layer in cache.layers):
        raise ModelError(f"it is not known how to join the rows of a {type(cache).__name__}")


def _joined(tensors: Sequence[Tensor], num_rows: Sequence[int]) -> Tensor:
    if not all(_has_rows(tensor, num) for tensor, num in zip(tensors, num_rows, strict=True)):
        return tensors[0].clone()
    lengths = [tensor.shape[-2] for tensor in tensors] if tensors[0].dim() > 2 else []
    if len(set(lengths)) > 1:
        longest = max(lengths)
        tensors = [pad(tensor, (0, 0, longest - tensor.shape[-2], 0)) for tensor in tensors]
    return torch.cat(list(tensors))
