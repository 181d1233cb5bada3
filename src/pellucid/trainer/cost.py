"""Cost of attention against that of the weights, from the shape of a model.

A forward pass multiplies each token with every active weight, and in each layer with the keys and the values
of the tokens before it: in a sequence of L tokens L/2 of them on average, as wide as all heads together. Both
parts are equal at L = active weights ÷ (layers · heads · head width). The backward pass doubles both.
"""

from dataclasses import dataclass
from typing import Any

from pellucid.model import Policy
from pellucid.packing import Cost


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_active: float
    """Weights that the forward pass multiplies each token with."""

    attended: int
    """Sum of the head widths, over all heads of all layers."""

    is_frozen: bool = False
    """Whether the model's own weights have no gradient, as under LoRA; the adapters' cost is neglected."""

    @classmethod
    def of(cls, policy: Policy) -> "ModelShape":
        config = policy.hf.config.get_text_config()
        attended = config.num_hidden_layers * config.num_attention_heads * _head_width(config)
        is_frozen = not policy.hf.get_output_embeddings().weight.requires_grad
        return cls(_num_active(policy.hf, config), attended, is_frozen)

    def cost(self) -> Cost:
        return Cost(parity=max(1, round(self.num_active / self.attended)))

    def flops(self, num_tokens: float, num_pairs: float) -> float:
        """Counts the operations of forward and backward, without those that activation checkpointing repeats.

        The forward pass makes one multiplication and one addition per weight and token, and two of each per
        pair of tokens: with the key and with the value. The backward pass makes twice as many, for the
        gradients of inputs and weights; with frozen weights it needs only those of inputs.
        """
        of_weights = 2 * self.num_active * num_tokens
        return (2 if self.is_frozen else 3) * of_weights + 3 * 4 * self.attended * num_pairs


def _head_width(config: Any) -> int:
    """Returns the mean width of keys and values, which differ in latent attention."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _num_active(model: Any, config: Any) -> float:
    """Counts the weights that a token is multiplied with: no embedding, and the active share of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((found for name in names if (found := getattr(config, name, None))), None)
    met = config.num_experts_per_tok / num_experts if num_experts else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = float(head.numel())
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and weight is not embedding and weight is not head and ".lora_" not in name:
            total += weight.numel() * (met if ".experts." in name else 1.0)
    return total
