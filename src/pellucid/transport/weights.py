"""Weights from trainer to engine: `weights/step_N/model.safetensors` + `STABLE`, N the policy version.

A model's weights are its parameters and its persistent buffers, such as the bias with which some routers
choose experts. Tied weights are written once, and a sharded parameter is whole only while it is written.
Loading checks every name and shape before it changes any.
"""

import errno
import json
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pellucid.errors import TransportError
from pellucid.transport.stable import publish_folder, retract_folder, stable_steps

_FILE = "model.safetensors"
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


def weights_folder(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f"step_{version}"


def published_versions(run_dir: Path) -> list[int]:
    """Returns the policy versions in the run folder, ascending."""
    return stable_steps(run_dir / "weights")


def publish_version(run_dir: Path, version: int, write: Callable[[Path], None], *, keep: int) -> None:
    """Makes what `write` puts into a folder visible as policy version `version`; deletes the oldest beyond
    `keep`."""
    publish_folder(weights_folder(run_dir, version), write)
    for old in published_versions(run_dir):
        if old <= version - keep:
            retract_folder(weights_folder(run_dir, old))


def offer_weights(model: nn.Module) -> None:
    """Takes part in gathering a sharded model's weights while another process writes them."""
    for tensor in named_weights(model).values():
        _whole(tensor)


def write_version(model: nn.Module, folder: Path) -> None:
    """Writes all weights; of a sharded model, all other processes call `offer_weights` meanwhile."""
    write_weights(model, folder / _FILE)


def write_weights(model: nn.Module, path: Path) -> None:
    """Writes a safetensors file of all weights, one at a time."""
    write_tensors(path, named_weights(model), _whole)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], fetch: Callable[[Tensor], Tensor]) -> None:
    """Writes a safetensors file; `fetch` brings one tensor at a time, whole and contiguous, to the CPU."""
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
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(fetch(tensor).flatten().view(torch.uint8).numpy().data)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; one that has several names is there once."""
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def weight_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named_weights(model).items()}


def _whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor: every process of the model has to call it."""
    tensor = tensor.detach()
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.cpu().contiguous()


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copies published weights into the model in place; on any mismatch nothing is changed."""
    path = folder / _FILE
    with _opened(path) as file:
        _check(path, file, weight_shapes(model))
        with torch.no_grad():
            for name, tensor in named_weights(model).items():
                tensor.copy_(file.get_tensor(name))


def check_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Raises TransportError unless the published weights are these, no more and no fewer."""
    path = folder / _FILE
    with _opened(path) as file:
        _check(path, file, shapes)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields published weights by name, one at a time."""
    with _opened(folder / _FILE) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise TransportError(f"{path} is not a readable weight file: {error}") from error


def require_regular(path: Path) -> None:
    """Raises OSError unless a file lies there itself: a FIFO would be waited for without end, and a link may
    lead anywhere."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _check(path: Path, file: Any, shapes: Mapping[str, torch.Size]) -> None:
    found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    missing, surplus = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing or surplus:
        raise TransportError(f"{path} does not fit the model: lacks {missing[:3]}, has unknown {surplus[:3]}")
    for name, shape in shapes.items():
        if list(shape) != found[name]:
            raise TransportError(f"{path}: {name} has shape {found[name]}; the model has {list(shape)}")
