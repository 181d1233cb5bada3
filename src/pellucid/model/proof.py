"""Proves at load that a model attends as plans say, or refuses it: no sequence sees another or its future.

A plan reaches attention alone. Convolutions, recurrent states and attention code of a model's own never see
it, and mix packed sequences without a word; windows and positions may only show in long sequences. So the
loaded model computes a few tokens:

    plan       every decoder layer asks the plan once per forward, with keys of one shape
    masks      masks that HF would build hide nothing within `max_length` tokens but the future
    buffers    none changes with the positions in a row, as those of some RoPE do
    values     packed sequences, at the first and at the last positions within `max_length`, have the logits
               that HF's own forward with its own attention gives each of them alone

Values are compared in float32, whatever the weights are in: with less, rounding alone sends tokens to other
experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pellucid.data.tokenizer import first_line
from pellucid.errors import ModelError
from pellucid.model.attention import (
    ATTENTION,
    NO_WINDOWS,
    AttentionPlan,
    PackedAttention,
    attention_function,
)
from pellucid.model.policy import NOT_YET, Policy

_PROBE = f"{ATTENTION}_masks"
"""The same attention; but HF asks for its masks, too."""

_LENGTH = 6
"""Tokens of a probed sequence: more than a convolution of four sees."""

_ROUNDINGS = 64
"""Roundings of a layer that add up: products of 4,096 terms make √4096 of them."""


def prove_attention(policy: Policy, max_length: int | None) -> None:
    """Raises a `ModelError` unless sequences of up to `max_length` tokens train and decode in isolation.

    None: nothing is promised of sequences longer than those that are probed.
    """
    length = max(max_length or 0, 3 * _LENGTH)  # never so short that near and far positions are one run
    name = type(policy.hf).__name__
    with torch.no_grad(), _float32(policy), _blaming(name):
        row = _ProbedRow(policy, length)
        packed = row.packed(policy)
        _check_masks(policy, row, length)
        _check_values(name, packed, row.alone(policy), len(policy.layers))


def key_shape(policy: Policy) -> tuple[int, int]:
    """Heads and width of the keys that every layer hands to the plan; values are as wide."""
    plan = _ObservedPlan(PackedAttention([1]), longest=1)
    zero = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    with torch.no_grad():
        policy.hidden(zero, zero, plan)
    return plan.key_shape(policy)


class _ObservedPlan:
    """A plan that notes who asks."""

    def __init__(self, plan: AttentionPlan, longest: int) -> None:
        self._plan = plan
        self.longest = longest
        self._num_calls: Counter[int] = Counter()
        self._keys: dict[int, tuple[int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        self._num_calls[layer] += 1
        self._keys[layer] = (key.shape[1], key.shape[3])
        return self._plan.attend(layer, query, key, value, scale)

    def key_shape(self, policy: Policy) -> tuple[int, int]:
        """Raises an error unless every layer has asked once, with as many heads as every other."""
        model = type(policy.hf).__name__
        for index, layer in enumerate(policy.layers):
            if self._num_calls[index] != 1:
                parts = ", ".join(f"{name}: {type(part).__name__}" for name, part in layer.named_children())
                raise ModelError(
                    f"layer {index} of {model} ({type(layer).__name__} of {parts}) asks for attention "
                    f"{self._num_calls[index]} times in a forward instead of once: packed sequences would "
                    f"leak into each other through what it does besides; {NOT_YET}"
                )
        shapes = {index: self._keys[index] for index in range(len(policy.layers))}
        for index, shape in shapes.items():
            if shape != shapes[0]:
                raise ModelError(
                    f"layer {index} of {model} has {shape[0]} key heads of width {shape[1]}, "
                    f"layer 0 has {shapes[0][0]} of {shapes[0][1]}, and all need the same; {NOT_YET}"
                )
        return shapes[0]


class _ProbedRow:
    """Sequences [near, far, near, far]: at the first positions, and at the last ones of `length`."""

    def __init__(self, policy: Policy, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, policy.vocab_size, (4, _LENGTH), generator=generator)
        near = torch.arange(_LENGTH)
        far = near + length - _LENGTH
        self.token_ids = ids.to(policy.device)
        self.positions = torch.stack([near, far, near, far]).to(policy.device)
        self._length = length

    def packed(self, policy: Policy) -> Tensor:
        """Logits [sequences, tokens, vocabulary] of the trainer's forward."""
        plan = _ObservedPlan(PackedAttention([_LENGTH] * 4), self._length)
        hidden = policy.hidden(self.token_ids.view(1, -1), self.positions.view(1, -1), plan)
        plan.key_shape(policy)
        return policy.logits(hidden[0]).view(4, _LENGTH, -1)

    def alone(self, policy: Policy) -> Tensor:
        """The same by HF, where a row of a batch is alone; near and far in batches of their own."""
        logits, buffers = [], []
        with _implementation(policy, "eager"):
            for rows in (slice(0, None, 2), slice(1, None, 2)):
                output = policy.hf(
                    input_ids=self.token_ids[rows], position_ids=self.positions[rows], use_cache=False
                )
                logits.append(output.logits)
                buffers.append({name: buffer.clone() for name, buffer in policy.hf.named_buffers()})
        for name, buffer in buffers[0].items():
            if not torch.equal(buffer, buffers[1][name]):
                raise ModelError(
                    f"{type(policy.hf).__name__}: {name} depends on the length of the row (RoPE of type "
                    "dynamic or longrope), so that logprobs would depend on how sequences are packed; set "
                    "seq_len to at most original_max_position_embeddings of its config.json"
                )
        return torch.stack(logits, dim=1).flatten(0, 1)


def _check_masks(policy: Policy, row: _ProbedRow, length: int) -> None:
    """The last token of a sequence of `length` has to see all others, whatever mask HF gives a layer."""
    rules: list[tuple[Tensor, Callable[..., Any]]] = []
    given: dict[int, Tensor | None] = {}
    device = policy.device  # HF keeps the functions below for good: they must not keep the model, too

    def make_mask(*, mask_function: Callable[..., Any], **options: Any) -> Tensor:
        rules.append((torch.zeros(1, 1, _LENGTH, _LENGTH, device=device), mask_function))
        return rules[-1][0]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        given[module.layer_idx] = mask
        return attention_function(module, q, k, v, None, **options)

    AttentionMaskInterface.register(_PROBE, make_mask)
    AttentionInterface.register(_PROBE, attend)
    with _implementation(policy, _PROBE):
        policy.hidden(row.token_ids[:1], row.positions[:1], _ObservedPlan(PackedAttention([_LENGTH]), length))
    model = type(policy.hf).__name__
    places = torch.arange(length, device=device)
    zero, last = places[:1], places[-1:]
    for layer, mask in given.items():
        rule = next((rule for made, rule in rules if made is mask), None)
        if rule is None:
            if mask is None:
                continue
            raise ModelError(f"layer {layer} of {model} changes the mask that HF builds; {NOT_YET}")
        sees = torch.as_tensor(rule(zero, zero, last, places)).expand(length)
        if not bool(sees.all()):
            raise ModelError(
                f"layer {layer} of {model} lets a token see {int(sees.sum())} tokens at most "
                f"(a sliding window or chunks, by its config.json), and sequences may have {length}; "
                f"{NO_WINDOWS}"
            )


def _check_values(name: str, packed: Tensor, alone: Tensor, num_layers: int) -> None:
    """Of two sequences each, the better one counts: rounding may send a token to another expert."""
    if not bool(alone.isfinite().all()):
        raise ModelError(
            f"{name}: logits of HF's own forward are not finite, so its weights hold NaN, infinities or huge "
            "numbers; start from an earlier checkpoint, or from other weights"
        )
    scale = max(1.0, float(alone.abs().max()))
    limit = _ROUNDINGS * torch.finfo(torch.float32).eps * num_layers * scale
    difference = (packed.float().log_softmax(-1) - alone.float().log_softmax(-1)).abs().amax((1, 2))
    for where, gap in zip(("first", "last"), difference.view(2, 2).amin(0).tolist(), strict=True):
        if not gap <= limit:
            raise ModelError(
                f"{name}: packed sequences at the {where} positions within seq_len have other logprobs than "
                f"each alone in HF's own forward, by up to {gap:.2g} nats where rounding explains "
                f"{limit:.1g}: {_CAUSES[where]}; {NOT_YET}"
            )


_CAUSES = {
    "first": "something besides attention passes from token to token, its mask is not a causal one, or its "
    "logits are not those of its last layer alone",
    "last": "something besides attention passes from token to token, or its positions are not those that it "
    "is given",
}


@contextmanager
def _implementation(policy: Policy, name: str) -> Iterator[None]:
    policy.hf.set_attn_implementation(name)
    try:
        yield
    finally:
        policy.hf.set_attn_implementation(ATTENTION)


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Errors of a forward that does not take what pellucid gives it, or gives something else back."""
    try:
        yield
    except ModelError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"{name} does not compute packed sequences ({type(error).__name__}: {first_line(error)}); "
            f"{NOT_YET}"
        ) from error


@contextmanager
def _float32(policy: Policy) -> Iterator[None]:
    """Converts one decoder layer at a time, and what is outside of them, while it computes."""
    layers = policy.layers
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in policy.hf.modules() if module not in inside]
    handles = [_converted(layer, recurse=True) for layer in layers]
    handles += [_converted(module, recurse=False) for module in outside]
    try:
        yield
    finally:
        for pair in handles:
            for handle in pair:
                handle.remove()


def _converted(module: nn.Module, *, recurse: bool) -> tuple[Any, Any]:
    kept: list[tuple[Tensor, Tensor]] = []

    def convert(*_: object) -> None:
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                kept.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def restore(*_: object) -> None:
        while kept:
            tensor, own = kept.pop()
            tensor.data = own

    return module.register_forward_pre_hook(convert), module.register_forward_hook(restore, always_call=True)
