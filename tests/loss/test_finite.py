"""No loss lets what is not trainable into the loss or the gradient, and none overflows on legal samples."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pellucid.config import LossConfig
from pellucid.data import TrainingSample
from pellucid.data.table import TokenTable
from pellucid.data.tensors import to_tensors
from pellucid.errors import DataError
from pellucid.loss import LossInputs, LossRecord, Ratios, loss_for

SPECIAL = (math.nan, math.inf, -math.inf, -120.0, float(np.finfo(np.float32).max))
NUMBERS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
LOGPROBS = st.floats(-44, 0, width=32)
LARGEST = float(np.float32(1e19))
ADVANTAGES = st.floats(-LARGEST, LARGEST, width=32)
TEACHERS = st.floats(-9998, 0, width=32)


def careless_loss(inputs: LossInputs) -> LossRecord:
    """A custom loss that looks at no mask: r·A·log π, with what the sequence's ratio is on average."""
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    mean = inputs.mean_per_sequence(inputs.ratios.log_importance_ratio)
    return LossRecord(-ratio * inputs.advantages - mean * inputs.trainer_logprobs, inputs.ratios)


KINDS: dict[str, dict[str, Any]] = {
    "dppo": {"kl_tau": 0.5},
    "dppo with a teacher": {"type": "dppo", "teacher_tau": 1.0},
    "ppo_clip": {"kl_tau": 0.5},
    "cispo": {"kl_tau": 0.5},
    "gspo": {"kl_tau": 0.5, "clip_high": 1e30},
    "icepop": {"kl_tau": 0.5},
    "tis": {"kl_tau": 0.5},
    "custom": {"import_path": "test_finite:careless_loss"},
    "opd": {"type": "dppo"},
    "sft": {"type": "dppo"},
}


@pytest.fixture(autouse=True, scope="module")
def importable():
    before = sys.modules.get("test_finite")
    sys.modules["test_finite"] = sys.modules[__name__]
    yield
    if before is None:
        del sys.modules["test_finite"]


def loss_of(kind: str, columns: dict[str, torch.Tensor]) -> tuple[LossRecord, torch.Tensor]:
    """The record, and the gradient of its sum by the trainer's logprobs."""
    config = TypeAdapter(LossConfig).validate_python({"type": kind} | KINDS[kind])
    loss = loss_for(config)[kind if kind in ("opd", "sft") else "rl"]
    logprobs = columns["trainer_logprobs"].clone().requires_grad_()
    inference = columns["inference_logprobs"]
    record = loss(
        LossInputs(
            logprobs,
            inference,
            columns["advantages"],
            columns["loss_mask"],
            columns.get("teacher_logprobs"),
            Ratios.of(logprobs, inference),
            [2, len(logprobs) - 2],
        )
    )
    record.token_loss.sum().backward()
    assert logprobs.grad is not None
    return record, logprobs.grad


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_stands_on_untrainable_tokens_changes_nothing(kind, data) -> None:
    """To the last bit: the trainable tokens' losses and the whole gradient."""
    mask = torch.tensor([False, *data.draw(st.lists(st.booleans(), min_size=5, max_size=5))])
    columns = {
        "trainer_logprobs": tensor([-1.0, -0.5, -2.0, -1.5, -0.1, -3.0]),
        "inference_logprobs": tensor([-1.0, -0.7, -1.0, -1.5, -0.2, -2.5]),
        "advantages": tensor([1.0, -1.0, 0.5, 2.0, -0.3, 1.0]),
        "teacher_logprobs": tensor([-1.0, -2.0, -3.0, -0.5, -0.6, -0.7]),
    }
    other = {
        name: torch.where(mask, values, tensor(data.draw(st.lists(NUMBERS, min_size=6, max_size=6))))
        for name, values in columns.items()
    }
    (own, gradient), (changed, changed_gradient) = (
        loss_of(kind, {**each, "loss_mask": mask}) for each in (columns, other)
    )
    assert torch.equal(changed.token_loss, own.token_loss)
    assert torch.equal(changed_gradient, gradient)
    assert not gradient[~mask].any() and not own.token_loss[~mask].any()
    if own.is_masked is not None:
        assert torch.equal(changed.is_masked, own.is_masked)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(LOGPROBS, ADVANTAGES, TEACHERS), min_size=3, max_size=3),
    st.lists(st.floats(-1000, 0, width=32), min_size=4, max_size=4),
)
def test_legal_samples_have_a_finite_loss_and_gradient(kind, tokens, trainer) -> None:
    """What the rules of samples let in, under any policy: π may be 1 where μ was e⁻⁴⁴."""
    inference, advantages, teacher = (np.array(values, np.float32) for values in zip(*tokens, strict=True))
    sample = TrainingSample.from_turn(
        [5],
        [6, 7, 8],
        inference,
        env_name="a",
        run_id="run",
        advantages=advantages,
        teacher_logprobs=np.array([math.nan, *teacher], np.float32),
    )
    tensors = to_tensors(TokenTable.from_samples([sample]), torch.device("cpu"))
    record, gradient = loss_of(kind, {**tensors.columns, "trainer_logprobs": tensor(trainer)})
    assert record.token_loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("logprob", [-120.0, -9999.0, float(np.finfo(np.float32).min), -math.inf, math.nan])
def test_a_logprob_that_overflows_the_ratio_is_refused_unless_its_token_does_not_train(logprob) -> None:
    def sample(mask):
        return TrainingSample.from_turn(
            [5], [6, 7], [-1.0, logprob], env_name="a", run_id="run", advantage=-1.0, completion_mask=mask
        )

    with pytest.raises(DataError, match="inference_logprobs of token 2 is"):
        sample([True, True])
    table = TokenTable.from_samples([sample([True, False])])
    tensors = to_tensors(table, torch.device("cpu"))
    for kind in KINDS:
        if kind != "opd":
            record, gradient = loss_of(kind, {**tensors.columns, "trainer_logprobs": tensor([-1.0] * 3)})
            assert record.token_loss.isfinite().all() and gradient.isfinite().all()
