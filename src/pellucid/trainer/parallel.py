"""The processes that train one model together, as the rest of the trainer sees them.

    process     0  1  2  3  4  5  6  7      of 8, with dp_replicate = 2 and cp = 2
    rank        0  0  1  1  2  2  3  3      trains micro batches of its own, and keeps books of its own
    cp rank     0  1  0  1  0  1  0  1      has a slice of the tokens of each
    replica     0  0  0  0  1  1  1  1      has the whole model, sharded over its processes

Only the main process receives batches, reports metrics, and writes weights and checkpoints' books; of each
rank, only the first cp rank exports tokens and writes a journal.

FSDP2 shards the model over the ranks of a replica and their context-parallel ranks together. Gradients are
*summed* over all processes: each has divided its loss by the denominator of the whole step, and context
parallel ranks have each the gradient through their own slice.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

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
def joined(config: TrainerConfig) -> Iterator["Ranks"]:
    """Joins the process group that torchrun started; without torchrun, the process trains alone."""
    config.check_num_processes(int(os.environ.get("WORLD_SIZE", "1")))
    if "RANK" not in os.environ:
        yield Ranks()
        return
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = Ranks.of(config, dist.new_group(backend="gloo", timeout=_PATIENCE), device)
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
class Ranks:
    """The place of this process among those of the trainer; by default it is the only one.

    Every process calls the same methods in the same order.
    """

    rank: int = 0
    num_ranks: int = 1
    cp_rank: int = 0
    group: dist.ProcessGroup | None = None
    """Group of all processes, for control messages; None if this process is alone."""

    model_mesh: DeviceMesh | None = None
    """Mesh of all processes: (replicas, shards of each)."""

    cp_mesh: DeviceMesh | None = None
    """Mesh of all processes: (ranks, context-parallel ranks of each)."""

    precision: MixedPrecisionPolicy | None = None
    """Dtypes of forward and reduction; None: all in float32."""

    @classmethod
    def of(cls, config: TrainerConfig, group: dist.ProcessGroup, device: torch.device) -> "Ranks":
        """Builds the meshes over the default group; every process calls it."""
        replicate, cp, num_processes = config.model.dp_replicate, config.model.cp, dist.get_world_size()
        model_mesh, cp_mesh = (
            init_device_mesh(device.type, shape, mesh_dim_names=names)
            for shape, names in (
                ((replicate, num_processes // replicate), ("replica", "shard")),
                ((num_processes // cp, cp), ("rank", "cp")),
            )
        )
        rank, cp_rank = divmod(dist.get_rank(), cp)
        precision = BF16 if device.type == "cuda" else None
        return cls(rank, num_processes // cp, cp_rank, group, model_mesh, cp_mesh, precision)

    @property
    def is_main(self) -> bool:
        return self.rank == self.cp_rank == 0

    @property
    def keeps_books(self) -> bool:
        """Whether this process writes the journal and the export of its rank."""
        return self.cp_rank == 0

    @property
    def num_processes(self) -> int:
        """Processes of the trainer on all machines."""
        return 1 if self.group is None else dist.get_world_size()

    @property
    def num_local(self) -> int:
        """Processes on this machine."""
        return 1 if self.group is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def computes_in(self) -> TrainerPrecision:
        """The dtype of weights and activations in a forward; gradients are summed in float32."""
        return "float32" if self.precision is None else "bfloat16"

    @property
    def context(self) -> ContextParallel | None:
        """Context-parallel ranks that share this rank's micro batches; None without context parallelism."""
        if self.cp_mesh is None or (size := self.cp_mesh.size(1)) == 1:
            return None
        return ContextParallel(self.cp_mesh.get_group("cp"), self.cp_rank, size)

    def apart(self) -> "Ranks":
        """Returns the same processes with a process group of its own, for use by another thread."""
        if self.group is None:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=_PATIENCE))

    def gather(self, value: Any) -> list[Any]:
        """Gathers one value per rank, in order of ranks, in every process."""
        return self.gather_all(value)[:: 1 if self.cp_mesh is None else self.cp_mesh.size(1)]

    def gather_all(self, value: Any) -> list[Any]:
        """Gathers one value per process, in order, in every process."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, make: Callable[[], T]) -> T:
        """Calls `make` in the main process alone; every process returns its result, or raises its error."""
        if self.group is None:
            return make()
        outcome: list[Any] = [_outcome_of(make) if self.is_main else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        value, error = outcome[0]
        if error is not None:
            raise error
        return cast(T, value)

    def alike(self, make: Callable[[], T]) -> T:
        """Calls `make` in every process, and raises in every process if it fails in one.

        `make` must not talk to the other processes: one that fails would leave them waiting.
        """
        value, own_error = _outcome_of(make)
        errors = [error for error in self.gather_all(own_error) if error is not None]
        if errors:
            raise own_error or errors[0]  # its own has a cause and a traceback, which are not sent
        return cast(T, value)

    def shard(self, policy: Policy) -> None:
        """Shards the model over the processes; this one keeps its shard."""
        if self.context is not None:
            self.context.check_heads(policy.num_heads)
        if self.model_mesh is not None:
            shard_module(policy, policy.layers, self.model_mesh, self.precision)


def _outcome_of(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Returns what `make` returned and raised; catches everything, so that all processes end alike."""
    try:
        return make(), None
    except BaseException as error:
        return None, error


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
