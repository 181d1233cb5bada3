"""What vLLM is started with."""

import pytest

from pellucid.config import InferenceRunConfig
from pellucid.errors import ConfigError
from pellucid.inference.server import open_engine
from pellucid.inference.vllm_engine import engine_args, max_lora_rank


def config(model=None, **vllm) -> InferenceRunConfig:
    return InferenceRunConfig.model_validate(
        {
            "model": {"name": "some/model", **(model or {})},
            "seed": 3,
            "seq_len": 512,
            "inference": {"backend": "vllm", "max_concurrent": 24, "replica": 1, "vllm": vllm},
        }
    )


def test_training_can_trust_the_logprobs_and_the_versions() -> None:
    args = engine_args(config(), dtype="bfloat16", on_cpu=False)
    assert args["logprobs_mode"] == "processed_logprobs", "after the temperature"
    assert args["async_scheduling"] is False, "a swap lies between two steps"
    assert args["generation_config"] == "vllm", "no sampling defaults of the model's own"
    assert (args["model"], args["dtype"], args["max_model_len"]) == ("some/model", "bfloat16", 512)
    assert args["max_num_seqs"] == 24 + 8
    assert args["seed"] == 4, "servers of one run draw differently"
    assert "kv_cache_memory_bytes" not in args and "enable_lora" not in args
    assert (args["enforce_eager"], args["gpu_memory_utilization"]) == (False, 0.9)


def test_a_cpu_has_its_own_defaults() -> None:
    args = engine_args(config(), dtype="float32", on_cpu=True)
    assert (args["enforce_eager"], args["kv_cache_memory_bytes"]) == (True, 1 << 30)
    own = config(enforce_eager=False, kv_cache_bytes=4096, tensor_parallel_size=2)
    args = engine_args(own, dtype="float32", on_cpu=True)
    assert (args["enforce_eager"], args["kv_cache_memory_bytes"]) == (False, 4096)
    assert args["tensor_parallel_size"] == 2


def test_an_adapter_is_given_the_least_room_that_vllm_offers() -> None:
    args = engine_args(config({"lora": {"rank": 12}}), dtype="float32", on_cpu=True)
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 16)
    assert [max_lora_rank(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    with pytest.raises(ConfigError, match="model.lora.rank = 513 exceeds 512"):
        max_lora_rank(513)


def test_further_arguments_are_passed_on_unless_they_follow_from_settings() -> None:
    args = engine_args(config(args={"block_size": 32}), dtype="float32", on_cpu=True)
    assert args["block_size"] == 32
    for name in ("logprobs_mode", "enable_lora", "kv_cache_memory_bytes"):
        with pytest.raises(ConfigError, match=rf"inference.vllm.args.{name} follows from other settings"):
            engine_args(config(args={name: True}), dtype="float32", on_cpu=False)


def test_without_vllm_it_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed here; `make vllm` makes an environment"):
        open_engine(config(), tokenizer=None)
