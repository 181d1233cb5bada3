"""Attention through HF's registry: the model calls one registered function, a plan says who sees whom.

The plan travels as a keyword of the forward pass. There is no default: a forward without a plan raises,
because HF's own fallback for packed inputs silently attends across sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from pellucid.errors import ModelError

ATTENTION = "pellucid"
_UNSUPPORTED = ("softcap", "s_aux")
NO_WINDOWS = "pellucid's attention has no windows yet: set seq_len within it, or choose a model without"


class AttentionPlan(Protocol):
    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""

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

    Families of similar shape are computed in one batch, as a call of its own costs more than their padding.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self._sizes = [family.num_tokens for family in families]
        self.longest = max(family.prefix + max(family.own) for family in families)
        starts = [0, *accumulate(self._sizes)]
        placed = list(zip(starts, families, strict=False))
        self._alone = [index for index, family in enumerate(families) if not family.prefix]
        self._shared = [_FamilyBatch(batch) for batch in _alike([each for each in placed if each[1].prefix])]
        order = [
            *(torch.arange(starts[index], starts[index + 1]) for index in self._alone),
            *(batch.tokens for batch in self._shared),
        ]
        self._places = torch.cat(order).argsort() if self._shared else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        key, value = repeat_heads(key, query), repeat_heads(value, query)
        outputs = []
        if self._alone:
            parts = [torch.split(tensor, self._sizes, dim=2) for tensor in (query, key, value)]
            for index in self._alone:
                q, k, v = (part[index] for part in parts)
                outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
        if self._places is None:
            return torch.cat(outputs, dim=2)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        found = [output[0].transpose(0, 1) for output in outputs]
        found += [batch.attend(q, k, v, scale) for batch in self._shared]
        in_order = torch.cat(found).index_select(0, self._places.to(query.device))
        return in_order.transpose(0, 1)[None]


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


class _FamilyBatch:
    """Families as a batch of prefixes and a batch of members, padded at the end.

    Causality hides the padding of prefixes from themselves; from members, a mask does. Padding repeats a
    token, so that every row has something to see.
    """

    def __init__(self, placed: Sequence[tuple[int, Family]]) -> None:
        prefixes = torch.tensor([family.prefix for _, family in placed])
        starts = torch.tensor([start for start, _ in placed])
        family_of = torch.tensor([index for index, (_, family) in enumerate(placed) for _ in family.own])
        own = torch.tensor([length for _, family in placed for length in family.own])
        own_starts = torch.tensor(
            [
                start + family.prefix + before
                for start, family in placed
                for before in (0, *accumulate(family.own[:-1]))
            ]
        )
        self._prefixes = _Padded(starts, prefixes)
        self._own = _Padded(own_starts, own)
        self.tokens = torch.cat([self._prefixes.tokens, self._own.tokens])
        members = self._prefixes.rows[family_of]
        self._seen = torch.cat([members, self._own.rows], dim=1)
        visible = prefixes[family_of] if len(prefixes.unique()) > 1 else prefixes[:1]  # one mask for all
        longest, width = self._own.rows.shape[1], members.shape[1]
        causal = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(visible), -1, -1)
        is_prefix = (torch.arange(width) < visible[:, None])[:, None].expand(-1, longest, -1)
        self._mask = torch.cat([is_prefix, causal], dim=2)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[tokens of the micro batch, heads, width] -> [those of the families, heads, width]."""
        q, k, v = (_rows(tensor, self._prefixes.rows) for tensor in (query, key, value))
        common = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        output = scaled_dot_product_attention(
            _rows(query, self._own.rows),
            _rows(key, self._seen),
            _rows(value, self._seen),
            attn_mask=self._mask.to(query.device),
            scale=scale,
        )
        return torch.cat([self._prefixes.without(common), self._own.without(output)])


class _Padded:
    """Spans of tokens as rows of equal length."""

    def __init__(self, starts: Tensor, lengths: Tensor) -> None:
        columns = torch.arange(int(lengths.max()))
        self.rows = starts[:, None] + columns.minimum(lengths[:, None] - 1)
        is_token = columns < lengths[:, None]
        self.tokens = self.rows[is_token]
        self._valid = None if bool(is_token.all()) else is_token.flatten().nonzero()[:, 0]

    def without(self, output: Tensor) -> Tensor:
        """[rows, heads, columns, width] -> [tokens, heads, width]."""
        flat = output.transpose(1, 2).flatten(0, 1)
        return flat if self._valid is None else flat.index_select(0, self._valid.to(flat.device))


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """[tokens, heads, width] -> [rows, heads, columns, width]."""
    chosen = tensor.flatten(1).index_select(0, rows.flatten().to(tensor.device))
    return chosen.view(*rows.shape, *tensor.shape[1:]).transpose(1, 2)


_CALL_PAIRS = 1 << 14
"""What a call costs beside its work, in pairs of tokens: so many may be computed in vain to save one."""

_BATCH_PAIRS = 1 << 20
"""Beyond this there is nothing to save, and the mask of a batch would grow large."""


def _alike(placed: Sequence[tuple[int, Family]]) -> list[list[tuple[int, Family]]]:
    """Families in batches whose padding costs less than a call for each."""
    batches: list[list[tuple[int, Family]]] = []
    for each in sorted(placed, key=lambda each: (each[1].prefix, max(each[1].own))):
        apart = _padded_pairs([each]) + (_padded_pairs(batches[-1]) if batches else 0)
        if batches and _padded_pairs([*batches[-1], each]) <= min(apart + _CALL_PAIRS, _BATCH_PAIRS):
            batches[-1].append(each)
        else:
            batches.append([each])
    return batches


def _padded_pairs(placed: Sequence[tuple[int, Family]]) -> int:
    families = [family for _, family in placed]
    prefix, own = max(family.prefix for family in families), max(max(family.own) for family in families)
    return len(families) * prefix**2 + sum(len(family.own) for family in families) * own * (prefix + own)


def repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Key or value heads, repeated to as many as there are query heads (grouped-query attention)."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that HF's attention modules call. Values are made as wide as keys on the way."""
    if plan is None:
        raise ModelError(
            f"{type(module).__name__}: forward without an attention plan; sequences would leak into each "
            "other"
        )
    _check_options(module, attention_mask, plan, options)
    width, num_missing = value.shape[3], key.shape[3] - value.shape[3]
    if num_missing < 0:
        raise ModelError(f"{type(module).__name__} has wider values ({width}) than keys ({key.shape[3]})")
    padded = pad(value, (0, num_missing)) if num_missing else value
    output = plan.attend(module.layer_idx, query, key, padded, scaling)
    return output[..., :width].transpose(1, 2).contiguous(), None


def _check_options(module: Any, mask: Tensor | None, plan: AttentionPlan, options: Mapping[str, Any]) -> None:
    """Whatever else a model asks of attention is refused rather than left out."""
    for option in _UNSUPPORTED:
        if options.get(option) is not None:
            raise ModelError(
                f"{type(module).__name__} asks for {option}; pellucid's attention does not have it yet"
            )
    if mask is not None:
        raise ModelError(
            f"{type(module).__name__} has an attention mask of its own; pellucid's attention does not take it"
        )
    window = options.get("sliding_window")
    if window is not None and window < plan.longest:
        raise ModelError(
            f"{type(module).__name__} asks for sliding_window = {window}, and sequences may have "
            f"{plan.longest} tokens; {NO_WINDOWS}"
        )


def register_attention() -> None:
    """Makes `attn_implementation="pellucid"` known to transformers.

    The plan decides who sees whom. Without a mask function of the same name, HF builds no mask of its own.
    """
    AttentionInterface.register(ATTENTION, attention_function)
