"""Loading a policy by hub name or folder, with errors that say what to do."""

from pathlib import Path
from typing import Any

import torch

from pellucid.config import ModelConfig
from pellucid.data.tokenizer import quiet_transformers, require_folder
from pellucid.errors import ModelError
from pellucid.model.attention import ATTENTION, register_attention
from pellucid.model.policy import Policy

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_UNSUPPORTED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def load_policy(config: ModelConfig, *, trainable: bool = False) -> Policy:
    """The model in evaluation mode: dropout would make trainer and inference disagree.

    A trainable one is float32 whatever `model.dtype` says: small updates vanish in bfloat16 weights.
    """
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    require_folder(config.name)
    register_attention()
    device = default_device()
    dtype = torch.float32 if trainable else resolve_dtype(config, device)
    try:
        hf = AutoModelForCausalLM.from_pretrained(config.name, dtype=dtype, attn_implementation=ATTENTION)
    except (OSError, ValueError) as error:
        raise ModelError(_not_loadable(config.name, error)) from error
    _check_supported(hf.config)
    return Policy(hf).to(device).eval()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


def check_tokenizer(policy: Policy, tokenizer: Any, name: str) -> None:
    """A token id outside the model's vocabulary would fail deep inside the forward pass."""
    if len(tokenizer) > policy.vocab_size:
        raise ModelError(
            f"model.name = {name!r}: the tokenizer has {len(tokenizer)} tokens, the model only "
            f"{policy.vocab_size}; use the tokenizer the model was trained with"
        )


def _check_supported(config: Any) -> None:
    for key in _UNSUPPORTED:
        if getattr(config, key, None) not in (None, 1.0):
            raise ModelError(f"{config.model_type} models scale their logits ({key}); not supported yet")


def _not_loadable(name: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    remedy = (
        "check that it holds config.json and safetensors"
        if Path(name).exists()
        else "give a local model folder or a hub name that this machine can reach"
    )
    return f"model.name = {name!r}: the model could not be loaded ({reason}); {remedy}"
