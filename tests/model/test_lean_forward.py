"""The forward written out for speed is HF's forward."""

import pytest
import torch
import transformers

from pellucid.config import ModelConfig
from pellucid.model import PackedAttention, lean_forward, load_policy
from pellucid.model.lean import _LeanModel
from tolerance import chain, near

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SCALED = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
KNOWN = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with scaled positions": ("Llama", {"rope_parameters": SCALED}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
OTHERS = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama with another activation": ("Llama", {"hidden_act": "gelu"}),
}
LENGTHS = [7, 1, 12]


def make(folder, name, options):
    config = getattr(transformers, f"{name}Config")(**SHAPE | options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():  # biases and norms are born as zeros and ones
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return load_policy(ModelConfig(name=str(folder)))


def both(policy, forward):
    token_ids = torch.randint(0, 101, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        expected = policy.hidden(token_ids[None], positions[None], PackedAttention(LENGTHS))[0]
    return forward(token_ids, positions, PackedAttention(LENGTHS)), expected


@pytest.mark.parametrize("model", KNOWN)
def test_known_models_give_the_values_of_hf(tmp_path, model) -> None:
    policy = make(tmp_path, *KNOWN[model])
    forward = lean_forward(policy)
    assert isinstance(forward, _LeanModel)
    found, expected = both(policy, forward)
    assert found == near(expected, terms=chain(policy, max(LENGTHS)))


@pytest.mark.parametrize("model", OTHERS)
def test_any_other_model_goes_through_hf(tmp_path, model) -> None:
    policy = make(tmp_path, *OTHERS[model])
    forward = lean_forward(policy)
    assert not isinstance(forward, _LeanModel)
    found, expected = both(policy, forward)
    assert torch.equal(found, expected)


class Doubled(torch.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_part_that_was_replaced_is_not_passed_over(tmp_path) -> None:
    policy = make(tmp_path, *KNOWN["llama"])
    before, _ = both(policy, lean_forward(policy))
    policy.hf.model.layers[1].mlp.up_proj.__class__ = Doubled
    found, expected = both(policy, lean_forward(policy))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, before, atol=1e-3)


def test_weights_that_are_loaded_in_place_count_at_once(tmp_path) -> None:
    policy = make(tmp_path, *KNOWN["qwen3"])
    forward = lean_forward(policy)
    before, _ = both(policy, forward)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(1.1 * parameter)
    found, expected = both(policy, forward)
    assert found == near(expected, terms=chain(policy, max(LENGTHS)))
    assert not torch.allclose(found, before, atol=1e-3)
