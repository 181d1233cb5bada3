"""LoRA: values by hand, PEFT's own reading of our files, and what an engine makes of them."""

import pytest
import torch

from pellucid.config.shared import LoraConfig, ModelConfig
from pellucid.errors import ConfigError, TransportError
from pellucid.model import Adapters, load_policy, packed_layout
from pellucid.transport.weights import ServedWeights, write_adapter, write_version
from tolerance import chain, near

IDS = torch.tensor([[5, 9, 17, 33, 64, 80, 12]])


def logits(policy) -> torch.Tensor:
    num_tokens = IDS.shape[1]
    hidden = policy.hidden(IDS, torch.arange(num_tokens)[None], packed_layout([num_tokens]).plan)
    return policy.logits(hidden).detach()


def filled(policy, config, *, num_slots=1) -> Adapters:
    """Every adapter with a B that is not 0."""
    adapters = Adapters(policy, config, num_slots=num_slots)
    for slot in range(num_slots):
        adapters[slot].reset(slot)
        generator = torch.Generator().manual_seed(slot)
        with torch.no_grad():
            for name, parameter in adapters[slot].named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1, generator=generator)
    return adapters


@pytest.fixture
def policy(tiny_model):
    return load_policy(ModelConfig(name=str(tiny_model)), trainable=True)


def test_a_new_adapter_changes_nothing_and_a_trained_one_adds_ba(policy) -> None:
    before = logits(policy)
    weight = policy.hf.model.layers[0].self_attn.q_proj.weight.detach().clone()
    adapter = Adapters(policy, LoraConfig(rank=2, alpha=6.0, targets=("q_proj",)))[0]
    adapter.reset(0)
    assert torch.equal(logits(policy), before)
    a = adapter.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    b = adapter.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    with torch.no_grad():
        b.fill_(0.25)
    changed = logits(policy)
    assert (changed - before).abs().max() > 1e-3
    by_hand = load_policy(ModelConfig(name=policy.hf.name_or_path))
    with torch.no_grad():
        by_hand.hf.model.layers[0].self_attn.q_proj.weight.copy_(weight + 3.0 * b @ a)
    assert logits(by_hand) == near(changed, terms=chain(policy, 7))


def test_slots_do_not_see_each_other(policy) -> None:
    adapters = filled(policy, LoraConfig(rank=4), num_slots=2)
    results = []
    for slot in (0, 1, 0):
        adapters[slot].activate()
        results.append(logits(policy))
    assert torch.equal(results[0], results[2])
    assert (results[0] - results[1]).abs().max() > 1e-3


def test_only_the_active_adapter_gets_a_gradient(policy) -> None:
    adapters = filled(policy, LoraConfig(rank=4), num_slots=2)
    adapters[1].activate()
    hidden = policy.hidden(IDS, torch.arange(7)[None], packed_layout([7]).plan)
    policy.logits(hidden).square().mean().backward()
    assert all(parameter.grad is None for parameter in adapters[0].parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in adapters[1].parameters())
    assert {name for name, parameter in policy.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in policy.named_parameters() if ".slot_1." in name
    }


def test_a_reset_adapter_depends_on_its_seed_alone(policy) -> None:
    adapters = filled(policy, LoraConfig(rank=4), num_slots=2)
    for slot, seed in ((0, 7), (1, 7)):
        adapters[slot].reset(seed)
    pairs = list(zip(adapters[0].named_parameters(), adapters[1].named_parameters(), strict=True))
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    adapters[1].reset(8)
    assert any(not torch.equal(one, other) for (_, one), (_, other) in pairs)


def test_peft_reads_what_is_published(policy, tiny_model, tmp_path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = LoraConfig(rank=4, alpha=12.0, targets=("q_proj", "down_proj"))
    adapter = filled(policy, config)[0]
    ours = logits(policy)
    write_adapter(adapter, config, str(tiny_model), tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path)(IDS).logits
    assert theirs == near(ours, terms=chain(policy, 7))
    alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert alone(IDS).logits == near(ours, terms=chain(policy, 7))


def test_a_server_adds_each_version_to_the_weights_it_began_with(policy, tiny_model, tmp_path) -> None:
    """Two adapters with different targets, one after the other, then whole weights again."""
    served = load_policy(ModelConfig(name=str(tiny_model)))
    began = logits(served)
    weights = ServedWeights(served.hf)
    for number, targets in enumerate((("q_proj", "up_proj"), ("v_proj",))):
        trained = load_policy(ModelConfig(name=str(tiny_model)), trainable=True)
        config = LoraConfig(rank=4, targets=targets)
        adapter = filled(trained, config)[0]
        folder = tmp_path / str(number)
        folder.mkdir()
        write_adapter(adapter, config, str(tiny_model), folder)
        weights.load(folder)
        assert logits(served) == near(logits(trained), terms=chain(trained, 7))
        assert (logits(served) - began).abs().max() > 1e-3
    write_version(policy.hf, tmp_path)
    weights.load(tmp_path)
    assert torch.equal(logits(served), began)


def test_an_adapter_of_another_model_changes_nothing(policy, tiny_model, tmp_path) -> None:
    from pellucid.model.tiny import make_tiny_model

    make_tiny_model(tmp_path / "other", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
    other = load_policy(ModelConfig(name=str(tmp_path / "other")))
    before = logits(other)
    adapter = filled(policy, LoraConfig(rank=4))[0]
    write_adapter(adapter, adapter.config, str(tiny_model), tmp_path)
    with pytest.raises(TransportError, match="does not fit the model: it changes .* of shape"):
        ServedWeights(other.hf).load(tmp_path)
    assert torch.equal(logits(other), before)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(TransportError, match="is not a readable LoRA adapter"):
        ServedWeights(other.hf).load(tmp_path)


REFUSED = {
    "lm_head": "is the head, which shares its weight with the embedding",
    "embed_tokens": "is the embedding",
    "q_porj": "is no layer of this model; the nearest is 'q_proj', and this model's decoder has down_proj, ",
    "self_attn": r"is a Qwen3Attention \(model.layers.0.self_attn\), not a plain linear layer",
}


@pytest.mark.parametrize("target", REFUSED)
def test_a_target_that_cannot_be_adapted_is_refused_with_the_reason(policy, target) -> None:
    with pytest.raises(ConfigError, match=f"model.lora.targets: '{target}' {REFUSED[target]}"):
        Adapters(policy, LoraConfig(targets=("q_proj", target)))


def test_a_target_may_name_the_part_that_its_layer_is_in(policy) -> None:
    adapters = Adapters(policy, LoraConfig(targets=("mlp.up_proj", "layers.1.self_attn.q_proj")))
    names = {name for name, _ in adapters[0].named_parameters() if "lora_A" in name}
    assert names == {
        f"base_model.model.model.layers.{layer}.lora_A.weight"
        for layer in ("0.mlp.up_proj", "1.mlp.up_proj", "1.self_attn.q_proj")
    }
    assert adapters[0].config.targets == (
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    )


def test_dropout_is_for_forwards_with_gradient_alone(policy) -> None:
    filled(policy, LoraConfig(rank=4, dropout=0.5))
    with torch.no_grad():
        assert torch.equal(logits(policy), logits(policy))
    assert not torch.equal(logits(policy), logits(policy))
