"""The forward of Llama-like models without gradient, in about half the operations that HF's modules take.

    x -> x + attention(norm(x)) -> x + swiglu(norm(x))      per layer

With one token per sequence, a small model spends more time between its operations than in them. The lean
forward shares the parameters of the HF model: weights that are loaded in place hold for the next call. Its
results differ from HF's by rounding alone. Models of any other kind go through HF.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pellucid.model.attention import AttentionPlan
from pellucid.model.policy import Policy

HiddenStates = Callable[[Tensor, Tensor, AttentionPlan], Tensor]
"""(token ids, positions, plan) -> last hidden states, for one row of tokens; without gradient."""

_KNOWN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def lean_forward(policy: Policy) -> HiddenStates:
    """Returns the lean forward if the model is of a known kind, else HF's."""
    if _is_known(policy.hf):
        return _LeanModel(policy.hf.model)

    def through_hf(token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        with torch.inference_mode():
            return policy.hidden(token_ids[None], positions[None], plan)[0]

    return through_hf


def _is_known(hf: Any) -> bool:
    """Returns whether the model is exactly one of the known classes, with none of its parts replaced."""
    return (
        type(hf).__name__ in _KNOWN
        and type(hf).__module__.startswith("transformers.models.")
        and hf.config.hidden_act == "silu"
        and all(_is_plain(layer) for layer in hf.model.layers)
    )


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]
    is_full = getattr(attention, "sliding_window", None) is None
    return is_full and all(type(projection) is nn.Linear for projection in projections)


class _LeanModel:
    def __init__(self, model: Any) -> None:
        self._embedding = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._layers = [_LeanLayer(layer) for layer in model.layers]
        self._norm = _Norm(model.norm)

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        states = embedding(token_ids, self._embedding)
        cos, sin = (angle[0, :, None] for angle in self._rotary(states, positions[None]))
        for layer in self._layers:
            states = layer(states, cos, sin, plan)
        return self._norm(states)


class _LeanLayer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._scale = attention.scaling
        self._width = attention.head_dim
        self._before_attention = _Norm(layer.input_layernorm)
        self._query, self._key, self._value = map(
            _weights, (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        is_normed = hasattr(attention, "q_norm")
        self._query_norm = _Norm(attention.q_norm) if is_normed else _identity
        self._key_norm = _Norm(attention.k_norm) if is_normed else _identity
        self._output = _weights(attention.o_proj)
        self._before_mlp = _Norm(layer.post_attention_layernorm)
        self._gate, self._up, self._down = map(_weights, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        by_head = (len(states), -1, self._width)
        normed = self._before_attention(states)
        query = _rotate(self._query_norm(linear(normed, *self._query).view(by_head)), cos, sin)
        key = _rotate(self._key_norm(linear(normed, *self._key).view(by_head)), cos, sin)
        value = linear(normed, *self._value).view(by_head)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attended = plan.attend(self._index, query, key, value, self._scale)[0].transpose(0, 1)
        states = states + linear(attended.reshape(len(states), -1), *self._output)
        normed = self._before_mlp(states)
        gated = silu(linear(normed, *self._gate)).mul_(linear(normed, *self._up))
        return states + linear(gated, *self._down)


class _Norm:
    """Root mean square over the last dimension, in float32 like HF's."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._epsilon = norm.variance_epsilon
        self._shape = norm.weight.shape

    def __call__(self, states: Tensor) -> Tensor:
        return rms_norm(states.float(), self._shape, eps=self._epsilon).to(states.dtype).mul_(self._weight)


def _identity(states: Tensor) -> Tensor:
    return states


def _weights(projection: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return projection.weight, projection.bias


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions; the two halves of a head are the coordinates of its planes."""
    first, second = states.chunk(2, dim=-1)
    return torch.addcmul(states * cos, torch.cat((-second, first), dim=-1), sin)
