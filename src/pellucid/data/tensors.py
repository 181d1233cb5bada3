"""A token table as tensors, one value per token: what forward and loss read.

Apart from the other modules of this package, because only the trainer pays for torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pellucid.data.columns import COLUMNS, Stored
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
    columns = {
        name: _tensor(table.dense(name), device)
        for name, column in COLUMNS.items()
        if column.stored is not Stored.SEQUENCES and (table.has(name) or column.stand_in is not None)
    }
    return TokenTensors(table.lengths.tolist(), _tensor(table.positions(), device), columns)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    if array.dtype == np.uint32:
        array = array.astype(np.int64)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).to(device, non_blocking=True)
