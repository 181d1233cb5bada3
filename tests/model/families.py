"""Every causal language model of transformers at tiny size: does it train and sample, and how?

    python tests/model/families.py [--json FILE] [FAMILY ...]
    python tests/model/families.py --table                      writes the table of docs/models.md

Each family is made with random weights, saved, loaded and checked as `pellucid verify --only model` does. The
trainer computes it *packed* or in *rows*, or *refuses* it by a `ModelError`, and an engine *samples* from it.
Anything else is *wrong*, and ends the script with 1.
"""

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pellucid.checks.finding import Finding
from pellucid.checks.verify.model import check_model, load_both
from pellucid.checks.verify.shrink import VOCABULARY, WINDOW, make_random, sizes_of
from pellucid.config.shared import LoraConfig
from pellucid.errors import ModelError
from pellucid.inference.methods import Method, choose_method
from pellucid.inference.vllm_engine import takes_new_weights
from pellucid.model import Policy, packed_layout
from pellucid.model.adapter import adapted_layers
from pellucid.model.routing import known_routers
from pellucid.trainer.step import ModelShape

LENGTHS = (40, 23, 64, 9)
"""Longer than the windows and the original contexts below, shorter than the contexts."""

CONTEXT = 128

TRIED: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "max_seq_len": CONTEXT,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "use_cache": False,
}
"""Settings of every family that has them, beside those that make its widths small."""

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
    "doge with experts": ("doge", {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}),
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

    row: str = ""
    """Its row in docs/models.md, if it trains."""


LISTED = (
    *("llama", "smollm3", "mistral", "ministral", "ministral3", "mixtral"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text"),
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_oss", "gpt2", "gpt_neox"),
    *("granite", "granitemoe", "granitemoehybrid", "bamba", "olmo2", "olmo3", "olmoe"),
    *("cohere", "cohere2", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "minimax", "minimax_m2"),
    *("nemotron", "nemotron_h", "jamba", "mamba", "falcon", "falcon_h1", "lfm2", "lfm2_moe"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "hunyuan_v1_dense", "stablelm", "starcoder2"),
)
"""Families in the table of docs/models.md, by `model_type`."""

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def make(name: str) -> Any:
    """The model with random weights of a size at which every layer matters, or an exception of any kind."""
    from transformers import CONFIG_MAPPING

    family, extra = VARIANTS.get(name, (name, {}))
    kind = CONFIG_MAPPING[family]
    if set(getattr(kind, "sub_configs", {})) - {"attn_config", "ffn_config"}:
        raise NotImplementedError("a model of several parts")
    default = kind()
    known = default.to_dict()
    sizes = sizes_of(default)
    sizes |= {key: value for key, value in TRIED.items() if key in known or hasattr(default, key)}
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
    model = make_random(config)
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


def examine(name: str, folder: Path) -> Outcome:
    try:
        make(name).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        alone(model, sequences()[0])
    except Exception as error:
        return Outcome(name, "unmade", "", f"{type(error).__name__}: {error}".splitlines()[0][:120])
    try:
        policy, reference = load_both(str(folder), CONTEXT)
        way, why_rows = policy.way, policy.why_rows  # an engine may have to take another way
        ModelShape.of(policy)
        findings = list(check_model(policy, reference))
    except ModelError as error:
        return Outcome(name, "refused", "", str(error))
    except Exception as error:
        return Outcome(name, "wrong", "", f"{type(error).__name__}: {error}".splitlines()[0])
    failed = [f"{each.what}: {each.value:.1e}, not {each.limit:.1e}" for each in findings if not each.passed]
    if failed:
        return Outcome(name, "wrong", "", f"{way}: {'; '.join(failed)}")
    samples = "samples" if any(each.is_held and "engine" in each.what for each in findings) else "refused"
    excess = max(each.value / each.limit for each in findings if each.is_held)
    why = f" ({why_rows})" if way == "rows" else ""
    reason = f"within {excess:.2f} of what rounding explains{why}"
    return Outcome(name, way, samples, reason, _row(name, way, policy, findings))


HEAD = ("`model_type`", "trains", "samples", "context parallel", "router replay", "LoRA", "vLLM")


def _row(name: str, way: str, policy: Policy, findings: list[Finding]) -> str:
    """Returns the family's row of the table in docs/models.md."""
    is_split = any(each.is_held and "context parallelism" in each.what for each in findings)
    has_experts = any(".experts." in each for each, _ in policy.hf.named_parameters())
    cells = (
        name,
        way,
        "packed" if policy.way == "packed" else _batches(choose_method(policy, CONTEXT)),
        "yes" if is_split else "no",
        ("yes" if known_routers(policy.hf) else "no") if has_experts else "–",
        "yes" if adapted_layers(policy, LoraConfig()) else "no",
        "if vLLM has it" if takes_new_weights(policy.hf) else "refused",
    )
    return f"| {' | '.join(cells)} |"


def _batches(method: Method) -> str:
    batch = "one batch" if method.joins else "a batch per group" if method.is_batched else "each alone"
    return batch if method.keeps_cache else "without a cache"


def page_with_table(rows: Iterable[str]) -> str:
    """Returns the text of docs/models.md with these rows in its table of families."""
    title = f"| {' | '.join(HEAD)} |"
    table = "\n".join([title, "|" + "---|" * len(HEAD), *rows]) + "\n"
    page, count = re.subn(
        rf"^{re.escape(title)}\n(\|.*\n)+", lambda _: table, PAGE.read_text(), flags=re.MULTILINE
    )
    assert count == 1, f"{PAGE} has no table that begins with {title}"
    return page


RIGHT = 1e-3
"""Nats. Rounding makes up to 1e-5 at this size and precision, and what leaks 0.01
and more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="write the table of docs/models.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for name in LISTED if options.table else options.families or names():
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
    if options.table:
        PAGE.write_text(page_with_table(outcome.row for outcome in outcomes))
    return 1 if counts["wrong"] else 0


KINDS = ("packed", "rows", "refused", "wrong", "unmade")

if __name__ == "__main__":
    sys.exit(main())
