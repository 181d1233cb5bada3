"""The stages of the trainer, from its export to the published weights, each held to the oracle.

Norm, update and weights follow from the trainer's own gradient, so that rounding does not add up over stages.
Journals and checkpoints are read as JSON here, not by their own readers.
"""

import json
import math
from collections import Counter
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
from pellucid.checkpoint import STATE
from pellucid.checkpoint.state import read_model
from pellucid.checks.finding import COUNTS, EPS, Differences
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
from pellucid.checks.verify.rollout_stages import ExpectedRollout, check_roles, read_entries, sum_counts
from pellucid.data.schema import FIELDS
from pellucid.ledger import Flow, State
from pellucid.trainer.run import Run
from pellucid.transport import stable_steps
from pellucid.transport.weights import weights_folder

UNDERFLOW = 1e-30
"""A gradient that float32 may lose: a ratio below 1e-38 is 0, whatever it is multiplied with later on."""

RUNNING_TOTALS = ("total/", "export/")
"""How the names of logged counts begin that are of all steps so far, and go on over a resume."""


def trained_weights(run: Run) -> dict[str, Tensor]:
    """The parameters that a run trains, by the names in Hugging Face's or PEFT's files."""
    return {
        name.removeprefix("hf."): parameter.detach().clone()
        for name, parameter in run.trained.module.named_parameters()
    }


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """The norm of all of them together, in float64."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


@dataclass
class Bounds:
    """Differences that rounding in float32 explains, for a model and sequences of some length."""

    chain: int
    """Numbers that are added up on the way from a token to its logprob."""

    @classmethod
    def of(cls, model: torch.nn.Module, length: int) -> "Bounds":
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        layers = sum(type(module).__name__.endswith("Attention") for module in model.modules())
        inputs = sum(matrix.shape[-1] for matrix in matrices)
        return cls(inputs + layers * length + max(len(matrix) for matrix in matrices))

    def logprob(self, scale: float) -> float:
        return 4 * math.sqrt(self.chain) * EPS * scale

    def gradient(self, num_tokens: int, scale: float) -> float:
        """Relative to the largest part of a gradient: through the model, over tokens with such logprobs."""
        return 4 * math.sqrt(2 * self.chain + num_tokens) * EPS + self.logprob(scale)


@dataclass(frozen=True)
class TrainedSequence:
    """One sequence of a step as the oracle computes it."""

    sample_id: str
    rollout_id: str
    rollout: ExpectedRollout
    conversation: Conversation
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


@dataclass(frozen=True)
class TrainedStep:
    """One step as the oracle computes it; sequences are by rollout and number of the sample."""

    number: int
    sequences: Mapping[tuple[str, int], ReferenceSequence]
    conversations: Mapping[tuple[str, int], Conversation]
    """The samples of the sequences, truncated."""

    rollouts: Mapping[str, ExpectedRollout]
    expected: ReferenceStep
    bounds: Bounds

    @property
    def where(self) -> str:
        return f"step {self.number}"

    def trained_sequences(self) -> Iterator[TrainedSequence]:
        """The sequences that train, with what the oracle computed of each."""
        for index, (key, sequence) in enumerate(self.sequences.items()):
            if sequence.trainable.any():
                logprobs = self.expected.logprobs[index]
                scale = max(math.log(2), float(np.abs(logprobs).max()))
                yield TrainedSequence(
                    f"{key[0]}-{key[1]}",
                    key[0],
                    self.rollouts[key[0]],
                    self.conversations[key],
                    sequence,
                    logprobs,
                    self.expected.entropies[index],
                    self.expected.losses[index],
                    self.expected.weights[index],
                    scale,
                    self.bounds.logprob(scale),
                )


def check_record(step: TrainedStep, folder: Path, differences: Differences) -> None:
    """Holds the exported tokens to the oracle's."""
    records = list(pellucid.export.open(folder).step(step.number))
    exported = {(str(record["rollout_id"]), tuple(record["token_ids"])): record for record in records}
    for record in records:  # readers of ours fill in what follows from other fields; those of others do not
        stored = record.source.names(record.row)
        missing = [field.name for field in FIELDS if field.derivable and field.name not in stored]
        differences.same("exported fields", [], missing, f"{step.where}: fields that the file lacks")
    known = {(each.rollout_id, tuple(each.sequence.token_ids)): each for each in step.trained_sequences()}
    differences.same("truncation", sorted(known), sorted(exported), f"{step.where}: exported sequences")
    denominator = step.expected.denominator
    total = rounding = 0.0
    for key, each in known.items():
        if key in exported:
            where, record = f"{step.where}, rollout {key[0]}", exported[key]
            check_fields(step.number, each, record, differences, where)
            differences.same("denominator", denominator, record["denominator"], where)
            check_losses(each, record, differences, where)
            total += float(_floats(record["token_loss"]).sum())
            rounding += float(each.loss_bound.sum())
    differences.near("loss", step.expected.loss, total / denominator, rounding / denominator, step.where)


def check_fields(
    step: int, each: TrainedSequence, record: Mapping[str, Any], differences: Differences, where: str
) -> None:
    """Holds what an exported record repeats of its sample, and the logprobs of its tokens."""
    sample, sequence = each.conversation, each.sequence
    reward, length = float(np.float32(each.rollout.reward)), len(sample.token_ids)
    differences.same("rewards", reward, record["reward"], f"{where}, exported")
    differences.same(
        "truncation", sequence.trainable.tolist(), list(record["loss_mask"]), f"{where}, loss_mask"
    )
    versions = zip(record["policy_versions"], record["sampled"], strict=True)
    levels = [int(record["step"]) - int(version) for version, is_sampled in versions if is_sampled]
    differences.same("off-policy levels", off_policy_levels(step, sample), levels, where)
    fields = {
        "step": step,
        "env_name": each.rollout.env_name,
        "group_id": sequence.group,
        "sample_id": each.sample_id,
        "stop_reason": "stop",
        "position_ids": list(range(length)),
        "sampled": sample.is_sampled,
        "policy_versions": sample.versions,
        "inference_logprobs": np.array(sample.logprobs, np.float32).tolist(),
        "rewards": [reward] * length,
    }
    for name, value in fields.items():
        found = record[name] if isinstance(record[name], str | int) else list(record[name])
        differences.same("exported fields", value, found, f"{where}, {name}")
    is_sampled = np.array(sample.is_sampled)
    check_roles("exported fields", list(record["role_spans"]), is_sampled, differences, where)
    for name, values in (("temperatures", sequence.temperatures), ("teacher_logprobs", sequence.teacher)):
        if values is not None:
            expected, found = np.float32(values[is_sampled]), _floats(record[name])[is_sampled]
            differences.near("exported fields", expected, found, EPS, f"{where}, {name}")
    differences.same("masks", sequence.mode, record["training_mode"], f"{where}, training_mode")
    differences.near("logprobs", each.logprobs, _floats(record["trainer_logprobs"]), each.bound, where)
    differences.near("entropy", each.entropies, _floats(record["entropy"]), each.bound * each.scale, where)


def check_losses(
    each: TrainedSequence, record: Mapping[str, Any], differences: Differences, where: str
) -> None:
    """Holds ratios to the recorded logprobs, and what the loss made of them to the oracle's."""
    if each.sequence.mode != "sft":
        trainable = each.sequence.trainable
        logprobs = [_floats(record[name])[trainable] for name in ("trainer_logprobs", "inference_logprobs")]
        known_ratios = ratios_of(*logprobs)
        for name, ratio in known_ratios.items():
            if record.get(name) is not None:
                log_ratio = np.abs(known_ratios["log_importance_ratio"])
                size = 1 + np.abs(ratio) * (1 + log_ratio) + log_ratio  # exp multiplies what rounds in ℓ
                found = _floats(record[name])[trainable]
                differences.near("ratios", ratio, found, 16 * EPS * size, f"{where}, {name}")
    decided = each.decided
    for name in ("is_masked", "is_masked_high", "is_masked_low"):
        mask = getattr(each.losses, name)
        if mask is not None:
            flags = np.array([bool(flag) for flag in record[name]])
            differences.same("masks", mask[decided].tolist(), flags[decided].tolist(), f"{where}, {name}")
    expected, found = each.weight * each.losses.loss[decided], _floats(record["token_loss"])[decided]
    differences.near("token losses", expected, found, each.loss_bound[decided], where)


def check_step_metrics(step: TrainedStep, logged: Mapping[str, float], differences: Differences) -> None:
    """Holds the means that the trainer logs, over all trainable tokens and over those of each environment."""
    values: dict[str, list[NDArray[np.float64]]] = {}
    bounds: dict[str, list[NDArray[np.float64]]] = {}

    def note(name: str, each: TrainedSequence, tokens: NDArray[np.float64], bound: Any) -> None:
        trainable = each.sequence.trainable
        for scope in ("all", each.rollout.env_name):
            key = f"{name}/{scope}/mean"
            values.setdefault(key, []).append(tokens[trainable])
            bounds.setdefault(key, []).append(np.broadcast_to(bound, tokens.shape)[trainable])

    loss_bound = 0.0
    for each in step.trained_sequences():
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
        found, within = logged.get(name, math.nan), allowances[name] + EPS * abs(mean)
        differences.near("metrics of steps", mean, found, within, f"{step.where}, {name}")


def _floats(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def check_trainer_books(step: TrainedStep, journal: Path, differences: Differences) -> None:
    """Holds what the trainer books of a step to the oracle's masks."""
    wanted: dict[str, Counter[State | Flow]] = {}
    for (rollout_id, number), conversation in step.conversations.items():
        rollout = step.rollouts[rollout_id]
        sampled, trainable = np.array(conversation.is_sampled), np.array(conversation.is_trainable)
        num_received = sum(rollout.samples[number].is_sampled)  # before truncation
        counts = wanted.setdefault(rollout.env_name, Counter())
        counts[Flow.RECEIVED] += num_received
        counts[State.TRUNCATED] += num_received - int(sampled.sum())
        counts[State.UNTRAINABLE] += int((sampled & ~trainable).sum())
        counts[State.TRAINED] += int(trainable.sum())
        counts[Flow.CONTEXT] += int((~sampled).sum())
    undecided = 0
    for each in step.trained_sequences():
        if each.losses.is_masked is not None:
            num_masked = int((each.losses.is_masked & each.sequence.trainable).sum())
            wanted[each.rollout.env_name][State.MASKED] += num_masked
            wanted[each.rollout.env_name][State.TRAINED] -= num_masked
            undecided += int((each.sequence.trainable & ~each.decided).sum())
    found = sum_counts(each for each in read_entries(journal) if each.get("step", 0) == step.number)
    for env, counts in wanted.items():
        for what, tokens in counts.items():
            allowed = 0.5 + (undecided if what in (State.MASKED, State.TRAINED) else 0)
            where = f"{step.where}, {env}: {what.value} tokens in {journal.name}"
            differences.near("books of steps", tokens, found.get(env, {}).get(what.value, 0), allowed, where)


def check_counts(
    trained: TrainedStep,
    logged: Mapping[str, float],
    journal: Path,
    before: Mapping[str, float] | None,
    differences: Differences,
) -> dict[str, float]:
    """Holds logged counts to the journal, and running totals to those `before`; returns the totals."""
    before = before or {}
    entries = (each for each in read_entries(journal) if each.get("step", 0) == trained.number)
    booked = sum((Counter(counts) for counts in sum_counts(entries).values()), Counter[str]())
    totals = {name: value for name, value in logged.items() if name.startswith(RUNNING_TOTALS)}
    for name, parts in COUNTS.items():
        where = f"{trained.where}, {name}"
        differences.same("books of steps", sum(booked[part.value] for part in parts), logged[name], where)
        total = before.get(f"total/{name}", 0) + logged[name]
        differences.same("books of steps", total, totals[f"total/{name}"], f"{where} so far")
    num_untrained = sum(not each.trainable.any() for each in trained.sequences.values())
    for name, number in (("export/skipped_sequences", num_untrained), ("export/lost_sequences", 0)):
        where = f"{trained.where}, {name} so far"
        differences.same("books of steps", before.get(name, 0) + number, totals.get(name), where)
    return totals


def check_gradient(step: TrainedStep, found: Mapping[str, Tensor], differences: Differences) -> None:
    expected = step.expected
    names = sorted(expected.gradients)
    differences.same("gradient", names, sorted(found), f"{step.where}: trained parameters")
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    largest = max(largest, expected.largest_part)
    scale = max(float(np.abs(each).max()) for each in expected.logprobs)
    bound = step.bounds.gradient(expected.denominator, scale) * largest + UNDERFLOW
    for name, gradient in expected.gradients.items():
        if name in found:
            values = found[name].double().cpu().numpy()
            differences.near("gradient", gradient.numpy(), values, bound, f"{step.where}, {name}")


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
    norm, size = norm_of(gradients), sum(gradient.numel() for gradient in gradients.values())
    differences.near("norm", norm, logged["grad_norm"], 4 * math.sqrt(size) * EPS * norm + UNDERFLOW, where)
    lr = rate_of(run, step)
    differences.near("learning rate", lr, logged["lr"], 16 * EPS * run.config.optim.lr, where)
    after_step = updated_weights(run, before, gradients, state, lr)
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
    factor = clip_factor(norm_of(gradients), optim.max_norm)
    clipped = {name: gradient.double().cpu() * factor for name, gradient in gradients.items()}
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


def check_start(run: Run, expected: Mapping[str, Tensor], differences: Differences) -> None:
    """Holds the weights of a run that has not begun to the oracle's, bit by bit."""
    found = trained_weights(run)
    for name, weight in expected.items():
        is_same = torch.equal(weight.to(found[name].dtype), found[name].cpu())
        differences.holds("start", is_same, f"{name} is not what the model or the seed gives")


def check_weights(stage: str, run: Run, folder: Path, differences: Differences, where: str) -> None:
    """Holds the files of a folder to the weights of the run, bit by bit."""
    written, known = read_weights(folder), trained_weights(run).keys()
    if run.trained.adapter is None:
        known |= run.policy.hf.state_dict().keys()
    unknown = sorted(written.keys() - known)
    differences.same(stage, [], unknown, f"{where}: tensors that are no weights of the model")
    _check_written(stage, run, written, differences, where)


def check_model(run: Run, folder: Path, differences: Differences) -> None:
    """Holds the result of a run, as Hugging Face reads it: the files of some models have other names."""
    if (folder / "config.json").exists():
        saved = type(run.policy.hf).from_pretrained(folder, dtype="auto", trust_remote_code=False)
        written = {name: parameter.detach() for name, parameter in saved.named_parameters()}
    else:
        written = read_weights(folder)
    _check_written("model", run, written, differences, "after the last step")


def _check_written(
    stage: str, run: Run, written: Mapping[str, Tensor], differences: Differences, where: str
) -> None:
    for name, weight in trained_weights(run).items():
        differences.holds(stage, name in written, f"{where}: {name} is missing")
        if name in written:
            is_same = torch.equal(written[name].to(weight.dtype), weight.cpu())
            differences.holds(stage, is_same, f"{where}: {name} differs from the trainer's")


def read_weights(folder: Path) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        written |= load_file(path)
    return written


def check_checkpoints(
    run: Run,
    due: list[int],
    journal: Path,
    totals: Mapping[int, Mapping[str, float]],
    differences: Differences,
) -> None:
    """Holds a run that is over to the checkpoints that are due; leaves it with the last one's weights."""
    parent = run.output_dir / "checkpoints"
    differences.same("checkpoint", due, stable_steps(parent), "steps after which there is one")
    folders = sorted(int(path.name.removeprefix("step_")) for path in parent.glob("step_*"))
    differences.same("checkpoint", due, folders, "steps after which there is a folder")
    for step in stable_steps(parent):
        folder, where = parent / f"step_{step}", f"checkpoint {step}"
        progress = json.loads((folder / "progress.json").read_bytes())
        differences.same("checkpoint", step, progress["step"], f"{where}: steps that are trained")
        booked = sum_counts(each for each in read_entries(journal) if each.get("step", 0) < step)
        kept = sum_counts(progress["ledger"])
        differences.same("checkpoint", booked, kept, f"{where}: its ledger, against {journal.name}")
        last = {each.get("step", 0) for each in progress["ledger"]}
        differences.same("checkpoint", {step - 1}, last, f"{where}: the last step of its ledger")
        where_totals = f"{where}: its running totals"
        differences.same("checkpoint", totals.get(step), progress["totals"], where_totals)
        published = weights_folder(run.output_dir, step)
        if published.exists():
            read_model(run.trained.module, folder / STATE)
            check_weights("checkpoint", run, published, differences, where)
