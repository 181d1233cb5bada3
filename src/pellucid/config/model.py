"""`[model]`: which model is trained and served."""

from typing import Annotated, Literal

from pydantic import Field

from pellucid.config.base import Section


class LoraConfig(Section):
    """Train a low-rank adapter beside the frozen weights: W x + (alpha / rank) · B A x."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B: a higher rank can learn more and makes a larger adapter."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are set to 0 in training. The server sets none to 0, so that dropout
    adds to the mismatch: leave it at 0 for rl."""

    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter, by the last part of their name, in every decoder layer. The head
    and the embedding cannot be among them."""


class ModelConfig(Section):
    name: str
    """Hub name or local folder of a causal language model with its tokenizer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the engine; `auto` is float32 on CPU and bfloat16 on GPU. The trainer keeps float32."""

    lora: LoraConfig | None = None
    """Present: the weights stay frozen, and the run trains and publishes a LoRA adapter."""
