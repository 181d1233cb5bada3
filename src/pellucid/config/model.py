"""`[model]`: which model is trained and served."""

from typing import Literal

from pellucid.config.base import Section


class ModelConfig(Section):
    name: str
    """Hub name or local folder of a causal language model with its tokenizer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the engine; `auto` is float32 on CPU and bfloat16 on GPU. The trainer keeps float32."""
