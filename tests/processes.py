"""What the processes of tests/trainer/test_parallel.py do.

    python processes.py FOLDER NUMBER     does FOLDER/jobs.json in NUMBER processes; writes results.json

Starting them costs seconds, so that one start does all jobs of a number of processes.
"""

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial, partialmethod
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed as dist
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from pellucid.checks import verify
from pellucid.checks.verify.gradients import check_record, difference
from pellucid.config import (
    DppoLossConfig,
    MonitorsConfig,
    PrometheusConfig,
    TrainerConfig,
    TrainerRunConfig,
    VerifyConfig,
)
from pellucid.config.base import save, to_toml
from pellucid.config.shared import LoraConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.errors import DataError, TransportError
from pellucid.integrations import TokenRecorder
from pellucid.launch.rl import places
from pellucid.loss import LossInputs, LossRecord, Ratios, dppo_loss, loss_for
from pellucid.model import stored
from pellucid.model.load import default_device
from pellucid.model.policy import Policy
from pellucid.trainer import build, run_with
from pellucid.trainer.alarms import local_shard
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate
from pellucid.trainer.many import Roster
from pellucid.trainer.parallel import BF16, Ranks, shard_module
from pellucid.trainer.run import Run
from pellucid.trainer.step import StepBatch
from pellucid.transport import weights

SEQ_LEN = 48
IMPORTED = (AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)
"""Before the processes are forked, and not by each of them."""
LOSSES = ("dppo", "ppo_clip", "cispo", "gspo", "icepop", "tis", "custom")


def sample(
    index: int,
    *,
    mode="rl",
    env="a",
    prompt=3,
    completion=4,
    group="",
    run="run",
    experts=None,
    advantage: float | None = None,
) -> TrainingSample:
    """Deterministic tokens; the logprobs of some are far from the model's, so that they are masked."""
    size = prompt + completion
    return TrainingSample.from_turn(
        [5 + (len(group) + position) % 90 for position in range(prompt)],
        [5 + (7 * index + 3 * position) % 90 for position in range(completion)],
        [-0.1 if position % 3 == 0 else -4.5 for position in range(completion)],
        completion_mask=[position % 4 != 3 for position in range(completion)],
        env_name=env,
        run_id=run,
        group_id=group,
        sample_id=str(index),
        rollout_id=f"r{index}",
        training_mode=mode,
        advantage=(1.0 if index % 2 else -0.5) if advantage is None else advantage,
        temperatures=[0.7 + 0.1 * (index % 4)] * completion,
        teacher_logprobs=[-2.0] * size if mode == "opd" else None,
        routed_experts=experts,
    )


def routed_batch() -> TokenTable:
    """A group with a shared prompt, and others; sent to experts that no router would choose."""
    samples = [
        *(sample(index, completion=2 + 3 * index, experts=routes(5 + 3 * index)) for index in range(4)),
        *(
            sample(
                20 + index, env="b", prompt=12, completion=3 + index, group="g", experts=routes(15 + index)
            )
            for index in range(3)
        ),
    ]
    return TokenTable.from_samples(samples)


def routes(num_tokens: int) -> np.ndarray:
    """Two layers, two of eight experts; those of a token depend on its position alone."""
    return (np.arange(num_tokens)[:, None, None] + np.array([[0, 3], [5, 1]])) % 8


def mixed_batch(first: int = 0, run: str = "run") -> TokenTable:
    """Three modes, a group with a shared prompt, a truncated sample; lengths of 5 to 48 tokens."""
    own = partial(sample, run=run)
    return TokenTable.from_samples(
        [
            *(own(first + index, completion=2 + 3 * index) for index in range(3)),
            *(own(20 + index, env="b", prompt=12, completion=3 + index, group="g") for index in range(2)),
            own(40, mode="opd", env="c", completion=6),
            own(60, mode="sft", env="d", completion=5),
            own(first + 50, env="b", completion=60),
        ]
    )


BATCHES = {
    "mixed": mixed_batch(),
    "unequal": TokenTable.from_samples([sample(0, completion=40), sample(1, prompt=1, completion=1)]),
    "one sample": TokenTable.from_samples([sample(0, completion=3)]),
    "one opd sample": TokenTable.from_samples([sample(0, mode="opd", prompt=1, completion=1)]),
}
ROUTED = {"routed": routed_batch(), "one sample": TokenTable.from_samples([sample(0, experts=routes(7))])}
"""With fewer samples than ranks, some ranks have a dummy only; the last has fewer tokens than 4 slices."""


def broken_loss(inputs: LossInputs):
    """NaN where the advantage is huge."""
    losses = torch.where(inputs.advantages > 1e18, torch.nan, -inputs.trainer_logprobs)
    return LossRecord(losses, ratios=None)


def steep_loss(inputs: LossInputs):
    """Finite where the advantage is huge, and so is the gradient; but its norm is not."""
    slope = torch.where(inputs.advantages > 1e18, 1e30, inputs.advantages)
    return LossRecord(-slope * inputs.trainer_logprobs, ratios=None)


def square_loss(inputs: LossInputs):
    """A custom loss without ratios."""
    return LossRecord(torch.where(inputs.loss_mask, inputs.trainer_logprobs.square(), 0.0), ratios=None)


def settings(weights: Path, folder: Path, **trainer) -> TrainerRunConfig:
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "run_id": "run",
            "seq_len": SEQ_LEN,
            "max_steps": 6,
            "model": {"name": str(weights)},
            "trainer": {"threads": 1, **trainer},
        }
    )


def loss_settings(name: str) -> dict:
    if name != "custom":
        return {"type": name}
    return {"type": "custom", "import_path": "processes:square_loss"}


def packings(*, thorough: bool) -> Iterator[tuple[str, str, dict]]:
    """(name, batch, settings): every loss under each cap and each reduction, and every batch in several ways.

    Not thorough: every loss, cap, reduction and batch, but most losses under the largest cap alone.
    """
    caps, reductions = (SEQ_LEN, SEQ_LEN // 2, SEQ_LEN // 4), ("token", "sequence", "group")
    pairs = list(zip(caps, reductions, strict=True))
    for number, loss in enumerate(LOSSES):
        some = (SEQ_LEN if number >= len(caps) else caps[number], reductions[number % 3])
        for cap, reduction in pairs if thorough else [some]:
            own = {"loss": {**loss_settings(loss), "reduction": reduction}, "micro_batch_max_tokens": cap}
            yield f"{loss}, cap {cap}, mean over {reduction}", "mixed", own
    for batch in BATCHES:
        yield f"{batch}, one sequence each", batch, {"micro_batch_max_tokens": 2}
        if thorough:
            yield f"{batch}, padded", batch, {"pad_to_multiple_of": 8}
            yield f"{batch}, no sharing", batch, {"share_prompts": False}


def gradients(run: Run, table: TokenTable) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Whole, of one step; and the step's metrics."""
    observer = accumulate(run, run.pack(0, table))
    found = {}
    for name, parameter in run.policy.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        parameter.grad = None
    return found, observer.report(run.ranks.gather(observer.metrics()))


PACKING = ("tokens", "computed_tokens", "padding_tokens", "micro_batches", "oversized_samples")
PACKING += ("max_micro_batch_tokens", "micro_batch_max_tokens")


def metric_difference(found: dict[str, float], expected: dict[str, float]) -> float:
    """The largest of all metrics but those that say how it was packed; relative where a metric exceeds 1."""
    names = {name for name in expected if name not in PACKING and not name.startswith("local/")}
    assert names <= found.keys()
    return max(abs(found[name] - expected[name]) / max(abs(expected[name]), 1.0) for name in names)


@contextmanager
def compiled_by(name: str) -> Iterator[list[torch.fx.GraphModule]]:
    """Context manager: `trainer.model.compile` uses a backend of torch that needs no compiler outside of it.

    Yields the graphs that it has been given, in order.
    """
    backend, graphs = lookup_backend(name), []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return backend(graph, inputs)

    by_backend = partialmethod(Policy.compile_layers, compile_graph)
    torch._dynamo.reset()
    with patch.object(Policy, "compile_layers", by_backend), patch.object(build, "check_compiler"):
        yield graphs
    torch._dynamo.reset()


def held_bytes() -> int:
    """Bytes of the storages of all tensors that Python holds, each once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        # Not `isinstance`, which asks lazy modules for a class that they would have to import.
        if issubclass(type(each), torch.Tensor) and type(each) is not DTensor:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def most_allocated(profile: torch.profiler.profile) -> int:
    """Most bytes that were allocated at a time, beyond those at the start, by the allocator's own events."""
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    total = most = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        total += each.nbytes()
        most = max(most, total)
    return most


class Jobs:
    def __init__(self, folder: Path) -> None:
        dist.init_process_group("gloo")
        self.folder = folder
        self.control = dist.new_group(backend="gloo")
        self.tied = folder / "models" / "tied"
        self.num_runs = 0
        self.runs: dict[str, Run] = {}
        self.known: dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]] = {}

    def ranks(self, config: TrainerConfig) -> Ranks:
        return Ranks.of(config, self.control, default_device())

    def build(self, weights: Path, *, alone: bool = False, **trainer) -> Run:
        self.num_runs += 1
        folder = self.folder / "scratch" / f"{dist.get_rank()}_{self.num_runs}"
        config = settings(weights, folder, **trainer)
        return build_run(config, None, None, [], None if alone else self.ranks(config.trainer))

    def parity(
        self, mesh: dict, model: str, thorough: bool, max_logits: int | None = None
    ) -> dict[str, list[float]]:
        """Differences of (gradient, metrics) from one process, by packing."""
        weights = self.folder / "models" / model
        together = self.build(weights, model=mesh)
        found = {}
        for name, batch, own in packings(thorough=thorough):
            together.config = TrainerConfig.model_validate({"model": {"seq_len": SEQ_LEN, **mesh}, **own})
            together.losses = loss_for(together.config.loss)
            expected, expected_report = self.alone(weights, batch, own.get("loss", {"type": "dppo"}))
            together.policy.max_logits = max_logits
            got, report = gradients(together, BATCHES[batch])
            found[name] = [difference(expected, got), metric_difference(report, expected_report)]
        return found

    def alone(
        self, weights: Path, batch: str, loss: dict
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The same in one process, in as few micro batches as possible."""
        key = json.dumps([weights.name, batch, loss])
        if key not in self.known:
            if weights.name not in self.runs:
                self.runs[weights.name] = self.build(weights, alone=True)
            run = self.runs[weights.name]
            run.config = TrainerConfig.model_validate({"model": {"seq_len": SEQ_LEN}, "loss": loss})
            run.losses = loss_for(run.config.loss)
            self.known[key] = gradients(run, BATCHES[batch])
        return self.known[key]

    def memory(self, mesh: dict, tokens: int, model: str) -> list[int]:
        """Bytes of tensors in each process at the fullest moment of a step of two full micro batches.

        The lesser of two steps: gloo's threads free the buffers of a collective when they come to it, so that
        now and then some are still there while the next ones are.
        """
        num_processes = dist.get_world_size()
        folder = self.folder / "scratch" / f"memory_{dist.get_rank()}"
        config = settings(self.folder / "models" / model, folder, model=mesh)
        seq_len = {"trainer": config.trainer.model_dump() | {"model": {**mesh, "seq_len": tokens}}}
        config = TrainerRunConfig.model_validate(config.model_dump() | seq_len | {"seq_len": tokens})
        ranks = None if num_processes == 1 else self.ranks(config.trainer)
        run = build_run(config, None, None, [], ranks)
        num_samples = 2 * num_processes // config.trainer.model.cp
        table = TokenTable.from_samples(
            [sample(index, prompt=1, completion=tokens - 1) for index in range(num_samples)]
        )
        run.update(accumulate(run, run.pack(0, table)))  # makes the optimizer's moments
        peaks = []
        for step in (1, 2) if ranks else (1,):
            before = held_bytes()
            with torch.profiler.profile(profile_memory=True) as profile:
                run.update(accumulate(run, run.pack(step, table)))
            peaks.append(before + most_allocated(profile))
        return [min(peaks)] if ranks is None else ranks.gather_all(min(peaks))

    def replay(self, mesh: dict) -> dict[str, list[float]]:
        """Differences of (gradient, metrics) from one process with replayed experts, by batch and cap."""
        weights, found = self.folder / "models" / "moe", {}
        alone = self.build(weights, alone=True, enable_router_replay=True)
        together = self.build(weights, model=mesh, enable_router_replay=True)
        for batch, table in ROUTED.items():
            expected, expected_report = gradients(alone, table)
            assert expected_report["router_replace_rate/all"] > 0.5
            for cap in (SEQ_LEN, SEQ_LEN // 4):
                together.config = together.config.model_copy(update={"micro_batch_max_tokens": cap})
                got, report = gradients(together, table)
                name = f"{batch}, cap {cap}"
                found[name] = [difference(expected, got), metric_difference(report, expected_report)]
        balanced = {"router_aux_loss_coef": 1.0}
        alone = self.build(weights, alone=True, model=balanced)
        together = self.build(weights, model={**mesh, **balanced}, micro_batch_max_tokens=SEQ_LEN // 4)
        expected, expected_report = gradients(alone, table)
        got, report = gradients(together, table)
        assert expected_report["router_balance_loss"] > 1
        found["balanced"] = [difference(expected, got), metric_difference(report, expected_report)]
        return found

    def compiled(self, mesh: dict, backend: str) -> list:
        """As `parity`, with compiled layers; and how many graphs were compiled in each process."""
        with compiled_by(backend) as graphs:
            found = self.parity({**mesh, "compile": True}, "untied", False)
        return [found, self.ranks(TrainerConfig()).gather_all(len(graphs))]

    def precision(self, mesh: dict, model: str = "tied") -> list[float]:
        """Difference of the gradient in bfloat16 from that of one process in float32."""
        weights = self.folder / "models" / model
        config = settings(weights, self.folder / "scratch" / f"bf16_{dist.get_rank()}", model=mesh)
        ranks = replace(self.ranks(config.trainer), precision=BF16)
        run = build_run(config, None, None, [], ranks)
        found, _ = gradients(run, BATCHES["mixed"])
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        expected, _ = self.alone(weights, "mixed", {"type": "dppo"})
        return ranks.gather(difference(expected, found))

    def loading(self, mesh: dict, model: str, lora: bool = False) -> list:
        """How often each process reads the whole model, bytes of its own part that it reads, and the largest
        difference of all weights and buffers from those of transformers."""
        weights = self.folder / "models" / model
        load, num_bytes = AutoModelForCausalLM.from_pretrained, []

        def counted(read):
            def reading(*args):
                found = read(*args)
                num_bytes.append(found.nbytes)
                return found

            return reading

        with (
            patch.object(AutoModelForCausalLM, "from_pretrained", wraps=load) as read,
            patch.object(stored._OpenFiles, "rows", counted(stored._OpenFiles.rows)),
            patch.object(stored._OpenFiles, "whole", counted(stored._OpenFiles.whole)),
        ):
            run = self.build(weights, model=mesh) if not lora else self.build_adapter(weights, mesh)
        hf = run.policy.hf
        found = {**dict(hf.named_parameters()), **dict(hf.named_buffers())}
        whole = {
            name.replace(".base_layer.", "."): each.full_tensor() if isinstance(each, DTensor) else each
            for name, each in found.items()
            if ".lora_" not in name
        }
        alone = load(weights, dtype=torch.float32)
        expected = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
        assert whole.keys() == expected.keys()
        if run.ranks.is_main:  # it saves the result
            assert hf.generation_config.to_dict() == alone.generation_config.to_dict()
            assert hf.config.to_dict() == alone.config.to_dict()
        worst = max(float((whole[name] - each).detach().abs().max()) for name, each in expected.items())
        output = run.policy.hf.get_output_embeddings().weight
        assert (output is hf.get_input_embeddings().weight) == alone.config.tie_word_embeddings
        gradients(run, BATCHES["one sample"])  # FSDP takes the weights as they were put there
        return run.ranks.gather_all([read.call_count, sum(num_bytes), worst])

    def build_adapter(self, weights: Path, mesh: dict) -> Run:
        """On experts, which adapters leave alone."""
        config = adapter_settings(weights, self.folder / "scratch" / f"load_{dist.get_rank()}", model=mesh)
        lora = LoraConfig(rank=4, targets=("q_proj", "v_proj"))
        config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
        return build_run(config, None, None, [], self.ranks(config.trainer))

    def reductions(self, mesh: dict, model: str = "tied") -> list:
        """Difference of gradients that are reduced once per step from those of one process, and from those
        reduced per micro batch; and how often each reduces, in micro batches of its own number."""
        weights = self.folder / "models" / model
        expected, _ = self.alone(weights, "mixed", {"type": "dppo"})
        found, counts = [], []
        for when in ("step", "micro_batch"):
            run = self.build(
                weights, model={**mesh, "reduce_gradients": when}, micro_batch_max_tokens=SEQ_LEN // 4
            )
            with patch.object(_fsdp_param_group, "foreach_reduce", wraps=foreach_reduce) as reduced:
                got, report = gradients(run, BATCHES["mixed"])
            found.append(got)
            counts.append([reduced.call_count, report["local/micro_batches"]])
        return [difference(expected, found[0]), difference(found[1], found[0]), counts]

    def clipping(self, mesh: dict) -> list[list[float]]:
        """(norm, learning rate) of each process and of one alone, after a step with clipping."""
        norms = []
        for alone in (True, False):
            run = self.build(self.tied, alone=alone, model=mesh if not alone else {})
            batch = run.pack(0, BATCHES["mixed"])
            for micro_batch in batch.micro_batches:
                run.loss(micro_batch, run.forward(micro_batch), batch.denominator).loss.backward()
            run.optimizer._optim = run.optimizer._optim.model_copy(update={"max_norm": 1e-3})
            norms.append(run.ranks.gather(run.optimizer.step().grad_norm))
        return norms

    def skipping(self, mesh: dict) -> dict[str, list]:
        """(whether it was skipped, largest change of a weight, tokens booked as skipped) of each process.

        The tokens of one rank have a loss of NaN, or a gradient whose norm overflows.
        """
        found = {}
        for name in ("broken_loss", "steep_loss"):
            loss = {"type": "custom", "import_path": f"processes:{name}"}
            run = self.build(self.tied, model=mesh, loss=loss, optim={"lr": 1.0})
            samples = [sample(0, completion=9), sample(1, completion=2, advantage=1e19)]
            before = {key: each.detach().clone() for key, each in run.policy.named_parameters()}
            observer = accumulate(run, run.pack(0, TokenTable.from_samples(samples)))
            update = run.update(observer)
            changes = [
                float((each.detach() - before[key]).to_local().abs().max())
                for key, each in run.policy.named_parameters()
                if each.to_local().numel()
            ]
            trained = observer.metrics().report()["trained_tokens"]
            found[name] = run.ranks.gather([update.is_skipped, max(changes), trained])
        return found

    def gathered(self, model: str) -> list[list[bool]]:
        """Whether the head is gathered in each process as the first layer computes, as the loss is computed,
        and as the gradient of the first layer's input is there."""
        run = self.build(self.folder / "models" / model)
        head, found = run.policy.hf.get_output_embeddings(), []

        def look(*_: object) -> None:
            found.append(not isinstance(head.weight, DTensor))

        run.policy.layers[0].register_forward_hook(look)
        run.policy.layers[0].register_full_backward_hook(look)
        batch = run.pack(0, BATCHES["one sample"])
        for micro_batch in batch.micro_batches:
            output = run.forward(micro_batch)
            look()
            run.loss(micro_batch, output, batch.denominator).loss.backward()
        return run.ranks.gather_all(found)

    def adapter(self, mesh: dict, model: str = "tied", targets: list[str] | None = None) -> list[float]:
        """Difference of an adapter's gradient from that of one process."""
        found = []
        for own, ranks in (({}, None), (mesh, self.ranks(TrainerConfig.model_validate({"model": mesh})))):
            folder = self.folder / "scratch" / f"lora_{dist.get_rank()}"
            weights = self.folder / "models" / model
            config = adapter_settings(weights, folder, targets, model=own)
            run = build_run(config, None, None, [], ranks)
            found.append(gradients(run, BATCHES["mixed"])[0])
            run.close()
        names = [name for name, gradient in found[0].items() if gradient is not None]
        alone, together = ({name: each[name] for name in names} for each in found)
        assert names == [name for name, gradient in found[1].items() if gradient is not None]
        return [difference(alone, together), len(names)]

    def held(self, mesh: dict, model: str) -> list:
        """Whether logprobs and gradients are those of frozen weights in float32, bit by bit, how many numbers
        were compared, and the bytes of the frozen weights of each process, in bfloat16 and in float32."""
        folder = self.folder / "scratch" / f"held_{dist.get_rank()}"
        weights = self.folder / "models" / model
        config = adapter_settings(weights, folder, model={**mesh, "precision": "bfloat16"})
        found, num_bytes = [], []
        for keeps_float32 in (False, True):
            ranks = replace(self.ranks(config.trainer), keeps_float32=keeps_float32)
            run = build_run(config, None, None, [], ranks)
            frozen = [each for each in run.policy.parameters() if not each.requires_grad]
            num_bytes.append(sum(local_shard(each).nbytes for each in frozen))
            batch = run.pack(0, BATCHES["mixed"])
            logprobs = []
            for micro_batch in batch.micro_batches:
                output = run.forward(micro_batch)
                logprobs.append(output.logprobs.detach())
                run.loss(micro_batch, output, batch.denominator).loss.backward()
            own = {name: each.grad for name, each in run.policy.named_parameters() if each.requires_grad}
            found.append([*logprobs, *(local_shard(each) for each in own.values())])
            run.close()
        assert {each.dtype for each in found[0]} == {torch.float32}
        same = all(torch.equal(*pair) for pair in zip(*found, strict=True))
        return run.ranks.gather_all([same, sum(each.numel() for each in found[0]), *num_bytes])

    def buffers(self, folder: str) -> None:
        """A model with persistent buffers, as several processes publish it and save it."""
        run = self.build(self.folder / "models" / "biased router")
        for name, write in (("published", run.trained.write), ("saved", run.trained.save)):
            if run.ranks.is_main:
                (Path(folder) / name).mkdir(parents=True)
                write(Path(folder) / name)
            else:
                run.trained.offer()
        if run.ranks.is_main:
            write = run.trained.take(run.trained.room(torch.bfloat16))
            (Path(folder) / "taken").mkdir(parents=True)
            write(Path(folder) / "taken")
        else:
            run.trained.offer(torch.bfloat16)

    def no_memory(self) -> list:
        """What each process raises as the main one has no host memory for the weights, and whether they are
        published once it has some."""
        run = self.build(self.tied)
        run.publishes = True

        def fail(*args, **options) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        with patch.object(weights, "_host_tensor", fail) if run.ranks.is_main else nullcontext():
            try:
                run.publish(0)
            except TransportError as error:
                raised = str(error)
        run.publish(0)
        run.finish_publishing()
        folder = run.ranks.share(lambda: weights.weights_folder(run.output_dir, 1))
        return run.ranks.gather_all([raised, (folder / "model.safetensors").exists()])

    def golden(self, path: str) -> list[list[float]]:
        """The gradient of each case, with a denominator of all ranks and FSDP's sum."""
        found = []
        for case in json.loads(Path(path).read_text())["cases"]:
            inputs = case["inputs"]
            config = DppoLossConfig(**inputs["config"])
            model = torch.nn.Linear(len(inputs["weights"]), 1, bias=False)
            model.weight.data = torch.tensor([inputs["weights"]])
            shard_module(model, {}, self.ranks(TrainerConfig()).model_mesh)
            own = inputs["ranks"][dist.get_rank()]
            denominator = sum(sum(rank["loss_mask"]) for rank in inputs["ranks"])
            logprobs = -torch.nn.functional.softplus(model(torch.tensor(own["features"]))[:, 0])
            inference = torch.tensor(own["inference_logprobs"])
            record = dppo_loss(
                LossInputs(
                    trainer_logprobs=logprobs,
                    inference_logprobs=inference,
                    advantages=torch.full_like(inference, own["advantage"]),
                    loss_mask=torch.tensor(own["loss_mask"]),
                    teacher_logprobs=None,
                    ratios=Ratios.of(logprobs, inference),
                    lengths=[len(inference)],
                ),
                config,
            )
            (record.token_loss.sum() / denominator).backward()
            found.append(model.weight.grad.full_tensor()[0].tolist())
        return found

    def sharing(self) -> list[str]:
        """What the main process raises is raised in all."""
        ranks = self.ranks(TrainerConfig())

        def fail() -> None:
            raise DataError("of the main process")

        try:
            ranks.share(fail)
        except DataError as error:
            return ranks.gather(str(error))
        return []

    def beside(self, folder: str) -> None:
        """Another trainer's loop: the first process has sequences of 1 and 2 trainable tokens, the second
        one of 3."""
        own = [(2, 3), (4,)][dist.get_rank()]
        with TokenRecorder(folder, loss={"type": "ppo_clip", "reduction": "sequence"}) as recorder:
            for length in own:
                recorder.add(
                    token_ids=torch.arange(length)[None],
                    attention_mask=torch.ones(1, length),
                    loss_mask=torch.ones(1, length - 1),
                    inference_logprobs=torch.full((1, length), -1.0),
                    trainer_logprobs=torch.full((1, length), -1.0),
                    advantages=[float(length)],
                )
            recorder.finish_step(loss=-sum(own) * 2 / 3)

    def verify(self, mesh: dict, fault: str = "") -> list[list]:
        """(exit code, what it printed) of each process, with a fault planted or not."""
        config = VerifyConfig.model_validate(
            {
                "model": {"name": str(self.tied)},
                "seq_len": 256,
                "trainer": {"threads": 1, "model": mesh},
                "orchestrator": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 12}},
                "json": True,
            }
        )
        ranks = self.ranks(config.trainer)
        checks, printed = {"record": check_record}, StringIO()
        with planted(fault), patch.object(verify, "CHECKS", checks), redirect_stdout(printed):
            code = verify.verify_with(config, ranks)
        return ranks.gather([code, printed.getvalue()])

    def train(self, folder: str, mesh: dict, resume: bool = False, model: str = "tied") -> None:
        """A run on the batches that are in its folder."""
        config = settings(self.folder / "models" / model, Path(folder), **training(mesh))
        config = config.model_copy(update={"resume": resume})
        run_with(config, self.ranks(config.trainer))

    def resume_many(self, folder: str, mesh: dict) -> None:
        self.many(folder, mesh, resume=True)

    def many(self, folder: str, mesh: dict, *, resume: bool = False) -> None:
        """The runs whose batches are below the folder, in one trainer."""
        shared = adapter_settings(
            self.tied, Path(folder), many_runs={"stay": False}, model=mesh, experimental={}
        )
        with ExitStack() as stack:
            if dist.get_rank() == 0:
                roster = Roster(shared.output_dir)
                for name in MANY:
                    config = joining(self.tied, Path(folder), name)
                    config = config.model_copy(update={"resume": resume, "max_steps": 2 if resume else 1})
                    stack.enter_context(roster.joined(name, to_toml(config)))
            run_with(shared, self.ranks(shared.trainer))

    def refuse(self, folder: str, mesh: dict) -> dict[str, list[str]]:
        """What became of four runs in one trainer: the main process cannot open the metrics of the first,
        publish weights of the second, nor go on under the name of the third; the fourth is trained."""
        place, mesh = Path(folder), {"model": mesh, "experimental": {}}
        shared = adapter_settings(self.tied, place, many_runs={"stay": False, "max_runs": 1}, **mesh)
        roster = Roster(shared.output_dir)
        with ExitStack() as stack:
            if dist.get_rank() == 0:
                taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                prometheus = PrometheusConfig(trainer_port=taken.getsockname()[1])
                changes = {
                    "busy": {"monitors": MonitorsConfig(prometheus=prometheus)},
                    "full": {},
                    "renamed": {"resume": True},
                    "one": {},
                }
                (place / "full" / "weights").touch()  # where a folder has to be
                for name, change in changes.items():
                    config = joining(self.tied, place, name).model_copy(update=change)
                    if config.resume:
                        save(
                            config.model_copy(update={"run_id": "former"}),
                            config.output_dir / "configs" / "step_0" / "trainer.toml",
                        )
                    stack.enter_context(roster.joined(name, to_toml(config)))
            run_with(shared, self.ranks(shared.trainer))
            found = {name: roster.outcome(name) for name in ("busy", "full", "renamed", "one")}
        return {name: [told[0].value, told[1]] for name, told in found.items() if told is not None}


MANY = ("one", "two")


def joining(weights: Path, folder: Path, name: str) -> TrainerRunConfig:
    """One of the runs that share a trainer; each has another learning rate."""
    config = adapter_settings(weights, folder / name, join=folder, optim={"lr": 1e-3 * len(name)})
    return config.model_copy(update={"run_id": name, "max_steps": 2})


def adapter_settings(
    weights: Path, folder: Path, targets: list[str] | None = None, **trainer
) -> TrainerRunConfig:
    config = settings(weights, folder).model_dump()
    config["model"]["lora"] = {"rank": 4, "targets": targets}
    own = {"ckpt": {"interval": 1}, "experimental": {"token_export": {}}, **trainer}
    model = {"seq_len": SEQ_LEN, **own.pop("model", {})}
    return TrainerRunConfig.model_validate({**config, "trainer": {"threads": 1, "model": model, **own}})


def planted(fault: str) -> AbstractContextManager:
    """Faults that only several processes can have."""
    if fault == "a denominator per rank":

        def own_tokens(batch: StepBatch) -> int:
            return max(1, sum(part.counts.loss_tokens for part in batch.packed.micro_batches(batch.rank)))

        return patch.object(StepBatch, "denominator", property(own_tokens))
    if fault == "an average over processes":

        def averaged(module, factor: float) -> None:
            set_factor(module, factor * dist.get_world_size())

        set_factor = FSDPModule.set_gradient_divide_factor
        return patch.object(FSDPModule, "set_gradient_divide_factor", averaged)
    if fault == "an update of one process":
        gather = DTensor.full_tensor

        def half_of_the_norm(tensor: DTensor) -> torch.Tensor:
            return gather(tensor) if tensor.ndim else gather(tensor) / 2

        stack = ExitStack()
        stack.enter_context(patch.object(DTensor, "full_tensor", half_of_the_norm))
        if dist.get_rank() > 0:
            stack.enter_context(patch.object(torch.optim.AdamW, "step", lambda self: None))
        return stack
    assert fault == ""
    return nullcontext()


def training(mesh: dict) -> dict:
    return {
        "model": mesh,
        "micro_batch_max_tokens": 24,
        "ckpt": {"interval": 3, "keep_last": 3, "asynchronous": bool(mesh)},
        "optim": {"lr": 1e-3},
        "scheduler": {"type": "cosine", "warmup_steps": 2},
        "experimental": {"token_export": {}},
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    jobs = Jobs(folder)
    results = {}
    for name, (method, *arguments) in json.loads((folder / "jobs.json").read_text()).items():
        results[name] = getattr(jobs, method)(*arguments)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def fork(folder: Path, place: dict[str, str]) -> int:
    """A process of its own that has imported everything already; returns its number."""
    if (number := os.fork()) != 0:
        return number
    os.environ.update(place)
    try:
        main(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    numbers = [fork(Path(sys.argv[1]), place) for place in places(int(sys.argv[2]), always=True)]
    sys.exit(any(os.waitpid(number, 0)[1] for number in numbers))
