"""Models are packed where that is proved at load, else in rows, and refused where both are wrong."""

import gc
import math
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid.config import InferenceRunConfig, ModelConfig, TrainerRunConfig
from pellucid.errors import ConfigError, ModelError
from pellucid.inference.server import open_engine
from pellucid.model import Policy, load_policy
from pellucid.model.proof import prove
from pellucid.model.tiny import character_tokenizer, make_tiny_model
from pellucid.trainer.batches import NoBatches
from pellucid.trainer.build import build_run

sys.path.insert(0, str(Path(__file__).parent))
import families

PACKED = [
    "llama",
    "qwen3_moe",
    "gpt_neox",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "cohere2",
    "granite",
    "minicpm3",
    "mistral",
    "phimoe",
    "qwen2_moe with a window",
    "llama with yarn RoPE",
    "llama with dynamic RoPE",
    "llama with longrope RoPE",
]

ROWS = {
    "qwen3_next": "layer 0 .Qwen3NextGatedDeltaNet, .* 0 times",
    "nemotron_h": "layer 0 .* 0 times",
    "jamba": "layer 0 .JambaMambaMixer.* 0 times",
    "lfm2": "layer 0 .Lfm2ShortConv.* 0 times",
    "falcon_h1": "last positions .* by up to .* nats",
    "bloom": "layer 0 .BloomAttention.* 0 times",
    "stablelm": "without an attention plan",
    "gptj": "attention code of its own",
    "diffllama": "layer 0 .* 2 times",
    "llama4_text": "mask of layer 0 hides more than the future, and not by a sliding window",
}

REFUSED = {
    "bert": "neither packed .* nor in rows .*have other logprobs than each alone .* by up to .* nats",
    "deepseek_v32": "neither packed .* nor in rows .*have other logprobs than each alone",
}


def loaded(name: str, folder: Path, **options: Any) -> Policy:
    families.make(name).save_pretrained(folder)
    options = {"trainable": True, "max_length": families.CONTEXT, **options}
    return load_policy(ModelConfig(name=str(folder)), **options)


@pytest.mark.parametrize("name", PACKED)
def test_families_that_attend_as_plans_say_are_packed(name, tmp_path) -> None:
    outcome = families.examine(name, tmp_path)
    assert outcome.trains == "packed", outcome.reason
    assert outcome.samples != "wrong", outcome.reason


@pytest.mark.parametrize("name", ROWS)
def test_what_passes_beside_attention_goes_in_rows(name, tmp_path) -> None:
    outcome = families.examine(name, tmp_path)
    assert outcome.trains == "rows", outcome.reason
    assert re.search(ROWS[name], outcome.reason), outcome.reason


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_would_be_wrong_are_refused(name, tmp_path) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        loaded(name, tmp_path)


def test_one_line_says_which_way_a_model_goes(tmp_path, caplog) -> None:
    caplog.set_level("INFO", logger="pellucid.model")
    loaded("gemma3_text", tmp_path / "windows")
    loaded("lfm2", tmp_path / "states")
    loaded("llama with longrope RoPE", tmp_path / "lengths")
    windows, states, lengths, _ = caplog.messages
    assert windows == ("Gemma3ForCausalLM: sequences are packed; 2 of 4 layers have a window of 20 tokens")
    assert states.startswith("Lfm2ForCausalLM: sequences go in rows, not packed (layer 0 (Lfm2ShortConv")
    assert "longrope uses its long factors for sequences of all lengths: the longest may have 128" in lengths


def test_the_user_chooses(tmp_path) -> None:
    assert loaded("llama", tmp_path, layout="rows").way == "rows"
    assert loaded("llama", tmp_path, layout="packed").way == "packed"
    with pytest.raises(ConfigError, match='layout = "packed", but .* cannot .* layer 0 .*; set it to "auto"'):
        loaded("jamba", tmp_path / "other", layout="packed")


def test_windows_are_those_of_the_masks(tmp_path) -> None:
    assert loaded("gemma3_text", tmp_path / "a").windows == {0: 20, 2: 20}
    assert loaded("phimoe", tmp_path / "b").windows == dict.fromkeys(range(4), 20)  # in its masks alone
    assert loaded("llama", tmp_path / "c").windows == {}


def saved(name: str, folder: Path) -> ModelConfig:
    families.make(name).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return ModelConfig(name=str(folder), dtype="bfloat16")


@torch.no_grad()
def test_longrope_is_fixed_by_the_longest_sequence(tmp_path) -> None:
    """So that a token's logprob depends neither on its neighbours in the row nor on what comes after it."""
    name = "llama with longrope RoPE"
    short, long = (loaded(name, tmp_path / str(limit), max_length=limit) for limit in (32, 33))
    tokens = families.sequences()[3]
    model = families.make(name)
    assert (
        float((families.computed(short, [tokens])[0] - families.alone(model, tokens)).abs().max())
        < families.RIGHT
    )
    own = families.computed(long, [tokens])[0]
    assert float((own - families.alone(model, tokens)).abs().max()) > families.RIGHT
    together = families.computed(long, [tokens, families.sequences()[0]])[0]
    assert float((own - together).abs().max()) < families.RIGHT
    long_alone = families.alone(model, families.sequences()[0])
    found = families.computed(long, [families.sequences()[0]])[0]
    assert float((found - long_alone).abs().max()) < families.RIGHT


class ShiftedMlp(torch.nn.Module):
    """Adds a part of the token before, as layers with a short convolution do; or of the token behind."""

    reach = 1

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp(states) + 0.1 * torch.nn.functional.pad(states, (0, 0, self.reach, -self.reach))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_leak_beside_attention_is_seen_in_any_precision(name, dtype, tmp_path) -> None:
    model = saved(name, tmp_path).model_copy(update={"dtype": dtype})
    policy = load_policy(model, max_length=families.CONTEXT)
    layer = policy.layers[2]
    layer.mlp = ShiftedMlp(layer.mlp)
    prove(policy, families.CONTEXT)
    assert policy.way == "rows"
    assert re.match("packed sequences at the last positions have other logprobs", policy.why_rows)
    layer.mlp.reach = -1  # from the token behind it
    with pytest.raises(ModelError, match="neither packed .* nor in rows .* than each alone"):
        prove(policy, families.CONTEXT)


def test_weights_in_bfloat16_are_left_as_they_are(tmp_path) -> None:
    policy = load_policy(saved("qwen3_moe", tmp_path), max_length=families.CONTEXT)
    before = {name: tensor.clone() for name, tensor in policy.hf.state_dict().items()}
    prove(policy, families.CONTEXT)
    after = policy.hf.state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_failed_proof_leaves_weights_as_they_are(tmp_path) -> None:
    policy = load_policy(saved("llama", tmp_path))

    def fail(*_: object) -> None:
        raise ValueError("broken")

    policy.layers[1].mlp.forward = fail
    with pytest.raises(ModelError, match="takes no packed .*ValueError: broken.* nor in rows .*broken"):
        prove(policy, families.CONTEXT)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}


def trainer_config(folder: Path, model: ModelConfig, seq_len: int) -> TrainerRunConfig:
    settings = {"output_dir": folder / "run", "model": model, "max_steps": 1, "seq_len": seq_len}
    return TrainerRunConfig.model_validate(settings)


def test_a_model_that_was_proven_can_be_let_go(tiny_model) -> None:
    policy = load_policy(ModelConfig(name=str(tiny_model)), max_length=64)
    known = weakref.ref(policy)
    del policy
    gc.collect()
    assert known() is None


def test_a_trainer_and_a_server_hold_their_lengths_to_the_model(tmp_path) -> None:
    model = saved("llama with longrope RoPE", tmp_path)
    with pytest.raises(ModelError, match=r"trainer.model.seq_len = 129 exceeds the context .* 128 tokens"):
        build_run(trainer_config(tmp_path, model, 129), NoBatches(), None, [])
    server = {"output_dir": tmp_path / "run", "model": model, "seq_len": 129}
    with pytest.raises(ModelError, match=r"set inference.max_model_len to at most 128"):
        open_engine(InferenceRunConfig.model_validate(server), character_tokenizer())


def test_layers_without_a_list_are_named(tmp_path) -> None:
    model = families.make("llama")
    model.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match="LlamaForCausalLM has no list of its 5 decoder layers"):
        _ = Policy(model).layers


def test_weights_that_are_not_finite_are_refused_as_such(tmp_path) -> None:
    make_tiny_model(tmp_path, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][0] = math.inf
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match="logits of HF's own forward are not finite, so its weights hold NaN"
    ):
        load_policy(ModelConfig(name=str(tmp_path)))
