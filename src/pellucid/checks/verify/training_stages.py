"""The stages of the trainer, from its export to the published weights, each held to the oracle.

Norm, update and weights follow from the trainer's own gradient, so that rounding does not add up over stages.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

import pellucid.export
from pellucid.checks.oracle import (
    AdamWState,
    ReferenceSequence,
    ReferenceStep,
    adamw_step,
    clip_factor,
    learning_rate,
    ratios_of,
)
from pellucid.checks.verify.differences import EPS, Bounds, Differences
from pellucid.trainer.optimizer import Update
from pellucid.trainer.run import Run
from pellucid.transport.weights import weights_folder

FLOATS = (
    "trainer_logprobs",
    "inference_logprobs",
    "entropy",
    "token_loss",
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


def check_record(
    folder: Path,
    step: int,
    sequences: Mapping[tuple[str, int], ReferenceSequence],
    expected: ReferenceStep,
    bounds: Bounds,
    differences: Differences,
) -> None:
    """Holds the exported tokens to the oracle's."""
    records = list(pellucid.export.open(folder).step(step))
    exported = {(str(record["rollout_id"]), tuple(record["token_ids"])): record for record in records}
    known = {
        (rollout_id, tuple(each.token_ids)): index
        for index, ((rollout_id, _), each) in enumerate(sequences.items())
        if each.trainable.any()
    }
    differences.same("truncation", sorted(known), sorted(exported), f"step {step}: exported sequences")
    total = rounding = 0.0
    for key, index in known.items():
        record = exported.get(key)
        if record is None:
            continue
        where = f"step {step}, rollout {key[0]}"
        each, own = list(sequences.values())[index], expected.losses[index]
        values = {name: _floats(record[name]) for name in FLOATS if record.get(name) is not None}
        differences.same("denominator", expected.denominator, record["denominator"], where)
        differences.same(
            "truncation", each.trainable.tolist(), list(record["loss_mask"]), f"{where}, loss_mask"
        )
        scale = max(math.log(2), float(np.abs(expected.logprobs[index]).max()))
        bound = bounds.logprob(scale)
        differences.near("logprobs", expected.logprobs[index], values["trainer_logprobs"], bound, where)
        differences.near("entropy", expected.entropies[index], values["entropy"], bound * scale, where)
        trained = {name: array[each.trainable] for name, array in values.items()}
        known_ratios = ratios_of(trained["trainer_logprobs"], trained["inference_logprobs"])
        for name, ratio in known_ratios.items():
            if name in trained:
                size = 1 + np.abs(ratio) + np.abs(known_ratios["log_importance_ratio"])
                differences.near("ratios", ratio, trained[name], 16 * EPS * size, f"{where}, {name}")
        decided = each.trainable if own.margin is None else each.trainable & (own.margin > 4 * bound)
        for name in ("is_masked", "is_masked_high", "is_masked_low"):
            mask = getattr(own, name)
            if mask is not None:
                found = np.array([bool(flag) for flag in record[name]])
                differences.same("masks", mask[decided].tolist(), found[decided].tolist(), f"{where}, {name}")
        weight = expected.weights[index]
        allowed = (2 * bound * np.abs(own.slope) + 16 * EPS * (1 + np.abs(own.loss))) * weight
        differences.near(
            "token losses",
            weight * own.loss[decided],
            values["token_loss"][decided],
            allowed[decided],
            where,
        )
        total += float(values["token_loss"].sum())
        rounding += float(allowed.sum())
    differences.near(
        "loss", expected.loss, total / expected.denominator, rounding / expected.denominator, f"step {step}"
    )


def _floats(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def check_gradient(
    expected: ReferenceStep,
    found: Mapping[str, Tensor],
    bounds: Bounds,
    differences: Differences,
    where: str,
) -> None:
    differences.same("gradient", sorted(expected.gradients), sorted(found), f"{where}: trained parameters")
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    scale = max(float(np.abs(each).max()) for each in expected.logprobs)
    bound = bounds.gradient(expected.denominator, scale) * largest
    for name, gradient in expected.gradients.items():
        if name in found:
            differences.near(
                "gradient", gradient.numpy(), found[name].double().cpu().numpy(), bound, f"{where}, {name}"
            )


def check_update(
    run: Run,
    step: int,
    before: dict[str, Tensor],
    gradients: Mapping[str, Tensor],
    update: Update,
    state: AdamWState,
    differences: Differences,
) -> None:
    """Holds norm, learning rate and new weights to what follows from the trainer's own gradient."""
    where = f"step {step}"
    own = {name: gradient.double().cpu() for name, gradient in gradients.items()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in own.values()))
    size = sum(gradient.numel() for gradient in own.values())
    differences.near("norm", norm, update.grad_norm, 4 * math.sqrt(size) * EPS * norm, where)
    optim, scheduler = run.config.optim, run.config.scheduler
    lr = learning_rate(
        step, peak=optim.lr, kind=scheduler.type, warmup_steps=scheduler.warmup_steps, max_steps=run.max_steps
    )
    differences.near("learning rate", lr, update.lr, 16 * EPS * optim.lr, where)
    factor = clip_factor(norm, optim.max_norm)
    clipped = {name: gradient * factor for name, gradient in own.items()}
    after_step = adamw_step(before, clipped, state, lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)
    for name, weight in trained_weights(run).items():
        moved = (after_step[name] - before[name]).abs()
        allowed = EPS * (4 * before[name].abs() + 64 * moved + 4 * lr)
        differences.near(
            "update",
            after_step[name].numpy(),
            weight.double().cpu().numpy(),
            allowed.numpy(),
            f"{where}, {name}",
        )


def check_published(run: Run, step: int, differences: Differences) -> None:
    folder = weights_folder(run.output_dir, step + 1)
    published: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        published |= load_file(path)
    for name, weight in trained_weights(run).items():
        if name not in published:
            differences.add("published", math.inf, f"step {step}: {name} is missing")
        else:
            same = torch.equal(published[name].to(weight.dtype), weight.cpu())
            differences.add(
                "published", 0.0 if same else math.inf, f"step {step}: {name} differs from the trainer's"
            )
