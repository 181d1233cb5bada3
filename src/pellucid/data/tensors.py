"""A token table as tensors, one value per token, for forward and loss.

No other module of this package imports torch: only the trainer needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


def to_tensors(table: TokenTable, device: torch.device) -> TokenTensors:
    """Converts the columns that forward or loss read; the others serve the books, which read the table."""
    columns = {
        name: _tensor(_dense(table, name), device)
        for name, column in COLUMNS.items()
        if column.read_by and (name in table or column.stand_in is not None)
    }
    return TokenTensors(table.lengths.tolist(), _tensor(table.positions(), device), columns)


def _dense(table: TokenTable, name: str) -> NDArray[Any]:
    """Views uint32 as int32, which every vocabulary fits: torch cannot index by uint32."""
    dense = table.dense(name)
    return dense.view(np.int32) if dense.dtype == np.uint32 else dense


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
