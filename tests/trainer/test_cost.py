"""The cost of a sequence, from the shape of a model, by hand."""

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pellucid.model import Policy
from pellucid.trainer.step import ModelShape

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16
"""Weights of queries, outputs, keys and values in one layer."""


def parity(model) -> int:
    return ModelShape.of(Policy(model)).cost().parity


def test_a_dense_model_whether_its_head_is_tied_or_not() -> None:
    layer = ATTENTION + 3 * 32 * 64
    expected = round((2 * layer + 100 * 32) / (2 * 4 * 8))
    for tied in (True, False):
        config = LlamaConfig(intermediate_size=64, tie_word_embeddings=tied, **SHAPE)
        assert parity(LlamaForCausalLM(config)) == expected


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    """Heads are 16 wide, twice as wide as the hidden state is divided: 64 columns in all."""
    layer = 2 * 32 * 64 + 2 * 32 * 32 + 8 * 32 + 2 * (3 * 32 * 16)
    config = Qwen3MoeConfig(
        moe_intermediate_size=16,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        **SHAPE,
    )
    assert parity(Qwen3MoeForCausalLM(config)) == round((2 * layer + 100 * 32) / (2 * 4 * 16))


def test_operations_of_a_step() -> None:
    """3 × (2 per weight and token + 4 per pair and column of attention): backward is twice forward."""
    config = LlamaConfig(intermediate_size=64, tie_word_embeddings=True, **SHAPE)
    shape = ModelShape.of(Policy(LlamaForCausalLM(config)))
    weights = 2 * (ATTENTION + 3 * 32 * 64) + 100 * 32
    assert shape.flops(num_tokens=5, num_pairs=7) == 3 * (2 * weights * 5 + 4 * (2 * 4 * 8) * 7)
