"""The way from a conversation to published weights, held stage by stage to the oracle.

    scenario ──> Orchestrator ──> bytes ──> train(run), with its export ──> weights/step_N
        │                                           │
        └──> oracle: from what the client sampled ──┴──> the first stage that differs is named

The oracle knows what was sampled and the settings; it computes the rest. After each step it goes on from the
trainer's own weights, so that every stage is held by itself and rounding does not add up over the steps. The
last step is one more than the orchestrator's: it trains samples of the modes opd and sft.
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

import pellucid.export
from pellucid.checks.finding import Differences, Finding
from pellucid.checks.oracle.training import AdamWState, ReferenceModel
from pellucid.checks.verify.rollout_stages import ExpectedRun, check_rollouts
from pellucid.checks.verify.scenario import NUM_STEPS, RESUMED_AT, play
from pellucid.checks.verify.schedule import check_schedule
from pellucid.checks.verify.subject import Subject, build_quiet_run, updated
from pellucid.checks.verify.training_stages import (
    Bounds,
    TrainedStep,
    check_checkpoints,
    check_counts,
    check_gradient,
    check_model,
    check_record,
    check_start,
    check_step_metrics,
    check_trainer_books,
    check_update,
    check_weights,
    trained_weights,
)
from pellucid.config import CustomLossConfig, VerifyConfig
from pellucid.config.trainer import DppoLossConfig
from pellucid.trainer.batches import BatchSource, Stopped
from pellucid.trainer.loop import train
from pellucid.trainer.run import Run
from pellucid.transport import Batch
from pellucid.transport.weights import weights_folder

CHECKPOINT_INTERVAL = 3
"""Steps; the trainer is stopped before that, and ends after it."""

NUM_KEPT = 2
"""Checkpoints that stay; there is one more, the oldest, which has to go."""

MAX_PARAMETERS = 500_000_000
"""A larger model is not loaded once more in float64."""


def check_oracle(subject: Subject) -> Iterator[Finding]:
    """Plays the scenario and trains on it for `NUM_STEPS` steps."""
    config, lora = subject.config, subject.config.model.lora
    num_parameters = sum(parameter.numel() for parameter in subject.run.policy.parameters())
    if num_parameters > MAX_PARAMETERS:
        yield Finding.not_held(
            "oracle",
            "the way from a conversation to published weights",
            f"the model has {num_parameters:,} parameters, and one above {MAX_PARAMETERS:,} is not loaded "
            "once more in float64; set model.name to a smaller model of the same architecture",
        )
        return
    if isinstance(config.trainer.loss, CustomLossConfig):
        yield Finding.not_held(
            "oracle",
            "the loss",
            f"trainer.loss.import_path = {config.trainer.loss.import_path!r} is a loss that the oracle does "
            "not have; it held the default one in its place",
        )
        config = updated(config, trainer={"loss": DppoLossConfig()})
    if weight := config.trainer.model.router_aux_loss_coef:
        yield Finding.not_held(
            "oracle",
            "the balancing loss of experts",
            f"trainer.model.router_aux_loss_coef = {weight} adds a loss that the oracle does not have; it "
            "held the steps without it",
        )
    differences = Differences()
    lora_scale = 1.0 if lora is None else lora.alpha / lora.rank
    model = ReferenceModel(config.model.name, trained_weights(subject.run), lora_scale=lora_scale)
    folder = Path(mkdtemp(dir=subject.folder))
    expected = ExpectedRun(play(config, folder, subject.tokenizer, model), subject.tokenizer)
    check_rollouts(expected, differences)
    check_schedule(differences)
    check_training(config, expected, model, folder, differences)
    yield from differences.findings()


def check_training(
    config: VerifyConfig,
    expected: ExpectedRun,
    model: ReferenceModel,
    folder: Path,
    differences: Differences,
) -> None:
    """Trains on the batches, is stopped and resumed once, and holds every step to the oracle.

    Sequences are cut short, and gradients clipped.
    """
    loss, optim = config.trainer.loss, config.trainer.optim
    sequences = expected.sequences(0, expected.seq_len)
    grad_norm = model.step(list(sequences.values()), loss.model_dump(), loss.reduction).grad_norm
    config = updated(
        config,
        seq_len=expected.seq_len,
        max_steps=NUM_STEPS + 1,
        trainer={
            "model": {"seq_len": expected.seq_len, "router_aux_loss_coef": 0.0},
            "micro_batch_max_tokens": None,
            "pad_to_multiple_of": 1,
            "enable_router_replay": False,
            "replay_expert_weights": False,
            "optim": {
                "max_norm": min(optim.max_norm, 0.7 * grad_norm),
                "weight_decay": max(optim.weight_decay, 0.01),
            },
            "ckpt": {"interval": CHECKPOINT_INTERVAL, "keep_last": NUM_KEPT},
        },
    )
    oracle = _OracleBeside(expected, model, differences)
    with closing(build_quiet_run(config, folder, batches=oracle, records=True)) as run:
        check_start(run, model.initial(config.seed), differences)
        oracle.train(run, RESUMED_AT)
        weights = trained_weights(run)
        check_checkpoints(run, [RESUMED_AT], oracle.journal, oracle.totals, differences)
    _train_resumed(oracle, config, folder, weights, differences)


def _train_resumed(
    oracle: "_OracleBeside",
    config: VerifyConfig,
    folder: Path,
    weights: Mapping[str, Tensor],
    differences: Differences,
) -> None:
    """Goes on from the checkpoint, which has to have these weights, to the end of the run."""
    with closing(build_quiet_run(config, folder, batches=oracle, records=True, resume=True)) as run:
        run.restore()
        for name, weight in trained_weights(run).items():
            differences.holds("checkpoint", torch.equal(weight, weights[name]), f"{name} is not what it was")
        oracle.train(run, run.max_steps)
        check_model(run, run.output_dir / "model", differences)
        kept = [RESUMED_AT, CHECKPOINT_INTERVAL, run.max_steps][-NUM_KEPT:]
        check_checkpoints(run, kept, oracle.journal, oracle.totals, differences)
        exported = pellucid.export.open(run.output_dir).steps
        differences.same(
            "exported fields", list(range(run.max_steps)), list(exported), "steps with an export"
        )
        where = "the first step whose batch is kept, after each checkpoint"
        differences.same("checkpoint", [0, RESUMED_AT, kept[0]], oracle.released[:3], where)


class _OracleBeside(BatchSource):
    """The oracle beside a trainer, which takes its batches from here and reports its steps to here.

    The trainer's loop is the real one: at the start of a step it asks for a batch (`next`), its backward
    passes leave gradients (`_keep_gradient`), and at its end it logs metrics (`log`). The moments of the
    oracle go on when the trainer is resumed.
    """

    def __init__(self, expected: ExpectedRun, model: ReferenceModel, differences: Differences) -> None:
        self._expected = expected
        self._model = model
        self._differences = differences
        self._state = AdamWState()
        self._stop_at = 0
        self._gradients: dict[str, Tensor] = {}
        self.released: list[int] = []
        """Steps before which the trainer let go of all batches, in turn."""

        self.totals: dict[int, dict[str, float]] = {}
        """Running totals as they were logged, by the number of steps that they are of."""

    def train(self, run: Run, stop_at: int) -> None:
        """Trains up to a step, where a run that would go on is told to stop, and leaves a checkpoint."""
        self._run, self._stop_at = run, stop_at
        self._bounds = Bounds.of(run.policy, run.config.model.seq_len)
        run.sinks.append(self)
        for name, parameter in run.trained.module.named_parameters():
            if parameter.requires_grad:
                keep = partial(self._keep_gradient, name.removeprefix("hf."))
                parameter.register_post_accumulate_grad_hook(keep)
        try:
            train(run)
        except Stopped:
            run.save_checkpoint()
            run.finish_checkpoint()

    @property
    def journal(self) -> Path:
        return self._run.output_dir / "ledger" / "trainer.jsonl"

    def _keep_gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._gradients[name] = parameter.grad.clone()

    def next(self, step: int) -> Batch:
        if step == self._stop_at:
            raise Stopped(signal.SIGTERM)
        expected, loss, seq_len = self._expected, self._run.config.loss, self._run.config.model.seq_len
        sequences = expected.sequences(step, seq_len)
        weights = trained_weights(self._run)
        self._before = {name: value.double().cpu() for name, value in weights.items()}
        self._model.parameters = dict(self._before)
        found = self._model.step(list(sequences.values()), loss.model_dump(), loss.reduction)
        conversations = expected.conversations(step, seq_len)
        self._step = TrainedStep(step, sequences, conversations, expected.rollouts, found, self._bounds)
        self._gradients = {name: torch.zeros_like(value) for name, value in weights.items()}
        return Batch("", step, expected.table(step))

    def is_there(self, step: int) -> bool:
        return True

    def release_before(self, step: int) -> None:
        self.released.append(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        run, differences, trained, gradients = self._run, self._differences, self._step, self._gradients
        check_record(trained, run.output_dir, differences)
        check_step_metrics(trained, metrics, differences)
        check_gradient(trained, gradients, differences)
        check_update(run, step, self._before, gradients, metrics, self._state, differences)
        check_trainer_books(trained, self.journal, differences)
        totals = self.totals.get(step)
        self.totals[step + 1] = check_counts(trained, metrics, self.journal, totals, differences)
        run.finish_publishing()
        folder = weights_folder(run.output_dir, step + 1)
        check_weights("published", run, folder, differences, f"step {step}")

    def close(self) -> None:
        """Nothing is open."""
