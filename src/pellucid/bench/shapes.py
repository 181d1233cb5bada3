"""The models that benchmarks run on: the demo's, and one of 135 M parameters with random weights."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pellucid.config import ModelConfig
from pellucid.model import Policy, load_policy
from pellucid.model.tiny import make_tiny_model


@contextmanager
def tiny_policy() -> Iterator[Policy]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        yield load_policy(ModelConfig(name=folder, dtype="float32"))


@contextmanager
def llama_135m_policy() -> Iterator[Policy]:
    """The shape of SmolLM2-135M: 30 layers of 576, 9 query heads on 3 key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        yield load_policy(ModelConfig(name=folder, dtype="float32"))


MODELS = {"tiny": tiny_policy, "135M": llama_135m_policy}
