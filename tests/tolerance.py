"""How far two correct computations of one number may lie apart, derived from their arithmetic.

A floating-point operation is off by up to eps/2 of its result, up or down. Where `terms` results are added
up, in an order that the CPU, the number of threads and the batch choose, the errors partly cancel: their sum
grows like √terms, not like terms. A value that is made of numbers as large as `scale` is therefore known to

    bound(scale, terms, dtype) = 2 · √terms · eps(dtype) · (scale + the smallest normal number)

which allows each of the two computations that are compared √terms roundings of full size, eps/2, twice over.
Numbers below the smallest normal one are rounded to multiples of eps times it.

    a sum of n terms                          near(…, terms=n, scale=largest partial sum, or |sum| itself)
    a formula of k operations per element     near(…, terms=k, each=True): the scale is each value itself
    logprobs and entropies of a model         near_logprobs(…, model)
    gradients, summed over n tokens           near(…, terms=gradient_chain(model, n), scale=largest of all)

Compare with a float64 reference where there is one. A bound says what rounding may do, so a wrong term, a
dropped token or a coarser dtype lies far beyond it: `tests/test_tolerance.py` plants such errors, and they
are refused.

    assert found == near(expected, terms=32)

A model is given as itself or as its folder.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pellucid.config import ModelConfig
from pellucid.model import load_policy


def eps(dtype: torch.dtype | type[np.floating[Any]] = torch.float32) -> float:
    """The distance from 1 to the next number of `dtype`."""
    return float(_finfo(dtype).eps)


def _finfo(dtype: Any) -> Any:
    return (torch.finfo if isinstance(dtype, torch.dtype) else np.finfo)(dtype)


def bound(scale: Any, terms: float, dtype: Any = torch.float32) -> Any:
    """What rounding may do to a value made of `terms` numbers as large as `scale`."""
    return 2 * math.sqrt(terms) * eps(dtype) * (scale + _finfo(dtype).smallest_normal)


def chain(model: nn.Module | Path, length: int) -> int:
    """Numbers added up on the way from a token to its logprob, for sequences of `length` tokens.

    Every matrix on the way adds up its inputs, every attention the values of up to `length` tokens, and the
    softmax at the end the whole vocabulary.
    """
    modules = _loaded(model)
    matrices = [parameter for parameter in modules.parameters() if parameter.ndim >= 2]
    vocabulary = max(len(matrix) for matrix in matrices)
    attentions = sum(type(module).__name__.endswith("Attention") for module in modules.modules())
    return sum(matrix.shape[-1] for matrix in matrices) + attentions * length + vocabulary


def gradient_chain(model: nn.Module | Path, num_tokens: int) -> int:
    """The same for a gradient: through the model forward and back, and summed over `num_tokens` tokens."""
    return 2 * chain(model, num_tokens) + num_tokens


def gradient_bound(model: nn.Module | Path, num_tokens: int) -> float:
    """What rounding may do to a gradient summed over `num_tokens` tokens, relative to the largest of all."""
    return float(bound(1.0, gradient_chain(model, num_tokens)))


def update_bound(model: nn.Module | Path, num_tokens: int) -> float:
    """What rounding may do to steps of AdamW, relative to what they did: to weights, and to later losses.

    AdamW divides a gradient by its own size. One that is 100 times smaller than the largest of all is known
    to two digits less, and so is what it did to its weight.
    """
    return 100 * gradient_bound(model, num_tokens)


def adapter_bound(model: nn.Module | Path, num_tokens: int) -> float:
    """What rounding may do to the weights of a LoRA adapter in a few steps of AdamW, relative to the largest.

    A starts at its size, B at 0. Steps move both by `moved`. Until then A's gradient is that of B times
    moved ÷ size, so that AdamW knows A's direction to size ÷ moved fewer digits: of A's `moved`, that is
    moved · size ÷ moved = size, whatever the learning rate and the number of steps are.
    """
    return update_bound(model, num_tokens)


def mismatch_kl_bound(logprob: float, dtype: Any = torch.float32) -> float:
    """The largest r − ℓ − 1, computed as expm1(ℓ) − ℓ, where rounding alone makes ℓ: up to `logprob`."""
    return math.expm1(logprob) - logprob + eps(dtype) * logprob


def partial_sum(values: Any) -> float:
    """The largest sum on the way, however the values are ordered: the scale of their sum."""
    array = _array(values)
    return float(max(array[array > 0].sum(), -array[array < 0].sum()))


class near:
    """Equal to every number, list, array or tensor that differs from `expected` by rounding alone.

    `scale` is the largest |expected| unless it is given: one number, or one for each element. With `each` it
    is each element's own size. `within` replaces the bound by one that was derived elsewhere. Infinities and
    NaN must stand in the same places.
    """

    __array_ufunc__ = None  # an array on the left leaves the comparison to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        expected: Any,
        *,
        terms: float = 1,
        scale: Any = None,
        each: bool = False,
        dtype: Any = torch.float32,
        within: Any = None,
    ) -> None:
        self.expected = _array(expected)
        if scale is None:
            sizes = np.abs(np.where(np.isfinite(self.expected), self.expected, 0.0))
            scale = sizes if each else sizes.max(initial=0.0)
        self.bound = bound(_array(scale), terms, dtype) if within is None else _array(within)
        self.seen = ""

    def __eq__(self, found: object) -> bool:
        values = _array(found)
        if values.shape != self.expected.shape:
            self.seen = f"; shape {values.shape} instead of {self.expected.shape}"
            return False
        finite = np.isfinite(self.expected)
        others = np.array_equal(values[~finite], self.expected[~finite], equal_nan=True)
        if not others or not np.isfinite(values[finite]).all():
            self.seen = "; NaN or infinity in other places"
            return False
        allowed = np.broadcast_to(self.bound, self.expected.shape)[finite]
        differences = np.abs(values[finite] - self.expected[finite])
        if (differences <= allowed).all():
            return True
        worst = int(np.argmax(differences - allowed))
        place = tuple(int(index) for index in np.argwhere(finite)[worst])
        self.seen = f"; off by {differences[worst]:.3g} at {place}, allowed {allowed[worst]:.3g}"
        return False

    def __repr__(self) -> str:
        largest = float(np.max(self.bound, initial=0.0))
        return f"{np.array2string(self.expected, threshold=8)} ± {largest:.3g}{self.seen}"


def logprob_bound(model: nn.Module | Path, length: int, largest: float = 0.0) -> float:
    """What rounding may do to logprobs and entropies of `model`, up to `largest` in size.

    The scale is that of its logits, log V at least: a logprob close to 0 is a difference of larger numbers.
    """
    vocabulary = max(len(parameter) for parameter in _loaded(model).parameters() if parameter.ndim >= 2)
    return float(bound(max(math.log(vocabulary), largest), chain(model, length)))


def near_logprobs(expected: Any, model: nn.Module | Path, length: int | None = None) -> near:
    """Equal to logprobs or entropies of `model` that differ by rounding alone.

    `length` is that of the longest sequence: as many tokens as `expected` has, unless it is given.
    """
    values = _array(expected)
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    return near(expected, within=logprob_bound(model, length or values.size, largest))


def _loaded(model: nn.Module | Path) -> nn.Module:
    return model if isinstance(model, nn.Module) else _load(model)


@cache
def _load(folder: Path) -> nn.Module:
    return load_policy(ModelConfig(name=str(folder)))


def _array(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if isinstance(value, Tensor):
        value = value.detach().to("cpu", torch.float64).numpy()
    return np.asarray(value, dtype=np.float64)
