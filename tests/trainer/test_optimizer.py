import pytest
import torch

from pellucid.config import OptimConfig, SchedulerConfig
from pellucid.trainer.optimizer import Optimizer, lr_factor
from tolerance import near


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
    update = optimizer.step()
    assert (update.grad_norm, update.lr, update.is_skipped) == (pytest.approx(30.0), 0.1, False)
    # AdamW's first step is lr in the direction of the gradient, whatever its size.
    assert model.weight.item() == near(before - 0.1, terms=8, scale=1.0)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(bad) -> None:
    """The gradient is not, or the loss is not; the parameter nearest to the loss is named."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1))
    optimizer = Optimizer(model, OptimConfig(lr=0.1), SchedulerConfig(), max_steps=3)
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    before = [each.clone() for each in model.parameters()]
    moments = [each["exp_avg"].clone() for each in optimizer.adamw.state.values()]
    loss = model[1](model[0](torch.ones(1)) * bad)
    loss.sum().backward()
    update = optimizer.step(is_finite=bad != 1)
    assert update.is_skipped
    assert update.parameter == (None if bad == 1 else "1.weight")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    after = [each["exp_avg"] for each in optimizer.adamw.state.values()]
    assert all(torch.equal(*pair) for pair in zip(moments, after, strict=True))
    assert all(each.grad is None for each in model.parameters())
    assert optimizer.num_steps == 2
