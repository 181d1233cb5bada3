"""Linear layers in float32 on a CPU, by oneDNN: forward, and both products of the backward pass.

torch leaves such products to MKL, which uses half of what a CPU of AMD with AVX-512 can do. oneDNN uses all
of it. It prepares a product for its number of rows, which takes longer than the product itself in a small
model. So rows of zeros, which change nothing, make numbers of tokens alike:

    tokens 645 … 704, of whichever micro batch     704 rows
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LEAST = 1 << 23
"""Multiplications from which on oneDNN is faster: 512 tokens by a weight of 128 × 128."""

_ROWS = 64
"""Numbers of rows are multiples of it."""


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + b; the result differs from torch's own by rounding alone."""
    is_wide = states.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu"
    if not is_wide or states.numel() * len(weight) < _LEAST or not torch.backends.mkldnn.is_available():
        return functional.linear(states, weight, bias)
    product: Tensor = _Product.apply(states.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return product.view(*states.shape[:-1], len(weight))


def speed_up(model: nn.Module) -> None:
    """Makes the linear layers of a model compute by `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, states: Tensor) -> Tensor:
    return linear(states, module.weight, module.bias)


class _Product(torch.autograd.Function):
    """x Wᵀ + b of rows x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Cut off without a view: a model may change what it gets in place.
        return _times(_padded(x), weight, bias).resize_(len(x), len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        padded, (needs_x, needs_weight, needs_bias) = _padded(gradient), ctx.needs_input_grad
        return (
            _times(padded, weight.T)[: len(x)] if needs_x else None,
            _times(padded.T, _padded(x).T) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def _padded(rows: Tensor) -> Tensor:
    num_missing = -len(rows) % _ROWS
    return functional.pad(rows, (0, 0, 0, num_missing)) if num_missing else rows


def _times(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes left · rightᵀ + bias, whichever way the two lie in memory."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
