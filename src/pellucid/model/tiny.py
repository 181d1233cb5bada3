"""Makes character-level models and their tokenizer, small enough to learn on one core."""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pellucid.data.tokenizer import CHATML, quiet_transformers

_SPECIAL = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]


def character_tokenizer(chat_template: str = CHATML) -> Any:
    """Makes a tokenizer with one token per printable ASCII character and ChatML markers as special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "\n" + "".join(sorted(set(string.printable) - set("\t\n\r\x0b\x0c")))
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
    )
    fast.chat_template = chat_template
    return fast


def make_tiny_model(
    folder: Path,
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    max_length: int = 4096,
    tied: bool = True,
    seed: int = 0,
) -> None:
    """Writes a freshly initialised model (0.9 M parameters by default) and its tokenizer into a folder.

    `tied`: the head has the weights of the embedding.
    """
    shape = (hidden_size, num_layers, num_heads, num_kv_heads, max_length)
    _make(folder, "Qwen3", seed, shape, tie_word_embeddings=tied)


def make_tiny_moe_model(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_experts: int = 8,
    top_k: int = 2,
    dense_layers: Sequence[int] = (),
    max_length: int = 4096,
    seed: int = 0,
) -> None:
    """Writes a Qwen3-MoE model; its layers have routers and experts, except for `dense_layers`.

    Its weights are larger than usual, so that the choice of experts matters even before training.
    """
    _make(
        folder,
        "Qwen3Moe",
        seed,
        (hidden_size, num_layers, num_heads, num_kv_heads, max_length),
        {"embed_tokens": 4, "mlp.gate.": 5, "mlp.experts.": 8},
        moe_intermediate_size=hidden_size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        mlp_only_layers=list(dense_layers),
    )


def make_tiny_hybrid_model(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_length: int = 4096,
    seed: int = 0,
) -> None:
    """Writes a Qwen3-Next model without experts: gated delta nets, and attention in its last layer."""
    _make(
        folder,
        "Qwen3Next",
        seed,
        (hidden_size, num_layers, num_heads, num_kv_heads, max_length),
        layer_types=["linear_attention"] * (num_layers - 1) + ["full_attention"],
        linear_num_key_heads=num_kv_heads,
        linear_num_value_heads=num_heads,
        linear_key_head_dim=hidden_size // num_heads,
        linear_value_head_dim=hidden_size // num_heads,
        num_experts=0,
        num_experts_per_tok=0,
        tie_word_embeddings=True,
    )


IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")


def make_tiny_vision_model(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    image_size: int = 32,
    patch_size: int = 8,
    scale_factor: int = 2,
    max_length: int = 4096,
    family: str = "SmolVLM",
    seed: int = 0,
) -> None:
    """Writes a model that reads images, its tokenizer and its image processor, which does not cut images into
    tiles. An image becomes (image_size ÷ patch_size ÷ scale_factor)² tokens, here 4.

    Its weights are larger than usual, so that a picture matters even before training.
    """
    import transformers
    from transformers import AutoModelForImageTextToText

    quiet_transformers()
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(IMAGE_TOKENS)}, replace_extra_special_tokens=False
    )
    size = {"longest_edge": image_size}
    processor = getattr(transformers, f"{family}ImageProcessorPil")(
        size=size, max_image_size=size, do_image_splitting=False
    )
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }
    config = getattr(transformers, f"{family}Config")(
        text_config={
            "model_type": "llama",
            **shape,
            "vocab_size": len(tokenizer),
            "num_key_value_heads": num_heads,
            "max_position_embeddings": max_length,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**shape, "image_size": image_size, "patch_size": patch_size},
        scale_factor=scale_factor,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight *= 4 if "layers" in name else 5
    for each in (model, tokenizer, processor):
        each.save_pretrained(folder)


def _make(
    folder: Path,
    kind: str,
    seed: int,
    shape: tuple[int, int, int, int, int],
    scales: Mapping[str, int] | None = None,
    **options: Any,
) -> None:
    """`shape`: hidden size, layers, heads, key/value heads, longest sequence; `scales`: of weights, by part
    of their names."""
    import transformers

    quiet_transformers()
    tokenizer = character_tokenizer()
    hidden_size, num_layers, num_heads, num_kv_heads, max_length = shape
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, weight in model.named_parameters():
            for part, scale in (scales or {}).items():
                if part in name:
                    weight *= scale
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
