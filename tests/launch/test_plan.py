"""`pellucid plan`: from a config.json to a table, for shapes of 8B, 70B and experts; weights are nowhere."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from pellucid.cli import main
from pellucid.config.shared import LoraConfig
from pellucid.config.tools import PlanConfig
from pellucid.errors import ConfigError
from pellucid.launch.plan import (
    divisions,
    find_remedies,
    plan,
    publish_bytes,
    settings_of,
    size_of,
    trainer_of,
    workload,
)

LLAMA_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
QWEN_30B_A3B = Qwen3MoeConfig(
    vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    tie_word_embeddings=False,
)  # fmt: skip


PAIRS = {"backend": "vllm", "vllm": {"tensor_parallel_size": 2}}


def config(**changes) -> PlanConfig:
    values = {
        "model": {"name": "some/model"},
        "seq_len": 8192,
        "orchestrator": {
            "env": [{"id": "reverse-text"}],
            "batch_size": 512,
            "sampling": {"max_tokens": 4096},
        },
        "inference": {"max_concurrent": 256},
    }
    return PlanConfig.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def llama():
    return size_of(LLAMA_8B)


def test_shapes_are_read_from_a_configuration_alone(llama) -> None:
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    assert llama.num_params == 32 * layer + 2 * 128_256 * 4096 + 4096 == 8_030_261_248
    assert (llama.largest_layer, llama.num_outside) == (layer, 2 * 128_256 * 4096 + 4096)
    assert llama.num_active == 32 * (layer - 2 * 4096) + 128_256 * 4096
    assert llama.kv_numbers == 2 * 32 * 8 * 128
    assert (llama.query_width, llama.kv_width, llama.mlp_width) == (4096, 1024, 14_336)


def test_experts_and_adapters() -> None:
    sparse = size_of(QWEN_30B_A3B)
    assert (sparse.num_params, sparse.num_active) == (30_532_122_624, 3_041_656_832)
    assert (sparse.mlp_width, sparse.num_experts, sparse.top_k, sparse.norms_heads) == (6144, 128, 8, True)
    adapted = size_of(LLAMA_8B, LoraConfig(rank=16))
    per_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336)
    assert adapted.num_adapter == 32 * 16 * per_layer


def test_a_workload_comes_from_the_settings_and_flags() -> None:
    work = workload(config(prompt_tokens=600))
    assert (work.num_groups, work.group_size, work.prompt, work.completion) == (64, 8, 600, 2048)
    assert work.longest == 600 + 4096
    tokens = {"env": [{"id": "reverse-text"}], "token_batch_size": 100_000, "sampling": {"max_tokens": 4096}}
    assert workload(config(orchestrator=tokens, completion_tokens=488)).num_rollouts == 104
    with pytest.raises(
        ConfigError, match="prompt_tokens = 512 \\+ completion_tokens = 5000 exceeds the longest"
    ):
        workload(config(completion_tokens=5000))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"gpus": 4}, [(1, 3, 0), (2, 2, 0), (3, 1, 0)]),
        ({"gpus": {"total": 8, "trainer": 6}}, [(6, 2, 0)]),
        ({"gpus": {"total": 8, "trainer": 6, "inference": 1}}, [(6, 1, 0)]),
        ({"gpus": 4, "trainer": {"model": {"cp": 2}}}, [(2, 2, 0)]),
        ({"gpus": 24}, [(8, 16, 0), (16, 8, 0)]),
        ({"gpus": 4, "inference": PAIRS}, [(1, 2, 0), (2, 2, 0)]),
    ],
)
def test_gpus_are_divided_by_whole_machines_where_there_are_several(changes, found) -> None:
    assert list(divisions(config(**changes))) == found


def test_the_division_with_the_shortest_step_is_taken(llama) -> None:
    again = {"model": {"activation_checkpointing": True}}
    run = config(gpus=64, trainer=again)
    best = plan(run, llama)
    assert best.fits
    assert best.trainer_gpus + best.inference_gpus == 64
    others = [
        plan(config(gpus={"total": 64, "trainer": trainer}, trainer=again), llama)
        for trainer in range(8, 64, 8)
    ]
    assert best.step_s == min(each.step_s for each in others if each.fits)
    nodes = best.trainer_gpus // 8
    assert settings_of(run, best) == {
        "cluster.trainer_nodes": nodes,
        "cluster.inference_nodes": 8 - nodes,
        "cluster.gpus_per_node": 8,
    }


def test_what_does_not_fit_comes_with_the_keys_to_change(llama) -> None:
    run = config(gpus={"total": 8, "trainer": 4})
    estimate = plan(run, llama)
    assert not estimate.trainer_fits
    first, *_ = remedies = list(find_remedies(run, llama, estimate))
    assert (first.key, first.value) == ("trainer.model.activation_checkpointing", True)
    assert remedies[-1].peak_gb * 1e9 <= estimate.memory_limit
    changed = config(gpus={"total": 8, "trainer": 4}, trainer={"model": {"activation_checkpointing": True}})
    assert plan(changed, llama).peak / 1e9 == pytest.approx(first.peak_gb)


@pytest.mark.parametrize(
    ("gpu", "trainer", "is_once"),
    [
        ("b200", {}, False),  # 4 × 8.03 GB of 191.5
        ("mine", {}, True),
        ("mine", {"model": {"reduce_gradients": "micro_batch"}}, False),
        ("b200", {"model": {"reduce_gradients": "step"}}, True),
    ],
)
def test_the_gpu_decides_how_large_chunks_are_and_when_gradients_are_reduced(
    llama, gpu, trainer, is_once
) -> None:
    """`mine` has 10 × 4 bytes per parameter; the head's chunks have a 128th of the memory's bytes."""
    figures = {"gpu_memory_gb": 321.3, "gpu_tflops": 1, "gpu_memory_gb_s": 1, "gpu_link_gb_s": 1}
    run = config(gpus=8, gpu=gpu, trainer=trainer, **(figures if gpu == "mine" else {}))
    planned = trainer_of(run, llama, 4)
    assert planned.reduces_once == is_once
    assert planned.max_logits == int(run.gpu_model.memory_gb * 1e9 / 128)
    assert not trainer_of(run, llama, 1).reduces_once  # which has nothing to reduce
    barely = replace(llama, num_params=8_032_500_001)
    assert trainer_of(run, barely, 4).reduces_once == (is_once and bool(trainer))


def test_published_weights_have_the_dtype_of_the_forward_pass(llama) -> None:
    exact = {"model": {"precision": "float32"}}
    found = [
        publish_bytes(config(trainer=trainer))
        for trainer in ({}, exact, {"publish_dtype": "float32"}, {**exact, "publish_dtype": "bfloat16"})
    ]
    assert found == [2, 4, 4, 2]
    assert trainer_of(config(trainer=exact), llama, 4).compute_bytes == 4


def test_whole_gradients_are_the_first_to_go(llama) -> None:
    again = {"activation_checkpointing": True, "reduce_gradients": "step"}
    run = config(gpus={"total": 8, "trainer": 4}, gpu="a100-40", trainer={"model": again})
    estimate = plan(run, llama)
    assert not estimate.trainer_fits
    first, *_ = find_remedies(run, llama, estimate)
    assert (first.key, first.value) == ("trainer.model.reduce_gradients", "micro_batch")
    assert estimate.peak / 1e9 - first.peak_gb == pytest.approx(4 * llama.num_params * 3 / 4 / 1e9)


def test_a_server_that_is_too_small_needs_more_gpus(llama) -> None:
    run = config(gpus=8, gpu="l4", gpu_memory_gb=18)
    estimate = plan(run, llama)
    assert not estimate.serving.concurrency
    remedies = list(find_remedies(run, llama, estimate))
    assert (remedies[-1].key, remedies[-1].value) == ("inference.vllm.tensor_parallel_size", 2)


def test_ranks_of_a_server_are_planned_like_as_many_servers(llama) -> None:
    """A server of four GPUs with two ranks of 128 sequences, and two servers of two GPUs with 128 each."""
    divided = {"gpus": {"total": 8, "trainer": 4, "inference": 4}, "gpu": "h100"}
    one = {**PAIRS, "max_concurrent": 256, "vllm": {"tensor_parallel_size": 2, "data_parallel_size": 2}}
    ranks = plan(config(inference=one, **divided), llama)
    servers = plan(config(inference={**PAIRS, "max_concurrent": 128}, **divided), llama)
    assert (ranks.num_servers, servers.num_servers) == (1, 2)
    assert (ranks.serving, ranks.sampling_s) == (servers.serving, servers.sampling_s)


def test_gpus_of_another_kind_need_their_figures() -> None:
    with pytest.raises(
        ValueError, match="gpu = 'mine' is not known; choose one of a100-40, .* gpu_memory_gb"
    ):
        config(gpu="mine")
    own = config(gpu="mine", gpu_memory_gb=10, gpu_tflops=20, gpu_memory_gb_s=30, gpu_link_gb_s=40).gpu_model
    assert (own.memory_gb, own.tflops, own.memory_gb_s, own.link_gb_s) == (10, 20, 30, 40)
    assert config(gpu_memory_gb=40).gpu_model.tflops == 989


def test_the_command_needs_no_weights_and_tells_by_its_exit_code(tmp_path, capsys) -> None:
    LLAMA_8B.save_pretrained(tmp_path)
    words = [
        "plan",
        "--model.name",
        str(tmp_path / "config.json"),
        "--gpus",
        "8",
        "--gpu",
        "h100",
        "--no-trace",
    ]
    assert main([*words, "--json", "--trainer.model.activation-checkpointing"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["num_params"] == 8_030_261_248
    assert report["estimate"]["fits"] and report["estimate"]["peak_from"] == "trace = false"
    assert set(report["settings"]) == {"gpus.trainer", "gpus.inference"}
    assert main([*words, "--gpu-memory-gb", "18"]) == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed and "inference.vllm.tensor_parallel_size = " in printed
