"""The samples of one optimizer step, packed, and their loss."""

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
    """A micro batch as tensors; they are made when it is about to be trained."""

    index: int
    packed: MicroBatch
    tokens: TokenTensors
    layout: Layout
    is_computed: NDArray[np.bool_]
    """False for tokens of a shared prompt that another sequence computes."""

    weights: torch.Tensor | None
    """Weight of each token's loss in the step's mean; None: all weigh 1."""

    num_filled: int = 0
    """Padding tokens, not in the table, that make the slices of context parallelism equally long."""

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
    """The micro batches of a step that one rank trains; all ranks pack the whole step alike."""

    step: int
    packed: PackedBatch
    share_prompts: bool
    device: torch.device
    rank: int = 0
    weights: NDArray[np.float32] | None = None
    """Weight of each sequence's tokens in the step's mean; None: all weigh 1."""

    context: ContextParallel | None = None
    """The ranks that share each micro batch; None: this rank computes it alone."""

    whole: "StepBatch | None" = None
    """The batch of the whole step, if this is a part of it; else None."""

    num_before: int = 0
    """Micro batches in earlier parts of the step."""

    is_last: bool = True
    """Whether this is the last part of the step."""

    @property
    def table(self) -> TokenTable:
        """Samples as received, before truncation."""
        return self.packed.table

    @property
    def denominator(self) -> int:
        """Number of trainable tokens of the whole step, at least 1."""
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
    """Weighs each sequence's tokens in the step's mean; only rl samples are reduced, all others weigh 1."""
    table = packed.table
    if reduction == "token":
        return None
    chosen = np.flatnonzero(table["training_mode"] == TrainingMode.RL.value)
    weights = np.ones(table.num_sequences, np.float32)
    groups = table["group_id"][chosen].tolist()
    weights[chosen] = sequence_weights(reduction, packed.trainable_lengths[chosen], groups)
    return weights
