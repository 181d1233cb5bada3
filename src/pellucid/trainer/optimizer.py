"""AdamW with clipping and a learning-rate schedule."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pellucid.config import OptimConfig, SchedulerConfig
from pellucid.errors import DataError


class Optimizer:
    def __init__(
        self, model: nn.Module, optim: OptimConfig, scheduler: SchedulerConfig, *, max_steps: int
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optim = optim
        self._scheduler = scheduler
        self._max_steps = max_steps
        self.num_steps = 0
        """Updates made; the schedule's position."""

        self.last_lr = 0.0
        self.adamw = torch.optim.AdamW(
            self._parameters,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=True,  # one pass over memory: 0.16 s for 135 M parameters on a core, against 0.60 s
        )

    def step(self, *, lr: float | None = None) -> float:
        """Clips, updates and clears the gradients; returns their norm before clipping.

        `lr` is used instead of the schedule's.
        """
        norm = nn.utils.clip_grad_norm_(self._parameters, self._optim.max_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(grad_norm):
            raise DataError(
                f"the gradient norm is {grad_norm}; the weights were left as they are. Look at the last "
                "token export for tokens with a huge ratio, lower trainer.optim.lr, or use float32"
            )
        scheduled = self._optim.lr * lr_factor(self.num_steps, self._scheduler, self._max_steps)
        self.last_lr = scheduled if lr is None else lr
        for group in self.adamw.param_groups:
            group["lr"] = self.last_lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.num_steps += 1
        return grad_norm


def lr_factor(step: int, scheduler: SchedulerConfig, max_steps: int) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then the schedule's shape down to 0."""
    warmup = scheduler.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if scheduler.type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return 1.0 - progress if scheduler.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
