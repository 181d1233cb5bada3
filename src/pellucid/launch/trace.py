"""Memory of one GPU of the trainer, by torch's own FSDP2 tracker: a step on fake tensors, without data.

The model, its attention, FSDP2 and AdamW are those that train; the process group is torch's fake one, of
the size of the real one. Layers are alike, so two shallow models are traced, and the line through them is
followed to the depth of the real one. Two things are stand-ins: the head computes one chunk of logits, since
each takes the same memory, and attention is SDPA on one sequence as long as the micro batch. Gradients are
reduced after the micro batch, whatever `reduce_gradients` says.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import linear

from pellucid.config import TrainerConfig
from pellucid.model import Layout, Policy, TokenOutput, packed_layout
from pellucid.model.attention import ATTENTION, attention_function
from pellucid.model.head import MAX_LOGITS
from pellucid.trainer.parallel import BF16, Ranks, shard_policy

DEPTHS = (4, 6)
"""Layers of the traced models: more than FSDP2 has in flight, or a line through them would be too steep."""

_STATES = {"Sharded Param": "weights", "Sharded Grad": "gradients", "OptState": "optimizer"}
_STATES |= {"Parameter": "weights", "Gradient": "gradients", "Optstate": "optimizer"}


@dataclass(frozen=True, slots=True)
class Trace:
    """Bytes on one GPU at the fullest moment of forward and backward, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    others: float
    """Gathered weights, gradients before they are scattered, gradients of activations, logits."""

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.others


def trace_trainer(
    hf_config: Any,
    trainer: TrainerConfig,
    num_processes: int,
    *,
    tokens: int,
    in_bfloat16: bool = True,
    max_logits: int = MAX_LOGITS,
) -> Trace:
    """Traces one micro batch of `tokens` tokens, on one of `num_processes` processes.

    The head computes at most `max_logits` logits at a time.

    One process in float32 is traced without a process group, as it trains. Raises whatever torch raises for
    models whose shapes depend on their data, such as those with experts.
    """
    depth = int(hf_config.get_text_config().num_hidden_layers)
    if depth <= DEPTHS[1]:
        return _trace(hf_config, trainer, num_processes, tokens, in_bfloat16, max_logits)
    low, high = (
        _trace(shallow(hf_config, each), trainer, num_processes, tokens, in_bfloat16, max_logits)
        for each in DEPTHS
    )
    steps = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    pairs = ((field.name, getattr(low, field.name), getattr(high, field.name)) for field in fields(Trace))
    return Trace(**{name: first + steps * (second - first) for name, first, second in pairs})


def shallow(hf_config: Any, num_layers: int) -> Any:
    """Returns the configuration of the same model with its first `num_layers` layers."""
    changed = copy.deepcopy(hf_config)
    text = changed.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return changed


def _trace(
    hf_config: Any, trainer: TrainerConfig, num_processes: int, tokens: int, bf16: bool, max_logits: int
) -> Trace:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attention_function)
    layout = packed_layout([tokens])
    is_alone = num_processes == 1 and not bf16
    with _fake_group(num_processes), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = Ranks()
        if not is_alone:
            group = dist.group.WORLD
            assert group is not None
            ranks = replace(Ranks.of(trainer, group, torch.device("cpu")), precision=BF16 if bf16 else None)
            if ranks.model_mesh is not None:
                ranks.model_mesh["shard"]  # made once, before tensors are fake
        if ranks.context is not None:
            layout = layout.slice(ranks.context)
        with FakeTensorMode() as mode:
            hf = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, attn_implementation=ATTENTION
            )
            policy = _TracedPolicy(hf).eval()
            policy.max_logits = max_logits
            if trainer.model.activation_checkpointing:
                policy.checkpoint_activations()
            if ranks.model_mesh is not None:
                shard_policy(policy, ranks.model_mesh, ranks.precision)
            adamw = torch.optim.AdamW(policy.parameters(), lr=1e-5)
            for parameter in policy.parameters():  # as after an earlier step and micro batch
                parameter.grad = torch.zeros_like(parameter)
            adamw.step()
            layout = _faked(layout, mode)
            ids, places = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
            tracker = MemTracker() if is_alone else FSDPMemTracker(policy, adamw)
            if is_alone:
                tracker.track_external(policy, adamw)
            with tracker:
                policy(ids, places, torch.ones(tokens), layout).logprobs.sum().backward()
            snapshot = next(iter(tracker.get_tracker_snapshot("peak").values()))
    return _by_kind(snapshot)


def _by_kind(snapshot: dict[Any, int]) -> Trace:
    found = {"weights": 0, "gradients": 0, "optimizer": 0, "activations": 0, "others": 0}
    for kind, num_bytes in snapshot.items():
        name = getattr(kind, "value", kind)
        if name != "Total":
            found[_STATES.get(name, "activations" if name == "Activation" else "others")] += num_bytes
    return Trace(**found)


@contextmanager
def _fake_group(num_processes: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _faked(layout: Layout, mode: FakeTensorMode) -> Layout:
    changes: dict[str, Any] = {
        field.name: mode.from_tensor(value)
        for field in fields(layout)
        if isinstance(value := getattr(layout, field.name), Tensor)
    }
    own = layout.own
    return replace(layout, **changes, own=own and replace(own, rows=mode.from_tensor(own.rows)))


class _TracedPolicy(Policy):
    def predict_rows(
        self, hidden: Tensor, token_ids: Tensor, temperatures: Tensor, read: Tensor
    ) -> TokenOutput:
        weight = self.head_weight()
        assert self.max_logits is not None
        if len(hidden) * len(weight) <= min(self.max_logits, MAX_LOGITS):
            return super().predict_rows(hidden, token_ids, temperatures, read)
        chunk = max(1, self.max_logits // len(weight))
        arguments = (hidden, weight, temperatures, chunk)
        return TokenOutput(*_OneChunk.apply(*arguments))  # type: ignore[no-untyped-call]


class _OneChunk(torch.autograd.Function):
    """The first chunk of `model.head`'s chunked head, with the memory that any of them takes on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, temperatures: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logits = linear(hidden[:chunk], weight).float()
        torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(hidden, weight)
        ctx.chunk = chunk
        logprobs, entropy = torch.empty_like(temperatures), torch.empty_like(temperatures)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        states = hidden[: ctx.chunk]
        of_logits = linear(states, weight).float().to(weight.dtype)
        of_hidden[: ctx.chunk] = of_logits @ weight
        if weight.dtype == of_weight.dtype:
            of_weight.addmm_(of_logits.T, states)
        else:
            of_weight += torch.empty_like(of_weight)  # the product, which a CPU cannot compute in float32
        return of_hidden, of_weight.to(weight.dtype), None, None
