"""The way from a conversation to published weights, held stage by stage to the oracle.

    scenario ──> Orchestrator ──> bytes ──> Run, with its export ──> weights/step_N
        │                                           │
        └──> oracle: from what the client sampled ──┴──> the first stage that differs is named

The oracle knows what was sampled, the settings, and which rollouts are in which batch; it computes the rest.
After each step it goes on from the trainer's own weights, so that every stage is held by itself and rounding
does not add up over the steps.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

import torch

from pellucid.checks.finding import Finding
from pellucid.checks.oracle import AdamWState, ReferenceModel
from pellucid.checks.verify.differences import Bounds, Differences
from pellucid.checks.verify.expected import ExpectedRun
from pellucid.checks.verify.rollout_stages import check_rollouts
from pellucid.checks.verify.scenario import NUM_STEPS, RESUMED_AT, play
from pellucid.checks.verify.subject import Subject, build_quiet_run
from pellucid.checks.verify.training_stages import (
    check_gradient,
    check_published,
    check_record,
    check_update,
    trained_weights,
)
from pellucid.config import VerifyConfig
from pellucid.data import TokenTable
from pellucid.trainer.loop import accumulate
from pellucid.trainer.resume import restore
from pellucid.trainer.run import Run

MAX_PARAMETERS = 500_000_000
"""A larger model is not loaded once more in float64."""


def check_oracle(subject: Subject) -> Iterator[Finding]:
    """Plays the scenario and trains on it for `NUM_STEPS` steps."""
    num_parameters = sum(parameter.numel() for parameter in subject.run.policy.parameters())
    if num_parameters > MAX_PARAMETERS:
        yield Finding.not_held(
            "oracle",
            "the way from a conversation to published weights",
            f"the model has {num_parameters:,} parameters, and one above {MAX_PARAMETERS:,} is not loaded "
            "once more in float64; set model.name to a smaller model of the same architecture",
        )
        return
    folder = Path(mkdtemp(dir=subject.folder))
    config = subject.config
    lora = config.model.lora
    model = ReferenceModel(
        config.model.name,
        trained_weights(subject.run),
        lora_scale=1.0 if lora is None else lora.alpha / lora.rank,
    )
    played = play(config, folder, subject.tokenizer, model)
    differences = Differences()
    expected = ExpectedRun(played, subject.tokenizer)
    check_rollouts(expected, differences)
    first = model.step(
        list(expected.sequences(0, expected.seq_len).values()),
        config.trainer.loss.model_dump(),
        config.trainer.loss.reduction,
    )
    trainer = _trainer_config(config, expected, first.grad_norm)
    oracle = _Oracle(expected, model, differences)
    with closing(build_quiet_run(trainer, folder, batches=_Tables(expected), records=True)) as run:
        oracle.train(run, range(RESUMED_AT))
        run.save_checkpoint()
        run.finish_checkpoint()
        weights = trained_weights(run)
    with closing(
        build_quiet_run(trainer, folder, batches=_Tables(expected), records=True, resume=True)
    ) as run:
        restore(run)
        for name, weight in trained_weights(run).items():
            same = torch.equal(weight, weights[name])
            differences.add("checkpoint", 0.0 if same else math.inf, f"{name} is not what it was")
        oracle.train(run, range(RESUMED_AT, NUM_STEPS))
    yield from differences.findings()


class _Tables:
    """The batches of a scenario as a source for the trainer."""

    def __init__(self, expected: ExpectedRun) -> None:
        self._expected = expected

    def next(self, step: int) -> TokenTable:
        return self._expected.tables[step]

    def release_before(self, step: int) -> None:
        """They stay."""


def _trainer_config(config: VerifyConfig, expected: ExpectedRun, grad_norm: float) -> VerifyConfig:
    """The user's trainer, on sequences that are cut short and gradients that are clipped."""
    trainer = config.trainer
    return config.model_copy(
        update={
            "seq_len": expected.seq_len,
            "max_steps": NUM_STEPS + 1,  # so that no checkpoint is due
            "trainer": trainer.model_copy(
                update={
                    "model": trainer.model.model_copy(update={"seq_len": expected.seq_len}),
                    "micro_batch_max_tokens": None,
                    "pad_to_multiple_of": 1,
                    "enable_router_replay": False,
                    "optim": trainer.optim.model_copy(
                        update={
                            "max_norm": min(trainer.optim.max_norm, 0.7 * grad_norm),
                            "weight_decay": max(trainer.optim.weight_decay, 0.01),
                        }
                    ),
                    "ckpt": trainer.ckpt.model_copy(update={"interval": NUM_STEPS + 2}),
                }
            ),
        }
    )


class _Oracle:
    """The oracle beside a trainer: its moments go on when the trainer is resumed."""

    def __init__(self, expected: ExpectedRun, model: ReferenceModel, differences: Differences) -> None:
        self._expected = expected
        self._model = model
        self._differences = differences
        self._state = AdamWState()

    def train(self, run: Run, steps: Iterable[int]) -> None:
        """Trains these steps, and holds all that comes of them to what should."""
        model, differences = self._model, self._differences
        bounds = Bounds.of(run.policy, run.config.model.seq_len)
        for step in steps:
            sequences = self._expected.sequences(step, run.config.model.seq_len)
            model.parameters = {name: value.double().cpu() for name, value in trained_weights(run).items()}
            loss = run.config.loss
            expected = model.step(list(sequences.values()), loss.model_dump(), loss.reduction)
            before = dict(model.parameters)
            observer = accumulate(run, run.next_batch(step))
            gradients = {
                name.removeprefix("hf."): torch.zeros_like(each) if each.grad is None else each.grad.clone()
                for name, each in run.trained.module.named_parameters()
            }
            update = run.update(observer)
            run.publish(step)
            run.finish(step, observer, update)
            check_record(run.output_dir, step, sequences, expected, bounds, differences)
            check_gradient(expected, gradients, bounds, differences, f"step {step}")
            check_update(run, step, before, gradients, update, self._state, differences)
            check_published(run, step, differences)
