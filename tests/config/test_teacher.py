"""`[orchestrator.teacher]`, and what has to agree with it."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from pellucid.config import OrchestratorRunConfig, RLConfig

TEACHER = {"model": "some/teacher"}


def rl_config(teacher: Any, loss: Any = None, **own: Any) -> RLConfig:
    trainer = {} if loss is None else {"loss": loss}
    orchestrator = {"env": [{"id": "reverse-text"}], **({"teacher": teacher} if teacher else {}), **own}
    return RLConfig.model_validate(
        {"model": {"name": "some/model"}, "orchestrator": orchestrator, "trainer": trainer}
    )


@pytest.mark.parametrize(
    ("teacher", "loss", "reason"),
    [
        ({"port": 8001}, None, "has neither model nor servers"),
        ({"mode": "sft"}, None, "has neither model nor servers"),
        ({**TEACHER, "servers": ["http://t:1"]}, None, "has both model and servers"),
        (
            {**TEACHER, "key_file": "k"},
            None,
            "key_file = 'k' is for orchestrator.teacher.servers; `pellucid rl`",
        ),
        ({"servers": ["t:1"]}, None, "is not the address of a server; write it as http://host:port"),
        ({"servers": ["http://t:1/v1"]}, None, "is not the address of a server"),
        ({**TEACHER, "mode": "rl"}, None, "teacher_tau = 0: the teacher would change nothing"),
        (
            {**TEACHER, "mode": "rl"},
            {"type": "dppo", "adv_tau": 2.0},
            "teacher_tau = 0: the teacher would change nothing",
        ),
        (None, {"type": "dppo", "teacher_tau": 0.5}, "weighs the logprobs of a teacher, but there is none"),
        (TEACHER, {"type": "dppo", "teacher_tau": 0.5}, 'mode = "opd" has a loss of its own'),
        ({**TEACHER, "mode": "sft"}, {"type": "custom", "import_path": "a:b"}, "has a loss of its own"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(teacher: Any, loss: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        rl_config(teacher, loss)


@pytest.mark.parametrize(
    ("teacher", "complaint"),
    [
        (
            {"servers": ["http://127.0.0.1:8000"]},
            "orchestrator.teacher.servers has http://127.0.0.1:8000, and so has the policy (inference.host "
            "and inference.port), whose servers are given new weights; start a server for each",
        ),
        ({**TEACHER, "port": 8000}, "orchestrator.teacher.port = 8000 is the port of the policy's server"),
    ],
)
def test_a_teacher_at_the_address_of_the_only_policy_server_is_refused(teacher: Any, complaint: str) -> None:
    config = {
        "model": {"name": "some/model"},
        "inference": {"port": 8000},
        "orchestrator": {"env": [{"id": "reverse-text"}], "teacher": teacher},
    }
    with pytest.raises(ValidationError, match=re.escape(complaint)):
        OrchestratorRunConfig.model_validate(config)


def test_a_server_cannot_be_both_policy_and_teacher() -> None:
    with pytest.raises(ValidationError, match="has http://t:1, and so has the policy"):
        OrchestratorRunConfig.model_validate(
            {
                "model": {"name": "some/model"},
                "inference": {"servers": ["http://p:1", "http://t:1"]},
                "orchestrator": {
                    "env": [{"id": "reverse-text"}],
                    "teacher": {"servers": ["http://t:1"]},
                },
            }
        )


def test_with_a_teacher_zero_advantages_carry_a_signal() -> None:
    """Groups of one have no other advantage, and are the natural thing to distil from."""
    config = rl_config(TEACHER, rollouts_per_example=1).orchestrator
    assert config.filter_zero_advantages and not config.drops_zero_advantages
    assert rl_config({**TEACHER, "mode": "rl"}, {"type": "dppo", "teacher_tau": 1.0}).orchestrator.teacher
    assert rl_config({**TEACHER, "mode": "rl"}, {"type": "custom", "import_path": "a:b"})
