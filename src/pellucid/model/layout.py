"""Which tokens of a micro batch are computed, and which computed token predicts each token.

Without sharing, every token is computed once and predicted by the one before it. With sharing, the members
of a group compute their common prefix once; what follows attends to it as if it were their own:

    table        a b X Y     a b Z        two members of a group, prompt `a b`
    computed     a b X Y Z                the prompt once
    predicts     a→b b→X X→Y a→b b→Z      every token of the table keeps its own prediction

Values and gradients are those of the unshared forward: a shared token's gradient is the sum over its
members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.model.attention import AttentionPlan, Family, SharedAttention

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    computed: Tensor
    """Tokens of the table that go through the model, in order."""

    predicted: Tensor
    """Tokens of the table that have a prediction: all but the first of each sequence."""

    predecessors: Tensor
    """For each predicted token, the row of `computed` that predicts it."""

    plan: AttentionPlan

    def to(self, device: torch.device) -> "Layout":
        return Layout(
            self.computed.to(device), self.predicted.to(device), self.predecessors.to(device), self.plan
        )


def packed_layout(lengths: Sequence[int]) -> Layout:
    """Every token is computed."""
    return _layout(np.asarray(lengths, np.int64), [(0, [index]) for index in range(len(lengths))])


def shared_layout(lengths: Sequence[int], token_ids: NDArray[np.uint32], groups: Sequence[str]) -> Layout:
    """Neighbours of the same group (not "") share what they have in common at their start."""
    sizes = np.asarray(lengths, np.int64)
    offsets = _starts(sizes)
    families = []
    for group, members in groupby(range(len(sizes)), key=lambda index: groups[index]):
        chosen = list(members)
        sequences = [token_ids[offsets[index] : offsets[index] + sizes[index]] for index in chosen]
        prefix = _common_prefix(sequences) if group else 0
        families += [(prefix, chosen)] if prefix else [(0, [index]) for index in chosen]
    return _layout(sizes, families)


def _common_prefix(sequences: Sequence[NDArray[np.uint32]]) -> int:
    """Tokens that all sequences start with, leaving each at least one of its own; 0 for a single one."""
    limit = min(len(sequence) for sequence in sequences) - 1
    if len(sequences) == 1 or limit < 1:
        return 0
    stacked = np.stack([sequence[:limit] for sequence in sequences])
    differs = (stacked != stacked[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else limit


def _layout(lengths: Indices, families: Sequence[tuple[int, list[int]]]) -> Layout:
    """`families` are (common prefix, members), in the order of the table."""
    starts = _starts(lengths)
    computed: list[Indices] = []
    row_of = np.empty(int(lengths.sum()), np.int64)
    num_rows = 0
    for prefix, members in families:
        first = starts[members[0]]
        computed.append(np.arange(first, first + prefix))
        prefix_rows = num_rows + np.arange(prefix)
        num_rows += prefix
        for member in members:
            own = np.arange(starts[member] + prefix, starts[member] + lengths[member])
            row_of[starts[member] : starts[member] + prefix] = prefix_rows
            row_of[own] = num_rows + np.arange(len(own))
            computed.append(own)
            num_rows += len(own)
    predicted = np.setdiff1d(np.arange(len(row_of)), starts)
    plan = SharedAttention([Family(p, [int(lengths[m]) - p for m in members]) for p, members in families])
    return Layout(
        computed=torch.from_numpy(np.concatenate(computed)),
        predicted=torch.from_numpy(predicted),
        predecessors=torch.from_numpy(row_of[predicted - 1]),
        plan=plan,
    )


def _starts(lengths: Indices) -> Indices:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
