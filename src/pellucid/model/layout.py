"""Layouts say which tokens of a micro batch are computed, and which computed token predicts each token.

Without sharing, every token is computed once and predicted by the one before it. With sharing, the members
of a group compute their common prefix once; the tokens behind it attend to it as if it were their own:

    table        a b X Y     a b Z        two members of a group, prompt `a b`
    computed     a b X Y Z                the prompt once
    predicted    a→b b→X X→Y     b→Z      the prompt's predictions once, too; the second `b` takes the first's

Values and gradients are those of the unshared forward: a shared token's gradient is the sum over its
members.

With context parallelism (Ulysses), several ranks hold slices of the computed tokens. A slice has all heads;
attention needs all tokens, but can do with few heads. So ranks exchange tokens for heads before attention and
back after it. In between, the plan of the whole micro batch attends:

    tokens       rank 0 | rank 1              rank 0          rank 1
    head a        0 1   |  2 3      ──>     a: 0 1 2 3      b: 0 1 2 3
    head b        0 1   |  2 3      <──

Each rank predicts the tokens that follow those of its slice. The ranks gather all values, so that a loss sees
the whole micro batch, but a gradient flows through a rank's own slice alone. The gradient of the whole is the
*sum* over ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from pellucid.data.shared_prompts import takes_part
from pellucid.data.tensors import to_device
from pellucid.errors import ConfigError
from pellucid.model.attention import AttentionPlan, Rule, SharedAttention, repeat_heads
from pellucid.model.head import TokenOutput
from pellucid.model.segments import Family


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The ranks that share a micro batch; `rank` is this one."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def check_heads(self, num_heads: int) -> None:
        if num_heads % self.size:
            raise ConfigError(
                f"trainer.model.cp = {self.size} does not divide the {num_heads} attention heads of the "
                "model; choose a divisor of them"
            )


class UlyssesAttention:
    """Runs `plan` on tokens in equal slices on all ranks; those beyond `num_tokens` are padding."""

    def __init__(self, plan: AttentionPlan, context: ContextParallel, num_tokens: int) -> None:
        self._plan = plan
        self.longest = plan.longest
        self._context = context
        self._num_tokens = num_tokens

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, rule: Rule
    ) -> Tensor:
        size, group = self._context.size, self._context.group
        # Every rank needs at least one key and value head: those of its query heads.
        num_heads = math.lcm(key.shape[1], size)
        parts = [query, repeat_heads(key, num_heads), repeat_heads(value, num_heads)]
        # [1, heads, own tokens, width] -> [ranks, heads of each, own tokens, width]
        by_rank = torch.cat([part[0].unflatten(0, (size, -1)) for part in parts], dim=1)
        received = _Exchange.apply(by_rank, group)  # type: ignore[no-untyped-call]
        # -> [1, own heads, all tokens, width]
        heads = received.transpose(0, 1).flatten(1, 2)[None]
        real = heads[:, :, : self._num_tokens].split([part.shape[1] // size for part in parts], dim=1)
        if rule.sinks is not None:
            rule = rule._replace(sinks=rule.sinks.view(size, -1)[self._context.rank])
        output = self._plan.attend(layer, real[0], real[1], real[2], scale, rule)
        padded = pad(output, (0, 0, 0, heads.shape[2] - self._num_tokens))
        # -> [ranks, own heads, tokens of each, width] -> [1, all heads, own tokens, width]
        by_rank = padded[0].unflatten(1, (size, -1)).transpose(0, 1)
        received = _Exchange.apply(by_rank, group)  # type: ignore[no-untyped-call]
        whole: Tensor = received.flatten(0, 1)[None]
        return whole


class _Exchange(torch.autograd.Function):
    """Sends row i to rank i. The exchange is its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None


@dataclass(frozen=True, slots=True)
class OwnPredictions:
    """Indices of the rows that this rank predicts, among the `num_rows` of all ranks."""

    context: ContextParallel
    rows: Tensor
    num_rows: int

    def gather(self, own: TokenOutput) -> TokenOutput:
        observed = [own.logprobs.detach(), own.entropy]
        if own.replaced is not None:
            observed.append(own.replaced)
        whole = torch.zeros(len(observed), self.num_rows, device=self.rows.device)
        whole[:, self.rows] = torch.stack(observed)
        dist.all_reduce(whole, group=self.context.group)
        logprobs, *others = whole
        return TokenOutput(logprobs.index_put((self.rows,), own.logprobs), *others)

    def total(self, share: Tensor) -> Tensor:
        """Adds up a number over the ranks; the gradient is that of this rank's share alone."""
        others = share.detach().clone()
        dist.all_reduce(others, group=self.context.group)
        return share + (others - share.detach())


Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Layout:
    computed: Tensor
    """Tokens of the table that go through the model, in order."""

    predicted: Tensor
    """Tokens of the table whose prediction is computed."""

    predecessors: Tensor
    """Row of `computed` that predicts each token of `predicted`."""

    read: Tensor
    """Rows of `predicted` whose logprob a loss reads; the others need no gradient."""

    targets: Tensor
    """Tokens of the table that have a prediction, their own or that of a shared prefix: all but the first of
    each sequence."""

    sources: Tensor
    """Row of `predicted` that holds the prediction of each token of `targets`."""

    plan: AttentionPlan

    num_pairs: int
    """Pairs of a computed token and one that it attends to; the plan computes some more."""

    own: OwnPredictions | None = None
    """Rows of the whole layout that this slice predicts; `sources` still counts in the whole."""

    def slice(self, context: ContextParallel) -> "Layout":
        """Cuts out the tokens that one rank computes and predicts: equally many on every rank.

        Padding fills the last slice. No token attends to it, and it predicts none.
        """
        size = self.slice_size(context.size)
        first, last = context.rank * size, (context.rank + 1) * size
        num_padding = size * context.size - len(self.computed)
        rows = ((self.predecessors >= first) & (self.predecessors < last)).nonzero()[:, 0]
        return replace(
            self,
            computed=torch.cat([self.computed, self.computed.new_zeros(num_padding)])[first:last],
            predicted=self.predicted[rows],
            predecessors=self.predecessors[rows] - first,
            read=torch.isin(rows, self.read).nonzero()[:, 0],
            plan=UlyssesAttention(self.plan, context, len(self.computed)),
            own=OwnPredictions(context, rows, len(self.predicted)),
        )

    def slice_size(self, num_slices: int) -> int:
        return -(-len(self.computed) // num_slices)

    def to(self, device: torch.device) -> "Layout":
        """Copies the indices to a device, by one copy; the plan copies its own when it attends first."""
        names = ("computed", "predicted", "predecessors", "read", "targets", "sources")
        indices = [getattr(self, name).numpy() for name in names]
        rows = [] if self.own is None else [self.own.rows.numpy()]
        moved = to_device([*indices, *rows], device)
        own = None if self.own is None else replace(self.own, rows=moved.pop())
        placed: dict[str, Any] = dict(zip(names, moved, strict=True))
        return replace(self, **placed, own=own)


def packed_layout(lengths: Sequence[int], loss_mask: Mask | None = None) -> Layout:
    """Lays out sequences side by side; every token is computed."""
    families = [(0, [index]) for index in range(len(lengths))]
    return _layout(np.asarray(lengths, np.int64), families, loss_mask)


def shared_layout(
    lengths: Sequence[int],
    token_ids: NDArray[np.uint32],
    groups: Sequence[str],
    temperatures: NDArray[np.float32] | None = None,
    loss_mask: Mask | None = None,
    routed_experts: NDArray[np.integer[Any]] | None = None,
    expert_weights: NDArray[np.float32] | None = None,
) -> Layout:
    """Lets neighbours of the same group (not "") compute their common prefix once.

    A prefix is common if its tokens, their temperatures and their experts with their weights are equal.
    """
    sizes = np.asarray(lengths, np.int64)
    offsets = _starts(sizes)
    known = (token_ids, temperatures, routed_experts, expert_weights)
    columns: list[NDArray[Any]] = [column for column in known if column is not None]
    families = []
    for group, members in groupby(range(len(sizes)), key=lambda index: groups[index]):
        prefix, chosen = _sharing(columns, offsets, sizes, list(members)) if group else (0, [])
        families += [(prefix, chosen)] if prefix else []
    sharing = {member for _, chosen in families for member in chosen}
    alone = [(0, [index]) for index in range(len(sizes)) if index not in sharing]
    return _layout(sizes, [*alone, *families], loss_mask)


def _sharing(
    columns: Sequence[NDArray[Any]], starts: Indices, lengths: Indices, members: list[int]
) -> tuple[int, list[int]]:
    """Finds the prefix to share and the members for whom that pays; without the others it may be longer."""
    while len(members) > 1:
        prefix = _common_prefix(columns, starts[members], lengths[members])
        taking_part = [member for member in members if takes_part(prefix, int(lengths[member]) - prefix)]
        if taking_part == members:
            return prefix, members
        members = taking_part
    return 0, []


def _common_prefix(columns: Sequence[NDArray[Any]], starts: Indices, lengths: Indices) -> int:
    """Counts the tokens that all sequences start with, leaving each at least one of its own."""
    prefix = int(lengths.min()) - 1
    for column in columns:
        stacked = np.stack([column[start : start + prefix] for start in starts.tolist()])
        differs = (stacked != stacked[0]).any(axis=(0, *range(2, stacked.ndim)))
        prefix = int(differs.argmax()) if differs.any() else prefix
    return prefix


def _layout(lengths: Indices, families: Sequence[tuple[int, list[int]]], loss_mask: Mask | None) -> Layout:
    """Lays out `families`, pairs (common prefix, members); those without a prefix come first."""
    starts = _starts(lengths)
    computed: list[Indices] = []
    num_tokens, num_rows = int(lengths.sum()), 0
    row_of = np.empty(num_tokens, np.int64)
    leader = np.arange(num_tokens)
    for prefix, members in families:
        first = starts[members[0]]
        common = np.arange(first, first + prefix)
        computed.append(common)
        prefix_rows = num_rows + np.arange(prefix)
        num_rows += prefix
        for member in members:
            start = starts[member]
            own = np.arange(start + prefix, start + lengths[member])
            row_of[start : start + prefix], leader[start : start + prefix] = prefix_rows, common
            row_of[own] = num_rows + np.arange(len(own))
            computed.append(own)
            num_rows += len(own)
    targets = np.setdiff1d(np.arange(num_tokens), starts)
    predicted, sources = np.unique(leader[targets], return_inverse=True)
    is_read = slice(None) if loss_mask is None else loss_mask[targets]
    kin = [Family(prefix, [int(lengths[m]) - prefix for m in members]) for prefix, members in families]
    return Layout(
        computed=torch.from_numpy(np.concatenate(computed)),
        predicted=torch.from_numpy(predicted),
        predecessors=torch.from_numpy(row_of[predicted - 1]),
        read=torch.from_numpy(np.unique(sources[is_read])),
        targets=torch.from_numpy(targets),
        sources=torch.from_numpy(sources),
        plan=SharedAttention(kin),
        num_pairs=sum(family.num_pairs for family in kin),
    )


def _starts(lengths: Indices) -> Indices:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
