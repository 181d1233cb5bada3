"""`trainer.enable_router_replay`, and what has to agree with it."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from pellucid.config import InferenceRunConfig, RLConfig, SFTConfig, TrainerConfig
from pellucid.errors import ModelError
from pellucid.launch.preflight import check_rl, resolve
from pellucid.launch.rl import parts

TEACHER = {"model": "some/teacher", "mode": "sft"}


def rl_config(*, replay: bool, teacher: Any = None, model: str = "some/model", **inference: Any) -> RLConfig:
    return RLConfig.model_validate(
        {
            "model": {"name": model},
            "orchestrator": {"env": [{"id": "reverse-text"}], "teacher": teacher},
            "trainer": {"enable_router_replay": replay},
            "inference": inference,
        }
    )


def is_recorded(config: RLConfig) -> dict[str, bool | None]:
    """By each server of the run."""
    return {
        name: part.inference.record_experts
        for name, part in parts(resolve(config, 2)).items()
        if isinstance(part, InferenceRunConfig)
    }


def test_the_servers_of_a_run_record_what_its_trainer_replays() -> None:
    assert is_recorded(rl_config(replay=False)) == {"inference": False}
    assert is_recorded(rl_config(replay=True)) == {"inference": True}
    assert is_recorded(rl_config(replay=False, record_experts=True)) == {"inference": True}
    teacher = {**TEACHER, "mode": "opd"}
    assert is_recorded(rl_config(replay=True, teacher=teacher)) == {"inference": True, "teacher": False}


def test_weights_of_experts_are_recorded_where_the_trainer_replays_them() -> None:
    wanted = rl_config(replay=True)
    trainer = wanted.trainer.model_copy(update={"replay_expert_weights": True})
    servers = parts(resolve(wanted.model_copy(update={"trainer": trainer}), 2))
    server = servers["inference"]
    assert isinstance(server, InferenceRunConfig)
    assert server.inference.record_experts and server.inference.record_expert_weights
    plain = parts(resolve(wanted, 2))["inference"]
    assert isinstance(plain, InferenceRunConfig) and plain.inference.record_expert_weights is False
    with pytest.raises(ValidationError, match="vLLM tells which experts it sent tokens to, not how it we"):
        rl_config(replay=True, record_expert_weights=True, backend="vllm")
    with pytest.raises(ValidationError, match="record_experts = false contradicts inference.record_expert_w"):
        rl_config(replay=False, record_experts=False, record_expert_weights=True)
    with pytest.raises(ValidationError, match="weighs the experts that trainer.enable_router_replay sends"):
        TrainerConfig.model_validate({"replay_expert_weights": True})
    settings = rl_config(replay=True).model_dump()
    settings["trainer"]["replay_expert_weights"] = True
    settings["inference"]["backend"] = "vllm"
    with pytest.raises(ValidationError, match="which tells experts without their weights"):
        RLConfig.model_validate(settings)


def test_settings_that_contradict_it_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"inference\.record_experts = false contradicts trainer\.ena"):
        rl_config(replay=True, record_experts=False)
    with pytest.raises(ValidationError, match="the experts of the teacher, not of the policy"):
        rl_config(replay=True, teacher=TEACHER)
    with pytest.raises(ValidationError, match=r"nothing to replay on trainer\.data\.fake"):
        TrainerConfig.model_validate({"enable_router_replay": True, "data": {"fake": {}}})
    with pytest.raises(ValidationError, match="sft has no engine's experts to replay"):
        SFTConfig.model_validate(
            {
                "model": {"name": "m"},
                "data": {"path": "data.jsonl"},
                "trainer": {"enable_router_replay": True},
            }
        )


def test_a_model_without_experts_is_refused_before_anything_is_started(tiny_model, tiny_moe) -> None:
    check_rl(rl_config(replay=True, model=str(tiny_moe)))
    check_rl(rl_config(replay=False, model=str(tiny_model)))
    reason = f"but model.name = '{tiny_model}' has no experts in its config.json"
    with pytest.raises(ModelError, match=re.escape(reason)):
        check_rl(rl_config(replay=True, model=str(tiny_model)))
