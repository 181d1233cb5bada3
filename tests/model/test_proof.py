"""Models that would train wrong are refused at load, with the reason; the others are right."""

import gc
import math
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid.config import InferenceRunConfig, ModelConfig, TrainerRunConfig
from pellucid.errors import ModelError
from pellucid.inference.server import open_engine
from pellucid.model import Policy, load_policy
from pellucid.model.proof import prove_attention
from pellucid.model.tiny import character_tokenizer, make_tiny_model
from pellucid.trainer.batches import NoBatches
from pellucid.trainer.build import build_run

sys.path.insert(0, str(Path(__file__).parent))
import families

RIGHT = [
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gpt_neox",
    "deepseek_v3",
    "glm4_moe",
    "mistral without a window",
    "phimoe without a window",
    "llama with yarn RoPE",
    "llama with dynamic RoPE",
]

REFUSED = {
    "qwen3_next": "layer 0 of Qwen3NextForCausalLM .*linear_attn: Qwen3NextGatedDeltaNet.* 0 times",
    "qwen3_5_text": "layer 0 .*GatedDeltaNet.* 0 times",
    "nemotron_h": "layer 0 .* 0 times",
    "jamba": "layer 0 .*mamba: JambaMambaMixer.* 0 times",
    "bamba": "layer 0 .*mamba: BambaMixer.* 0 times",
    "lfm2": "layer 0 .*conv: Lfm2ShortConv.* 0 times",
    "minimax": "layer 0 .* 0 times|sliding_window",
    "falcon_h1": "last positions .* by up to .* nats",
    "bloom": "layer 0 .*self_attention: BloomAttention.* 0 times",
    "xglm": "layer 0 .*self_attn: XGLMAttention.* 0 times",
    "gptj": "attention code of its own",
    "diffllama": "layer 0 .* 2 times",
    "bert": "first positions .* by up to .* nats",
    "gemma2": "scale their logits",
    "gemma3_text": "sliding_window = 20, and sequences may have 128",
    "mistral": "sliding_window = 20, and sequences may have 128",
    "qwen2_moe with a window": "lets a token see 20 tokens at most .* may have 128",
    "phimoe": "lets a token see 20 tokens at most .* may have 128",
    "llama with longrope RoPE": "inv_freq depends on the length of the row .*original_max_position",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_families_are_taken(name, tmp_path) -> None:
    outcome = families.examine(name, tmp_path)
    assert outcome.verdict == "right", outcome.reason


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_would_be_wrong_are_refused(name, tmp_path) -> None:
    families.make(name).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=REFUSED[name]):
        load_policy(ModelConfig(name=str(tmp_path)), trainable=True, max_length=families.CONTEXT)


def saved(name: str, folder: Path) -> ModelConfig:
    families.make(name).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return ModelConfig(name=str(folder), dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "limit", "complaint"),
    [
        ("mistral", families.WINDOW, "sliding_window = 20, and sequences may have 21"),
        ("qwen2_moe with a window", families.WINDOW, "see 20 tokens at most .* may have 21"),
        ("llama with longrope RoPE", 32, "depends on the length of the row"),
        ("llama with dynamic RoPE", families.CONTEXT, "exceeds the context of the model"),
    ],
)
def test_what_shows_in_long_sequences_alone_is_taken_up_to_there(name, limit, complaint, tmp_path) -> None:
    model = saved(name, tmp_path)
    load_policy(model, trainable=True, max_length=limit)
    with pytest.raises(ModelError, match=complaint):
        load_policy(model, trainable=True, max_length=limit + 1)


class ShiftedMlp(torch.nn.Module):
    """Adds a part of the token before, as layers with a short convolution do."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp(states) + 0.1 * torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_leak_beside_attention_is_seen_in_any_precision(name, dtype, tmp_path) -> None:
    model = saved(name, tmp_path).model_copy(update={"dtype": dtype})
    policy = load_policy(model, max_length=families.CONTEXT)
    layer = policy.layers[2]
    layer.mlp = ShiftedMlp(layer.mlp)
    with pytest.raises(ModelError, match="last positions .* something besides attention"):
        prove_attention(policy, families.CONTEXT)


def test_weights_in_bfloat16_are_left_as_they_are(tmp_path) -> None:
    policy = load_policy(saved("qwen3_moe", tmp_path), max_length=families.CONTEXT)
    before = {name: tensor.clone() for name, tensor in policy.hf.state_dict().items()}
    prove_attention(policy, families.CONTEXT)
    after = policy.hf.state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_failed_proof_leaves_weights_as_they_are(tmp_path) -> None:
    policy = load_policy(saved("llama", tmp_path))

    def fail(*_: object) -> None:
        raise ValueError("broken")

    policy.layers[1].mlp.forward = fail
    with pytest.raises(ModelError, match="does not compute packed sequences .ValueError: broken"):
        prove_attention(policy, families.CONTEXT)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}


def test_a_sequence_beyond_the_window_is_refused_by_the_forward_itself(tmp_path) -> None:
    families.make("mistral").save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path)))
    short, long = torch.arange(5, 25), torch.arange(5, 26)
    policy.hf.set_attn_implementation("eager")
    expected = families.alone(policy.hf, short)
    policy.hf.set_attn_implementation("pellucid")
    assert float((families.packed(policy, [short, short])[1] - expected).abs().max()) < families.RIGHT
    with pytest.raises(ModelError, match="sliding_window = 20, and sequences may have 21"):
        families.packed(policy, [short, long])


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
    with pytest.raises(ModelError, match="depends on the length of the row"):
        build_run(trainer_config(tmp_path, model, 128), NoBatches(), None, [])
    server = {"output_dir": tmp_path / "run", "model": model, "seq_len": 129}
    with pytest.raises(ModelError, match=r"set inference.max_model_len to at most 128"):
        open_engine(InferenceRunConfig.model_validate(server), character_tokenizer())
    server["seq_len"] = 128
    with pytest.raises(ModelError, match="depends on the length of the row"):
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
