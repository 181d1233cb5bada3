"""Linear layers in float32 by oneDNN, on the CPUs where it is faster: those of AMD with AVX-512.

torch leaves such products to MKL, which uses half of what these CPUs can do; oneDNN uses all of it, and reads
weights as they are stored. But it prepares a product for its number of rows, which takes longer than the
product itself in a small model (fifteen times as long for 64 tokens by a weight of 128 × 384). So rows of
zeros, which change nothing, make numbers of tokens alike:

    tokens 645 … 704, of whichever micro batch     704 rows
    sequences 65 … 80, of a step of the engine      80 rows
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CPU = Path("/proc/cpuinfo")
"""File in which Linux describes the CPU; other systems have none."""

_LEAST = 1 << 20
"""Multiplications from which on oneDNN is faster: 64 tokens by a weight of 128 × 128."""

_LEAST_TRAINED = 1 << 23
"""The same where a gradient is wanted, and shapes are many: 512 tokens by a weight of 128 × 128."""

_ROWS = 16
"""Numbers of rows are multiples of it."""

_ROWS_TRAINED = 64
"""The same where a gradient is wanted: a micro batch has many tokens, and seldom as many as another."""


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + b; the result differs from torch's own by rounding alone."""
    is_trained = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    is_large = states.numel() * len(weight) >= (_LEAST_TRAINED if is_trained else _LEAST)
    is_wide = states.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu"
    if not (is_large and is_wide and is_onednn_faster()):
        return functional.linear(states, weight, bias)
    rows = states.flatten(0, -2)
    if is_trained:
        product: Tensor = _Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    else:
        product = _product(rows, weight, bias, _ROWS)
    return product.view(*states.shape[:-1], len(weight))


@cache
def is_onednn_faster() -> bool:
    if not torch.backends.mkldnn.is_available() or not CPU.exists():
        return False
    about = CPU.read_text()
    return "AuthenticAMD" in about and "avx512f" in about


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
        return _product(x, weight, bias, _ROWS_TRAINED)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        padded, (needs_x, needs_weight, needs_bias) = _padded(gradient), ctx.needs_input_grad
        return (
            _times(padded, weight.T)[: len(x)] if needs_x else None,
            _times(padded.T, _padded(x).T) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, multiple: int) -> Tensor:
    """Computes x Wᵀ + b of rows x; those of padding are cut off without a view, since a model may change
    what it gets in place."""
    return _times(_padded(x, multiple), weight, bias).resize_(len(x), len(weight))


def _padded(rows: Tensor, multiple: int = _ROWS_TRAINED) -> Tensor:
    num_missing = -len(rows) % multiple
    return functional.pad(rows, (0, 0, 0, num_missing)) if num_missing else rows


def _times(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes left · rightᵀ + bias, whichever way the two lie in memory."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product
