"""AdamW with clipping and a learning-rate schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pellucid.config import OptimConfig, SchedulerConfig
from pellucid.trainer.update_watch import Look, UpdateWatch, own


@dataclass(frozen=True, slots=True)
class Update:
    """One step of the optimizer."""

    grad_norm: float
    """Norm of all gradients before clipping."""

    lr: float
    is_skipped: bool = False
    """Whether weights and AdamW's state stayed as they were, because loss or gradient is not finite."""

    parameter: str | None = None
    """Name of the parameter nearest to the loss whose gradient is not finite in this process's shard: the
    backward pass met it first. None if there is none."""

    looks: Sequence[Look] = ()
    """Comparisons of a few weights with AdamW's formula."""


class Optimizer:
    def __init__(
        self, model: nn.Module, optim: OptimConfig, scheduler: SchedulerConfig, *, max_steps: int
    ) -> None:
        self._named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._parameters = list(self._named.values())
        self._optim = optim
        self._scheduler = scheduler
        self._max_steps = max_steps
        self.num_steps = 0
        """Steps made, skipped ones included; the schedule's position."""

        self.adamw = torch.optim.AdamW(
            self._parameters,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=True,  # one pass over memory: 0.16 s for 135 M parameters on a core, against 0.60 s
        )
        self._watch = UpdateWatch(self._named, self.adamw, optim)

    def step(self, *, lr: float | None = None, is_finite: bool = True) -> Update:
        """Clips and applies the gradients, then clears them; if loss or norm is not finite, only clears them.

        `lr` replaces that of the schedule. `is_finite` says whether the loss of the step is finite on all
        ranks.
        """
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        grad_norm = float(_whole(norm))
        own_lr = self._optim.lr * lr_factor(self.num_steps, self._scheduler, self._max_steps)
        update = Update(grad_norm, own_lr if lr is None else lr)
        if is_finite and math.isfinite(grad_norm):  # the norm over all ranks: each decides alike
            noted = self._watch.before()
            nn.utils.clip_grads_with_norm_(self._parameters, self._optim.max_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = update.lr
            self.adamw.step()
            update = replace(update, looks=self._watch.after(noted, grad_norm, update.lr))
        else:
            update = replace(update, is_skipped=True, parameter=self._not_finite())
        self.adamw.zero_grad(set_to_none=True)
        self.num_steps += 1
        return update

    def _not_finite(self) -> str | None:
        for name, parameter in reversed(self._named.items()):
            gradient = parameter.grad
            if gradient is not None and not bool(own(gradient).isfinite().all()):
                return name
        return None


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def lr_factor(step: int, scheduler: SchedulerConfig, max_steps: int) -> float:
    """Returns the share of the peak learning rate at a step: linear warm-up, then the schedule's shape."""
    warmup = scheduler.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if scheduler.type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return 1.0 - progress if scheduler.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
