"""The models that benchmarks run on: the demo's, and one of 135 M parameters with random weights."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pellucid.config import ModelConfig
from pellucid.data.tokenizer import quiet_transformers
from pellucid.model import Policy, load_policy
from pellucid.model.tiny import character_tokenizer, make_tiny_hybrid_model, make_tiny_model


def make_llama_135m(folder: Path) -> None:
    """The shape of SmolLM2-135M: 30 layers of 576, 9 query heads on 3 key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_transformers()
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
    LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


MAKERS: dict[str, Callable[[Path], None]] = {
    "tiny": partial(make_tiny_model, max_length=8192),  # a batch of the demo in one micro batch
    "135M": make_llama_135m,
    "hybrid": partial(make_tiny_hybrid_model, hidden_size=128, num_layers=4),
}
"""What writes a model and its tokenizer into a folder."""


@contextmanager
def made_policy(name: str) -> Iterator[Policy]:
    with tempfile.TemporaryDirectory() as folder:
        MAKERS[name](Path(folder))
        yield load_policy(ModelConfig(name=folder, dtype="float32"))
