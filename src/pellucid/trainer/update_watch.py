"""Compares the update of a few weights with AdamW's formula, every few steps.

Before the gradients are clipped, `before` copies a few elements of some tensors: weight, gradient, moments.
After the step, `after` compares the weights and first moments of the same elements with AdamW's formula, in
float64, for the gradient clipped at `max_norm` and the learning rate of the schedule:

    g ← g · min(1, max_norm / norm)        m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    w ← w · (1 − lr·wd) − lr · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

The first moments are compared, too: AdamW divides a gradient by its own size, so that one that is not clipped
hardly shows in the weights. Every tensor has its turn once in 32 steps, each time with other elements.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.config import OptimConfig

Floats = NDArray[np.float64]

LOOK_EVERY = 8
"""Steps from one look to the next."""

NUM_TURNS = 4
"""Looks in which every tensor has its turn once."""

NUM_ELEMENTS = 32
"""Elements of each tensor that a look compares."""

UPDATE_TOLERANCE = 1e-3
"""Relative error that an update may have. In float32, 1 − β₂ for β₂ = 0.999 has a relative error of 6e-5."""

_NUM_ROUNDINGS = 8
"""Rounding errors that a step may add to a weight, each of float32 eps × its size."""

_EPS, _TINY = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)


class Look(NamedTuple):
    """Comparison of one tensor's update in one step with AdamW's formula."""

    name: str
    has_gradient: bool = True
    has_changed: bool = False
    """Whether an element changed whose update by AdamW exceeds its rounding error."""

    is_stuck: bool = False
    """Whether there are such elements, and none changed."""

    is_lost: bool = False
    """Whether no element changed because every update of AdamW is lost to rounding."""

    excess: float = 0.0
    """Largest difference from AdamW's weight or moment ÷ the rounding error allowed; sound below 1."""

    is_moment: bool = False
    """Whether the largest difference is that of a first moment."""

    factor: float = 1.0
    """Median of the update of a weight ÷ AdamW's update, or of a moment ÷ AdamW's moment; 1 if sound."""


class _Spots(NamedTuple):
    """Elements of one tensor: `num` of them from `start` on, `stride` apart."""

    name: str
    parameter: nn.Parameter
    num: int
    stride: int
    start: int

    def view(self, tensor: Tensor) -> Tensor:
        local = local_shard(tensor).contiguous()
        return local.as_strided((self.num,), (self.stride,), local.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class Noted:
    """Elements of some tensors before a step."""

    places: Sequence[_Spots]
    weights: Sequence[Tensor]
    """Views of the elements of each tensor; after the step they show the new weights."""

    values: Floats
    """Rows of weight, unclipped gradient, first and second moment."""

    num_updates: Floats
    """Number of AdamW's updates of each tensor, this step included."""

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
        self._random = random.Random(0)

    def before(self) -> Noted | None:
        """Copies elements of the tensors whose turn it is, with unclipped gradients; None in most steps."""
        turn, rest = divmod(self._num_steps, LOOK_EVERY)
        self._num_steps += 1
        return None if rest else self._note(self._parameters[turn % NUM_TURNS :: NUM_TURNS])

    def _note(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> Noted:
        places: list[_Spots] = []
        rows: tuple[list[Tensor], ...] = [], [], [], [], []
        for name, parameter in parameters:
            weight = local_shard(parameter.detach())
            if parameter.grad is None or not (size := weight.numel()) or not weight.is_contiguous():
                continue
            stride = max(1, size // NUM_ELEMENTS)
            place = _Spots(name, parameter, min(size, NUM_ELEMENTS), stride, self._random.randrange(stride))
            places.append(place)
            state = self._adamw.state.get(parameter)
            element = place.view(weight)
            nothing = element.new_zeros(place.num)
            taken = (
                (place.view(state["exp_avg"]), place.view(state["exp_avg_sq"]), state["step"].view(1))
                if state
                else (nothing, nothing, nothing[:1])
            )
            for row, each in zip(rows, (element, place.view(parameter.grad), *taken), strict=True):
                row.append(each)
        bare = [name for name, parameter in parameters if parameter.grad is None]
        if not places:
            return Noted([], [], np.zeros((4, 0)), np.zeros(0), bare)
        values = _as_array(torch.cat([each for row in rows for each in row]))
        num_updates = values[-len(places) :] + 1
        return Noted(places, rows[0], values[: -len(places)].reshape(4, -1), num_updates, bare)

    def after(self, noted: Noted | None, grad_norm: float, lr: float) -> list[Look]:
        """Compares the same elements after a step; `grad_norm` is before clipping, `lr` is the step's."""
        if noted is None:
            return []
        looks = [Look(name, has_gradient=False) for name in noted.bare]
        if not noted.places:
            return looks
        optim, sizes = self._optim, [place.num for place in noted.places]
        beta, second = optim.betas
        weight, gradient, mean, square = noted.values
        gradient = gradient * min(1.0, optim.max_norm / (grad_norm + 1e-6))
        size = beta * np.abs(mean) + (1 - beta) * np.abs(gradient)
        mean = beta * mean + (1 - beta) * gradient
        square = second * square + (1 - second) * gradient * gradient
        first_scale = np.repeat(lr / (1 - beta**noted.num_updates), sizes)
        second_scale = np.repeat(1 / (1 - second**noted.num_updates), sizes)
        scale = first_scale / (np.sqrt(square * second_scale) + self._adamw.defaults["eps"])
        moved = -lr * optim.weight_decay * weight - scale * mean
        rounding = _EPS * np.abs(weight)
        found_weight, found_mean = self._found(noted)
        found_moved = found_weight - weight
        by_weight = np.abs(found_moved - moved)
        by_weight /= _NUM_ROUNDINGS * rounding + UPDATE_TOLERANCE * scale * size + _TINY
        by_mean = np.abs(found_mean - mean) / (UPDATE_TOLERANCE * size + _TINY)
        is_due = np.abs(moved) > 2 * rounding + _TINY
        starts = np.cumsum([0, *sizes])
        worst = np.maximum.reduceat(np.maximum(by_weight, by_mean), starts[:-1]).tolist()
        changed = np.logical_or.reduceat(is_due & (found_moved != 0), starts[:-1]).tolist()
        for index, place in enumerate(noted.places):
            look = Look(place.name, has_changed=changed[index], excess=worst[index])
            if look.excess > 1 or not look.has_changed:
                part = slice(starts[index], starts[index + 1])
                is_moment = by_mean[part].max() > max(1.0, by_weight[part].max())
                found, expected = (found_mean, mean) if is_moment else (found_moved, moved)
                has_due = bool(is_due[part].any())
                look = look._replace(
                    is_stuck=has_due and not look.has_changed,
                    is_lost=not has_due and bool(moved[part].any()) and not found_moved[part].any(),
                    is_moment=bool(is_moment),
                    factor=_factor(found[part], expected[part]),
                )
            looks.append(look)
        return looks

    def _found(self, noted: Noted) -> Floats:
        """Reads the weights and first moments of the noted elements."""
        means = [
            place.view(state["exp_avg"])
            if (state := self._adamw.state.get(place.parameter))
            else weight.new_zeros(place.num)
            for place, weight in zip(noted.places, noted.weights, strict=True)
        ]
        return _as_array(torch.cat([*noted.weights, *means])).reshape(2, -1)


def _factor(found: Floats, expected: Floats) -> float:
    """Returns the median ratio over the larger half of the expected values: rounding blurs the others."""
    large = np.abs(expected) >= max(np.median(np.abs(expected)), _TINY)
    return float(np.median(found[large] / expected[large])) if large.any() else math.nan


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_array(tensor: Tensor) -> Floats:
    array: Floats = tensor.double().cpu().numpy()
    return array
