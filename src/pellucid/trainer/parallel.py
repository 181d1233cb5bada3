"""Several processes under torchrun: FSDP2 over all of them, or over each replica (HSDP), and Ulysses.

The model is sharded over the ranks of a replica and their context-parallel ranks together. Gradients are
*summed* over all processes: each has divided its loss by the denominator of the whole step, and context
parallel ranks have each the gradient through their own slice.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pellucid.config import TrainerConfig, TrainerPrecision
from pellucid.data.tokenizer import first_line
from pellucid.errors import ProcessError
from pellucid.model import ContextParallel, Policy
from pellucid.model.load import default_device
from pellucid.trainer.ranks import Ranks, outcome_of

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""Time that processes wait for the main one, which waits for batches. They notice at once if a process dies:
its connections close."""

BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    cast_forward_inputs=False,  # temperatures stay in float32
)


@contextmanager
def joined(config: TrainerConfig) -> Iterator[Ranks]:
    """Joins the process group that torchrun started; without torchrun, the process trains alone."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    config.check_num_processes(num_processes)
    if "RANK" not in os.environ:
        yield Ranks()
        return
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = Processes.of(config, dist.new_group(backend="gloo", timeout=_PATIENCE), device)
    try:
        yield ranks
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ProcessError(
            f"another process of the trainer is gone; its log tells why ({first_line(error)})"
        ) from error
    # Skipped after an error: the other processes notice when this one ends.
    dist.barrier(ranks.group)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Processes(Ranks):
    cp_rank: int = 0
    control: dist.ProcessGroup | None = None
    model_mesh: DeviceMesh | None = None
    """Mesh of all processes: (replicas, shards of each)."""

    cp_mesh: DeviceMesh | None = None
    """Mesh of all processes: (ranks, context-parallel ranks of each)."""

    precision: MixedPrecisionPolicy | None = None
    """Dtypes of forward and reduction; None: all in float32."""

    @classmethod
    def of(cls, config: TrainerConfig, control: dist.ProcessGroup, device: torch.device) -> "Processes":
        """Builds the meshes over the default group; every process calls it."""
        replicate, cp, num_processes = config.model.dp_replicate, config.model.cp, dist.get_world_size()
        meshes = [
            init_device_mesh(device.type, shape, mesh_dim_names=names)
            for shape, names in (
                ((replicate, num_processes // replicate), ("replica", "shard")),
                ((num_processes // cp, cp), ("rank", "cp")),
            )
        ]
        rank, cp_rank = divmod(dist.get_rank(), cp)
        precision = BF16 if device.type == "cuda" else None
        return cls(rank, num_processes // cp, cp_rank, control, meshes[0], meshes[1], precision)

    @property
    def is_main(self) -> bool:
        return self.rank == self.cp_rank == 0

    @property
    def keeps_books(self) -> bool:
        return self.cp_rank == 0

    @property
    def num_processes(self) -> int:
        return dist.get_world_size()

    @property
    def num_local(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def computes_in(self) -> TrainerPrecision:
        return "float32" if self.precision is None else "bfloat16"

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.control

    @property
    def context(self) -> ContextParallel | None:
        assert self.cp_mesh is not None
        if (size := self.cp_mesh.size(1)) == 1:
            return None
        return ContextParallel(self.cp_mesh.get_group("cp"), self.cp_rank, size)

    def apart(self) -> "Processes":
        return replace(self, control=dist.new_group(backend="gloo", timeout=_PATIENCE))

    def gather(self, value: Any) -> list[Any]:
        assert self.cp_mesh is not None
        return self.gather_all(value)[:: self.cp_mesh.size(1)]

    def gather_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, make: Callable[[], T]) -> T:
        outcome: list[Any] = [outcome_of(make) if self.is_main else None]
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        value, error = outcome[0]
        if error is not None:
            raise error
        shared: T = value
        return shared

    def shard(self, policy: Policy) -> None:
        assert self.model_mesh is not None
        if self.context is not None:
            self.context.check_heads(policy.num_heads)
        shard_module(policy, policy.layers, self.model_mesh, self.precision)


def shard_module(
    root: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Shards the layers, and the rest with the root, over the last dimension of (replicas, shards).

    The gradient is the sum over all processes. Both settings are needed on *every* module: with gloo,
    gradients are silently wrong if only the root has them.
    """
    options: dict[str, Any] = {"mesh": mesh if mesh.size(0) > 1 else mesh["shard"]}
    if precision is not None:
        options["mp_policy"] = precision
    for module in (*layers, root):
        fully_shard(module, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
