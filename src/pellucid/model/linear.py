"""Large products on a CPU, where no gradient is wanted, by oneDNN.

torch leaves products in float32 to MKL. On a CPU of AMD with AVX-512, 64 tokens times a weight of 576 × 1,536
were measured to take MKL 1.42 ms and oneDNN 0.75. oneDNN reads a weight as it is stored: there is no second
copy, so weights that are loaded in place hold for the next call.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_LEAST = 1 << 21
"""Multiplications of the smallest product that oneDNN computes: its calls take 10 us longer, and the first
one for a number of tokens up to 1 ms."""


def multiply_by_onednn(model: nn.Module) -> None:
    """Makes the plain linear layers of a model compute large products by oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_multiply, module)  # type: ignore[method-assign]


def _multiply(module: nn.Linear, states: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    is_large = states.numel() * len(weight) >= _LEAST
    if torch.is_grad_enabled() or not is_large or weight.dtype != torch.float32 or not weight.is_cpu:
        return linear(states, weight, bias)
    product: Any = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return product  # type: ignore[no-any-return]
