"""The processes that train one model together, as the rest of the trainer sees them.

    process     0  1  2  3  4  5  6  7      of 8, with dp_replicate = 2 and cp = 2
    rank        0  0  1  1  2  2  3  3      trains micro batches of its own, and keeps books of its own
    cp rank     0  1  0  1  0  1  0  1      has a slice of the tokens of each
    replica     0  0  0  0  1  1  1  1      has the whole model, sharded over its processes

Only the main process receives batches, reports metrics, and writes weights and checkpoints' books; of each
rank, only the first cp rank exports tokens and writes a journal.

FSDP2 shards the model over the ranks of a replica and their context-parallel ranks together. Gradients are
*summed* over all processes: each has divided its loss by the denominator of the whole step, and context
parallel ranks have each the gradient through their own slice. They are added up after the last micro batch of
a step, if every process has the memory for the whole gradient, else after each.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pellucid.config import ModelConfig, TrainerConfig, TrainerPrecision
from pellucid.config.trainer import SequenceLayout, TrainerModelConfig
from pellucid.data.images import read_image_shape
from pellucid.data.model_folder import model_fingerprint
from pellucid.data.tokenizer import first_line
from pellucid.errors import ConfigError, ModelError, ProcessError
from pellucid.model import ContextParallel, Policy, load_policy
from pellucid.model.kernels import check_kernel
from pellucid.model.load import default_device, empty_policy, prove_unread, unread_policy
from pellucid.model.policy import Traits
from pellucid.model.stored import NotByRows, StoredWeights

logger = logging.getLogger(__name__)

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
        yield Ranks.alone(config)
        return
    device = default_device()
    if device.type == "cuda":
        device = own_gpu(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(**group_options(device, config.collective_timeout_s))
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


def own_gpu(local_rank: int, num_visible: int) -> torch.device:
    """Returns the GPU of a process of this machine; raises ConfigError if there are fewer than processes."""
    if local_rank >= num_visible:
        raise ConfigError(
            f"process {local_rank} of the trainer on this machine has no GPU: {num_visible} are visible "
            "(CUDA_VISIBLE_DEVICES), and each process needs one of its own; start at most that many "
            "(`torchrun --nproc-per-node`; for `pellucid rl`, gpus.trainer)"
        )
    return torch.device("cuda", local_rank)


def group_options(device: torch.device, timeout_s: float) -> dict[str, Any]:
    """Returns the arguments of `init_process_group`.

    With its GPU, NCCL sets up connections at once, so that a wrong network shows at the start, and never
    guesses a process's GPU from its rank.
    """
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if device.type == "cuda":
        return {"backend": "nccl", "device_id": device, **options}
    return {"backend": "gloo", **options}


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

    device: torch.device = field(default_factory=default_device)
    """Device that this process computes on."""

    keeps_float32: bool = False
    """Whether weights that are not trained stay in float32 under any `precision`, as `verify` wants them."""

    @classmethod
    def alone(cls, config: TrainerConfig, device: torch.device | None = None) -> "Ranks":
        """Returns the place of the only process; `device` is the GPU if there is one, unless it is given."""
        device = device or default_device()
        return cls(precision=_precision(config, device), device=device)

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
        precision = _precision(config, device)
        return cls(rank, num_processes // cp, cp_rank, group, model_mesh, cp_mesh, precision, device)

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
    def process(self) -> int:
        """Number of this process among all of the trainer's."""
        return self.rank * (1 if self.cp_mesh is None else self.cp_mesh.size(1)) + self.cp_rank

    @property
    def num_local(self) -> int:
        """Processes on this machine."""
        return 1 if self.group is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def computes_in(self) -> TrainerPrecision:
        """The dtype of weights and activations in a forward; gradients are summed in float32."""
        return "float32" if self.precision is None else "bfloat16"

    def publish_dtype(self, config: TrainerConfig) -> torch.dtype:
        """Returns the dtype of published weights: by default that which the trainer computes with."""
        wanted = self.computes_in if config.publish_dtype == "auto" else config.publish_dtype
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]

    def reduces_once(self, config: TrainerModelConfig, trained: nn.Module) -> bool:
        """Returns whether gradients are added up over processes once per step; see `reduce_gradients`.

        All processes return the same: one with less memory than the others decides for them.
        """
        if self.model_mesh is None:
            return False
        num_trained = sum(each.numel() for each in trained.parameters() if each.requires_grad)
        num_sharing = self.num_local if self.device.type == "cpu" else 1
        memory = _memory_bytes(self.device) / num_sharing
        return all(self.gather_all(config.reduces_once(num_trained, memory)))

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

    def add_up(self, tensor: Tensor) -> Tensor:
        """Adds a tensor of each process up, in every process."""
        if self.group is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

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

    def hold(self, policy: Policy) -> None:
        """Holds weights that are not trained in the dtype to which every forward would cast them."""
        if self.precision is None or self.keeps_float32:
            return
        places: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)  # tied ones once
        for module in policy.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not weight.requires_grad and weight.is_floating_point():
                    places[weight].append((module, name))
        while places:  # one after the other: each is freed as the next one is cast
            weight, where = places.popitem()
            held = nn.Parameter(weight.to(self.precision.param_dtype), requires_grad=False)
            for module, name in where:
                module._parameters[name] = held

    def cast(self, policy: Policy) -> None:
        """Has a model that is not sharded compute in the dtype of `precision`; FSDP casts the others."""
        if self.model_mesh is None and self.precision is not None:
            policy.compute_in(torch.bfloat16)

    def load(
        self, config: ModelConfig, max_length: int, layout: SequenceLayout = "auto"
    ) -> tuple[Policy, StoredWeights | None]:
        """Loads the model to train: of several processes, each without weights, which `shard` then reads.

        Returns also where they are stored. It is None if the policy has them: if this process is alone, or if
        they cannot be read in parts. Then the main process has all of them, in host memory, and the others
        none.

        All processes raise if one does: if the model cannot be trained, or if the kernels of a device err.
        """

        def load(device: torch.device) -> Policy:
            return load_policy(config, trainable=True, max_length=max_length, device=device, layout=layout)

        if self.group is None:
            return load(self.device), None
        if read_image_shape(config.name) is not None:
            raise ConfigError(
                f"model.name = {config.name!r} reads images, and several trainer processes gather the vision "
                "tower's weights together: one whose micro batch has no image would not take part, and the "
                "others would wait for it forever; train it in one process (gpus.trainer = 1, "
                "trainer.model.cp = 1)"
            )
        found: list[tuple[Policy, StoredWeights]] = []

        def look() -> tuple[str, str, Traits | None]:
            """Returns why the weights cannot be read in parts, if they cannot, a hash of them, and traits."""
            check_kernel(self.device)
            try:
                policy, stored = unread_policy(config, max_length)
                if self.is_main:
                    prove_unread(policy, config, max_length, layout)
            except NotByRows as error:
                return str(error), "", None
            found.append((policy, stored))
            return "", model_fingerprint(config.name), policy.traits

        reasons, prints, traits = zip(*self.gather_all(self.alike(look)), strict=True)
        if not any(reasons):
            if others := [process for process, each in enumerate(prints) if each != prints[0]]:
                raise ModelError(
                    f"model.name = {config.name!r}: process {others[0]} of the trainer finds other weights "
                    "there than the first one; give every machine the same files"
                )
            found[0][0].traits = traits[0]
            return found[0]
        found.clear()
        loaded: list[Policy] = []
        if self.is_main:
            process, reason = next((number, each) for number, each in enumerate(reasons) if each)
            logger.warning(
                "model.name = %r: the first process reads all weights, with 4 bytes of host memory for each, "
                "because process %d cannot read its part alone: %s",
                config.name,
                process,
                reason,
            )

        def load_whole() -> Traits:
            loaded.append(load(torch.device("cpu")))
            return loaded[0].traits

        found_out = self.share(load_whole)
        policy = loaded[0] if loaded else empty_policy(config, max_length)
        policy.traits = found_out
        return policy, None

    def shard(self, policy: Policy, stored: StoredWeights | None = None) -> None:
        """Shards the model over the processes; this one reads its shard, or gets it from the main process."""
        if self.context is not None:
            self.context.check_heads(policy.num_heads)
        if self.model_mesh is not None:
            whole = policy.state_dict() if self.is_main else {}  # sharding puts other tensors in its place
            shard_policy(policy, self.model_mesh, self.precision, self.device)
            if stored is not None:
                self.alike(stored.fill)
            else:
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(policy, whole, options=options)  # one weight at a time
            for buffer in policy.buffers():
                dist.broadcast(buffer, src=0)


def _memory_bytes(device: torch.device) -> int:
    """Returns the memory of a device; the processes of a machine share that of its CPU."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def _precision(config: TrainerConfig, device: torch.device) -> MixedPrecisionPolicy | None:
    wanted = config.model.precision
    is_half = wanted == "bfloat16" or (wanted == "auto" and device.type != "cpu")
    return BF16 if is_half else None


def _outcome_of(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Returns what `make` returned and raised; catches everything, so that all processes end alike."""
    try:
        return make(), None
    except BaseException as error:
        return None, error


def shard_policy(
    policy: Policy,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy | None = None,
    device: torch.device | None = None,
) -> None:
    """Shards a model, as `shard_module` does, so that FSDP gathers layers, embedding and head on their own.

    The head is not freed after its forward, since its backward comes next. It is gathered while the last
    layer computes: FSDP by itself would keep the buffer of its arrival, as large as the head, beside logits.
    An embedding that is tied to the head stays with the root, and so does that head.
    """
    embedding, head = policy.hf.get_input_embeddings(), policy.hf.get_output_embeddings()
    units = dict.fromkeys(policy.layers, True)
    if embedding.weight is head.weight:
        return shard_module(policy, units, mesh, precision, device)
    shard_module(policy, {**units, embedding: True, head: False}, mesh, precision, device)

    def gather_head(*_: object) -> None:
        head.unshard(async_op=True)

    policy.layers[-1].register_forward_pre_hook(gather_head)


def shard_module(
    root: nn.Module,
    units: Mapping[nn.Module, bool],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy | None = None,
    device: torch.device | None = None,
) -> None:
    """Shards these units, and the rest with the root, over the last dimension of (replicas, shards).

    A unit that is True is freed after its forward, and gathered again for its backward.
    Weights on torch's meta device become zeros on `device`: a shard of each, and never more.

    The gradient is the sum over all processes. Both settings are needed on *every* module: with gloo,
    gradients are silently wrong if only the root has them.
    """
    options: dict[str, Any] = {"mesh": mesh if mesh.size(0) > 1 else mesh["shard"]}
    if precision is not None:
        options["mp_policy"] = precision
    for module, is_freed in {**units, root: False}.items():
        fully_shard(module, reshard_after_forward=is_freed, **options)
    if device is not None:
        _allocate(root, device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Replaces tensors on torch's meta device by zeros; tied ones stay tied."""
    made: dict[Tensor, Any] = {}
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    zeros = torch.zeros_like(tensor, device=device)
                    is_trained = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(zeros, tensor.requires_grad) if is_trained else zeros
                tensors[name] = made[tensor]
