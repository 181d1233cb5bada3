"""`[model]`: which model is trained and served."""

from typing import Literal

from pellucid.config.base import Section


class ModelConfig(Section):
    name: str
    """Hub name or local folder of a causal language model with its tokenizer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights in memory; `auto` is float32 on CPU (bfloat16 is slower there) and bfloat16 on GPU."""
