"""The stages of the trainer, from its export to the published weights, each held to the oracle.

Norm, update and weights follow from the trainer's own gradient, so that rounding does not add up over stages.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

import pellucid.export
from pellucid.checks.oracle.conversation import Conversation, off_policy_levels
from pellucid.checks.oracle.losses import TokenLosses, ratios_of
from pellucid.checks.oracle.training import (
    AdamWState,
    ReferenceSequence,
    ReferenceStep,
    adamw_step,
    clip_factor,
    learning_rate,
)
from pellucid.checks.verify.differences import EPS, UNDERFLOW, Bounds, Differences
from pellucid.checks.verify.expected import ExpectedRollout
from pellucid.trainer.run import Run

RATIOS = (
    "trainer_logprobs",
    "inference_logprobs",
    "log_importance_ratio",
    "importance_ratio",
    "mismatch_kl",
    "prob_delta",
)


def trained_weights(run: Run) -> dict[str, Tensor]:
    """The parameters that a run trains, by the names in Hugging Face's or PEFT's files."""
    return {
        name.removeprefix("hf."): parameter.detach().clone()
        for name, parameter in run.trained.module.named_parameters()
    }


@dataclass(frozen=True)
class TrainedStep:
    """One step as the oracle computes it; mappings are by rollout and number of the sample."""

    number: int
    sequences: Mapping[tuple[str, int], ReferenceSequence]
    conversations: Mapping[tuple[str, int], Conversation]
    rollouts: Mapping[str, ExpectedRollout]
    expected: ReferenceStep
    bounds: Bounds

    @property
    def where(self) -> str:
        return f"step {self.number}"

    def of_tokens(self) -> Iterator["TrainedSequence"]:
        """The sequences that train, with what the oracle computed of each."""
        for index, (key, sequence) in enumerate(self.sequences.items()):
            if sequence.trainable.any():
                logprobs = self.expected.logprobs[index]
                scale = max(math.log(2), float(np.abs(logprobs).max()))
                yield TrainedSequence(
                    key,
                    sequence,
                    logprobs,
                    self.expected.entropies[index],
                    self.expected.losses[index],
                    self.expected.weights[index],
                    scale,
                    self.bounds.logprob(scale),
                )


@dataclass(frozen=True)
class TrainedSequence:
    """One sequence of a step as the oracle computes it."""

    key: tuple[str, int]
    sequence: ReferenceSequence
    logprobs: NDArray[np.float64]
    entropies: NDArray[np.float64]
    losses: TokenLosses
    weight: float
    scale: float
    """Its largest logprob."""

    bound: float
    """The difference of a logprob that rounding explains."""

    @property
    def decided(self) -> NDArray[np.bool_]:
        """Trainable tokens that are not as near to a bound of the trust region as rounding is large."""
        margin, trainable = self.losses.margin, self.sequence.trainable
        return trainable if margin is None else trainable & (margin > 4 * self.bound)

    @property
    def loss_bound(self) -> NDArray[np.float64]:
        """The difference of each token's loss that rounding explains."""
        slope, loss = np.abs(self.losses.slope), np.abs(self.losses.loss)
        return (2 * self.bound * slope + 16 * EPS * (1 + loss)) * self.weight


def check_record(step: TrainedStep, folder: Path, differences: Differences) -> None:
    """Holds the exported tokens to the oracle's."""
    records = list(pellucid.export.open(folder).step(step.number))
    exported = {(str(record["rollout_id"]), tuple(record["token_ids"])): record for record in records}
    known = {(each.key[0], tuple(each.sequence.token_ids)): each for each in step.of_tokens()}
    differences.same("truncation", sorted(known), sorted(exported), f"{step.where}: exported sequences")
    total = rounding = 0.0
    for key, each in known.items():
        if key in exported:
            where = f"{step.where}, rollout {key[0]}"
            check_values_of_sequence(step, each, exported[key], differences, where)
            check_losses(each, exported[key], differences, where)
            total += float(_floats(exported[key]["token_loss"]).sum())
            rounding += float(each.loss_bound.sum())
    denominator = step.expected.denominator
    differences.near("loss", step.expected.loss, total / denominator, rounding / denominator, step.where)


def check_values_of_sequence(
    step: TrainedStep,
    each: TrainedSequence,
    record: Mapping[str, Any],
    differences: Differences,
    where: str,
) -> None:
    rollout, sample = step.rollouts[each.key[0]], step.conversations[each.key]
    differences.same("rewards", float(np.float32(rollout.reward)), record["reward"], f"{where}, exported")
    trainable = each.sequence.trainable.tolist()
    differences.same("truncation", trainable, list(record["loss_mask"]), f"{where}, loss_mask")
    levels = [
        int(record["step"]) - int(version)
        for version, is_sampled in zip(record["policy_versions"], record["sampled"], strict=True)
        if is_sampled
    ]
    differences.same("off-policy levels", off_policy_levels(step.number, sample), levels, where)
    for name, value in _fields(step, each, sample).items():
        own = record[name]
        found = own if isinstance(own, str | int) else list(own)
        differences.same("exported fields", value, found, f"{where}, {name}")
    for name, values in (
        ("temperatures", each.sequence.temperatures),
        ("teacher_logprobs", each.sequence.teacher),
    ):
        if values is not None:
            sampled = np.array(sample.is_sampled)
            found = _floats(record[name])[sampled]
            differences.near("exported fields", np.float32(values[sampled]), found, EPS, f"{where}, {name}")
    differences.same("denominator", step.expected.denominator, record["denominator"], where)
    differences.same("masks", each.sequence.mode, record["training_mode"], f"{where}, training_mode")
    logprobs, entropies = _floats(record["trainer_logprobs"]), _floats(record["entropy"])
    differences.near("logprobs", each.logprobs, logprobs, each.bound, where)
    differences.near("entropy", each.entropies, entropies, each.bound * each.scale, where)


def _fields(step: TrainedStep, each: TrainedSequence, sample: Conversation) -> dict[str, Any]:
    """Fields of a record that follow from its sample."""
    rollout_id, number = each.key
    rollout, length = step.rollouts[rollout_id], len(sample.token_ids)
    return {
        "step": step.number,
        "env_name": rollout.env_name,
        "group_id": each.sequence.group,
        "sample_id": f"{rollout_id}-{number}",
        "stop_reason": "stop",
        "position_ids": list(range(length)),
        "sampled": sample.is_sampled,
        "policy_versions": sample.versions,
        "inference_logprobs": np.array(sample.logprobs, np.float32).tolist(),
        "rewards": [float(np.float32(rollout.reward))] * length,
    }


def check_losses(
    each: TrainedSequence, record: Mapping[str, Any], differences: Differences, where: str
) -> None:
    """Holds ratios to the recorded logprobs, and what the loss made of them to the oracle's."""
    if each.sequence.mode != "sft":
        values = {name: _floats(record[name]) for name in RATIOS if record.get(name) is not None}
        trained = {name: array[each.sequence.trainable] for name, array in values.items()}
        known_ratios = ratios_of(trained["trainer_logprobs"], trained["inference_logprobs"])
        for name, ratio in known_ratios.items():
            if name in trained:
                size = 1 + np.abs(ratio) + np.abs(known_ratios["log_importance_ratio"])
                differences.near("ratios", ratio, trained[name], 16 * EPS * size, f"{where}, {name}")
    decided = each.decided
    for name in ("is_masked", "is_masked_high", "is_masked_low"):
        mask = getattr(each.losses, name)
        if mask is not None:
            found = np.array([bool(flag) for flag in record[name]])
            differences.same("masks", mask[decided].tolist(), found[decided].tolist(), f"{where}, {name}")
    differences.near(
        "token losses",
        each.weight * each.losses.loss[decided],
        _floats(record["token_loss"])[decided],
        each.loss_bound[decided],
        where,
    )


def check_step_metrics(step: TrainedStep, logged: Mapping[str, float], differences: Differences) -> None:
    """Holds the means that the trainer logs, over all trainable tokens and over those of each environment."""
    values: dict[str, list[NDArray[np.float64]]] = {}
    bounds: dict[str, list[NDArray[np.float64]]] = {}

    def note(name: str, each: TrainedSequence, tokens: NDArray[np.float64], bound: Any) -> None:
        trainable = each.sequence.trainable
        for scope in ("all", step.rollouts[each.key[0]].env_name):
            key = f"{name}/{scope}/mean"
            values.setdefault(key, []).append(tokens[trainable])
            bounds.setdefault(key, []).append(np.broadcast_to(bound, tokens.shape)[trainable])

    loss_bound = 0.0
    for each in step.of_tokens():
        loss_bound += float(each.loss_bound.sum()) / step.expected.denominator
        note("entropy", each, each.entropies, each.bound * each.scale)
        if each.sequence.mode != "sft":
            kl = ratios_of(each.logprobs, each.sequence.log_mu)
            steep = np.abs(kl["importance_ratio"] - 1)
            allowed = 2 * each.bound * steep + 16 * EPS * (1 + np.abs(kl["mismatch_kl"]) + each.scale)
            note("mismatch_kl", each, kl["mismatch_kl"], allowed)
    means = {name: float(np.concatenate(parts).mean()) for name, parts in values.items()}
    allowances = {name: float(np.concatenate(parts).mean()) for name, parts in bounds.items()}
    means["loss"], allowances["loss"] = step.expected.loss, loss_bound
    for name, mean in means.items():
        found = logged.get(name, math.nan)
        where = f"{step.where}, {name}"
        differences.near("metrics of steps", mean, found, allowances[name] + EPS * abs(mean), where)


def _floats(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def check_gradient(step: TrainedStep, found: Mapping[str, Tensor], differences: Differences) -> None:
    expected = step.expected
    differences.same(
        "gradient", sorted(expected.gradients), sorted(found), f"{step.where}: trained parameters"
    )
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    scale = max(float(np.abs(each).max()) for each in expected.logprobs)
    bound = step.bounds.gradient(expected.denominator, scale) * largest + UNDERFLOW
    for name, gradient in expected.gradients.items():
        if name in found:
            differences.near(
                "gradient",
                gradient.numpy(),
                found[name].double().cpu().numpy(),
                bound,
                f"{step.where}, {name}",
            )


def check_update(
    run: Run,
    step: int,
    before: dict[str, Tensor],
    gradients: Mapping[str, Tensor],
    logged: Mapping[str, float],
    state: AdamWState,
    differences: Differences,
) -> None:
    """Holds norm, learning rate and new weights to what follows from the trainer's own gradient."""
    where = f"step {step}"
    own = {name: gradient.double().cpu() for name, gradient in gradients.items()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in own.values()))
    size = sum(gradient.numel() for gradient in own.values())
    differences.near("norm", norm, logged["grad_norm"], 4 * math.sqrt(size) * EPS * norm + UNDERFLOW, where)
    lr = rate_of(run, step)
    differences.near("learning rate", lr, logged["lr"], 16 * EPS * run.config.optim.lr, where)
    after_step = updated_weights(run, before, own, state, lr)
    for name, weight in trained_weights(run).items():
        check_moved("update", before[name], after_step[name], weight, lr, differences, f"{where}, {name}")


def rate_of(run: Run, step: int) -> float:
    """The oracle's learning rate of a step."""
    optim, scheduler = run.config.optim, run.config.scheduler
    return learning_rate(
        step, peak=optim.lr, kind=scheduler.type, warmup_steps=scheduler.warmup_steps, max_steps=run.max_steps
    )


def updated_weights(
    run: Run, before: dict[str, Tensor], gradients: Mapping[str, Tensor], state: AdamWState, lr: float
) -> dict[str, Tensor]:
    """The oracle's weights after one update, all in float64."""
    optim = run.config.optim
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    factor = clip_factor(norm, optim.max_norm)
    clipped = {name: gradient * factor for name, gradient in gradients.items()}
    return adamw_step(before, clipped, state, lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)


def check_moved(
    stage: str,
    before: Tensor,
    expected: Tensor,
    found: Tensor,
    lr: float,
    differences: Differences,
    where: str,
) -> None:
    """Holds one weight after an update to the oracle's."""
    allowed = EPS * (4 * before.abs() + 64 * (expected - before).abs() + 4 * lr)
    differences.near(stage, expected.numpy(), found.double().cpu().numpy(), allowed.numpy(), where)


def check_weights(stage: str, run: Run, folder: Path, differences: Differences, where: str) -> None:
    """Holds the files of a folder to the weights of the run, bit by bit."""
    _check_written(stage, run, read_weights(folder), differences, where)


def check_model(run: Run, folder: Path, differences: Differences) -> None:
    """Holds the result of a run, as Hugging Face reads it: the files of some models have other names."""
    if (folder / "config.json").exists():
        own = type(run.policy.hf).from_pretrained(folder, dtype="auto", trust_remote_code=False)
        written = {name: parameter.detach() for name, parameter in own.named_parameters()}
    else:
        written = read_weights(folder)
    _check_written("model", run, written, differences, "after the last step")


def _check_written(
    stage: str, run: Run, written: Mapping[str, Tensor], differences: Differences, where: str
) -> None:
    for name, weight in trained_weights(run).items():
        if name not in written:
            differences.add(stage, math.inf, f"{where}: {name} is missing")
        else:
            same = torch.equal(written[name].to(weight.dtype), weight.cpu())
            differences.add(stage, 0.0 if same else math.inf, f"{where}: {name} differs from the trainer's")


def read_weights(folder: Path) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        written |= load_file(path)
    return written
