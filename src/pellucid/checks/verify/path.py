"""The way from a conversation to published weights, held stage by stage to the oracle.

    scenario ──> Orchestrator ──> bytes ──> train(run), with its export ──> weights/step_N
        │                                           │
        └──> oracle: from what the client sampled ──┴──> the first stage that differs is named

The oracle knows what was sampled and the settings; it computes the rest. After each step it goes on from the
trainer's own weights, so that every stage is held by itself and rounding does not add up over the steps. The
last step is one more than the orchestrator's: it trains samples of the modes opd and sft.
"""

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from pellucid.checks.finding import Finding
from pellucid.checks.oracle.training import AdamWState, ReferenceModel, ReferenceSequence, ReferenceStep
from pellucid.checks.verify.books import check_checkpoints, check_trainer_books
from pellucid.checks.verify.differences import Bounds, Differences
from pellucid.checks.verify.expected import ExpectedRun
from pellucid.checks.verify.rollout_stages import check_rollouts
from pellucid.checks.verify.scenario import NUM_STEPS, RESUMED_AT, play
from pellucid.checks.verify.subject import Subject, build_quiet_run
from pellucid.checks.verify.training_stages import (
    TrainedStep,
    check_gradient,
    check_model,
    check_record,
    check_step_metrics,
    check_update,
    check_weights,
    trained_weights,
)
from pellucid.config import CustomLossConfig, VerifyConfig
from pellucid.config.loss import DppoLossConfig
from pellucid.data import TokenTable
from pellucid.trainer.batches import Stopped
from pellucid.trainer.loop import train
from pellucid.trainer.run import Run
from pellucid.transport.weights import weights_folder

CHECKPOINT_INTERVAL = 3
"""Steps; the trainer is stopped before that, and ends after it."""

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
    config = subject.config
    if isinstance(config.trainer.loss, CustomLossConfig):
        yield Finding.not_held(
            "oracle",
            "the loss",
            f"trainer.loss.import_path = {config.trainer.loss.import_path!r} is a loss that the oracle does "
            "not have; it held the default one in its place",
        )
        config = _with_default_loss(config)
    differences = Differences()
    model = reference_model(subject)
    folder = Path(mkdtemp(dir=subject.folder))
    expected = ExpectedRun(play(config, folder, subject.tokenizer, model), subject.tokenizer)
    check_rollouts(expected, differences)
    check_training(config, expected, model, folder, differences)
    yield from differences.findings()


def reference_model(subject: Subject) -> ReferenceModel:
    """Loads the model of the subject once more, with the weights that it starts from."""
    lora = subject.config.model.lora
    return ReferenceModel(
        subject.config.model.name,
        trained_weights(subject.run),
        lora_scale=1.0 if lora is None else lora.alpha / lora.rank,
    )


def _with_default_loss(config: VerifyConfig) -> VerifyConfig:
    trainer = config.trainer.model_copy(update={"loss": DppoLossConfig()})
    return config.model_copy(update={"trainer": trainer})


def check_training(
    config: VerifyConfig,
    expected: ExpectedRun,
    model: ReferenceModel,
    folder: Path,
    differences: Differences,
) -> None:
    """Trains on the batches, is stopped and resumed once, and holds every step to the oracle."""
    first = model.step(
        list(expected.sequences(0, expected.seq_len).values()),
        config.trainer.loss.model_dump(),
        config.trainer.loss.reduction,
    )
    trainer = _trainer_config(config, expected, first.grad_norm)
    oracle = _OracleBeside(expected, model, differences)
    weights = _train_until_stopped(oracle, trainer, folder)
    _train_resumed(oracle, trainer, folder, weights, differences)


def _train_until_stopped(oracle: "_OracleBeside", config: VerifyConfig, folder: Path) -> dict[str, Tensor]:
    """Returns the weights that the checkpoint has to have."""
    with closing(build_quiet_run(config, folder, batches=oracle, records=True)) as run:
        oracle.train(run, RESUMED_AT)
        return trained_weights(run)


def _train_resumed(
    oracle: "_OracleBeside",
    config: VerifyConfig,
    folder: Path,
    weights: Mapping[str, Tensor],
    differences: Differences,
) -> None:
    with closing(build_quiet_run(config, folder, batches=oracle, records=True, resume=True)) as run:
        run.restore()
        for name, weight in trained_weights(run).items():
            same = torch.equal(weight, weights[name])
            differences.add("checkpoint", 0.0 if same else math.inf, f"{name} is not what it was")
        oracle.train(run, run.max_steps)
        check_model(run, run.output_dir / "model", differences)
        due = [RESUMED_AT, CHECKPOINT_INTERVAL, run.max_steps]
        check_checkpoints(run, due, oracle.journal, differences)


def _trainer_config(config: VerifyConfig, expected: ExpectedRun, grad_norm: float) -> VerifyConfig:
    """The user's trainer, on sequences that are cut short and gradients that are clipped."""
    trainer = config.trainer
    return config.model_copy(
        update={
            "seq_len": expected.seq_len,
            "max_steps": NUM_STEPS + 1,
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
                    "ckpt": trainer.ckpt.model_copy(
                        update={"interval": CHECKPOINT_INTERVAL, "keep_last": NUM_STEPS + 1}
                    ),
                }
            ),
        }
    )


@dataclass
class _Forecast:
    """The oracle's account of a step that is about to be trained."""

    sequences: Mapping[tuple[str, int], ReferenceSequence]
    step: ReferenceStep
    before: dict[str, Tensor]


class _OracleBeside:
    """The oracle beside a trainer, which takes its batches from here and reports its steps to here.

    The trainer's loop is the real one: at the start of a step it asks for a batch (`next`), its backward
    passes leave gradients (`_note_gradient`), and at its end it logs metrics (`log`). The moments of the
    oracle go on when the trainer is resumed.
    """

    def __init__(self, expected: ExpectedRun, model: ReferenceModel, differences: Differences) -> None:
        self._expected = expected
        self._model = model
        self._differences = differences
        self._state = AdamWState()
        self._stop_at = 0
        self._gradients: dict[str, Tensor] = {}

    def train(self, run: Run, stop_at: int) -> None:
        """Trains up to a step, where a run that would go on is told to stop, and leaves a checkpoint."""
        self._run, self._stop_at = run, stop_at
        self._bounds = Bounds.of(run.policy, run.config.model.seq_len)
        run.sinks.append(self)
        for name, parameter in run.trained.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient(name.removeprefix("hf.")))
        try:
            train(run)
        except Stopped:
            run.save_checkpoint()
            run.finish_checkpoint()

    @property
    def journal(self) -> Path:
        return self._run.output_dir / "ledger" / "trainer.jsonl"

    def _note_gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._gradients[name] = parameter.grad.clone()

        return note

    def next(self, step: int) -> TokenTable:
        if step == self._stop_at:
            raise Stopped(signal.SIGTERM)
        run, model = self._run, self._model
        sequences = self._expected.sequences(step, run.config.model.seq_len)
        before = {name: value.double().cpu() for name, value in trained_weights(run).items()}
        model.parameters = dict(before)
        loss = run.config.loss
        found = model.step(list(sequences.values()), loss.model_dump(), loss.reduction)
        self._forecast = _Forecast(sequences, found, before)
        self._gradients = {name: torch.zeros_like(value) for name, value in trained_weights(run).items()}
        return self._expected.table(step)

    def release_before(self, step: int) -> None:
        """They stay."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        run, differences, forecast = self._run, self._differences, self._forecast
        trained = TrainedStep(
            step,
            forecast.sequences,
            self._expected.conversations(step, run.config.model.seq_len),
            {rollout_id: self._expected.rollouts[rollout_id] for rollout_id, _ in forecast.sequences},
            forecast.step,
            self._bounds,
        )
        check_record(trained, run.output_dir, differences)
        check_step_metrics(trained, metrics, differences)
        check_gradient(trained, self._gradients, differences)
        check_update(run, step, forecast.before, self._gradients, metrics, self._state, differences)
        whole = {key: trained.rollouts[key[0]].samples[key[1]] for key in trained.conversations}
        check_trainer_books(trained, whole, self.journal, differences)
        folder = weights_folder(run.output_dir, step + 1)
        check_weights("published", run, folder, differences, f"step {step}")

    def close(self) -> None:
        """Nothing is open."""
