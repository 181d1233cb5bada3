"""Keys and values of the running sequences, on shelves of equally long rows.

    shelf of 48    a a a a a a . .      row 0, sequence a: 6 tokens so far
                   b b b . . . . .
    shelf of 96    c c c c c c c c c c c c . . . .

A step reads every shelf from end to end: skipping the unused ends of longer rows was measured to take three
times as long per byte. Having several shelves, a short sequence does not pay for the longest one. A sequence
that outgrows its shelf moves to the next, twice as long one; the last row of a shelf moves into a gap.

Invariants:
- From `arrange` to the end of the step no shelf has a gap.
- What was never written is zero, so whatever is hidden from a sequence is finite and can weigh nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data.tensors import to_device
from pellucid.inference.decoder import Decoder, Prompt, SequenceRow, score_together
from pellucid.inference.slots import Scoring
from pellucid.model import (
    ExpertRecorder,
    ImageInputs,
    PackedAttention,
    Policy,
    Rule,
    key_shape,
    lean_forward,
)

_FIRST_CAPACITY = 48
"""Positions of the shortest rows: a short prompt and answer, of which a step reads few that are unused."""

_FIRST_ROWS = 8


@dataclass(eq=False, slots=True)
class CacheRow(SequenceRow):
    """Where the keys and values of one sequence are; the cache moves it as the sequence grows."""

    shelf: "Shelf"
    index: int


class Shelf:
    """Rows of one capacity, side by side in memory."""

    def __init__(self, capacity: int, max_rows: int, empty: Tensor) -> None:
        """`empty` is [keys and values, layers, no rows, heads, no positions, width]."""
        self.capacity = capacity
        self.rows: list[CacheRow | None] = []
        self._max_rows = max_rows
        self._store = empty.new_zeros(*empty.shape[:4], capacity, empty.shape[5])

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [rows × heads, capacity, width]: views of what is stored."""
        keys, values = self._store[:, :, : len(self.rows)].flatten(2, 3)
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def put(self, row: CacheRow) -> None:
        """Gives a sequence a row; what the row held before stays in it."""
        gaps = (index for index, holder in enumerate(self.rows) if holder is None)
        row.shelf, row.index = self, next(gaps, len(self.rows))
        if row.index == len(self.rows):
            self.rows.append(None)
        self.rows[row.index] = row

    def copy(self, index: int, source: "Shelf", source_index: int, length: int) -> None:
        """Copies the first positions of one row into another."""
        self._reserve()
        self._store[:, :, index, :, :length] = source._store[:, :, source_index, :, :length]

    def close_gaps(self) -> None:
        for index in reversed(range(len(self.rows))):
            if self.rows[index] is None:
                last = self.rows.pop()
                if last is not None:
                    self.copy(index, self, last.index, last.length - 1)
                    self.rows[index], last.index = last, index
        self._reserve()

    def _reserve(self) -> None:
        """Makes room for all rows, and for as many again where some have room already: growing is rare.

        What no row needs is freed once there are no rows.
        """
        held, needed = self._store.shape[2], len(self.rows)
        if needed > held:
            self._resize(min(max(_FIRST_ROWS, needed, 2 * held), self._max_rows))
        elif not needed and held:
            self._resize(0)

    def _resize(self, num_rows: int) -> None:
        old = self._store
        self._store = _zeros((*old.shape[:2], num_rows, *old.shape[3:]), old)
        num_kept = min(num_rows, old.shape[2])
        self._store[:, :, :num_kept] = old[:, :, :num_kept]


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Makes zeros; on a CPU, unwritten ones are the system's and take no memory."""
    if like.device.type != "cpu":
        return like.new_zeros(*shape)
    return torch.from_numpy(np.zeros(shape, f"i{like.element_size()}")).view(like.dtype)


class KVCache:
    def __init__(self, policy: Policy, num_slots: int, max_length: int) -> None:
        heads, width = key_shape(policy)
        dtype = next(policy.parameters()).dtype
        empty = torch.zeros(2, len(policy.layers), 0, heads, 0, width, dtype=dtype, device=policy.device)
        self.shelves = [Shelf(capacity, num_slots, empty) for capacity in _capacities(max_length)]
        """Shortest rows first."""

    def add(self, length: int) -> CacheRow:
        """Returns a row for a new sequence; nothing is written yet."""
        row = CacheRow(length, self.shelves[0], 0)
        self._shelf_for(length).put(row)
        return row

    def remove(self, row: CacheRow) -> None:
        row.shelf.rows[row.index] = None

    def copy_prefix(self, source: CacheRow, target: CacheRow, length: int) -> None:
        """Copies the keys and values of a prompt that is already computed."""
        target.shelf.copy(target.index, source.shelf, source.index, length)

    def forget_prefixes(self) -> None:
        """Does nothing: a prompt is copied from the keys and values with which its row goes on."""

    def arrange(self) -> list[CacheRow]:
        """Moves rows that outgrew their shelf and closes gaps; returns the rows in order of the shelves."""
        for row in self._rows():
            if row.length > row.shelf.capacity:
                self._move_up(row)
        for shelf in self.shelves:
            shelf.close_gaps()
        return list(self._rows())

    def _move_up(self, row: CacheRow) -> None:
        source, source_index = row.shelf, row.index
        self._shelf_for(row.length).put(row)
        row.shelf.copy(row.index, source, source_index, row.length - 1)
        source.rows[source_index] = None

    def _shelf_for(self, length: int) -> Shelf:
        return next(shelf for shelf in self.shelves if length <= shelf.capacity)

    def _rows(self) -> Iterator[CacheRow]:
        return (row for shelf in self.shelves for row in shelf.rows if row is not None)


def _capacities(max_length: int) -> list[int]:
    """48, 96, 192, … and the maximum."""
    doubling = [_FIRST_CAPACITY << exponent for exponent in range(max_length.bit_length())]
    return [capacity for capacity in doubling if capacity < max_length] + [max_length]


Indices = NDArray[np.int64]


class PackedDecoder(KVCache, Decoder[CacheRow]):
    """Computes new prompts and one token of every row in one forward, whose attention reads the cache."""

    def __init__(
        self, policy: Policy, num_slots: int, max_length: int, recorder: ExpertRecorder | None
    ) -> None:
        super().__init__(policy, num_slots, max_length)
        self._policy = policy
        self._recorder = recorder
        if policy.images is not None:
            self.why_no_images = ""
        self.hidden = lean_forward(policy)

    def logits(
        self, prompts: Sequence[Prompt[CacheRow]], rows: Sequence[CacheRow], last_tokens: Sequence[int]
    ) -> Tensor:
        device = self._policy.device
        last_positions = [row.length - 1 for row in rows]
        token_ids = np.concatenate([*(prompt.token_ids for prompt in prompts), last_tokens])
        positions = np.concatenate([*(np.arange(len(p.token_ids)) for p in prompts), last_positions])
        plan = StepAttention(prompts, self.shelves, device)
        ids, places = to_device([token_ids, positions], device)
        embeddings = self._policy.embed(ids, self._images_of(prompts))
        return self._policy.logits(self.hidden(ids, places, plan, embeddings)[-len(rows) :])

    def _images_of(self, prompts: Sequence[Prompt[CacheRow]]) -> ImageInputs | None:
        """Returns the images of a step: of prompts with images, every token with their id stands for them."""
        sequences, first = [], 0
        for prompt in prompts:
            if prompt.mm_tensors and self._policy.images is not None:
                is_image = prompt.token_ids == self._policy.images.token_id
                sequences.append((first + np.flatnonzero(is_image), prompt.mm_tensors))
            first += len(prompt.token_ids)
        return ImageInputs.of(sequences, self._policy.device) if sequences else None

    def experts(self) -> Tensor:
        assert self._recorder is not None
        return self._recorder.last()

    def score(self, scorings: Sequence[Scoring]) -> list[list[float]]:
        """Computes all sequences in one packed forward."""
        return score_together(self._policy, self.hidden, scorings)


class StepAttention:
    def __init__(
        self, prompts: Sequence[Prompt[CacheRow]], shelves: Sequence[Shelf], device: torch.device
    ) -> None:
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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, rule: Rule
    ) -> Tensor:
        outputs = []
        if self._packed is not None:
            q, k, v = (tensor[:, :, : self._num_prompt_tokens] for tensor in (query, key, value))
            outputs.append(self._packed.attend(layer, q, k, v, scale, rule)[0].transpose(0, 1))
        scaled = query * (scale or query.shape[3] ** -0.5)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (scaled, key, value))
        outputs += [part.attend(layer, q, k, v, rule) for part in self._parts]
        merged = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return merged.transpose(0, 1)[None]


def _writes(prompts: Sequence[Prompt[CacheRow]], shelf: Shelf) -> list[Indices]:
    """Returns the prompts' tokens that this shelf stores, and the row and position of each; [] if none."""
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
    return [np.concatenate(each) for each in (tokens, rows, positions)] if tokens else []


class _ShelfPart:
    """The running sequences of one shelf: each sees its row up to its own length.

    Written out as two batched products over (row, key/value head): the fused kernel takes several times as
    long with one query per row, and needs the keys repeated for grouped queries.
    """

    def __init__(self, shelf: Shelf, first: int, prompts: Sequence[Indices], device: torch.device) -> None:
        last = np.array([row.length - 1 for row in shelf.rows if row is not None])
        rows = np.arange(len(last))
        tokens, positions = first + rows, last
        self._own = slice(first, first + len(last))
        if prompts:
            own = (tokens, rows, positions)
            tokens, rows, positions = map(np.concatenate, zip(prompts, own, strict=True))
        self._layers = shelf.layers()
        heads = len(self._layers[0][0]) // len(last)
        targets = (rows[:, None] * heads + np.arange(heads)) * shelf.capacity + positions[:, None]
        written = [tokens] if prompts else []
        self._targets, seen, *indices = to_device([targets.reshape(-1), last, *written], device)
        self._written = indices[0] if indices else None
        """The tokens whose keys and values the shelf stores; None: those of its rows alone."""

        self._last = seen
        self._hidden = torch.arange(shelf.capacity, device=device) > seen[:, None, None]
        self._windows: dict[int, _Window] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Writes the step's keys and values into the cache and returns the attention output of this shelf's
        tokens.

        `query` is scaled already; all tensors are [tokens, heads, width].
        """
        width = query.shape[2]
        keys, values = self._layers[layer]
        for kept, computed in ((keys, key), (values, value)):
            written = (
                computed[self._own] if self._written is None else computed.index_select(0, self._written)
            )
            kept.view(-1, width).index_copy_(0, self._targets, written.reshape(-1, width))
        own = query[self._own]
        hidden = self._hidden
        if rule.window is not None and rule.window < keys.shape[1]:
            keys, values, hidden = self._within(rule.window, keys, values)
        scores = torch.bmm(own.reshape(len(keys), -1, width), keys.transpose(1, 2))
        if rule.softcap is not None:
            scores = (scores / rule.softcap).tanh_().mul_(rule.softcap)
        scores.view(len(own), -1, keys.shape[1]).masked_fill_(hidden, -torch.inf)
        if rule.sinks is None:
            weights = scores.softmax(-1, dtype=torch.float32).to(own.dtype)
        else:
            weights = _softmax_beside(rule.sinks, scores).to(own.dtype)
        return torch.bmm(weights, values).view_as(own)

    def _within(self, window: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the keys and values of a window that ends at each row's last token, and what is hidden of
        it; all keys and values, if gathering those of the window would cost more than it saves."""
        width = keys.shape[2]
        if window not in self._windows:
            self._windows[window] = _window(window, self._last, self._hidden, len(keys))
        hidden, index = self._windows[window]
        if index is None:
            return keys, values, hidden
        shape = (len(keys), -1, width)
        keys, values = (each.view(-1, width).index_select(0, index).view(shape) for each in (keys, values))
        return keys, values, hidden


_Window = tuple[Tensor, Tensor | None]
"""Mask [rows, 1, keys], True where a key is hidden, and which of the shelf's keys these are; None: all."""

_GATHERED = 2
"""Rows this many times longer than a window are not read whole: gathering a key was measured to take about
twice as long as reading it in its order."""


def _window(window: int, last: Tensor, hidden: Tensor, num_rows: int) -> _Window:
    capacity = hidden.shape[2]
    if _GATHERED * window > capacity:
        return hidden | (torch.arange(capacity, device=last.device) <= (last - window)[:, None, None]), None
    places = (last - window + 1)[:, None] + torch.arange(window, device=last.device)
    starts = torch.arange(num_rows, device=last.device).view(len(last), -1, 1) * capacity
    return (places < 0)[:, None], (starts + places.clamp(min=0)[:, None]).view(-1)


def _softmax_beside(sinks: Tensor, scores: Tensor) -> Tensor:
    """Computes weights from scores [rows × key heads, queries of each, keys]; sinks take their shares."""
    beside = sinks.view(-1, scores.shape[1], 1).repeat(len(scores) * scores.shape[1] // len(sinks), 1, 1)
    return torch.cat([scores, beside], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
