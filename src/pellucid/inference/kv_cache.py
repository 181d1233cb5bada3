"""Static key/value cache with one row per slot, each row at its own length, and the two plans that use it.

    slot 0   k k k k k k . .      prompt + what it sampled so far
    slot 1   k k k . . . . .
    slot 2   . . . . . . . .      free

Prefill runs the trainer's packed attention and writes what it computed into the rows; decode writes one
position per row and attends to the row up to there. The rows grow in length when a sequence needs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.model import PackedAttention, Policy

_FIRST_LENGTH = 128


class KVCache:
    def __init__(self, policy: Policy, num_slots: int, max_length: int) -> None:
        config = policy.hf.config
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._max_length = max_length
        shape = (config.num_hidden_layers, num_slots, heads, min(_FIRST_LENGTH, max_length), width)
        dtype = next(policy.parameters()).dtype
        self.keys = torch.zeros(shape, dtype=dtype, device=policy.device)
        self.values = torch.zeros_like(self.keys)

    def reserve(self, length: int) -> None:
        """Makes room for sequences of this length; doubles, so that growing is rare."""
        held = self.keys.shape[3]
        if length > held:
            extra = min(max(2 * held, length), self._max_length) - held
            shape = (*self.keys.shape[:3], extra, self.keys.shape[4])
            self.keys = torch.cat([self.keys, self.keys.new_zeros(shape)], dim=3)
            self.values = torch.cat([self.values, self.values.new_zeros(shape)], dim=3)

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """The first `length` positions of one row into others: a prompt that is already computed."""
        index = torch.tensor(targets, device=self.keys.device)
        for store in (self.keys, self.values):
            store[:, index, :, :length] = store[:, source, None, :, :length]


class Prefill(PackedAttention):
    """Packed prompts, one per slot."""

    def __init__(self, cache: KVCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        device = cache.keys.device
        self._cache = cache
        self._rows = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(device)
        self._positions = torch.cat([torch.arange(length) for length in lengths]).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        self._cache.keys[layer][self._rows, :, self._positions] = key[0].transpose(0, 1)
        self._cache.values[layer][self._rows, :, self._positions] = value[0].transpose(0, 1)
        return super().attend(layer, query, key, value, scale)


class Decode:
    """One new token for each of the rows 0 … B−1, at the row's own position.

    Written out as two batched products over (row, key/value head): the fused kernel needs the keys repeated
    for grouped queries, which alone takes several times as long.
    """

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self._cache = cache
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        self._length = int(positions.max()) + 1
        heads = cache.keys.shape[2]
        hidden = torch.arange(self._length, device=positions.device) > positions[:, None]
        self._hidden = hidden[:, None].expand(-1, heads, -1).reshape(-1, 1, self._length)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        num_pairs = len(self._rows) * keys.shape[1]
        seen_keys, seen_values = (store.flatten(0, 1)[:num_pairs, : self._length] for store in (keys, values))
        grouped = query.reshape(num_pairs, -1, query.shape[3]) * (scale or query.shape[3] ** -0.5)
        scores = torch.bmm(grouped, seen_keys.transpose(1, 2)).masked_fill(self._hidden, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        return torch.bmm(weights, seen_values).view_as(query)
