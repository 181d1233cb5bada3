"""The stages of the real path, and by how much each differs from the oracle."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pellucid.checks.finding import Finding

EPS = float(np.finfo(np.float32).eps)
UNDERFLOW = 1e-30
"""A gradient that float32 may lose: a ratio below 1e-38 is 0, whatever it is multiplied with later on."""

STAGES: Mapping[str, str] = {
    "prompts": "chat template → token ids of a prompt",
    "examples": "stream of examples → groups: each is attempted, also those of a run that was stopped",
    "samples": "turns → token ids, trainable and sampled tokens, logprobs, versions of a sample",
    "rewards": "score → reward of its own sample",
    "advantages": "rewards of a group → advantages",
    "batches": "groups → batches: whole, in order, full, each rollout once, nothing without a signal",
    "staleness": "groups → those with a token that is too old, which are dropped",
    "saved rollouts": "turns, rewards and outcomes → rollouts/step_N",
    "books of batches": "tokens of rollouts → outcomes in the orchestrator's ledger",
    "metrics of batches": "batches → rewards and off-policy levels that are logged",
    "truncation": "samples → sequences of at most seq_len tokens",
    "off-policy levels": "versions of sampled tokens → export",
    "exported fields": "samples → the fields of the export that the trainer does not compute",
    "denominator": "trainable tokens of the step",
    "logprobs": "token ids → the trainer's logprobs",
    "entropy": "token ids → entropy",
    "ratios": "logprobs → ratios and mismatch KL",
    "masks": "ratios and advantages → trust region",
    "token losses": "the loss of each token, weighted",
    "loss": "token losses → the loss of the step",
    "metrics of steps": "tokens → loss, entropy and mismatch KL that are logged",
    "books of steps": "tokens → states in the trainer's ledger",
    "gradient": "loss → gradient",
    "norm": "gradient → its norm",
    "learning rate": "step → learning rate",
    "update": "gradient → clipping → AdamW → weights",
    "published": "weights → weights/step_N",
    "checkpoint": "checkpoints: when they are due, their weights and ledger, the trainer that goes on",
    "model": "weights → model/, the result of a run",
}
"""Stages in the order in which a token meets them."""


@dataclass
class Differences:
    """The largest difference of each stage, in units of what rounding explains."""

    worst: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, excess: float, where: str) -> None:
        if not excess <= self.worst.get(stage, -1.0):
            self.worst[stage], self.where[stage] = excess, where

    def same(self, stage: str, expected: object, found: object, where: str) -> None:
        """Notes whether two values are equal; nothing rounds here."""
        equal = bool(expected == found)
        self.add(
            stage, 0.0 if equal else math.inf, where if equal else f"{where}: {found!r}, not {expected!r}"
        )

    def near(self, stage: str, expected: Any, found: Any, within: Any, where: str) -> None:
        """Notes by how many times the bound `within` the values differ, NaN being equal to NaN."""
        own, other = np.atleast_1d(np.asarray(expected, float)), np.atleast_1d(np.asarray(found, float))
        if own.shape != other.shape:
            self.add(stage, math.inf, f"{where}: shape {other.shape}, not {own.shape}")
            return
        gap = np.where(np.isnan(own) & np.isnan(other), 0.0, np.abs(own - other))
        excess = np.nan_to_num(gap / np.broadcast_to(within, own.shape), nan=math.inf)
        if excess.size:
            index = np.unravel_index(int(excess.argmax()), excess.shape)
            self.add(
                stage,
                float(excess[index]),
                f"{where}{[int(i) for i in index]}: {other[index]:.9g}, not {own[index]:.9g}",
            )

    def findings(self) -> Iterator[Finding]:
        failed = [stage for stage in STAGES if not self.worst.get(stage, 0.0) <= 1.0]
        for stage, what in STAGES.items():
            if stage in self.worst:
                order = "the first stage that differs" if failed[:1] == [stage] else "differs, too"
                yield Finding(
                    "oracle",
                    f"{stage}: {what}: largest difference ÷ what rounding explains",
                    self.worst[stage],
                    1.0,
                    f"{order}: {stage}, {self.where[stage]}",
                )


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
        """Relative to the largest gradient: back through the model, summed over tokens with such logprobs."""
        return 4 * math.sqrt(2 * self.chain + num_tokens) * EPS + self.logprob(scale)
