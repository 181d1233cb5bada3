"""Compares the update of a few weights per step with AdamW's formula.

Before the gradients are clipped, `before` copies a few elements of some tensors: weight, gradient, moments.
After the step, `after` compares the weights and first moments of the same elements with AdamW's formula, in
float64, for the gradient clipped at `max_norm` and the learning rate of the schedule:

    g ← g · min(1, max_norm / norm)        m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    w ← w · (1 − lr·wd) − lr · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

The first moments are compared, too: AdamW divides a gradient by its own size, so that one that is not clipped
hardly shows in the weights. Every tensor has its turn once in 32 steps, each time with other elements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.config import OptimConfig

EVERY = 4
"""Steps from one look to the next."""

TURNS = 8
"""Looks in which every tensor has its turn once."""

NUM_ELEMENTS = 32
"""Elements of each tensor that a look compares."""

TOLERANCE = 1e-3
"""Relative error that an update may have. In float32, 1 − β₂ for β₂ = 0.999 has a relative error of 6e-5."""

_ROUNDINGS = 8
"""Rounding errors that a step may add to a weight, each of float32 eps × its size."""

_EPS = float(np.finfo(np.float32).eps)

_TINY = float(np.finfo(np.float32).tiny)
_MOMENTS = ("exp_avg", "exp_avg_sq")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Look:
    """Comparison of one tensor's update in one step with AdamW's formula."""

    name: str
    has_gradient: bool
    excess: float = 0.0
    """Largest difference from AdamW's weight or moment ÷ the rounding error allowed; sound below 1."""

    is_moment: bool = False
    """Whether the largest difference is that of a first moment."""

    factor: float = 1.0
    """Median of the update of a weight ÷ AdamW's update, or of a moment ÷ AdamW's moment; 1 if sound."""

    num_due: int = 0
    """Elements that the step should have changed: AdamW's update exceeds their rounding error."""

    num_changed: int = 0
    """Elements among the `num_due` that changed."""

    is_lost: bool = False
    """Whether no element changed because every update of AdamW is lost to rounding."""


@dataclass(frozen=True, slots=True)
class Noted:
    """Elements of some tensors before a step; the rows of `values` are weight, gradient and both moments."""

    names: Sequence[str]
    places: Sequence[tuple[Tensor, slice]]
    """Flattened tensors, and the slice of elements taken of each."""

    sizes: Sequence[int]
    """Number of elements taken of each tensor."""

    steps: Floats
    """Number of AdamW's updates of each element, this step included."""

    values: Floats
    bare: Sequence[str]
    """Tensors without a gradient."""


class UpdateWatch:
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], adamw: torch.optim.AdamW, optim: OptimConfig
    ) -> None:
        self._parameters = list(parameters.items())
        self._adamw = adamw
        self._optim = optim
        self._num_steps = 0
        self._generator = np.random.default_rng(0)

    def before(self) -> Noted | None:
        """Copies elements of the tensors whose turn it is, with unclipped gradients; None in most steps."""
        turn, rest = divmod(self._num_steps, EVERY)
        self._num_steps += 1
        if rest:
            return None
        chosen = self._parameters[turn % TURNS :: TURNS]
        names: list[str] = []
        bare: list[str] = []
        places: list[tuple[Tensor, slice]] = []
        rows: list[Tensor] = []
        steps: list[float] = []
        for name, parameter in chosen:
            if parameter.grad is None:
                bare.append(name)
                continue
            weight = own(parameter.detach())
            if not weight.numel() or not weight.is_contiguous():
                continue
            flat = weight.view(-1)
            stride = max(1, len(flat) // NUM_ELEMENTS)
            start = int(self._generator.integers(stride))
            part = slice(start, start + stride * NUM_ELEMENTS, stride)
            state = self._adamw.state.get(parameter) or {}
            row = [flat[part], _taken(parameter.grad, part)]
            row += [_taken(state[key], part) if state else torch.zeros_like(row[0]) for key in _MOMENTS]
            rows.append(torch.stack(row))
            names.append(name)
            places.append((flat, part))
            steps.append(1.0 + (float(state["step"]) if state else 0.0))
        sizes = [row.shape[1] for row in rows]
        values = _as_array(torch.cat(rows, dim=1)) if rows else np.zeros((4, 0))
        return Noted(names, places, sizes, np.repeat(steps, sizes), values, bare)

    def after(self, noted: Noted | None, grad_norm: float, lr: float) -> list[Look]:
        """Compares the same elements after a step; `grad_norm` is before clipping, `lr` is the step's."""
        if noted is None:
            return []
        looks = [Look(name, has_gradient=False) for name in noted.bare]
        if not noted.names:
            return looks
        optim = self._optim
        beta, second = optim.betas
        weight, gradient, mean, square = noted.values
        gradient = gradient * min(1.0, optim.max_norm / (grad_norm + 1e-6))
        size = beta * np.abs(mean) + (1 - beta) * np.abs(gradient)
        mean = beta * mean + (1 - beta) * gradient
        square = second * square + (1 - second) * gradient**2
        scale = lr / (1 - beta**noted.steps)
        scale /= np.sqrt(square / (1 - second**noted.steps)) + self._adamw.defaults["eps"]
        moved = -lr * optim.weight_decay * weight - scale * mean
        rounding = _EPS * np.abs(weight)
        found, found_mean = self._found(noted)
        found_moved = found - weight
        by_weight = np.abs(found_moved - moved) / (_ROUNDINGS * rounding + TOLERANCE * scale * size + _TINY)
        by_mean = np.abs(found_mean - mean) / (TOLERANCE * size + _TINY)
        is_due = np.abs(moved) > 2 * rounding + _TINY
        has_changed = found_moved != 0
        starts = np.cumsum([0, *noted.sizes[:-1]])
        worst, worst_mean = (np.maximum.reduceat(each, starts).tolist() for each in (by_weight, by_mean))
        num_due, num_changed, num_due_changed, num_pushed = (
            np.add.reduceat(each, starts, dtype=np.int64).tolist()
            for each in (is_due, has_changed, is_due & has_changed, moved != 0)
        )
        for index, name in enumerate(noted.names):
            excess, factor = max(worst[index], worst_mean[index]), 1.0
            is_moment = worst_mean[index] > max(1.0, worst[index])
            if excess > 1:
                part = slice(starts[index], starts[index] + noted.sizes[index])
                pair = (found_mean, mean) if is_moment else (found_moved, moved)
                factor = _factor(pair[0][part], pair[1][part])
            is_lost = num_pushed[index] > 0 and not num_due[index] and not num_changed[index]
            counts = num_due[index], num_due_changed[index]
            looks.append(Look(name, True, excess, is_moment, factor, *counts, is_lost))
        return looks

    def _found(self, noted: Noted) -> tuple[Floats, Floats]:
        by_name = dict(self._parameters)
        rows = []
        for name, (flat, part) in zip(noted.names, noted.places, strict=True):
            state = self._adamw.state.get(by_name[name]) or {}
            taken = flat[part]
            rows.append(torch.stack([taken, _taken(state["exp_avg"], part) if state else taken * 0]))
        weight, mean = _as_array(torch.cat(rows, dim=1))
        return weight, mean


def _factor(found: Floats, expected: Floats) -> float:
    """Returns the median ratio over the larger half of the expected values: rounding blurs the others."""
    large = np.abs(expected) >= max(np.median(np.abs(expected)), _TINY)
    return float(np.median(found[large] / expected[large])) if large.any() else math.nan


def own(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _taken(tensor: Tensor, part: slice) -> Tensor:
    return own(tensor).reshape(-1)[part]


def _as_array(tensor: Tensor) -> Floats:
    array: Floats = tensor.double().cpu().numpy()
    return array
