"""Attention through HF's registry: the model calls one registered function, and a plan masks it.

The plan is a keyword of the forward pass. There is no default: a forward without a plan raises,
because HF's own fallback for packed inputs silently attends across sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pellucid.data.shared_prompts import is_masked
from pellucid.data.tensors import to_device
from pellucid.errors import ModelError
from pellucid.model.rows import PaddedRows
from pellucid.model.ruled import attend_ruled
from pellucid.model.segments import (
    Family,
    PlacedSegments,
    Segments,
    attend_segments,
    place,
    segments_of,
    takes_segments,
)

ATTENTION = "pellucid"


class Rule(NamedTuple):
    """Wishes of a layer, beyond that a token sees every one up to its own.

    Rule(window=3, softcap=50.0, sinks=tensor([0.2, -1.0])), with two query heads: token 9 sees the tokens
    7, 8 and 9, by scores s that have become 50 · tanh(s / 50). In head 0 these three share what e^0.2 leaves
    them: their weights add up to Σ e^s / (e^0.2 + Σ e^s).
    """

    window: int | None = None
    """Keys that a token sees at most, its own included; None: all up to its own."""

    softcap: float | None = None
    """Bound that scores approach: a score becomes cap · tanh(score / cap)."""

    sinks: Tensor | None = None
    """One logit per query head, which takes its share of each softmax and gives nothing."""

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and self.sinks is None


PLAIN = Rule()


class AttentionPlan(Protocol):
    @property
    def longest(self) -> int:
        """Length of the longest sequence, in tokens."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, rule: Rule
    ) -> Tensor:
        """Attends; queries, keys, values and the result are [batch, heads, tokens, width].

        Raises ModelError for a rule that it does not have.
        """


class SharedAttention:
    """Families side by side; a member attends to the family's prefix and, causally, to itself.

    prefix 2, own [2, 1]:   x . . . .
                            x x . . .
                            x x x . .
                            x x x x .
                            x x . . x

    On a GPU all of them are one call: see `model/segments.py`. On a CPU, `model/ruled.py` computes windows,
    soft caps and sinks. Without these, families without a prefix, which come first, take one call of SDPA
    each, the others at most one per member and prefix. A masked call may compute more pairs of tokens than
    the members would alone, but that costs less than the rest of the model saves on the prefix: see
    `data/shared_prompts.py`.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self.longest = max(family.prefix + max(family.own) for family in families)
        self._families = families
        self._sizes = [family.num_tokens for family in families if not family.prefix]
        assert all(family.prefix for family in families[len(self._sizes) :])
        self._placed: PlacedSegments | None = None
        self._rows: PaddedRows | None = None

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of tokens that calls compute, padding included; a causal call computes half of a square."""
        return sum(size**2 for size in self._sizes) // 2 + sum(call.num_pairs for call in self._calls)

    @cached_property
    def _segments(self) -> Segments:
        return segments_of(self._families)

    @cached_property
    def _calls(self) -> list["_SdpaCall"]:
        return _calls(self._families[len(self._sizes) :], sum(self._sizes))

    @cached_property
    def _places(self) -> Tensor | None:
        """Row of each token in the calls' outputs, for families with a prefix."""
        return torch.cat([call.tokens for call in self._calls]).argsort() if self._calls else None

    def rows(self, device: torch.device) -> PaddedRows:
        """Returns the rows of the sequences, each of its own."""
        if self._rows is None or self._rows.device != device:
            self._rows = PaddedRows(self._segments, device)
        return self._rows

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, rule: Rule
    ) -> Tensor:
        if rule.window is not None and rule.window >= self.longest:
            rule = rule._replace(window=None)
        if takes_segments(query) and rule.softcap is None:
            if self._placed is None or self._placed.query_starts.device != query.device:
                self._placed = place(self._segments, query.device)
            return attend_segments(
                query, key, value, self._placed, scale, window=rule.window, sinks=rule.sinks
            )
        key, value = (repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
        if rule.is_plain:
            return self._attend_by_calls(query, key, value, scale)
        return attend_ruled(query, key, value, self._segments, scale, **rule._asdict())

    def _attend_by_calls(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        outputs = []
        if self._sizes:
            alone = (tensor[:, :, : sum(self._sizes)] for tensor in (query, key, value))
            parts = [torch.split(tensor, self._sizes, dim=2) for tensor in alone]
            outputs = [
                scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
                for q, k, v in zip(*parts, strict=True)
            ]
        if self._places is not None:
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            found = torch.cat([call.attend(q, k, v, scale) for call in self._calls])
            (self._places,) = _moved([self._places], query.device)
            outputs.append(found.index_select(0, self._places).transpose(0, 1)[None])
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


class _Row(NamedTuple):
    """One row of a call: a prefix, possibly empty, then the tokens of a member, or of several in a masked
    call."""

    prefix_start: int
    prefix: int
    own_start: int
    own: int
    num_dropped: int
    """Tokens of the prefix whose output is taken from another row."""

    members: tuple[int, ...] = ()
    """Own tokens of each member, in a masked call."""

    @property
    def cost(self) -> int:
        """Pairs of tokens, and what it costs to gather the keys."""
        return (self.own + _KEY_PAIRS) * (self.prefix + self.own)

    def joined(self, other: "_Row") -> "_Row":
        """Returns one masked row for the members of both, which lie side by side."""
        return self._replace(own=self.own + other.own, members=self.members + other.members)


def _calls(families: Sequence[Family], start: int) -> list["_SdpaCall"]:
    causal: list[_Row] = []
    masked: list[_Row] = []
    for family in families:
        prefix, own_start, is_prefix_done = family.prefix, start + family.prefix, False
        for own in family.own:
            if is_masked(prefix, own):
                _append_member(masked, _Row(start, prefix, own_start, own, prefix, (own,)))
            else:
                causal.append(_Row(start, prefix, own_start, own, prefix if is_prefix_done else 0))
                is_prefix_done = True
            own_start += own
        if not is_prefix_done:
            causal.append(_Row(start, 0, start, prefix, 0))
        start += family.num_tokens
    masks: dict[int, _Mask] = {}
    for row in masked:
        if len(row.members) == 1 and (row.prefix not in masks or masks[row.prefix].num_own < row.own):
            masks[row.prefix] = _Mask([row])
    causal.sort(key=lambda row: row.prefix + row.own)
    masked.sort(key=lambda row: (row.prefix, row.own))
    return [
        *(_causal_call(rows) for rows in _alike(causal, _causal_pairs)),
        *(_masked_call(rows, masks) for rows in _alike(masked, _masked_pairs)),
    ]


def _append_member(rows: list[_Row], row: _Row) -> None:
    """Adds a member's row, joined with that of the member before it if one row for both costs less and has
    no large mask."""
    if rows and rows[-1].prefix_start == row.prefix_start:
        before, joined = rows[-1], rows[-1].joined(row)
        is_next = before.own_start + before.own == row.own_start
        is_small = joined.own * (joined.prefix + joined.own) <= _MASK_PAIRS
        if is_next and is_small and joined.cost <= before.cost + row.cost:
            rows[-1] = joined
            return
    rows.append(row)


class _SdpaCall:
    """One call of SDPA for a batch of rows; padding repeats a token, and its output is dropped."""

    def __init__(
        self, queries: Tensor, keys: Tensor, is_kept: Tensor, num_pairs: int, mask: "_Mask | None" = None
    ) -> None:
        """Takes [rows, columns] of indices of tokens; without a mask, the call is causal."""
        self._queries, self._keys = queries, keys
        self._kept = is_kept.flatten().nonzero()[:, 0]
        self._mask = mask
        self.tokens = queries.flatten()[self._kept]
        self.num_pairs = num_pairs

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[tokens of the micro batch, heads, width] -> [those of the call, heads, width]."""
        self._queries, self._keys, self._kept = _moved([self._queries, self._keys, self._kept], query.device)
        mask = None
        if self._mask is not None:
            mask = self._mask.like(query)[:, :, : self._queries.shape[1], : self._keys.shape[1]]
        output = scaled_dot_product_attention(
            _gathered(query, self._queries),
            _gathered(key, self._keys),
            _gathered(value, self._keys),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        flat = output.transpose(1, 2).flatten(0, 1)
        return flat if len(flat) == len(self._kept) else flat.index_select(0, self._kept)


def _causal_call(rows: Sequence[_Row]) -> _SdpaCall:
    """Batches rows whose padding is at the end, where causality hides it."""
    starts, prefixes, own_starts, own, dropped = _columns(rows)
    columns = torch.arange(int((prefixes + own).max()))
    behind = own_starts + (columns - prefixes).minimum(own - 1)
    tokens = torch.where(columns < prefixes, starts + columns, behind)
    return _SdpaCall(tokens, tokens, (columns >= dropped) & (columns < prefixes + own), _causal_pairs(rows))


def _masked_call(rows: Sequence[_Row], masks: Mapping[int, "_Mask"]) -> _SdpaCall:
    """Batches members' own tokens, which attend to prefix and themselves; a mask hides padding."""
    starts, prefixes, own_starts, own, _ = _columns(rows)
    columns, prefix_columns = torch.arange(int(own.max())), torch.arange(int(prefixes.max()))
    tokens = own_starts + columns.minimum(own - 1)
    seen = torch.cat([starts + prefix_columns.minimum(prefixes - 1), tokens], dim=1)
    mask = masks[rows[0].prefix] if _share_a_mask(rows) else _Mask(rows)
    return _SdpaCall(tokens, seen, columns < own, _masked_pairs(rows), mask)


def _columns(rows: Sequence[_Row]) -> list[Tensor]:
    """Returns prefix starts, prefixes, own starts, own and dropped tokens of rows, each [rows, 1]."""
    return list(torch.tensor([row[:5] for row in rows]).T[:, :, None])


class _Mask:
    """Mask of own tokens over a prefix and, causally, those of their member: 0 where they attend, −inf
    elsewhere.

    Rows of one member with fewer tokens behind the same prefix use the same mask, cut at the end. All layers
    share it.
    """

    def __init__(self, rows: Sequence[_Row]) -> None:
        self.num_own = max(row.own for row in rows)
        self._rows = rows
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, query: Tensor) -> Tensor:
        """Makes the mask [rows or 1, 1, own, prefix + own], once per device and dtype of `query`."""
        key = (query.device, query.dtype)
        if key not in self._made:
            num_own = self.num_own
            lengths = torch.tensor([row.prefix for row in self._rows])[:, None, None]
            in_prefix = (torch.arange(int(lengths.max())) < lengths).expand(-1, num_own, -1)
            member = torch.tensor([_member_of_each(row, num_own) for row in self._rows])
            is_same = member[:, :, None] == member[:, None, :]
            (is_seen,) = _moved([torch.cat([in_prefix, is_same.tril()], dim=2)[:, None]], query.device)
            self._made[key] = query.new_zeros(is_seen.shape).masked_fill_(~is_seen, -torch.inf)
        return self._made[key]


def _member_of_each(row: _Row, num_columns: int) -> list[int]:
    """Numbers the members of a row by token; padding belongs to the last."""
    numbers = [number for number, own in enumerate(row.members) for _ in range(own)]
    return numbers + [numbers[-1]] * (num_columns - len(numbers))


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves host tensors to the device, by one copy that nobody waits for; in the first layer alone."""
    if tensors[0].device == device:
        return list(tensors)
    return to_device([tensor.numpy() for tensor in tensors], device)


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    """Gathers rows of tokens: [tokens, heads, width] -> [rows, heads, columns, width]."""
    chosen = tensor.flatten(1).index_select(0, rows.flatten())
    return chosen.view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)


_KEY_PAIRS = 64
"""Cost of gathering a key and its value, in pairs of tokens."""

_CALL_PAIRS = 1 << 14
"""Overhead of a call, in pairs of tokens: rows share a call if that adds at most so many pairs of padding."""

_MASK_PAIRS = 1 << 20
"""Largest mask, in pairs of tokens, of rows that need one each: of different prefixes, or several members."""


def _alike(rows: Sequence[_Row], pairs: Callable[[Sequence[_Row]], int]) -> list[list[_Row]]:
    """Batches rows, sorted by size, where padding costs less than separate calls, and little memory."""
    batches: list[list[_Row]] = []
    for row in rows:
        merged = [*batches[-1], row] if batches else [row]
        apart = pairs([row]) + (pairs(batches[-1]) if batches else 0)
        num_padded = len(merged) * (max(r.prefix for r in merged) + max(r.own for r in merged))
        if (
            batches
            and pairs(merged) <= apart + _CALL_PAIRS
            and 4 * num_padded <= 5 * sum(r.prefix + r.own for r in merged)
            and (_share_a_mask(merged) or pairs(merged) <= _MASK_PAIRS)
        ):
            batches[-1] = merged
        else:
            batches.append([row])
    return batches


def _share_a_mask(rows: Sequence[_Row]) -> bool:
    """Returns whether one mask does for all rows, or none is needed."""
    return all(len(row.members) < 2 and row.prefix == rows[0].prefix for row in rows)


def _causal_pairs(rows: Sequence[_Row]) -> int:
    return len(rows) * max(row.prefix + row.own for row in rows) ** 2 // 2


def _masked_pairs(rows: Sequence[_Row]) -> int:
    own = max(row.own for row in rows)
    return len(rows) * own * (own + max(row.prefix for row in rows))


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Repeats each key or value head equally often (grouped-query attention)."""
    repeats = num_heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    windows: Mapping[int, int] = MappingProxyType({}),
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends by the plan; HF's attention modules call it. Values are padded to the width of keys.

    `windows` are those of the layers that have one: HF's masks say which, not the options of its modules.
    """
    name = type(module).__name__
    if plan is None:
        raise ModelError(f"{name}: forward without an attention plan; sequences would leak into each other")
    if attention_mask is not None:
        raise ModelError(f"{name} has an attention mask of its own; pellucid's attention does not take it")
    width, num_missing = value.shape[3], key.shape[3] - value.shape[3]
    if num_missing < 0:
        raise ModelError(f"{name} has wider values ({width}) than keys ({key.shape[3]})")
    padded = pad(value, (0, num_missing)) if num_missing else value
    rule = Rule(windows.get(module.layer_idx), softcap=options.get("softcap"), sinks=options.get("s_aux"))
    output = plan.attend(module.layer_idx, query, key, padded, scaling, rule)
    cut = output[..., :width] if num_missing else output
    return cut.transpose(1, 2).contiguous(), None


def register_uncompiled() -> str:
    """Registers with HF an attention function that compiled layers call as it is; returns its name."""
    from transformers import AttentionInterface

    name = f"{ATTENTION}_uncompiled"
    AttentionInterface.register(name, torch.compiler.disable(attention_function))
    return name
