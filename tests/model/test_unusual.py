"""Configs that are legal and rare, held to transformers as `pellucid verify --model` holds a model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid.checks.verify.model import check_model, load_both
from pellucid.config import ModelConfig
from pellucid.data.tokenizer import quiet_transformers
from pellucid.model import load_policy, packed_layout, shared_layout
from tolerance import gradient_chain, near, near_logprobs

sys.path.insert(0, str(Path(__file__).parent))
import families

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MIXED = ["sliding_attention", "full_attention"] * 2

UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "a window longer than any sequence, and positions by layer type": (
        "gemma3_text",
        {
            "layer_types": MIXED,
            "sliding_window": 500,
            "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": PLAIN},
        },
    ),
    "a window of one token beside full layers": ("qwen3", {**families.WINDOWED, "sliding_window": 1}),
    "one key head, heads wider than hidden size ÷ heads": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "sinks, one key head, a short window": (
        "gpt_oss",
        {"layer_types": MIXED, "num_key_value_heads": 1, "sliding_window": 3},
    ),
    "tied head, scaled logits, scaled embeddings": (
        "granite",
        {
            "tie_word_embeddings": True,
            "logits_scaling": 3.0,
            "embedding_multiplier": 5.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.7,
        },
    ),
    "tied head that multiplies its logits": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "caps so low that they bind": (
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7, "query_pre_attn_scalar": 3},
    ),
    "an eighth of a head rotates": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.125}),
    "no layer has positions": ("smollm3", {"no_rope_layers": [0, 0, 0, 0]}),
    "shared experts that gate themselves, dense layers between": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_experts_per_tok": 1},
    ),
    "latent attention without a query rank, one dense layer, groups of experts": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    quiet_transformers()


@pytest.mark.parametrize("name", UNUSUAL)
def test_trainer_and_engine_compute_what_transformers_does(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(families.VARIANTS, name, UNUSUAL[name])  # type: ignore[misc]
    families.make(name).save_pretrained(tmp_path)
    policy, reference = load_both(str(tmp_path), families.CONTEXT)
    assert policy.way == "packed", policy.why_rows
    findings = list(check_model(policy, reference))
    assert [each.what for each in findings if not each.passed] == []
    assert len([each for each in findings if each.is_held]) == 8


@pytest.mark.parametrize("weights", [False, True])
def test_foreign_experts_are_replayed_alike_packed_in_rows_and_with_a_shared_prompt(
    tmp_path, weights
) -> None:
    """Beside shared experts and dense layers; the members of a group have one prompt and its experts."""
    settings = {"decoder_sparse_step": 2, "norm_topk_prob": weights}
    model = families.make_random(
        type(config := families.make("qwen2_moe").config)(**config.to_dict() | settings)
    )
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompt, *own = (
        torch.randint(5, families.VOCABULARY, (each,), generator=generator) for each in (40, 9, 30)
    )
    rows = [torch.cat([prompt, each]) for each in own]
    ids, lengths = torch.cat(rows), [len(row) for row in rows]
    shape = 2, 2  # layers with a router, experts per token
    of_prompt, *others = (torch.rand(len(each), *shape, 4, generator=generator) for each in (prompt, *own))
    scores = torch.cat([part for each in others for part in (of_prompt, each)])
    chosen = scores[:, :, 0].topk(2, dim=-1).indices.to(torch.uint8)
    replayed = scores[:, :, 1, :2] if weights else None
    found = {}
    for layout in ("packed", "rows"):
        policy = load_policy(
            ModelConfig(name=str(tmp_path)), trainable=True, max_length=families.CONTEXT, layout=layout
        )
        policy.replay_experts(weights=weights)
        positions = torch.cat([torch.arange(length) for length in lengths])
        layouts = {layout: packed_layout(lengths)}
        if layout == "packed":
            layouts["shared"] = shared_layout(lengths, ids.numpy().astype("uint32"), ["group"] * 2)
        for name, each in layouts.items():
            output = policy(ids, positions, torch.ones(len(ids)), each, chosen, replayed)
            gradient = torch.autograd.grad(output.logprobs.sum(), policy.layers[0].self_attn.q_proj.weight)[0]
            found[name] = output.logprobs.detach(), output.replaced, gradient
    logprobs, replaced, gradient = found.pop("packed")
    assert 0.2 < float(replaced.mean()) < 0.8
    for other_logprobs, other_replaced, other_gradient in found.values():
        assert other_logprobs == near_logprobs(logprobs, policy, max(lengths))
        assert torch.equal(other_replaced, replaced)
        assert other_gradient == near(gradient, terms=gradient_chain(policy, len(ids)))
