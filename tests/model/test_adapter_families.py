"""LoRA by family: which layers get an adapter, and PEFT's plain forward of HF's model as the reference."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pellucid.config.shared import LoraConfig, ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Adapters, Policy, load_policy, packed_layout
from pellucid.transport.weights import ServedWeights, write_adapter
from tests.model import families
from tolerance import gradient_chain, near, near_logprobs

LENGTHS = [7, 5]
ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
SHARED = {"mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"}
NEOX = {"attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}

TRAINED = {
    "llama": ATTENTION | MLP,
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "gpt_neox": NEOX,
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    "qwen2_moe": ATTENTION | SHARED,
    "bamba": ATTENTION
    | {"mamba.in_proj", "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"},
}
"""Default targets of families that are compared with PEFT."""

DEFAULTS = TRAINED | {
    "qwen3_moe": ATTENTION,
    "jamba": ATTENTION
    | {"mamba.in_proj", "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"},
    "nemotron_h": {
        *(f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "in")),
        *(f"mixer.shared_experts.{name}_proj" for name in ("up", "down")),
    },
    "qwen3_next": ATTENTION | {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"},
    "falcon": {
        "self_attention.query_key_value",
        "self_attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    },
    "mpt": {"attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj"},
    "ernie4_5_moe": ATTENTION,
    "deepseek_v3": {
        f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    },
}
"""Default targets by family, within a layer. Routers, heads, experts in one tensor, and what the kernels of
state-space layers read are in none of them; nor are layers that PEFT takes for experts by their names."""


def policy_of(family: str) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Policy(families.make(family)).eval()


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_the_linear_layers_of_the_decoder(family) -> None:
    policy = policy_of(family)
    adapter = Adapters(policy, LoraConfig(rank=2))[0]
    places = {module: name for name, module in policy.hf.named_modules()}
    prefixes = [f"base_model.model.{places[layer]}." for layer in policy.layers]
    found = set()
    for name, _ in adapter.named_parameters():
        (prefix,) = (each for each in prefixes if name.startswith(each))
        found.add(name.removeprefix(prefix).rpartition(".lora_")[0])
    assert found == DEFAULTS[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a family's tiny model in a folder, once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                families.make(family).save_pretrained(made[family])
        return made[family]

    return folder


def forward(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    output: torch.Tensor = policy(ids, positions, torch.ones(len(ids)), packed_layout(LENGTHS)).logprobs
    return output


@pytest.mark.parametrize("family", TRAINED)
def test_logprobs_and_gradients_are_those_of_pefts_plain_forward(family, folders, tmp_path) -> None:
    """Of each sequence alone, through HF's own attention; and an engine that adds the published adapter to
    its weights has the same logprobs."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = load_policy(ModelConfig(name=str(folders(family))), trainable=True)
    adapter = Adapters(policy, LoraConfig(rank=2, alpha=6.0))[0]
    adapter.reset(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=generator)
    ids = torch.randint(5, families.VOCABULARY, (sum(LENGTHS),), generator=generator)
    own = forward(policy, ids)
    own[own.isfinite()].sum().backward()

    write_adapter(
        adapter, adapter.config, str(folders(family)), tmp_path, is_transposed=adapter.is_transposed
    )
    base = AutoModelForCausalLM.from_pretrained(
        folders(family), dtype=torch.float32, attn_implementation="eager"
    )
    peft = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
    rows = ids.split(LENGTHS)
    theirs = [families.logprobs(peft(row[None]).logits[0], row) for row in rows]
    sum(each.sum() for each in theirs).backward()
    predicted = torch.cat([part[1:] for part in own.split(LENGTHS)])
    assert predicted == near_logprobs(torch.cat(theirs), policy, max(LENGTHS))
    gradients = {
        name.replace(".default.", "."): each.grad
        for name, each in peft.named_parameters()
        if each.requires_grad
    }
    assert gradients.keys() == {name for name, _ in adapter.named_parameters()}
    # Both round, each in its own order. A state decays by exp of a sum, which multiplies what rounds in it.
    scale = (8 if family == "bamba" else 2) * max(each.abs().max() for each in gradients.values())
    for name, parameter in adapter.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        assert parameter.grad == near(gradients[name], terms=gradient_chain(policy, len(ids)), scale=scale)

    served = load_policy(ModelConfig(name=str(folders(family))))
    with torch.no_grad():
        before = forward(served, ids)
        ServedWeights(served.hf).load(tmp_path)
        after = forward(served, ids)
    assert after == near_logprobs(own, policy, max(LENGTHS))
    assert (after - before).abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "target", "why"),
    [
        (
            "qwen3_moe",
            "gate_up_proj",
            r"is one tensor for all experts of a layer \(mlp.experts.gate_up_proj\)",
        ),
        ("qwen3_moe", "experts", "is one tensor for all experts of a layer"),
        (
            "qwen3_moe",
            "gate",
            r"is a Qwen3MoeTopKRouter \(model.layers.0.mlp.gate\), not a plain linear layer",
        ),
        ("jamba", "out_proj", "is read by the kernels of state-space layers past an adapter"),
        ("qwen3_next", "down_proj", "is a name that PEFT takes for this model's experts"),
        ("gpt2", "lm_head", "is the head, whose weight lies the other way round than those of the layers"),
        ("gpt2", "q_proj", "is no layer of this model; the nearest is 'c_proj', and .* c_attn, c_fc, c_proj"),
    ],
)
def test_what_would_pass_an_adapter_by_is_refused(family, target, why) -> None:
    with pytest.raises(ConfigError, match=f"model.lora.targets: '{target}' {why}"):
        Adapters(policy_of(family), LoraConfig(targets=(target,)))


def test_dropout_does_not_reach_the_head() -> None:
    with pytest.raises(ConfigError, match="'lm_head' is the head, .* set model.lora.dropout = 0.1 to 0"):
        Adapters(policy_of("llama"), LoraConfig(targets=("lm_head",), dropout=0.1))


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma2", "lfm2"])
@pytest.mark.parametrize("max_logits", [None, 400])
def test_an_adapter_of_the_head_is_one_for_trainer_engine_and_peft(family, max_logits, tmp_path) -> None:
    """Heads that scale and cap their logits among them, in one piece and in chunks."""
    from peft import PeftModel

    families.make(family).save_pretrained(tmp_path / "base")
    name = ModelConfig(name=str(tmp_path / "base"))
    policy = load_policy(name, trainable=True, max_length=families.CONTEXT)
    policy.max_logits = max_logits
    config = LoraConfig(rank=3, alpha=6.0, targets=("lm_head",))
    adapter = Adapters(policy, config)[0]
    adapter.reset(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(parameter)))
    rows = families.sequences()[:2]
    found = torch.cat(families.computed(policy, rows))
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((found * weights).sum(), list(adapter.parameters()))

    write_adapter(adapter, adapter.config, str(tmp_path / "base"), tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    peft = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    theirs = torch.cat([families.alone(peft, row) for row in rows])
    assert found == near_logprobs(theirs, base, families.CONTEXT)
    assert (
        found - torch.cat([families.alone(families.make(family), row) for row in rows])
    ).abs().max() > 0.01
    named = {each: parameter for each, parameter in peft.named_parameters() if "lora_" in each}
    expected = torch.autograd.grad((theirs * weights).sum(), list(named.values()))
    scale = max(float(each.abs().max()) for each in expected)
    for gradient, (_, other) in zip(gradients, sorted(zip(named, expected, strict=True)), strict=True):
        assert gradient == near(other, terms=gradient_chain(base, len(found)), scale=scale)

    served = load_policy(name, max_length=families.CONTEXT)
    ServedWeights(served.hf).load(tmp_path)
    assert torch.cat(families.computed(served, rows)) == near_logprobs(theirs, base, families.CONTEXT)


def test_experts_that_keep_their_weights_are_named() -> None:
    summary = Adapters(policy_of("qwen2_moe"), LoraConfig(rank=2)).summary
    assert summary == (
        "model.lora: adapters on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; experts keep "
        "their weights (mlp.experts.down_proj, mlp.experts.gate_up_proj)"
    )
    summary = Adapters(policy_of("deepseek_v3"), LoraConfig(rank=2)).summary
    assert summary.endswith(
        "; experts keep their weights (mlp.experts.down_proj, mlp.experts.gate_up_proj), and so do "
        "down_proj, gate_proj, up_proj, which PEFT takes for experts"
    )
    assert "experts" not in Adapters(policy_of("llama"), LoraConfig(rank=2)).summary
