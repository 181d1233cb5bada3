"""A token table as tensors, one value per token, for forward and loss; and copies that keep no GPU waiting.

A host that waits for a GPU gives it nothing to do meanwhile. So copies to it go through pinned memory and are
not waited for (`to_device`), numbers come back together (`read_together`), and values of every token, or
weights, are waited for by the thread that needs them (`HostCopy`).

No other module of this package imports torch: only the trainer needs it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data.schema import COLUMNS
from pellucid.data.table import TokenTable


@dataclass(frozen=True, slots=True)
class TokenTensors:
    lengths: list[int]
    positions: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def get(self, name: str) -> Tensor | None:
        return self.columns.get(name)


def read_together(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Reads tensors of one device in one copy: the host waits for the device once."""
    if not tensors:
        return []
    if tensors[0].device.type == "cpu":
        return [tensor.detach().numpy() for tensor in tensors]
    whole = torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in tensors]).cpu()
    parts = whole.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    return [
        # A part may begin at any byte, and a tensor of wider numbers may not: so it is copied.
        part.clone().view(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(parts, tensors, strict=True)
    ]


class HostCopy:
    """Copies of tensors of one device in pinned host memory, started when this is made.

    Only `wait` waits for the device, in whichever thread calls it. Tensors on the CPU are not copied, unless
    there is a place for them: `into` has tensors of the same names, in host memory. A device fills them on a
    stream of its own and computes on meanwhile; what changes the tensors has to be `held_back` until then.
    """

    def __init__(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None) -> None:
        (self._device,) = {tensor.device for tensor in tensors.values()} or {torch.device("cpu")}
        self._event: Any = None
        sources = {name: tensor.detach() for name, tensor in tensors.items()}
        if into is None:
            self._copies = {name: source.to("cpu", non_blocking=True) for name, source in sources.items()}
        else:
            self._copies = {name: into[name] for name in sources}
        if self._device.type == "cpu":
            for name in () if into is None else sources:
                self._copies[name].copy_(sources[name])
            return
        stream = torch.get_device_module(self._device).current_stream(self._device)
        if into is not None:
            stream = _fill_beside(self._copies, sources, stream)
        self._event = stream.record_event()

    def wait(self) -> dict[str, Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies

    def hold_back(self) -> None:
        """Makes what the device is given from now on wait until the tensors are copied; the host goes on."""
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)


def _fill_beside(copies: Mapping[str, Tensor], sources: Mapping[str, Tensor], computing: Any) -> Any:
    """Starts copies on a second stream, after what `computing` has been given so far; returns the stream."""
    device = next(iter(sources.values())).device
    module, stream = torch.get_device_module(device), _copy_stream(device)
    stream.wait_stream(computing)
    with module.stream(stream):
        for name, source in sources.items():
            copies[name].copy_(source, non_blocking=True)
            source.record_stream(stream)  # its memory is not given away before it is copied
    return stream


@cache
def _copy_stream(device: torch.device) -> Any:
    """Returns the stream of a device's copies: one, so that they are made in order."""
    return torch.get_device_module(device).Stream(device)


def to_tensors(table: TokenTable, device: torch.device) -> TokenTensors:
    """Converts the columns that forward or loss read; the others serve the books, which read the table."""
    columns = {
        name: _dense(table, name)
        for name, column in COLUMNS.items()
        if column.read_by and (name in table or column.stand_in is not None)
    }
    *values, positions = to_device([*columns.values(), table.positions()], device)
    return TokenTensors(table.lengths.tolist(), positions, dict(zip(columns, values, strict=True)))


def _dense(table: TokenTable, name: str) -> NDArray[Any]:
    """Views uint32 as int32, which every vocabulary fits: torch cannot index by uint32."""
    dense = table.dense(name)
    return dense.view(np.int32) if dense.dtype == np.uint32 else dense


_ALIGNMENT = 16
"""Bytes at whose multiples the arrays of a copy start; a multiple of every item's size."""


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to a device, by one copy that the host does not wait for; a CPU shares their memory."""
    tensors = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]
    if device.type == "cpu":
        return tensors
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(packed.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    moved = packed.to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(moved, tensors, strict=True)
    ]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns torch's own generators of a process: that of the CPU, then that of its GPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
