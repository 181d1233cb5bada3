"""The model that `pellucid verify --only model` checks: the user's own, or a small one like it.

A model is made small in width alone: its layers stay as many and of the kinds that config.json says, and so
do positions, norms, caps and the way in which experts are chosen. Windows stay, too, but are so short that a
few tokens reach beyond them. Weights are random, and large enough that every layer matters.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pellucid.config import ModelConfig
from pellucid.config.commands import VerifyModelConfig
from pellucid.data.tokenizer import first_line, quiet_transformers
from pellucid.errors import ModelError
from pellucid.model.load import empty_model, read_config
from pellucid.model.tiny import make_tiny_model

MAX_PARAMETERS = 500_000_000
"""A model with more is not computed with its own weights: its gradients would be in memory, twice."""

VOCABULARY = 101
WINDOW = 20

SIZES: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "d_ff": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "rotary_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "chunk_size": 8,
    "n_groups": 1,
    "conv_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_window_size": WINDOW,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
"""Settings that make a model small, wherever a family has one of that name and it is larger."""

_SHALLOW = 4
"""Layers up to which weights are as large as their inputs are many."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Special tokens, which have to be in the vocabulary."""


def sizes_of(config: Any) -> dict[str, Any]:
    """Returns the settings of a family that are larger than those of a small model, made small."""
    own = config.to_dict()
    sizes: dict[str, Any] = {
        key: size for key, size in SIZES.items() if isinstance(value := own.get(key), int) and value > size
    }
    num_heads, num_key_heads = own.get("num_attention_heads"), own.get("num_key_value_heads")
    if num_key_heads and (
        num_heads == num_key_heads or own.get("kv_lora_rank")
    ):  # each head has its own keys
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", num_heads)
    if "mamba_d_ssm" in sizes:  # heads side by side
        heads = ({**own, **sizes}[key] for key in ("mamba_n_heads", "mamba_d_head"))
        sizes["mamba_d_ssm"] = math.prod(heads)
    return sizes | {key: value for key, value in _TOKENS.items() if own.get(key) is not None}


def _shrunk_ropes(own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters of rotary positions; lists, a number per plane of a head, are cut to small heads."""
    if not (ropes := own.get("rope_parameters")):
        return {}
    width = own.get("qk_rope_head_dim") or own.get("head_dim")
    width = width or own["hidden_size"] // own["num_attention_heads"]

    def fit(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: fit(each, key) for key, each in value.items()}
        is_list = name in ("short_factor", "long_factor")
        return value[: max(1, len(value) * SIZES["head_dim"] // width)] if is_list else value

    return {"rope_parameters": fit(ropes)}


def make_random(config: Any) -> Any:
    """Makes the model with random weights of a size at which every layer matters.

    Those of many layers are smaller: through 48 gated delta nets, rounding would grow to what a leak is.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        ).eval()
        scale = min(1.0, (_SHALLOW / (getattr(config, "num_hidden_layers", None) or 1)) ** 0.5)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=scale * weight.shape[-1] ** -0.5)
    return model


def model_to_verify(name: str, folder: Path) -> tuple[str, str]:
    """Returns the name of the model to check, and what it is; one that has to be small is made in `folder`.

    `name` is a hub name, a folder, a folder with a config.json alone, or such a file.
    """
    quiet_transformers()
    if name == VerifyModelConfig.DEMO:
        make_tiny_model(folder / "demo", num_kv_heads=2)
        name = str(folder / "demo")
    given = Path(name)
    if given.is_file():
        (folder / "given").mkdir()
        shutil.copy(given, folder / "given" / "config.json")
        name = str(folder / "given")
    config = read_config(ModelConfig(name=name))
    try:
        num_parameters = sum(each.numel() for each in empty_model(ModelConfig(name=name)).parameters())
        has_weights = not Path(name).is_dir() or any(Path(name).glob("*.safetensors"))
        if has_weights and num_parameters <= MAX_PARAMETERS:
            return name, f"{given} with its own weights, {num_parameters:,} parameters"
        text = config.get_text_config()
        small, said = small_config(text)
        model = make_random(small)
        model.save_pretrained(folder / "small")
    except Exception as error:  # of all kinds, of strict dataclasses as well
        raise ModelError(
            f"model.name = {str(given)!r}: transformers cannot make a small model like it "
            f"({type(error).__name__}: {first_line(error)}); check it in a run: `pellucid verify @ FILE.toml`"
        ) from error
    why = f"it has {num_parameters:,} parameters" if has_weights else "it has no weights"
    return str(folder / "small"), (
        f"{type(model).__name__} like {given}, as {why}: {text.num_hidden_layers} layers as configured, "
        f"random weights, and {said}"
    )


def small_config(config: Any) -> tuple[Any, str]:
    """Returns the config of a small model like `config`, and which settings differ."""
    sizes = sizes_of(config)
    own = config.to_dict()
    whole = {**own, **sizes, **_shrunk_ropes(own)}
    whole.pop("quantization_config", None)  # of weights that are not there
    changed = (f"{key} {own[key]} → {value}" for key, value in sizes.items() if key not in _TOKENS)
    return type(config).from_dict(whole), ", ".join(changed)
