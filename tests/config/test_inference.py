"""`[inference]`, and what has to agree with it."""

from typing import Any

import pytest
from pydantic import ValidationError

from pellucid.config import InferenceConfig, RLConfig

TEACHER = {"model": "some/teacher", "mode": "opd"}


def rl_config(*, temperature: float = 1.0, **changes: Any) -> RLConfig:
    own = {"env": [{"id": "reverse-text"}], "sampling": {"temperature": temperature}}
    return RLConfig.model_validate(
        {
            "model": {"name": "some/model"},
            "inference": {"backend": "vllm"},
            **changes,
            "orchestrator": {**own, **changes.get("orchestrator", {})},
        }
    )


def test_settings_of_vllm_need_vllm() -> None:
    assert InferenceConfig(backend="vllm", vllm={"enforce_eager": True}).vllm.enforce_eager
    with pytest.raises(ValidationError, match='inference.vllm is for inference.backend = "vllm"'):
        InferenceConfig(vllm={"enforce_eager": True})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"orchestrator": {"teacher": TEACHER}, "temperature": 0.7},
            "temperature = 0.7 with a teacher on vLLM",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused(changes, reason) -> None:
    with pytest.raises(ValidationError, match=reason):
        rl_config(**changes)


def test_gpus_of_a_server_are_those_of_all_its_ranks() -> None:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 4}
    found = InferenceConfig(backend="vllm", vllm=sizes)
    assert (found.gpus_per_rank, found.ranks_per_server, found.gpus_per_server) == (2, 4, 8)
    assert found.server_size == (
        "inference.vllm.tensor_parallel_size = 2 × inference.vllm.data_parallel_size = 4"
    )
    with pytest.raises(
        ValidationError, match=r"gpus.inference = 12 is no multiple of .* = 4, the GPUs of one"
    ):
        rl_config(inference={"backend": "vllm", "vllm": sizes}, gpus={"trainer": 4, "inference": 12})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": {"transfer": "nccl"}}, 'with weights.transport = "filesystem": the trainer is asked'),
        ({"inference": {"backend": "embedded"}}, 'is for vLLM, and inference.backend = "embedded"'),
        ({"model": {"name": "m", "lora": {}}}, "vLLM reads adapters from files"),
        (
            {
                "weights": {"transport": "http", "transfer": "ipc"},
                "inference": {"backend": "vllm", "vllm": {"data_parallel_size": 2}},
            },
            "is for one GPU that trainer and server share, and a server has",
        ),
    ],
)
def test_a_transfer_from_gpu_to_gpu_needs_vllm_and_a_trainer_that_listens(changes, reason) -> None:
    weights = {"transport": "http", "transfer": "nccl"}
    assert rl_config(weights=weights).weights.transfer == "nccl"
    with pytest.raises(ValidationError, match=reason):
        rl_config(**{"weights": weights, **changes})


def test_a_teacher_at_temperature_1_or_that_only_samples_is_fine() -> None:
    rl_config(orchestrator={"teacher": TEACHER})
    rl_config(orchestrator={"teacher": {**TEACHER, "mode": "sft"}}, temperature=0.7)
