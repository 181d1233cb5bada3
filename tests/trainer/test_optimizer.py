import pytest
import torch

from pellucid.config import OptimConfig, SchedulerConfig
from pellucid.errors import DataError
from pellucid.trainer.optimizer import Optimizer, lr_factor


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules(kind, expected) -> None:
    scheduler = SchedulerConfig(type=kind, warmup_steps=2)
    assert [lr_factor(step, scheduler, max_steps=6) for step in range(6)] == pytest.approx(expected)


def test_gradients_are_clipped_and_cleared() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = Optimizer(model, OptimConfig(lr=0.1, max_norm=1.0), SchedulerConfig(), max_steps=1)
    (model.weight * 30).sum().backward()
    assert optimizer.step() == pytest.approx(30.0)
    # AdamW's first step is lr in the direction of the gradient, whatever its size.
    assert model.weight.item() == pytest.approx(before - 0.1, abs=1e-5)
    assert model.weight.grad is None
    assert optimizer.last_lr == 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(bad) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = Optimizer(model, OptimConfig(lr=0.1), SchedulerConfig(), max_steps=1)
    (model.weight * bad).sum().backward()
    with pytest.raises(DataError, match="the gradient norm is (nan|inf); the weights were left as they are"):
        optimizer.step()
    assert model.weight.item() == before
