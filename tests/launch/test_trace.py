"""The trainer's memory: formulas, torch's tracker on fake tensors, and what real processes allocate."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

import processes
import warm
from pellucid.config import TrainerConfig
from pellucid.launch import estimate, trace
from pellucid.launch.estimate import PlannedTrainer, trainer_memory
from pellucid.launch.plan import size_of
from pellucid.launch.trace import trace_trainer
from pellucid.model import head
from pellucid.model.tiny import character_tokenizer, make_tiny_model

WITHIN = 0.1
"""Share by which formulas, tracker and real runs may differ: what docs/sizing.md says of them."""

LLAMA = LlamaConfig(
    vocab_size=8000, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
QWEN = Qwen3Config(
    vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
UNTIED = Qwen3Config(
    vocab_size=8000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
"""A model whose head has more weights than two of its layers."""


def predictions(
    hf_config, num_processes: int, tokens: int, *, bf16: bool, max_logits: int = head.MAX_LOGITS, **model
) -> tuple[float, float]:
    """(by formula, by torch's tracker), which knows nothing of gradients that stay whole."""
    settings = TrainerConfig.model_validate({"model": {"seq_len": tokens, **model}})
    mesh = settings.model
    trainer = PlannedTrainer(
        num_processes,
        mesh.dp_replicate,
        mesh.cp,
        tokens,
        mesh.activation_checkpointing,
        estimate.BFLOAT16 if bf16 else estimate.FLOAT32,
        is_sharded=bf16 or num_processes > 1,
        max_logits=max_logits,
        reduces_once=num_processes > 1 and mesh.reduce_gradients == "step",
    )
    traced = trace_trainer(
        hf_config, settings, num_processes, tokens=tokens, in_bfloat16=bf16, max_logits=max_logits
    )
    size = size_of(hf_config)
    peak = trainer_memory(size, trainer).peak
    whole = peak - trainer_memory(size, replace(trainer, reduces_once=False)).peak
    return peak, traced.peak + whole


def test_the_head_computes_as_many_logits_at_a_time_as_the_formula_says() -> None:
    assert estimate.MAX_LOGITS == head.MAX_LOGITS
    assert estimate.LOGIT_BYTES == head._LOGIT_BYTES
    assert estimate.LOGIT_SHARE == head._MEMORY_SHARE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hf_config", "num_processes", "model"),
    [
        (LLAMA, 8, {}),
        (LLAMA, 8, {"max_logits": 1 << 20, "activation_checkpointing": True}),
        (LLAMA, 8, {"max_logits": 1 << 22, "activation_checkpointing": True}),
        (QWEN, 256, {"activation_checkpointing": True}),
        (QWEN, 64, {"dp_replicate": 8, "cp": 2}),
    ],
)
def test_formulas_are_held_to_the_tracker(hf_config, num_processes, model) -> None:
    by_formula, traced = predictions(hf_config, num_processes, 1024, bf16=True, **model)
    assert by_formula == pytest.approx(traced, rel=WITHIN)


@pytest.mark.slow
def test_a_line_through_two_depths_leads_to_the_third() -> None:
    """With few tokens and words, layers in flight are most of the memory."""
    deep = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4
    )
    settings = TrainerConfig.model_validate({"model": {"seq_len": 16, "activation_checkpointing": True}})
    followed = trace_trainer(deep, settings, 4, tokens=16)
    assert followed.peak == pytest.approx(trace._trace(deep, settings, 4, 16, True, 1 << 24).peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_real_processes_allocate_what_is_predicted(tmp_path, num_processes) -> None:
    """Bytes of tensors by the allocator's own events, in float32 on the CPU; not those of the process.

    All processes do the same work, so the least of them counts; the others have buffers of gloo that are not
    freed yet.
    """
    tokens, models = 512, tmp_path / "models"
    make_tiny_model(models / "tied", hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2)
    Qwen3ForCausalLM(UNTIED).save_pretrained(models / "untied")
    character_tokenizer().save_pretrained(models / "untied")
    cases = {
        1: [("tied", False, "auto"), ("untied", True, "auto")],
        2: [("tied", False, "micro_batch"), ("untied", True, "step")],
        4: [("tied", True, "micro_batch"), ("untied", False, "step")],
    }[num_processes]
    jobs = {
        f"{model} {again} {reduced}": (
            "memory",
            {"activation_checkpointing": again, "reduce_gradients": reduced},
            tokens,
            model,
        )
        for model, again, reduced in cases
    }
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    folder = processes.__file__.rpartition("/")[0]
    ended = warm.run([str(tmp_path), str(num_processes)], module="processes", cwd=folder)
    assert ended.returncode == 0, ended.stderr[-5000:]
    measured = json.loads((tmp_path / "results.json").read_text())
    for name, (_, mesh, _, model) in jobs.items():
        hf_config = AutoConfig.from_pretrained(models / model)
        expected = predictions(hf_config, num_processes, tokens, bf16=False, **mesh)
        assert expected == pytest.approx((min(measured[name]),) * 2, rel=WITHIN), name
