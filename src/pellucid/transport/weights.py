"""Weights from trainer to engine: `weights/step_N/model.safetensors` + `STABLE`, N the policy version.

A model's weights are its parameters and its persistent buffers, such as the bias with which some routers
choose experts. Tied weights are written once. Loading checks every name and shape before it changes any.

A sharded model is gathered in buckets, on the device, each by one exchange of bytes, and copied to pinned
memory of the host. The host does not wait for it, nor does the next step: the device copies on a second
stream, and has memory for the buckets that wait for it. Only the next update waits for these copies:

    shards ──> dtype that is published ──> bucket, whole ──> host ──> file

A LoRA adapter is published as PEFT writes it, `adapter_model.safetensors` beside `adapter_config.json`:

    y = (W + alpha / rank · B A) x

A server adds an adapter to the weights that it began with, so that serving one costs no more than serving
none.

Every version has a digest per tensor; see `digests`. A server computes its own from the parameters that it
serves. Where these are not the published tensors bit for bit, it goes by way of what it made of them:

    published ──digest reported──> tensor as read ──cast, or W + alpha / rank · B A──> made ──copied──> served

It notes the digests of both when it loads, and reports the first as long as the served tensor has the
second; else that of the served tensor, which is no published one.
"""

import errno
import json
import math
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from pellucid.config.shared import LoraConfig
from pellucid.data.model_folder import everywhere
from pellucid.data.tensors import HostCopy
from pellucid.data.tokenizer import first_line
from pellucid.errors import TransportError
from pellucid.transport.deltas import add_delta
from pellucid.transport.digests import (
    PublishedDigests,
    PublishedFile,
    digest_of_bytes,
    digest_of_tensor,
    write_digests,
)
from pellucid.transport.spool import publish_folder, retract_folder, stable_steps

WEIGHTS_FILE = "model.safetensors"
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BUCKET_BYTES = 1 << 28


def weights_folder(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f"step_{version}"


def published_versions(run_dir: Path) -> list[int]:
    """Returns the policy versions in the run folder, ascending."""
    return stable_steps(run_dir / "weights")


def publish_version(
    run_dir: Path,
    version: int,
    write: Callable[[Path], None],
    *,
    keep: int,
    is_read: Callable[[int], bool] = lambda version: False,
    deltas: bool = False,
) -> None:
    """Makes what `write` puts into a folder visible as policy version `version`; deletes the oldest beyond
    `keep`, except those that somebody reads. `deltas`: with the difference from the version before."""

    def write_all(folder: Path) -> None:
        write(folder)
        if deltas:
            add_delta(folder, weights_folder(run_dir, version - 1), version - 1)

    publish_folder(weights_folder(run_dir, version), write_all)
    for old in published_versions(run_dir):
        if old <= version - keep and not is_read(old):
            retract_folder(weights_folder(run_dir, old))


def offer_weights(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Takes part in gathering a sharded model's weights while another process takes or writes them."""
    for _ in _gathered(model, dtype):
        pass


def write_version(weights: "nn.Module | WeightsCopy", folder: Path) -> None:
    """Writes a policy version with its digests; of a sharded model, all other processes call `offer_weights`
    meanwhile."""
    tensors: dict[str, str] = {}
    file = _write(weights, folder / WEIGHTS_FILE, tensors)
    write_digests(folder, PublishedDigests(tensors, {WEIGHTS_FILE: file}))


def write_weights(model: nn.Module, path: Path, digests: dict[str, str] | None = None) -> PublishedFile:
    """Writes a safetensors file of all weights, a bucket at a time; the other processes offer theirs."""
    copies = (copy for bucket in _gathered(model, None) for copy in HostCopy(bucket).wait().values())
    return write_tensors(path, named_weights(model), copies, digests)


class WeightsCopy:
    """Host memory for the weights of a model: parameters of `dtype`, buffers of their own.

    copy = WeightsCopy(model)     raises TransportError if the host has too little memory
    copy.take()                   of a sharded model, all other processes call `offer_weights` meanwhile
    copy.hold_back()              before weights change
    copy.write(path)              in any thread; waits for the device
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._model, self._dtype = model, dtype
        dtypes = _published_dtypes(model, dtype)
        weights = named_weights(model)
        try:
            self._tensors = {
                name: _host_tensor(tensor.shape, dtypes[name], is_pinned=tensor.device.type == "cuda")
                for name, tensor in weights.items()
            }
        except (RuntimeError, MemoryError) as error:
            num_bytes = sum(tensor.numel() * dtypes[name].itemsize for name, tensor in weights.items())
            raise TransportError(
                f"no host memory for a copy of the weights, {num_bytes / 1e9:.1f} GB ({first_line(error)}); "
                'give the first machine of the trainer more, or set trainer.publish_dtype = "bfloat16"'
            ) from error
        self._buckets: list[HostCopy] = []

    def take(self) -> None:
        """Starts to copy the weights as they are now.

        A device copies beside what it computes. What was gathered waits there, in up to a quarter of its
        memory; then gathering goes on at the pace of the copies.
        """
        waiting: deque[tuple[int, HostCopy]] = deque()
        num_waiting = 0
        for bucket in _gathered(self._model, self._dtype):
            self._buckets.append(HostCopy(bucket, self._tensors))
            num_bytes = sum(tensor.nbytes for tensor in bucket.values())
            waiting.append((num_bytes, self._buckets[-1]))
            num_waiting += num_bytes
            while num_waiting > _most_waiting(next(iter(bucket.values())).device):
                num_done, oldest = waiting.popleft()
                oldest.hold_back()
                num_waiting -= num_done

    def hold_back(self) -> None:
        """Makes what the device is given from now on wait until the weights are copied; the host goes on."""
        for bucket in self._buckets:
            bucket.hold_back()

    def write(self, path: Path, digests: dict[str, str] | None = None) -> PublishedFile:
        """Writes a safetensors file; any thread may."""
        tensors = {name: copy for bucket in self._buckets for name, copy in bucket.wait().items()}
        return write_tensors(path, tensors, tensors.values(), digests)


def _host_tensor(shape: torch.Size, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=is_pinned)


def _most_waiting(device: torch.device) -> float:
    """Returns how many bytes may wait on a device for their copy; a CPU copies at once."""
    if device.type == "cpu":
        return math.inf
    return float(torch.get_device_module(device).get_device_properties(device).total_memory) / 4


def _write(weights: nn.Module | WeightsCopy, path: Path, digests: dict[str, str]) -> PublishedFile:
    if isinstance(weights, WeightsCopy):
        return weights.write(path, digests)
    return write_weights(weights, path, digests)


def _published_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Returns the dtype of each weight as it is published: parameters have `dtype`, unless it is None."""
    parameters = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    return {
        name: tensor.dtype if dtype is None or name not in parameters else dtype
        for name, tensor in named_weights(model).items()
    }


def _gathered(model: nn.Module, dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    """Yields whole weights on the model's device, by name, in buckets; every process has to ask for all."""
    dtypes = _published_dtypes(model, dtype)
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in named_weights(model).items():
        wanted = dtypes[name]
        size = tensor.numel() * wanted.itemsize
        if bucket and num_bytes + size > _BUCKET_BYTES:
            yield _whole(bucket)
            bucket, num_bytes = {}, 0
        bucket[name] = tensor.detach().to(wanted)
        num_bytes += size
    if bucket:
        yield _whole(bucket)


def _whole(bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathers the sharded tensors of a bucket: every process of the model has to call it."""
    sharded = {name: tensor for name, tensor in bucket.items() if isinstance(tensor, DTensor)}
    whole = dict(zip(sharded, _gather_shards(list(sharded.values())), strict=True)) if sharded else {}
    return {name: whole.get(name, tensor).contiguous() for name, tensor in bucket.items()}


def _gather_shards(tensors: Sequence[DTensor]) -> Iterator[Tensor]:
    """Puts tensors together by one exchange; each is sharded by rows over the last dimension of one mesh.

    rows 0 1 2 3 4 of a tensor, 2 processes     0 1 2 | 3 4 -      the last shard is padded
    """
    mesh = tensors[0].device_mesh
    group, num_shards = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    shards = [tensor.to_local().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    rows = [-(-len(tensor) // num_shards) for tensor in tensors]
    sizes = [
        num * (tensor.numel() // len(tensor)) * tensor.element_size()
        for num, tensor in zip(rows, tensors, strict=True)
    ]
    packed = shards[0].new_zeros(sum(sizes))
    for part, shard in zip(packed.split(sizes), shards, strict=True):
        part[: len(shard)] = shard
    gathered = packed.new_empty(num_shards, len(packed))
    dist.all_gather_single(gathered.view(-1), packed, group=group)
    for part, num, tensor in zip(gathered.split(sizes, dim=1), rows, tensors, strict=True):
        shape = (num_shards * num, *tensor.shape[1:])
        yield part.contiguous().view(tensor.dtype).view(shape)[: len(tensor)]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    copies: Iterable[Tensor],
    digests: dict[str, str] | None = None,
) -> PublishedFile:
    """Writes a safetensors file; `copies` are the tensors in host memory, in order, whole and contiguous.

    `digests` receives the digest of each copy, by name.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    with path.open("wb") as file:
        file.write(head)
        for name, copy in zip(tensors, copies, strict=True):
            if digests is not None:
                digests[name] = digest_of(copy)
            file.write(_bytes_of(copy))
    return PublishedFile(len(head) + end, digest_of_bytes(head))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns a view of a contiguous tensor in host memory."""
    data: memoryview = tensor.detach().flatten().view(torch.uint8).numpy().data
    return data


def digest_of(tensor: Tensor) -> str:
    """Computes the digest of a tensor; one of a device is copied to the host for it."""
    return digest_of_tensor(_DTYPES[tensor.dtype], _bytes_of(tensor.detach().cpu().contiguous()))


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; one that has several names is there once."""
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def weight_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named_weights(model).items()}


class Origin(NamedTuple):
    """The published tensor of which a served one was made that is not the same bit for bit."""

    published: str
    """Digest of the published tensor, as it was read."""

    served: str
    """Name of the served one."""

    made: str
    """Digest of what was made for it."""


def load_weights(model: nn.Module, folder: Path) -> dict[str, Origin]:
    """Copies published weights into the model in place; on any mismatch nothing is changed.

    Returns the origin of each tensor that the model has in another dtype.
    """
    path = folder / WEIGHTS_FILE
    origins = {}
    with _opened(path) as file:
        _check(path, file, weight_shapes(model))
        with torch.no_grad():
            for name, tensor in named_weights(model).items():
                published = file.get_tensor(name)
                if published.dtype != tensor.dtype:
                    cast = published.to(tensor.dtype)
                    origins[name] = Origin(digest_of(published), name, digest_of(cast))
                    published = cast
                tensor.copy_(published)
    return origins


def check_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Raises TransportError unless the published weights are these, no more and no fewer."""
    path = folder / WEIGHTS_FILE
    with _opened(path) as file:
        _check(path, file, shapes)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields published weights by name, one at a time."""
    with _opened(folder / WEIGHTS_FILE) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        _require_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise TransportError(f"{path} is not a readable weight file: {error}") from error


def _require_regular(path: Path) -> None:
    """Raises OSError unless a file lies there itself: a FIFO would be waited for without end, and a link may
    lead anywhere."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _check(path: Path, file: Any, shapes: Mapping[str, torch.Size]) -> None:
    found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    require_shapes(found, shapes, str(path))


def require_shapes(found: Mapping[str, Sequence[int]], shapes: Mapping[str, torch.Size], source: str) -> None:
    """Raises TransportError unless these are the tensors of a model, no more and no fewer."""
    missing, surplus = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing or surplus:
        raise TransportError(
            f"{source} does not fit the model: lacks {missing[:3]}, has unknown {surplus[:3]}"
        )
    for name, shape in shapes.items():
        if list(shape) != list(found[name]):
            raise TransportError(
                f"{source}: {name} has shape {list(found[name])}; the model has {list(shape)}"
            )


def published_shapes(folder: Path) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Returns dtype and shape of each published tensor by name, in the order of `read_weights`."""
    with _opened(folder / WEIGHTS_FILE) as file:
        dtypes = {name: dtype for dtype, name in _DTYPES.items()}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (dtypes[each.get_dtype()], each.get_shape()) for name, each in slices.items()}


_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_PREFIX = "base_model.model."


def is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER_CONFIG).exists()


def write_adapter(
    adapter: nn.Module | WeightsCopy,
    config: LoraConfig,
    base: str,
    folder: Path,
    *,
    is_transposed: bool = False,
) -> None:
    """Writes an adapter in PEFT's format, with its digests. `base`: hub name or folder of the model that it
    belongs to.

    `config` names its targets. `is_transposed` says that the adapted weights are [inputs, outputs].
    """
    tensors: dict[str, str] = {}
    file = _write(adapter, folder / _ADAPTER_WEIGHTS, tensors)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": everywhere(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets or ()),
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "inference_mode": True,
    }
    content = orjson.dumps(described, option=orjson.OPT_INDENT_2)
    (folder / _ADAPTER_CONFIG).write_bytes(content)
    about = PublishedFile(len(content), digest_of_bytes(content))
    write_digests(folder, PublishedDigests(tensors, {_ADAPTER_WEIGHTS: file, _ADAPTER_CONFIG: about}))


class ServedWeights:
    """The weights of a served model: whole weights replace them, an adapter is added to the base weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._underneath: dict[str, Tensor] = {}
        """Base weights of the parameters that an adapter has changed, by name."""
        self._origins: dict[str, Origin] = {}
        """Origins of served tensors that are not published ones bit for bit, by name of the published one."""
        self._has_adapter = False

    def digests(self) -> dict[str, str]:
        """Computes digests from the parameters as they are now; an adapter's by its own names."""
        weights = named_weights(self._model)
        if not self._has_adapter:
            served = {name: digest_of(tensor) for name, tensor in weights.items()}
        else:
            served = {name: digest_of(weights[name]) for name in self._underneath}
        made = {
            name: origin.published if served[origin.served] == origin.made else served[origin.served]
            for name, origin in self._origins.items()
        }
        return made if self._has_adapter else served | made

    def load(self, folder: Path) -> None:
        """Loads whole weights or an adapter; on any mismatch it changes nothing."""
        if is_adapter(folder):
            self._add(_read_updates(folder), folder)
        else:
            self._origins = load_weights(self._model, folder)
            self._underneath.clear()
            self._has_adapter = False

    def _add(self, updates: dict[str, "_Update"], folder: Path) -> None:
        parameters = dict(self._model.named_parameters())
        _check_updates(updates, folder, {name: parameter.shape for name, parameter in parameters.items()})
        with torch.no_grad():
            for name in self._underneath.keys() - updates.keys():
                parameters[name].copy_(self._underneath.pop(name))
            self._origins, self._has_adapter = {}, True
            for name, update in updates.items():
                parameter = parameters[name]
                before = self._underneath.setdefault(name, parameter.detach().clone())
                merged = (before.float() + update.whole().to(parameter.device)).to(parameter.dtype)
                made = digest_of(merged)
                for factor, tensor in update.factors.items():
                    self._origins[factor] = Origin(digest_of(tensor), name, made)
                parameter.copy_(merged)


def check_adapter(folder: Path, shapes: Mapping[str, torch.Size], *, max_rank: int) -> None:
    """Raises TransportError unless the adapter belongs to a model with parameters of these shapes."""
    updates = _read_updates(folder)
    _check_updates(updates, folder, shapes)
    if (rank := max(update.rank for update in updates.values())) > max_rank:
        raise TransportError(
            f"{folder} has rank {rank} and the server takes up to {max_rank}; start it with this "
            "model.lora.rank"
        )


def _check_updates(updates: Mapping[str, "_Update"], folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    for name, update in updates.items():
        if shapes.get(name) != update.shape:
            raise TransportError(
                f"{folder} does not fit the model: it changes {name} of shape {list(update.shape)}, "
                f"which the model does not have; serve the model that it was trained on"
            )


class _Update(NamedTuple):
    scale: float
    path: str
    """The changed layer's name in the file."""

    a: Tensor
    b: Tensor
    is_transposed: bool = False
    """Whether the weight is [inputs, outputs]."""

    @property
    def factors(self) -> dict[str, Tensor]:
        """A and B by their names in the file."""
        return {f"{self.path}.lora_A.weight": self.a, f"{self.path}.lora_B.weight": self.b}

    @property
    def shape(self) -> torch.Size:
        shape = self.b.shape[0], self.a.shape[1]
        return torch.Size(reversed(shape) if self.is_transposed else shape)

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def whole(self) -> Tensor:
        update = self.scale * (self.b.float() @ self.a.float())
        return update.T if self.is_transposed else update


def _read_updates(folder: Path) -> dict[str, _Update]:
    """Reads the updates of an adapter, by the name of the weight that each changes."""
    try:
        for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
            _require_regular(folder / name)
        config = orjson.loads((folder / _ADAPTER_CONFIG).read_bytes())
        scale, is_transposed = config["lora_alpha"] / config["r"], bool(config.get("fan_in_fan_out"))
        with safe_open(folder / _ADAPTER_WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        paths = {name.rsplit(".lora_", 1)[0] for name in tensors}
        return {
            f"{path.removeprefix(_ADAPTER_PREFIX)}.weight": _Update(
                scale,
                path,
                tensors[f"{path}.lora_A.weight"],
                tensors[f"{path}.lora_B.weight"],
                is_transposed,
            )
            for path in sorted(paths)
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise TransportError(f"{folder} is not a readable LoRA adapter: {error}") from error
