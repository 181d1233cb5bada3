"""One optimizer step's worth of samples, packed, and what became of each token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.config import Reduction
from pellucid.data import TokenTable, TrainingMode
from pellucid.data.tensors import TokenTensors, to_tensors
from pellucid.loss import LossInputs, LossRecord, sequence_weights
from pellucid.model import ContextParallel, Layout, packed_layout, shared_layout
from pellucid.packing import MicroBatch, PackedBatch


@dataclass(frozen=True, slots=True)
class LoadedMicroBatch:
    """A micro batch as tensors, inflated when its turn comes."""

    index: int
    packed: MicroBatch
    tokens: TokenTensors
    layout: Layout
    is_computed: NDArray[np.bool_]
    """False for tokens of a shared prompt that another sequence computes."""

    weights: torch.Tensor | None
    """Of each token's loss in the step's mean; None: all weigh 1."""

    num_filled: int = 0
    """Tokens of padding, not in the table, that make the slices of context parallelism equally long."""

    @property
    def table(self) -> TokenTable:
        return self.packed.table


@dataclass(frozen=True, slots=True)
class LossResult:
    loss: torch.Tensor
    """The micro batch's share of the step's loss, to be differentiated."""

    inputs: LossInputs
    record: LossRecord


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank trains of a step; all ranks pack the whole of it alike."""

    step: int
    packed: PackedBatch
    share_prompts: bool
    device: torch.device
    rank: int = 0
    weights: NDArray[np.float32] | None = None
    """Of each sequence of the batch; None: all weigh 1."""

    context: ContextParallel | None = None
    """The ranks that share each micro batch; None: this one computes all of it."""

    whole: "StepBatch | None" = None
    """What this is a part of; None: it is the whole."""

    num_before: int = 0
    """Micro batches of earlier parts."""

    is_last: bool = True
    """Whether the step ends with it."""

    @property
    def table(self) -> TokenTable:
        """As received, before truncation."""
        return self.packed.table

    @property
    def denominator(self) -> int:
        """Of the step, whichever part of it this is."""
        return max(1, (self.whole or self).packed.num_trainable)

    @property
    def micro_batches(self) -> Iterator[LoadedMicroBatch]:
        for index, micro_batch in enumerate(self.packed.micro_batches(self.rank), self.num_before):
            yield self._load(index, micro_batch)

    def _load(self, index: int, micro_batch: MicroBatch) -> LoadedMicroBatch:
        table = micro_batch.table
        layout = layout_of(table, share_prompts=self.share_prompts)
        is_computed = np.zeros(table.num_tokens, np.bool_)
        is_computed[layout.computed.numpy()] = True
        num_filled = 0
        if (context := self.context) is not None:
            num_filled = layout.slice_size(context.size) * context.size - len(layout.computed)
            layout = layout.slice(context)
        return LoadedMicroBatch(
            index,
            micro_batch,
            to_tensors(table, self.device),
            layout.to(self.device),
            is_computed,
            self._weights(micro_batch),
            num_filled,
        )

    def _weights(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        if self.weights is None:
            return None
        per_sequence = np.zeros(micro_batch.table.num_sequences, np.float32)  # padding comes last
        per_sequence[: len(micro_batch.indices)] = self.weights[micro_batch.indices]
        return torch.from_numpy(np.repeat(per_sequence, micro_batch.table.lengths)).to(self.device)


def layout_of(table: TokenTable, *, share_prompts: bool) -> Layout:
    lengths, loss_mask = table.lengths.tolist(), table["loss_mask"]
    if not share_prompts:
        return packed_layout(lengths, loss_mask)
    groups = table["group_id"].tolist()
    experts = table["routed_experts"] if table.has("routed_experts") else None
    return shared_layout(lengths, table["token_ids"], groups, table.dense("temperatures"), loss_mask, experts)


def loss_weights(packed: PackedBatch, reduction: Reduction) -> NDArray[np.float32] | None:
    """What the tokens of each sequence weigh in the step's mean; `trainer.loss` is about rl samples alone."""
    table = packed.table
    if reduction == "token":
        return None
    chosen = np.flatnonzero(table["training_mode"] == TrainingMode.RL.value)
    weights = np.ones(table.num_sequences, np.float32)
    groups = table["group_id"][chosen].tolist()
    weights[chosen] = sequence_weights(reduction, packed.trainable_lengths[chosen], groups)
    return weights
