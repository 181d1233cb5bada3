"""The samples of one optimizer step, packed, with their loss; and what it costs to compute them."""

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.config import Reduction
from pellucid.config.gpus import KNOWN_GPUS
from pellucid.data import TokenTable, TrainingMode
from pellucid.data.images import IMAGE
from pellucid.data.tensors import TokenTensors, to_device, to_tensors
from pellucid.loss import LossInputs, LossRecord, sequence_weights
from pellucid.model import ContextParallel, ImageInputs, Layout, Policy, packed_layout, shared_layout
from pellucid.packing import Cost, MicroBatch, PackedBatch


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

    images: ImageInputs | None = None
    """The images of its sample; None without any."""

    num_filled: int = 0
    """Padding tokens, not in the table, that make rows or slices of context parallelism equally long."""

    is_last: bool = True
    """Whether it is the last one of its step, or of a part of it, on every rank."""

    @property
    def table(self) -> TokenTable:
        return self.packed.table


class LossResult(NamedTuple):
    loss: torch.Tensor
    """The micro batch's share of the step's loss, to be differentiated."""

    inputs: LossInputs
    record: LossRecord


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The micro batches of a step that one rank trains; all ranks pack the whole step alike."""

    step: int
    packed: PackedBatch
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
            table, weights, num_filled = micro_batch.table, None, 0
            in_rows = self.packed.in_rows
            layout = layout_of(table, share_prompts=self.packed.shares_prompts)
            is_computed = np.zeros(table.num_tokens, np.bool_)
            is_computed[layout.computed.numpy()] = True
            if in_rows:
                num_filled = int(table.num_sequences * table.lengths.max()) - table.num_tokens
            elif (context := self.context) is not None:
                num_filled = layout.slice_size(context.size) * context.size - len(layout.computed)
                layout = layout.slice(context)
            if self.weights is not None:
                per_sequence = np.zeros(table.num_sequences, np.float32)  # padding comes last
                per_sequence[: len(micro_batch.indices)] = self.weights[micro_batch.indices]
                (weights,) = to_device([np.repeat(per_sequence, table.lengths)], self.device)
            tokens = to_tensors(table, self.device)
            images = _images_of(table, self.device) if micro_batch.kind.is_multimodal else None
            is_last = index - self.num_before == len(self.packed.steps) - 1
            placed = layout.to(self.device)
            yield LoadedMicroBatch(
                index, micro_batch, tokens, placed, is_computed, weights, images, num_filled, is_last
            )


def forward_inputs(
    tokens: TokenTensors, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Layout, torch.Tensor | None, torch.Tensor | None]:
    """Returns the arguments of a policy's forward; tokens that train are told beside them."""
    experts = tokens.get("routed_experts"), tokens.get("expert_weights")
    return tokens["token_ids"], tokens.positions, tokens["temperatures"], layout, *experts


def _images_of(table: TokenTable, device: torch.device) -> ImageInputs:
    """Returns the images of a micro batch; the tokens that stand for them are told by their type."""
    ends = np.cumsum(table.lengths)
    is_image = table["mm_token_type_ids"] == IMAGE
    sequences = [
        (start + np.flatnonzero(is_image[start:end]), mm_tensors)
        for start, end, mm_tensors in zip(ends - table.lengths, ends, table["mm_tensors"], strict=True)
        if mm_tensors
    ]
    return ImageInputs.of(sequences, device)


def layout_of(table: TokenTable, *, share_prompts: bool) -> Layout:
    lengths, loss_mask = table.lengths.tolist(), table["loss_mask"]
    if not share_prompts:
        return packed_layout(lengths, loss_mask)
    groups = table["group_id"].tolist()
    return shared_layout(
        lengths,
        table["token_ids"],
        groups,
        table.dense("temperatures"),
        loss_mask,
        table.get("routed_experts"),
        table.get("expert_weights"),
    )


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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Cost of attention against that of the weights, from the shape of a model.

    A forward pass multiplies each token with every active weight, and in each layer with the keys and the
    values of the tokens before it: in a sequence of L tokens L/2 of them on average, as wide as all heads
    together. Both parts are equal at L = active weights ÷ (layers · heads · head width). The backward pass
    doubles both.
    """

    num_active: float
    """Weights that the forward pass multiplies each token with."""

    attended: int
    """Sum of the head widths, over all heads of all layers."""

    is_frozen: bool = False
    """Whether the model's own weights have no gradient, as under LoRA; the adapters' cost is neglected."""

    @classmethod
    def of(cls, policy: Policy) -> "ModelShape":
        config = policy.hf.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", None) or 0)  # a state-space model has none
        if getattr(config, "kv_lora_rank", None):  # latent attention: the mean width of keys and values
            width = int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
        else:
            width = _head_width(config, heads)
        attended = config.num_hidden_layers * heads * width
        is_frozen = not policy.hf.get_output_embeddings().weight.requires_grad
        return cls(_num_active(policy, config), attended, is_frozen)

    def cost(self) -> Cost:
        return Cost(parity=max(1, round(self.num_active / max(1, self.attended))))

    def flops(self, num_tokens: float, num_pairs: float) -> float:
        """Counts the operations of forward and backward, without those that activation checkpointing repeats.

        The forward pass makes one multiplication and one addition per weight and token, and two of each per
        pair of tokens: with the key and with the value. The backward pass makes twice as many, for the
        gradients of inputs and weights; with frozen weights it needs only those of inputs.
        """
        of_weights = 2 * self.num_active * num_tokens
        return (2 if self.is_frozen else 3) * of_weights + 3 * 4 * self.attended * num_pairs


def _head_width(config: Any, heads: int) -> int:
    try:
        width = getattr(config, "head_dim", None)
    except RuntimeError:  # it differs from layer to layer, as in Gemma 4
        widths = [each.head_dim for each in config.per_layer_config]
        width = round(sum(widths) / len(widths))
    return int(width or config.hidden_size // max(1, heads))


def _num_active(policy: Policy, config: Any) -> float:
    """Counts the weights that a token is multiplied with: no embedding, no vision tower, and the active share
    of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((found for name in names if (found := getattr(config, name, None))), None)
    num_met = getattr(config, "num_experts_per_tok", None) or num_experts
    met = num_met / num_experts if num_experts else 1.0
    model = policy.hf
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = float(head.numel())
    for name, weight in (model if policy.images is None else policy.decoder).named_parameters():
        if weight.dim() > 1 and weight is not embedding and weight is not head and ".lora_" not in name:
            total += weight.numel() * (met if ".experts." in name else 1.0)
    return total


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory of this process so far: allocated on its GPU, or resident if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def peak_flops(device: torch.device) -> float | None:
    """Returns operations per second; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.tflops * 1e12 for gpu in KNOWN_GPUS.values() if gpu.device_name in name), None)
