"""The windows of a model's layers, read from the masks that transformers builds for them.

A layer's sliding window may be in the options that it passes to attention, in its mask, or in both. The mask
is what counts in HF's own forward, so the mask is what is read: layers compute a few tokens by an attention
that looks at the mask of each, and the function that makes it is asked what a token sees.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from pellucid.model.attention import ATTENTION, AttentionPlan, PackedAttention, Rule, attention_function
from pellucid.model.policy import Policy

_PROBE = f"{ATTENTION}_masks"
"""Name of an attention that differs in one point: HF builds masks for it."""

_FAR = 4096
"""Tokens among which a window is looked for, if it is not longer by the model's config.json."""

_NUM_PLACES = 64
"""Tokens of which a mask is compared with a window, token by token."""


class NotPacked(Exception):
    """A model that cannot compute packed sequences; the text says why, without its name."""


@contextmanager
def computing_by(policy: Policy, name: str) -> Iterator[None]:
    """Context manager: the model attends by another of HF's implementations."""
    before = policy.attention
    policy.attention = name
    try:
        yield
    finally:
        policy.attention = before


@contextmanager
def short_windows(policy: Policy, window: int) -> Iterator[None]:
    """Context manager: layers see so few tokens that windows and sparse attention bind in short sequences."""
    config = policy.hf.config.get_text_config()
    places = [(config, "sliding_window"), *((module, "index_topk") for module in policy.hf.modules())]
    before = [(owner, name, getattr(owner, name, None)) for owner, name in places]
    changed = [each for each in before if isinstance(each[2], int) and each[2] > window]
    for owner, name, _ in changed:
        setattr(owner, name, window)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def read_windows(policy: Policy, token_ids: Tensor, max_length: int | None) -> dict[int, int]:
    """Returns the windows of the layers that have one; computes `token_ids` by all layers.

    Raises NotPacked unless every layer asks for attention once, under a mask that hides from tokens of up to
    `max_length` only the future and what is behind a window.
    """
    given = _masks_of(policy, token_ids)
    config = policy.hf.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    far = max(max_length or 0, _FAR, 2 * window if isinstance(window, int) else 0)
    known: dict[_MaskFunction | None, int | None] = {None: None}
    for layer, rule in given.items():
        if rule is not None and rule not in known:
            known[rule] = _window_of(layer, rule, far, max_length or far, policy.device)
    return {layer: window for layer, rule in given.items() if (window := known[rule]) is not None}


_MaskFunction = Callable[..., Any]


def _masks_of(policy: Policy, token_ids: Tensor) -> dict[int, _MaskFunction | None]:
    """Returns what makes each layer's mask; None: it has none."""
    made: list[tuple[Tensor, _MaskFunction]] = []
    given: dict[int, Tensor | None] = {}
    num_calls: Counter[int] = Counter()
    # HF keeps the functions below forever: they must not hold the model.
    device, length = policy.device, token_ids.shape[1]

    def make_mask(*, mask_function: _MaskFunction, **options: Any) -> Tensor:
        made.append((torch.zeros(1, 1, length, length, device=device), mask_function))
        return made[-1][0]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        given[module.layer_idx] = mask
        num_calls[module.layer_idx] += 1
        return attention_function(module, q, k, v, None, **options)

    AttentionMaskInterface.register(_PROBE, make_mask)
    AttentionInterface.register(_PROBE, attend)
    with computing_by(policy, _PROBE):
        policy.hidden(token_ids, torch.arange(length, device=device)[None], PackedAttention([length]))
    _check_calls(policy, num_calls)
    rules: dict[int, _MaskFunction | None] = {}
    for layer, mask in given.items():
        rule = next((rule for each, rule in made if each is mask), None)
        if rule is None and mask is not None:
            raise NotPacked(f"layer {layer} changes the mask that transformers builds")
        rules[layer] = rule
    return rules


_USUAL = ("Norm", "Linear", "Dropout", "Activation", "MLP")
"""Ends of the names of parts that every layer has."""


def _check_calls(policy: Policy, num_calls: Counter[int]) -> None:
    for index, layer in enumerate(policy.layers):
        if num_calls[index] != 1:
            kinds = [type(part).__name__ for part in layer.children()]
            parts = ", ".join(kind for kind in kinds if not kind.endswith(_USUAL))
            raise NotPacked(
                f"layer {index} ({parts}) asks for attention {num_calls[index]} times in a forward instead "
                "of once"
            )


def _window_of(layer: int, rule: _MaskFunction, far: int, length: int, device: torch.device) -> int | None:
    """Returns the window of a mask; None: tokens see all before them. Raises NotPacked for other masks."""
    keys = torch.arange(max(far, length), device=device)
    window = int(_seen(rule, keys[-1:], keys).sum())
    spread = torch.linspace(0, length - 1, _NUM_PLACES).long().tolist()
    near_window = [window - 2, window - 1, window, window + 1, 2 * window]
    chosen = sorted({place for place in (*range(8), *near_window, *spread) if 0 <= place < length})
    places = torch.tensor(chosen, device=device)
    is_window = window < len(keys)
    keys = keys[:length]
    seen = _seen(rule, places, keys)
    causal = keys <= places[:, None]
    if is_window and torch.equal(seen, causal & (keys > places[:, None] - window)):
        return window
    if torch.equal(seen, causal):
        return None
    raise NotPacked(
        f"the mask of layer {layer} hides more than the future, and not by a sliding window (chunks, "
        "documents, …)"
    )


def _seen(rule: _MaskFunction, places: Tensor, keys: Tensor) -> Tensor:
    """Makes the matrix [places, keys] that is True where a token sees a key."""
    zero = keys[:1]
    seen = torch.as_tensor(rule(zero, zero, places[:, None], keys[None]))
    return seen.expand(len(places), len(keys)).bool()


def key_shape(policy: Policy) -> tuple[int, int]:
    """Returns heads and width of the keys that every layer hands to the plan; values are as wide.

    Raises NotPacked where layers differ.
    """
    plan = _ObservedPlan(PackedAttention([1]))
    zero = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    with torch.no_grad():
        policy.hidden(zero, zero, plan)
    shapes = [plan.keys.get(index) for index in range(len(policy.layers))]
    first = shapes[0]
    for index, shape in enumerate(shapes):
        if shape is None or first is None:
            raise NotPacked(f"layer {index} asks for no attention")
        if shape != first:
            raise NotPacked(
                f"layer {index} has {shape[0]} key heads of width {shape[1]}, and layer 0 has {first[0]} of "
                f"{first[1]}: the cache of packed sequences needs the same in all layers"
            )
    assert first is not None
    return first


class _ObservedPlan:
    """A plan that notes the keys of each layer."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self.longest = plan.longest
        self.keys: dict[int, tuple[int, int]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, rule: Rule
    ) -> Tensor:
        self.keys[layer] = (key.shape[1], key.shape[3])
        return self._plan.attend(layer, query, key, value, scale, rule)
