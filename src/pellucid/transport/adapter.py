"""A LoRA adapter on disk, as PEFT writes it: `adapter_model.safetensors` beside `adapter_config.json`.

    y = (W + alpha / rank · B A) x

A server adds an adapter to the weights that it began with, so that serving one costs no more than serving
none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pellucid.config.model import LoraConfig
from pellucid.data.model_folder import everywhere
from pellucid.errors import TransportError
from pellucid.transport.weights import load_weights, require_regular, write_weights

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def is_adapter(folder: Path) -> bool:
    return (folder / _CONFIG).exists()


def write_adapter(adapter: nn.Module, config: LoraConfig, base: str, folder: Path) -> None:
    """Writes an adapter in PEFT's format. `base`: hub name or folder of the model that it belongs to."""
    write_weights(adapter, folder / _WEIGHTS)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": everywhere(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / _CONFIG).write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2))


class ServedWeights:
    """The weights of a served model: whole weights replace them, an adapter is added to the base weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._underneath: dict[str, Tensor] = {}
        """Base weights of the parameters that an adapter has changed, by name."""

    def load(self, folder: Path) -> None:
        """Loads whole weights or an adapter; on any mismatch it changes nothing."""
        if is_adapter(folder):
            self._add(_read(folder), folder)
        else:
            load_weights(self._model, folder)
            self._underneath.clear()

    def _add(self, updates: dict[str, "_Update"], folder: Path) -> None:
        parameters = dict(self._model.named_parameters())
        _check(updates, folder, {name: parameter.shape for name, parameter in parameters.items()})
        with torch.no_grad():
            for name in self._underneath.keys() - updates.keys():
                parameters[name].copy_(self._underneath.pop(name))
            for name, update in updates.items():
                parameter = parameters[name]
                before = self._underneath.setdefault(name, parameter.detach().clone())
                parameter.copy_(before.float() + update.whole().to(parameter.device))


def check_adapter(folder: Path, shapes: Mapping[str, torch.Size], *, max_rank: int) -> None:
    """Raises TransportError unless the adapter belongs to a model with parameters of these shapes."""
    updates = _read(folder)
    _check(updates, folder, shapes)
    if (rank := max(update.rank for update in updates.values())) > max_rank:
        raise TransportError(
            f"{folder} has rank {rank} and the server takes up to {max_rank}; start it with this "
            "model.lora.rank"
        )


def _check(updates: Mapping[str, "_Update"], folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    for name, update in updates.items():
        if shapes.get(name) != update.shape:
            raise TransportError(
                f"{folder} does not fit the model: it changes {name} of shape {list(update.shape)}, "
                f"which the model does not have; serve the model that it was trained on"
            )


class _Update(NamedTuple):
    scale: float
    a: Tensor
    b: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.b.shape[0], self.a.shape[1]))

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def whole(self) -> Tensor:
        return self.scale * (self.b.float() @ self.a.float())


def _read(folder: Path) -> dict[str, _Update]:
    """Reads the updates of an adapter, by the name of the weight that each changes."""
    try:
        for name in (_CONFIG, _WEIGHTS):
            require_regular(folder / name)
        config = orjson.loads((folder / _CONFIG).read_bytes())
        scale = config["lora_alpha"] / config["r"]
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        paths = {name.rsplit(".lora_", 1)[0] for name in tensors}
        return {
            f"{path.removeprefix(_PREFIX)}.weight": _Update(
                scale, tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
            )
            for path in sorted(paths)
        }
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise TransportError(f"{folder} is not a readable LoRA adapter: {error}") from error
