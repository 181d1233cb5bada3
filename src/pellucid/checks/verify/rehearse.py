"""`pellucid verify --rehearse`: one micro batch of the configured model on a pretend GPU, phase by phase.

The model has its real shape and no values, so an 8B model takes a minute and little memory. A micro batch
holds groups of the configured size, as many as `trainer.micro_batch_max_tokens` has room for. Everything runs
in one process: FSDP2 and context parallelism are not rehearsed.
"""

import json
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from pellucid.checks.rehearsal import Rehearsal, rehearsing
from pellucid.config import TrainerRunConfig, VerifyConfig
from pellucid.data import PackedArray, TokenTable, TrainingSample
from pellucid.loss import LossInputs, loss_for
from pellucid.model import Policy
from pellucid.model.load import empty_model
from pellucid.packing import pack_batch
from pellucid.trainer.build import prepare_policy
from pellucid.trainer.optimizer import Optimizer
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.step import StepBatch, forward_inputs

PHASES = ("load", "forward", "loss", "backward", "update")


class PhaseCounts(NamedTuple):
    """Counts of one phase of a rehearsed step."""

    phase: str
    syncs: int
    launches: int
    copies: int
    copied_bytes: int
    peak_bytes: int
    """Most memory that tensors took at once, those of earlier phases included."""


def rehearse(config: VerifyConfig, memory_bytes: int = 80 * 10**9) -> tuple[list[PhaseCounts], Rehearsal]:
    """Trains one micro batch of the configured shape on a pretend GPU with `memory_bytes` of memory.

    Layers are not compiled: torch has no compiler for a pretend GPU.
    """
    part = config.part(TrainerRunConfig, monitors={})
    assert isinstance(part, TrainerRunConfig)
    model = part.trainer.model.model_copy(update={"compile": False})
    part = part.model_copy(update={"trainer": part.trainer.model_copy(update={"model": model})})
    with rehearsing(holds_values=False, total_memory=memory_bytes) as rehearsal:
        with rehearsal.phase("build"):
            policy = Policy(empty_model(part.model, rehearsal.device)).eval()
            adapters = prepare_policy(policy, part, Ranks.alone(part.trainer, rehearsal.device))
            trained = policy if adapters is None else adapters[0]
            if adapters is not None:
                adapters[0].activate()
            optimizer = Optimizer(trained, part.trainer.optim, part.trainer.scheduler, max_steps=1)
        table = _table(config, policy)
        packed = pack_batch(
            table,
            seq_len=part.trainer.model.seq_len,
            max_tokens=table.num_tokens,
            share_prompts=part.trainer.share_prompts,
        )
        batch = StepBatch(0, packed, rehearsal.device)
        loss = loss_for(part.trainer.loss)["rl"]
        with rehearsal.phase("load"):
            micro_batch = next(iter(batch.micro_batches))
        tokens = micro_batch.tokens
        with rehearsal.phase("forward"):
            output = policy(*forward_inputs(tokens, micro_batch.layout))
        with rehearsal.phase("loss"):
            total = loss(LossInputs.of(tokens, output.logprobs)).token_loss.sum() / batch.denominator
        with rehearsal.phase("backward"):
            total.backward()
        del output, total
        with rehearsal.phase("update"):
            optimizer.step()
        return [_counts(rehearsal, phase) for phase in PHASES], rehearsal


def _counts(rehearsal: Rehearsal, phase: str) -> PhaseCounts:
    return PhaseCounts(
        phase,
        rehearsal.count("sync", phase),
        rehearsal.count("launch", phase),
        rehearsal.count("h2d", phase) + rehearsal.count("d2h", phase),
        rehearsal.bytes("h2d", phase) + rehearsal.bytes("d2h", phase),
        rehearsal.peak_bytes[phase],
    )


def _table(config: VerifyConfig, policy: Policy) -> TokenTable:
    """Makes groups of the longest replies that sampling and `seq_len` allow, to prompts as long as these."""
    generator = np.random.default_rng(0)
    length = min(config.orchestrator.sampling.max_tokens, config.trainer.model.seq_len // 2)
    num_samples = max(1, config.trainer.max_tokens // (2 * length))
    members = config.orchestrator.rollouts_per_example
    made = []
    for index in range(num_samples):
        if index % members == 0:
            prompt = generator.integers(0, policy.vocab_size, length).tolist()
        reply = generator.integers(0, policy.vocab_size, length).tolist()
        made.append(
            TrainingSample.from_turn(
                prompt,
                reply,
                [-1.0] * length,
                env_name="rehearsal",
                run_id="rehearsal",
                rollout_id=f"r{index}",
                group_id=f"g{index // members}",
                reward=1.0,
                advantage=1.0,
                routed_experts=_experts(policy, 2 * length),
                expert_weights=_expert_weights(policy, 2 * length),
            )
        )
    return TokenTable.from_samples(made)


def _experts(policy: Policy, num_tokens: int) -> PackedArray | None:
    """Sends every token to the first experts."""
    if policy.replay is None:
        return None
    shape = policy.replay.shape
    chosen = np.broadcast_to(
        np.arange(shape.top_k, dtype=shape.dtype), (num_tokens, shape.num_layers, shape.top_k)
    )
    return PackedArray(chosen.tobytes(), chosen.shape, shape.dtype.name)


def _expert_weights(policy: Policy, num_tokens: int) -> NDArray[np.float32] | None:
    """Weighs all experts of a token alike, if weights are replayed."""
    if policy.replay is None or not (shape := policy.replay.shape).has_weights:
        return None
    return np.full((num_tokens, shape.num_layers, shape.top_k), 1 / shape.top_k, np.float32)


def print_rehearsal(config: VerifyConfig, console: Console) -> int:
    """Rehearses and prints; returns 1 if the host waits for the device before the update, else 0."""
    phases, rehearsal = rehearse(config)
    waits = sum(counts.syncs for counts in phases if counts.phase != "update")
    if config.as_json:
        for counts in phases:
            print(json.dumps(counts._asdict()))
        return int(waits > 0)
    table = Table("phase", "syncs", "launches", "copies", "copied MB", "peak memory GB")
    for phase, *numbers, copied, peak in phases:
        table.add_row(
            phase, *(f"{number:,}" for number in numbers), f"{copied / 1e6:.2f}", f"{peak / 1e9:.1f}"
        )
    console.print(table)
    console.out(rehearsal.table("sync", "attention"), highlight=False)
    return int(waits > 0)
