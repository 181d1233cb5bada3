"""Refuses a model at load unless its tokens attend as plans say: to no other sequence and to no future token.

A plan controls attention alone. Convolutions, recurrent states and a model's own attention code ignore it and
silently mix packed sequences; errors of windows and positions may only show in long sequences. So the loaded
model computes a few tokens:

    plan       every decoder layer calls the plan once per forward, with keys of one shape
    masks      masks that HF would build hide only the future within `max_length` tokens
    buffers    none changes with the positions in a row, as those of some RoPE do
    values     packed sequences, at the first and at the last positions within `max_length`, have the logits
               that HF's own forward with its own attention gives each of them alone
    kernel     on a GPU, flash attention over segments gives what SDPA gives, sequence by sequence

Values are compared in float32 whatever the dtype of the weights: in bfloat16, rounding alone sends tokens to
other experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pellucid.data.tokenizer import first_line
from pellucid.errors import ConfigError, ModelError
from pellucid.model.attention import (
    ATTENTION,
    NO_WINDOWS,
    PLAIN,
    AttentionPlan,
    PackedAttention,
    Rule,
    SharedAttention,
    attention_function,
)
from pellucid.model.policy import NOT_YET, Policy
from pellucid.model.segments import Family

_PROBE = f"{ATTENTION}_masks"
"""Name of an attention that differs in one point: HF builds masks for it."""

_LENGTH = 6
"""Tokens of a probed sequence: more than a convolution of width four covers."""

_ROUNDINGS = 64
"""Rounding errors that add up in a layer: a product of 4,096 terms makes √4096 of them."""


def prove_attention(policy: Policy, max_length: int | None) -> None:
    """Raises a `ModelError` unless sequences of up to `max_length` tokens train and decode in isolation.

    With None, only sequences as long as those that are probed are proved.
    """
    length = max(max_length or 0, 3 * _LENGTH)  # so that near and far positions never adjoin
    name = type(policy.hf).__name__
    with torch.no_grad(), in_float32(policy), _blaming(name):
        row = _ProbedRow(policy, length)
        packed = row.packed(policy)
        _check_masks(policy, row, length)
        _check_values(name, packed, row.alone(policy), len(policy.layers))
    check_kernel(policy.device)


def check_kernel(device: torch.device) -> None:
    """Raises ModelError unless flash attention on this device aligns segments as `model/segments.py` says.

    A CPU has none, and nothing to check.
    Both ways attend to the same numbers. Their results differ by the roundings of bfloat16, or by the size of
    the values where a query sees other keys.
    """
    if device.type == "cpu":
        return
    generator = torch.Generator().manual_seed(0)
    plan = SharedAttention([Family(0, [5]), Family(3, [2, 6, 1])])
    query, key, value = (
        torch.randn(1, heads, 17, 64, generator=generator).bfloat16().to(device) for heads in (4, 2, 2)
    )
    remedy = 'set trainer.model.precision and model.dtype to "float32", which need no flash attention'
    with torch.no_grad():
        expected = plan.attend(0, query.float(), key.float(), value.float(), None, PLAIN)
        try:
            found = plan.attend(0, query, key, value, None, PLAIN)
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(f"no flash attention on {device}: {first_line(error)}; {remedy}") from error
        gap = float((found.float() - expected).abs().max())
    limit = 4 * torch.finfo(torch.bfloat16).eps * float(value.abs().max())
    if not gap <= limit:
        raise ModelError(
            f"flash attention on {device} is off by {gap:.2g} where rounding explains {limit:.1g}: its "
            f"causal mask does not end at the last key of a sequence; {remedy}"
        )


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError unless torch can compile for this device, which needs compilers outside of torch."""
    compiled = torch.compile(lambda numbers: numbers * 2 + 1, dynamic=True)
    try:
        compiled(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        cause = getattr(error, "inner_exception", error)
        raise ConfigError(
            f"trainer.model.compile = true, but torch cannot compile for {device.type} "
            f"({type(cause).__name__}: {first_line(cause)}); install g++, and Triton for a GPU, or leave it "
            "out"
        ) from error


def key_shape(policy: Policy) -> tuple[int, int]:
    """Returns heads and width of the keys that every layer hands to the plan; values are as wide."""
    plan = _ObservedPlan(PackedAttention([1]), longest=1)
    zero = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    with torch.no_grad():
        policy.hidden(zero, zero, plan)
    return plan.key_shape(policy)


class _ObservedPlan:
    """A plan that counts the calls of each layer."""

    def __init__(self, plan: AttentionPlan, longest: int) -> None:
        self._plan = plan
        self.longest = longest
        self._num_calls: Counter[int] = Counter()
        self._keys: dict[int, tuple[int, int]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, rule: Rule
    ) -> Tensor:
        self._num_calls[layer] += 1
        self._keys[layer] = (key.shape[1], key.shape[3])
        return self._plan.attend(layer, query, key, value, scale, rule)

    def key_shape(self, policy: Policy) -> tuple[int, int]:
        """Returns (heads, width) of keys; raises ModelError unless all layers called once with the same."""
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
    """Sequences [near, far, near, far]: at the first and at the last positions within `length`."""

    def __init__(self, policy: Policy, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, policy.vocab_size, (4, _LENGTH), generator=generator)
        near = torch.arange(_LENGTH)
        far = near + length - _LENGTH
        self.token_ids = ids.to(policy.device)
        self.positions = torch.stack([near, far, near, far]).to(policy.device)
        self._length = length

    def packed(self, policy: Policy) -> Tensor:
        """Computes logits [sequences, tokens, vocabulary] by the trainer's forward."""
        plan = _ObservedPlan(PackedAttention([_LENGTH] * 4), self._length)
        hidden = policy.hidden(self.token_ids.view(1, -1), self.positions.view(1, -1), plan)
        plan.key_shape(policy)
        return policy.logits(hidden[0]).view(4, _LENGTH, -1)

    def alone(self, policy: Policy) -> Tensor:
        """Computes the same logits by HF's forward, each sequence in its own row; near and far apart."""
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
    """Raises ModelError if a mask of HF hides any token from the last one of `length` tokens."""
    rules: list[tuple[Tensor, Callable[..., Any]]] = []
    given: dict[int, Tensor | None] = {}
    device = policy.device  # HF keeps the functions below forever: they must not hold the model

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
    """Compares logprobs; of two sequences per position the better counts: rounding may change an expert."""
    if not bool(alone.isfinite().all()):
        raise ModelError(
            f"{name}: logits of HF's own forward are not finite, so its weights hold NaN, infinities or huge "
            "numbers; start from an earlier checkpoint, or from other weights"
        )
    scale = max(1.0, float(alone.abs().max()))
    limit = _ROUNDINGS * torch.finfo(torch.float32).eps * num_layers * scale
    difference = (packed.float().log_softmax(-1) - alone.float().log_softmax(-1)).abs().amax((1, 2))
    gaps = difference.view(2, 2).amin(0).tolist()
    for (where, cause), gap in zip(_OTHER_CAUSES.items(), gaps, strict=True):
        if not gap <= limit:
            raise ModelError(
                f"{name}: packed sequences at the {where} positions within seq_len have other logprobs than "
                f"each alone in HF's own forward, by up to {gap:.2g} nats where rounding explains "
                f"{limit:.1g}: something besides attention passes from token to token, {cause}; {NOT_YET}"
            )


_OTHER_CAUSES = {
    "first": "its mask is not a causal one, or its logits are not those of its last layer alone",
    "last": "or its positions are not those that it is given",
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
    """Context manager: turns errors of a forward with another interface than expected into a ModelError."""
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
def in_float32(policy: Policy) -> Iterator[None]:
    """Context manager: converts each decoder layer, and each module outside of them, while it computes."""
    inside = {module for layer in policy.layers for module in layer.modules()}
    outside = [module for module in policy.hf.modules() if module not in inside]
    handles = [handle for layer in policy.layers for handle in _converted(layer, recurse=True)]
    handles += [handle for module in outside for handle in _converted(module, recurse=False)]
    try:
        yield
    finally:
        for handle in handles:
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
