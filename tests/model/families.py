"""Every causal language model of transformers at tiny size: does it train and sample, and how?

    python tests/model/families.py [--json FILE] [FAMILY ...]

Each family is made with random weights, saved and loaded as a user's model would be. The trainer computes it
*packed* or in *rows* if its logprobs are those of HF's own forward of each sequence alone, and *refuses* it
by a `ModelError`. An engine *samples* if its logprobs are those, too. Anything else is *wrong*, and ends the
script with 1.
"""

import argparse
import json
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pellucid.config import ModelConfig
from pellucid.errors import ModelError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy, load_policy, packed_layout
from pellucid.model.rope import fix_frequencies
from pellucid.trainer.step import ModelShape

VOCABULARY = 101
LENGTHS = (40, 23, 64, 9)
"""Longer than the windows and the original contexts below, shorter than the contexts."""

CONTEXT, WINDOW = 128, 20

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
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
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "max_seq_len": CONTEXT,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
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
    "tie_word_embeddings": False,
    "use_cache": False,
}
"""Settings that make a model small, wherever a family has one of that name."""

OWN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"]},
    "minimax": {"block_size": 8},
    "phimoe": {"lm_head_bias": False},
    "dots1": {"n_shared_experts": 1},
}
"""What a family needs besides."""

WINDOWED: Mapping[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
}

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2 with a window": ("qwen2", WINDOWED),
    "qwen2_moe with a window": ("qwen2_moe", WINDOWED),
    "qwen3_moe with a window": ("qwen3_moe", WINDOWED),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mixtral with a window": ("mixtral", {"sliding_window": WINDOW}),
    "phimoe without a window": ("phimoe", {"sliding_window": None}),
    "laguna with a window": ("laguna", WINDOWED),
    "mellum with a window": ("mellum", WINDOWED),
    "minimax_m3_vl_text with sparse layers": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "index_local_blocks": 1,
        },
    ),
    "falcon with alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
    **{
        f"llama with {name} RoPE": ("llama", {"rope_parameters": {"rope_theta": 10000.0, **rope}})
        for name, rope in {
            "linear": {"rope_type": "linear", "factor": 2.0},
            "dynamic": {
                "rope_type": "dynamic",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "llama3": {
                "rope_type": "llama3",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "longrope": {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        }.items()
    },
}
"""Families with settings under which they attend differently."""


@dataclass(frozen=True, slots=True)
class Outcome:
    family: str
    trains: str
    """packed, rows, refused, wrong, or unmade: transformers itself cannot make or run it at this size."""

    samples: str
    """samples, refused, wrong, or ""."""

    reason: str


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def make(name: str) -> Any:
    """The model with random weights of a size at which every layer matters, or an exception of any kind."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, extra = VARIANTS.get(name, (name, {}))
    kind = CONFIG_MAPPING[family]
    if set(getattr(kind, "sub_configs", {})) - {"attn_config", "ffn_config"}:
        raise NotImplementedError("a model of several parts")
    default = kind()
    known = default.to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known or hasattr(default, key)}
    if "qk_rope_head_dim" in known or "head_dim" not in known:
        sizes.pop("head_dim", None)
    if "kv_lora_rank" in known:  # latent attention has keys for every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    num_layers = getattr(default, "num_hidden_layers", 0)
    for key, value in known.items():
        if isinstance(value, list) and len(value) == num_layers and value:
            distinct = list(dict.fromkeys(value)) if isinstance(value[0], str | int | bool) else value[:4]
            sizes[key] = (distinct * 4)[:4]
    config = kind(**{**sizes, **OWN_SIZES.get(family, {}), **extra})
    config.is_decoder = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise NotImplementedError("parameters that are no numbers")
    return model


def sequences(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


def alone(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logprobs of a sequence through HF's own forward and attention, without its first token."""
    return logprobs(model(input_ids=tokens[None], use_cache=False).logits[0], tokens)


def computed(policy: Policy, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.cat(rows)
    output = policy(ids, positions, torch.ones(len(ids)), packed_layout(lengths))
    return [part[1:] for part in output.logprobs.split(lengths)]


def sampled(policy: Policy, prompts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Sequences that an engine finished, the logprobs of what it sampled, and the length of the prompt."""
    found: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def request(prompt: list[int], seed: int) -> Request:
        def keep(completion: Any) -> None:
            whole = torch.tensor([*prompt, *completion.token_ids])
            found.append((whole, torch.tensor(completion.logprobs), len(prompt)))

        return Request(prompt, SamplingParams(max_tokens=45, seed=seed), Account(), keep)

    engine = Engine(policy, num_slots=4, max_length=CONTEXT)
    run_to_end(engine, [request(prompt, seed) for seed, prompt in enumerate(prompts)])
    return found


def gradients(found: list[torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Of the weights that have one, of a sum in which tokens weigh differently."""
    total = torch.stack([(each * torch.linspace(-1, 2, len(each))).sum() for each in found]).sum()
    weights = dict(model.named_parameters())
    each = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    return {name: own for name, own in zip(weights, each, strict=True) if own is not None}


def difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The largest over all weights, relative to the largest gradient of any."""
    if expected.keys() != found.keys():
        return math.inf
    scale = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[name] - each).abs().max()) for name, each in expected.items()) / scale


def examine(name: str, folder: Path) -> Outcome:
    from transformers import AutoModelForCausalLM

    try:
        make(name).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        fix_frequencies(model, CONTEXT)  # as trainer and engine do, whatever the length of a sequence
        rows = sequences()
        expected = [alone(model, row) for row in rows]
        gradient = gradients(expected, model)
    except Exception as error:
        return Outcome(name, "unmade", "", f"{type(error).__name__}: {error}".splitlines()[0][:120])
    try:
        policy = load_policy(ModelConfig(name=str(folder)), trainable=True, max_length=CONTEXT)
        ModelShape.of(policy)
        found = computed(policy, rows)
        own_gradient = gradients(found, policy.hf)
    except ModelError as error:
        return Outcome(name, "refused", "", str(error))
    except Exception as error:
        return Outcome(name, "wrong", "", f"{type(error).__name__}: {error}".splitlines()[0])
    gap = max(float((own - other).detach().abs().max()) for own, other in zip(found, expected, strict=True))
    off = difference(gradient, own_gradient)
    if not (gap < RIGHT and off < RIGHT):
        return Outcome(name, "wrong", "", f"{policy.way}, {gap:.1e} nats off, gradient {off:.1e}")
    samples, said = sampling(policy, model, rows)
    why = f" ({policy.why_rows})" if policy.way == "rows" else ""
    found_out = f"trainer within {gap:.1e} nats and {off:.1e} of the gradient"
    return Outcome(name, policy.way, samples, f"{found_out}{why}, {said}")


def sampling(policy: Policy, model: Any, rows: list[torch.Tensor]) -> tuple[str, str]:
    try:
        drawn = sampled(policy, [row[: 7 + index].tolist() for index, row in enumerate(rows)])
    except ModelError as error:
        return "refused", f"engine: {error}"
    except Exception as error:
        return "wrong", f"engine: {type(error).__name__}: {error}".splitlines()[0]
    with torch.no_grad():
        gap = max(
            float((own - alone(model, whole)[prompt - 1 :]).abs().max()) for whole, own, prompt in drawn
        )
    return "samples" if gap < RIGHT else "wrong", f"engine within {gap:.1e}"


RIGHT = 1e-3
"""Nats, and shares of a gradient. Rounding makes up to 1e-5 at this size and precision, and what leaks 0.01
and more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for name in options.families or names():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.append(examine(name, Path(folder)))
        last = outcomes[-1]
        print(f"{last.trains:8} {last.samples:8} {name:28} {last.reason}", flush=True)
    counts = Counter(each for outcome in outcomes for each in (outcome.trains, outcome.samples) if each)
    for kind in KINDS:
        of_kind = [outcome.family for outcome in outcomes if outcome.trains == kind]
        print(f"| {kind} ({len(of_kind)}) | {', '.join(of_kind)} |")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 1 if counts["wrong"] else 0


KINDS = ("packed", "rows", "refused", "wrong", "unmade")

if __name__ == "__main__":
    sys.exit(main())
