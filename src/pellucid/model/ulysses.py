"""Context parallelism: several ranks hold slices of the computed tokens of a micro batch (Ulysses).

A rank holds a slice of the tokens with all heads; attention needs all tokens, but can do with few heads. So
ranks exchange tokens for heads before attention and back after it. In between, the plan of the whole micro
batch attends:

    tokens       rank 0 | rank 1              rank 0          rank 1
    head a        0 1   |  2 3      ──>     a: 0 1 2 3      b: 0 1 2 3
    head b        0 1   |  2 3      <──

Each rank predicts the tokens that follow those of its slice. The ranks gather all values, so that a loss sees
the whole micro batch, but a gradient flows through a rank's own slice alone. The gradient of the whole is the
*sum* over ranks.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from pellucid.errors import ConfigError
from pellucid.model.attention import AttentionPlan
from pellucid.model.head import TokenOutput


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        # Every rank needs at least one key and value head: those of its query heads.
        num_heads = math.lcm(key.shape[1], self._context.size)
        parts = [query, *(_with_heads(tensor, num_heads) for tensor in (key, value))]
        sizes = [part.shape[1] // self._context.size for part in parts]
        heads = self._to_heads(torch.cat([self._by_rank(part) for part in parts], dim=1))
        real = [part[:, :, : self._num_tokens] for part in heads.split(sizes, dim=1)]
        output = self._plan.attend(layer, real[0], real[1], real[2], scale)
        return self._to_tokens(pad(output, (0, 0, 0, heads.shape[2] - self._num_tokens)))

    def _by_rank(self, tensor: Tensor) -> Tensor:
        """[1, heads, tokens, width] -> [ranks, heads of each, tokens, width]."""
        by_rank: Tensor = tensor[0].unflatten(0, (self._context.size, -1))
        return by_rank

    def _to_heads(self, own: Tensor) -> Tensor:
        """[ranks, heads of each, own tokens, width] -> [1, own heads, all tokens, width]."""
        received = _Exchange.apply(own, self._context.group)  # type: ignore[no-untyped-call]
        whole: Tensor = received.transpose(0, 1).flatten(1, 2)[None]
        return whole

    def _to_tokens(self, own: Tensor) -> Tensor:
        """[1, own heads, all tokens, width] -> [1, all heads, own tokens, width]."""
        by_rank = own[0].unflatten(1, (self._context.size, -1)).transpose(0, 1)
        received = _Exchange.apply(by_rank, self._context.group)  # type: ignore[no-untyped-call]
        whole: Tensor = received.flatten(0, 1)[None]
        return whole


def _with_heads(tensor: Tensor, num_heads: int) -> Tensor:
    repeats = num_heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


class _Exchange(torch.autograd.Function):
    """Sends row i to rank i. The exchange is its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = rows.contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received


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
