"""Sequences in rows of their own: the way of models whose layers see more of a row than attention shows them.

States, convolutions and a family's own attention code go from token to token of a row, whatever a plan says.
So each sequence gets a row, and padding follows it, where causality hides it:

    lengths [3, 1, 2]     a b c     through HF's own forward, with its own attention
                          d . .
                          e f .     the hidden states of a b c d e f are gathered again

A plan says who the sequences are. Members that share a prompt in it compute the prompt each for themselves;
its states are taken from the first of them.
"""

import numpy as np
import torch
from torch import Tensor

from pellucid.data.tensors import to_device
from pellucid.model.segments import Segments


class PaddedRows:
    """The places of a micro batch's tokens in rows; padding repeats the first token of its row."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self.device = device
        lengths, num_queries = np.array(segments.keys), np.array(segments.queries)
        tokens = np.arange(lengths.sum()) if segments.selected is None else segments.selected
        starts = np.cumsum(lengths) - lengths
        columns = np.arange(max(segments.keys))
        is_real = columns < lengths[:, None]
        places = tokens[starts[:, None] + np.where(is_real, columns, 0)]
        is_kept = is_real & (columns >= (lengths - num_queries)[:, None])
        # Queries lie in the plan's order, so kept places do, too.
        self._places, self._kept, self._is_padding = to_device(
            [places, np.flatnonzero(is_kept), ~is_real], device
        )

    def spread(self, values: Tensor) -> Tensor:
        """[tokens, …] -> [rows, columns, …]"""
        return values[self._places]

    def gather(self, values: Tensor) -> Tensor:
        """[rows · columns, …], or [rows, columns, …] -> [tokens, …]"""
        flat = values.flatten(0, 1) if values.shape[:2] == self._places.shape else values
        return flat.index_select(0, self._kept)

    def spread_flat(self, values: Tensor, fill: float) -> Tensor:
        """[tokens, …] -> [rows · columns, …], with `fill` at the places of padding."""
        spread = self.spread(values)
        shape = (*self._is_padding.shape, *(1,) * (spread.dim() - 2))
        return spread.masked_fill(self._is_padding.view(shape), fill).flatten(0, 1)
