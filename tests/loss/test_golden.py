"""The losses against recorded cases: value, gradient and metrics."""

from itertools import chain

import pytest
import torch

from pellucid.config import DppoLossConfig
from pellucid.errors import DataError
from pellucid.loss import LossInputs, Ratios, dppo_loss, opd_loss, sft_loss
from pellucid.trainer.observer import LossStats, observe_loss
from tolerance import near, partial_sum

OPERATIONS = 8
"""Between the logprobs of a token and its loss."""


def scale_of(inputs: LossInputs, name: str) -> float:
    """Of the numbers that a metric is made of: a KL r − ℓ − 1 is small where r and ℓ + 1 are not.

    The recorded values were computed in this order, without expm1.
    """
    if "kl" not in name:
        return 1.0
    return 1 + float(
        torch.maximum(inputs.ratios.importance_ratio, inputs.ratios.log_importance_ratio.abs()).max()
    )


def inputs_of(case, logprobs: torch.Tensor) -> LossInputs:
    values = case["inputs"]
    inference = torch.tensor(values["inference_logprobs"])
    teacher = values["teacher_logprobs"]
    return LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=inference,
        advantages=torch.tensor(values["advantages"]),
        loss_mask=torch.tensor(values["loss_mask"]),
        teacher_logprobs=None if teacher is None else torch.tensor(teacher),
        ratios=Ratios.of(logprobs, inference),
        lengths=[len(logprobs)],
    )


def check(case, loss_fn) -> None:
    logprobs = torch.tensor(case["inputs"]["trainer_logprobs"], requires_grad=True)
    inputs = inputs_of(case, logprobs)
    record = loss_fn(inputs)
    total = record.token_loss.sum()
    total.backward()
    expected = case["outputs"]
    terms = len(logprobs) + OPERATIONS
    assert total == near(expected["loss"], terms=terms, scale=partial_sum(record.token_loss))
    assert logprobs.grad == near(expected["grad_trainer_logprobs"], terms=terms)
    stats = LossStats(["env"])
    env = torch.zeros(len(logprobs), dtype=torch.long)
    observe_loss(stats, inputs, record, torch.zeros(len(logprobs)), env)
    report = stats.metrics().report()
    for name, value in expected["metrics"].items():
        found = report.get(f"{name}/all", report.get(f"{name}/all/mean", 0.0))
        assert found == near(value, terms=terms, scale=scale_of(inputs, name)), name


@pytest.mark.golden("loss_rl")
def test_rl(case) -> None:
    check(case, lambda inputs: dppo_loss(inputs, DppoLossConfig(**case["config"])))


@pytest.mark.golden("loss_sft")
def test_sft(case) -> None:
    check(case, sft_loss)


@pytest.mark.golden("loss_opd")
def test_opd(case) -> None:
    if "raises" in case:
        logprobs = torch.zeros(2)
        inputs = LossInputs(
            logprobs,
            logprobs,
            logprobs,
            torch.tensor([False, True]),
            None,
            Ratios.of(logprobs, logprobs),
            [2],
        )
        with pytest.raises(DataError, match="opd samples need teacher_logprobs"):
            opd_loss(inputs)
    else:
        check(case, opd_loss)


@pytest.mark.golden("loss_packed")
def test_packed_sequences_share_one_sum(case) -> None:
    values, expected = case["inputs"], case["outputs"]
    lengths = values["lengths"]
    logprobs = torch.tensor(list(chain(*values["trainer_logprobs"])), requires_grad=True)
    inference = torch.tensor(list(chain(*values["inference_logprobs"])))
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=inference,
        advantages=torch.repeat_interleave(
            torch.tensor(values["advantage_per_sequence"]), torch.tensor(lengths)
        ),
        loss_mask=torch.tensor(list(chain(*values["loss_mask"]))),
        teacher_logprobs=None,
        ratios=Ratios.of(logprobs, inference),
        lengths=lengths,
    )
    record = dppo_loss(inputs, DppoLossConfig(**case["config"]))
    loss = record.token_loss.sum() / values["loss_scale"]
    loss.backward()
    terms = len(logprobs) + OPERATIONS
    scale = partial_sum(record.token_loss) / values["loss_scale"]
    assert loss == near(expected["loss"], terms=terms, scale=scale)
    assert logprobs.grad == near(list(chain(*expected["grads"])), terms=terms)
    stats = LossStats([str(index) for index in range(len(lengths))])
    env = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    observe_loss(stats, inputs, record, torch.zeros(len(logprobs)), env)
    report = stats.metrics().report()
    for name, per_sequence in expected["metrics_per_sequence"].items():
        for index, value in enumerate(per_sequence):
            found = report.get(f"{name}/{index}", report.get(f"{name}/{index}/mean", 0.0))
            assert found == near(value, terms=terms, scale=scale_of(inputs, name)), (name, index)
