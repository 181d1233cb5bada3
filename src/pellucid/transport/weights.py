"""Weights from trainer to engine: `weights/step_N/model.safetensors` + `STABLE`, N the policy version.

Tied weights are written once. Loading checks every name and shape before it changes any.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from pellucid.errors import TransportError
from pellucid.transport.stable import publish_folder, retract_folder, stable_steps

_FILE = "model.safetensors"


def weights_folder(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / f"step_{version}"


def published_versions(run_dir: Path) -> list[int]:
    """Ascending."""
    return stable_steps(run_dir / "weights")


def publish_weights(model: nn.Module, run_dir: Path, version: int, *, keep: int) -> None:
    """Makes policy version `version` visible, and deletes the oldest beyond `keep`."""
    tensors = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    publish_folder(weights_folder(run_dir, version), lambda folder: save_file(tensors, folder / _FILE))
    for old in published_versions(run_dir):
        if old <= version - keep:
            retract_folder(weights_folder(run_dir, old))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copies published weights into the model in place; on any mismatch nothing is changed."""
    path = folder / _FILE
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            _check(path, {name: file.get_slice(name).get_shape() for name in file.keys()}, parameters)  # noqa: SIM118
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise TransportError(f"{path} is not a readable weight file: {error}") from error


def _check(path: Path, shapes: dict[str, list[int]], parameters: dict[str, nn.Parameter]) -> None:
    missing = sorted(parameters.keys() - shapes.keys())
    surplus = sorted(shapes.keys() - parameters.keys())
    if missing or surplus:
        raise TransportError(f"{path} does not fit the model: lacks {missing[:3]}, has unknown {surplus[:3]}")
    for name, parameter in parameters.items():
        if list(parameter.shape) != list(shapes[name]):
            raise TransportError(
                f"{path}: {name} has shape {list(shapes[name])}; the model has {list(parameter.shape)}"
            )
