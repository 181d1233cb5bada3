"""Last hidden states for the engine, which needs no gradient: Llama-like models without HF's modules.

With one token per sequence, a small model spends more time between its operations than in them. The lean
forward has about half as many operations as HF's modules:

    x -> x + attention(norm(x)) -> x + swiglu(norm(x))      per layer

Queries, keys and values are one product, gate and up another. It shares the parameters of the HF model:
weights that are loaded in place hold for the next call. Its results differ from HF's by rounding alone.
Models of any other kind go through HF.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from pellucid.model.attention import AttentionPlan, Rule
from pellucid.model.linear import linear
from pellucid.model.policy import Policy


class HiddenStates(Protocol):
    """Computes the last hidden states of one row of tokens, without gradient."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, embeddings: Tensor | None = None
    ) -> Tensor:
        """`embeddings` take the place of those of the ids."""


_LEAN = ("LlamaModel", "Qwen2Model", "Qwen3Model")


def lean_forward(policy: Policy) -> HiddenStates:
    """Returns the lean forward if the model is of a known kind, else HF's."""
    return _LeanModel(policy.decoder, policy.windows) if _is_known(policy) else hf_forward(policy)


def hf_forward(policy: Policy) -> HiddenStates:
    def through_hf(
        token_ids: Tensor, positions: Tensor, plan: AttentionPlan, embeddings: Tensor | None = None
    ) -> Tensor:
        with torch.inference_mode():
            return policy.hidden(token_ids[None], positions[None], plan, embeddings)[0]

    return through_hf


def _is_known(policy: Policy) -> bool:
    """Returns whether the decoder is exactly one of the known classes, with none of its parts replaced."""
    decoder = policy.decoder
    return (
        type(decoder).__name__ in _LEAN
        and all(type(each).__module__.startswith("transformers.models.") for each in (policy.hf, decoder))
        and decoder.config.hidden_act == "silu"
        and all(_is_plain(layer) for layer in decoder.layers)
    )


def _is_plain(layer: Any) -> bool:
    projections = [
        part
        for name, part in (*layer.self_attn.named_children(), *layer.mlp.named_children())
        if "_proj" in name
    ]
    return all(type(projection) is nn.Linear for projection in projections)


class _LeanModel:
    def __init__(self, model: Any, windows: Mapping[int, int]) -> None:
        self._embedding = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._layers = [_LeanLayer(layer, windows.get(layer.self_attn.layer_idx)) for layer in model.layers]
        self._norm = _Norm(model.norm)

    @torch.inference_mode()
    def __call__(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, embeddings: Tensor | None = None
    ) -> Tensor:
        states = embedding(token_ids, self._embedding) if embeddings is None else embeddings
        cos, sin = (angle[0, :, None] for angle in self._rotary(states, positions[None]))
        sin = sin.clone()
        sin[..., : sin.shape[-1] // 2].neg_()
        for layer in self._layers:
            states = layer(states, cos, sin, plan)
        return self._norm(states)


class _LeanLayer:
    def __init__(self, layer: Any, window: int | None) -> None:
        self._rule = Rule(window)
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._scale = attention.scaling
        self._width = attention.head_dim
        self._before_attention = _Norm(layer.input_layernorm)
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._project = _Joined(inputs)
        num_query, num_key, num_value = (each.out_features // self._width for each in inputs)
        self._heads = num_query, num_key
        self._split = num_query + num_key, num_value
        is_normed = hasattr(attention, "q_norm")
        self._norm = _Norm(attention.q_norm, attention.k_norm, heads=self._heads) if is_normed else _identity
        self._output = attention.o_proj.forward
        self._before_mlp = _Norm(layer.post_attention_layernorm)
        self._gate_and_up = _Joined((mlp.gate_proj, mlp.up_proj))
        self._down = mlp.down_proj.forward

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        projected = self._project(self._before_attention(states)).view(len(states), -1, self._width)
        turned, value = projected.split(self._split, dim=1)
        query, key = _rotate(self._norm(turned), cos, sin).split(self._heads, dim=1)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attended = plan.attend(self._index, query, key, value, self._scale, self._rule)[0].transpose(0, 1)
        states = states + self._output(attended.reshape(len(states), -1))
        gate, up = self._gate_and_up(self._before_mlp(states)).chunk(2, dim=-1)
        mixed: Tensor = states + self._down(silu(gate).mul_(up))
        return mixed


class _Joined:
    """Linear layers of the same input as one product.

    Their weights become views of one tensor: those that are loaded in place hold for the next product.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._weight = _join([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _join(biases) if biases else None

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self._weight, self._bias)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    parts = joined.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


class _Norm:
    """Root mean square over the last dimension, in float32 like HF's.

    Of several norms, each weighs its own of the `heads`, as many as it is given.
    """

    def __init__(self, *norms: Any, heads: Sequence[int] = ()) -> None:
        self._weights = [norm.weight for norm in norms]
        self._epsilon = norms[0].variance_epsilon
        self._shape = norms[0].weight.shape
        self._heads = heads

    def __call__(self, states: Tensor) -> Tensor:
        normed = rms_norm(states.float(), self._shape, eps=self._epsilon).to(states.dtype)
        parts = normed.split(self._heads, dim=1) if self._heads else [normed]
        for part, weight in zip(parts, self._weights, strict=True):
            part.mul_(weight)
        return normed


def _identity(states: Tensor) -> Tensor:
    return states


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions; the two halves of a head are the coordinates of its planes.

    The first half of `sin` is negative: x cos − y sin, y cos + x sin.
    """
    return (states * cos).addcmul_(states.roll(states.shape[-1] // 2, -1), sin)
