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


def test_a_teacher_at_temperature_1_or_that_only_samples_is_fine() -> None:
    rl_config(orchestrator={"teacher": TEACHER})
    rl_config(orchestrator={"teacher": {**TEACHER, "mode": "sft"}}, temperature=0.7)
