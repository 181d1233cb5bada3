"""The attention plan of one step of the engine: new prompts, and one token of every running sequence.

    tokens   a b c | d e | x y z w      two prompts, then the running sequences in the order of their rows

A prompt attends to itself, as in training. Its keys and values are written into the rows of all requests that
start with it, which then run in the same step: their first token x is the last of the prompt, and attends to
the rest of it in the cache like any later token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.inference.kv_cache import CacheRow, Shelf
from pellucid.model import PackedAttention

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that this step computes, without its last token, and the rows that start with it."""

    token_ids: Indices
    rows: list[CacheRow]


class StepAttention:
    def __init__(self, prompts: Sequence[Prompt], shelves: Sequence[Shelf], device: torch.device) -> None:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        self.longest = max(
            (row.length for shelf in shelves for row in shelf.rows if row is not None), default=0
        )
        self._num_prompt_tokens = sum(lengths)
        self._packed = PackedAttention(lengths) if lengths else None
        self._parts = []
        first = self._num_prompt_tokens
        for shelf in shelves:
            if shelf.rows:
                self._parts.append(_ShelfPart(shelf, first, _writes(prompts, shelf), device))
                first += len(shelf.rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        outputs = []
        if self._packed is not None:
            q, k, v = (tensor[:, :, : self._num_prompt_tokens] for tensor in (query, key, value))
            outputs.append(self._packed.attend(layer, q, k, v, scale)[0].transpose(0, 1))
        scaled = query * (scale or query.shape[3] ** -0.5)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (scaled, key, value))
        outputs += [part.attend(layer, q, k, v) for part in self._parts]
        merged = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return merged.transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class _Writes:
    """Tokens of the step, and the row and position in the cache that each is written to."""

    tokens: Indices
    rows: Indices
    positions: Indices


def _writes(prompts: Sequence[Prompt], shelf: Shelf) -> _Writes | None:
    """Returns the writes of the prompts whose rows are on this shelf; None if there are none."""
    tokens, rows, positions = [], [], []
    first = 0
    for prompt in prompts:
        span = np.arange(len(prompt.token_ids))
        for row in prompt.rows:
            if row.shelf is shelf:
                tokens.append(first + span)
                rows.append(np.full(len(span), row.index))
                positions.append(span)
        first += len(span)
    if not tokens:
        return None
    return _Writes(np.concatenate(tokens), np.concatenate(rows), np.concatenate(positions))


class _ShelfPart:
    """The running sequences of one shelf: each sees its row up to its own length.

    Written out as two batched products over (row, key/value head): the fused kernel takes several times as
    long with one query per row, and needs the keys repeated for grouped queries.
    """

    def __init__(self, shelf: Shelf, first: int, prompts: _Writes | None, device: torch.device) -> None:
        last = np.array([row.length - 1 for row in shelf.rows if row is not None])
        rows = np.arange(len(last))
        tokens, positions = first + rows, last
        self._own = slice(first, first + len(last))
        self._written: slice | Tensor = self._own
        if prompts is not None:
            tokens = np.concatenate([prompts.tokens, tokens])
            rows = np.concatenate([prompts.rows, rows])
            positions = np.concatenate([prompts.positions, positions])
            self._written = torch.from_numpy(tokens).to(device)
        self._layers = shelf.layers()
        heads = len(self._layers[0][0]) // len(last)
        targets = (rows[:, None] * heads + np.arange(heads)) * shelf.capacity + positions[:, None]
        self._targets = torch.from_numpy(targets.reshape(-1)).to(device)
        seen = torch.from_numpy(last).to(device)[:, None, None]
        self._hidden = torch.arange(shelf.capacity, device=device) > seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes the step's keys and values into the cache and returns the attention output of this shelf's
        tokens.

        `query` is scaled already; all tensors are [tokens, heads, width].
        """
        width = query.shape[2]
        keys, values = self._layers[layer]
        keys.view(-1, width).index_copy_(0, self._targets, key[self._written].reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._targets, value[self._written].reshape(-1, width))
        own = query[self._own]
        scores = torch.bmm(own.reshape(len(keys), -1, width), keys.transpose(1, 2))
        scores.view(len(own), -1, keys.shape[1]).masked_fill_(self._hidden, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(own.dtype)
        return torch.bmm(weights, values).view_as(own)
