"""`pellucid plan @ run.toml --gpus 64 --gpu h100`: what fits, how fast, and which keys to change.

    config.json ──> ModelSize ─┐
    config      ──> Workload  ─┼──> divide the GPUs ──> memory, traffic, times ──> table or JSON
    GPU, assume ───────────────┘         (pure: estimate.py)

The model is made on torch's meta device: a folder with a config.json is enough. No GPU is used.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from pellucid.config import ModelConfig
from pellucid.config.shared import LoraConfig
from pellucid.config.tools import PlanConfig
from pellucid.errors import ConfigError
from pellucid.launch.console import make_console
from pellucid.launch.estimate import (
    BFLOAT16,
    FLOAT32,
    LOGIT_BYTES,
    LOGIT_SHARE,
    ModelSize,
    PlannedServer,
    PlannedTrainer,
    Serving,
    Traffic,
    TrainerMemory,
    Workload,
    num_micro_batches,
    sampling_s,
    serving,
    step_s,
    traffic,
    trainer_memory,
    training_s,
    transfer_s,
)

logger = logging.getLogger(__name__)

_GB = 1e9
_WORTHWHILE = 0.02
"""Share of the memory that a change has to save to be named."""

_MAX_GPUS = 1 << 16


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that makes a run fit, alone or on top of the ones before it."""

    key: str
    value: object
    peak_gb: float
    """Memory of the part that did not fit, with this and all earlier remedies."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run on some GPUs. Times are in seconds and rest on assumptions; bytes do not."""

    trainer: PlannedTrainer
    inference_gpus: int
    teacher_gpus: int
    idle_gpus: int
    num_servers: int
    memory: TrainerMemory
    memory_limit: float
    """Bytes of a GPU that tensors of the trainer may take."""

    traced_peak: float | None
    """Peak by torch's tracker; None: it was not asked, or cannot trace this model."""

    traffic: Traffic
    micro_batches: int
    """Micro batches of a rank in a step."""

    serving: Serving
    compute_s: float
    traffic_s: float
    sampling_s: float
    transfer_s: float
    step_s: float

    @property
    def trainer_gpus(self) -> int:
        return self.trainer.num_gpus

    @property
    def peak(self) -> float:
        return self.memory.peak if self.traced_peak is None else self.traced_peak

    @property
    def trainer_fits(self) -> bool:
        return self.peak <= self.memory_limit

    @property
    def fits(self) -> bool:
        return self.trainer_fits and self.serving.concurrency > 0


def run_plan(config: PlanConfig) -> int:
    """Prints the plan; the exit code is 1 if the run does not fit."""
    hf_config = read_hf_config(config.model.name)
    model = size_of(hf_config, config.model.lora)
    estimate = plan(config, model)
    traced, reason = (None, "trace = false")
    if config.trace and model.num_adapter:
        reason = "adapters are not traced"
    elif config.trace:
        traced, reason = _traced(config, hf_config, model, estimate)
    estimate = replace(estimate, traced_peak=traced)
    remedies = [] if estimate.fits else list(find_remedies(config, model, estimate))
    report = _report(config, model, estimate, reason, remedies)
    if config.as_json:
        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        _show(config, model, estimate, reason, remedies)
    return 0 if estimate.fits else 1


def read_hf_config(name: str) -> Any:
    """Reads a config.json, its folder, or that of a hub name; needs no weights."""
    from pellucid.model.load import empty_model

    path = Path(name)
    return empty_model(ModelConfig(name=str(path.parent) if path.is_file() else name)).config


def size_of(hf_config: Any, lora: LoraConfig | None = None) -> ModelSize:
    """Measures a model that is made without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from pellucid.model import Policy
    from pellucid.trainer.step import ModelShape

    with torch.device("meta"):
        policy = Policy(AutoModelForCausalLM.from_config(hf_config))
    config, shape = hf_config.get_text_config(), ModelShape.of(policy)
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in policy.layers]
    num_params = sum(weight.numel() for weight in policy.parameters())
    heads, num_layers = config.num_attention_heads, config.num_hidden_layers
    query_width = shape.attended // num_layers
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv_width = query_width // heads * kv_heads
    if latent := getattr(config, "kv_lora_rank", None):
        kv_numbers = num_layers * (latent + config.qk_rope_head_dim)
    else:
        kv_numbers = 2 * num_layers * kv_width
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((found for name in names if (found := getattr(config, name, None))), 0)
    return ModelSize(
        num_params=num_params,
        num_outside=num_params - sum(layers),
        num_layers=num_layers,
        largest_layer=max(layers),
        num_active=shape.num_active,
        attended=shape.attended,
        hidden=config.hidden_size,
        query_width=query_width,
        kv_width=kv_width,
        mlp_width=_mlp_width(config, num_experts),
        vocabulary=policy.vocab_size,
        kv_numbers=kv_numbers,
        num_heads=heads,
        num_experts=num_experts,
        top_k=config.num_experts_per_tok if num_experts else 0,
        norms_heads=any(name.endswith("q_norm.weight") for name, _ in policy.named_parameters()),
        num_adapter=0 if lora is None else _num_adapter(policy, lora),
    )


def _mlp_width(config: Any, num_experts: int) -> int:
    dense = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if not num_experts:
        return dense
    width = int(getattr(config, "moe_intermediate_size", None) or dense)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    shared = shared or (getattr(config, "n_shared_experts", None) or 0) * width
    return int(config.num_experts_per_tok * width + shared)


def _num_adapter(policy: Any, lora: LoraConfig) -> int:
    """Counts rank × (inputs + outputs) of every linear layer that gets an adapter."""
    from pellucid.model.adapter import adapted_layers

    layers = adapted_layers(policy, lora).values()
    return sum(lora.rank * sum(layer.get_parameter("weight").shape) for layer in layers)


def workload(config: PlanConfig) -> Workload:
    """Returns a step's rollouts as the configuration and the flags describe them."""
    orchestrator, prompt = config.orchestrator, config.prompt_tokens
    longest_completion = orchestrator.sampling.max_tokens
    completion = config.completion_tokens or max(1, longest_completion // 2)
    num_rollouts = orchestrator.batch_size
    if orchestrator.token_batch_size is not None:
        num_rollouts = max(1, orchestrator.token_batch_size // (prompt + completion))
    longest = min(prompt + longest_completion, config.trainer.model.seq_len, config.inference.max_model_len)
    if prompt + completion > longest:
        raise ConfigError(
            f"prompt_tokens = {prompt} + completion_tokens = {completion} exceeds the longest sequence, "
            f"{longest} tokens (prompt_tokens + orchestrator.sampling.max_tokens, seq_len); raise seq_len "
            "and sampling.max_tokens, or give shorter lengths"
        )
    group = orchestrator.rollouts_per_example
    num_groups = -(-num_rollouts // group)
    return Workload(num_groups, group, prompt, completion, longest, config.trainer.share_prompts)


def plan(config: PlanConfig, model: ModelSize) -> Estimate:
    """Divides the GPUs so that steps are shortest, among divisions that fit if there are any."""
    found = [estimate_of(config, model, *shares) for shares in divisions(config)]
    if not found:
        total = num_gpus(config)
        raise ConfigError(
            f"gpus.total = {total} cannot be divided into a trainer (a multiple of trainer.model.dp_replicate"
            f" × trainer.model.cp) and servers of {config.inference.gpus_per_server} GPU(s), whole machines "
            f"of assume.gpus_per_node = {config.assume.gpus_per_node} each; give more GPUs"
        )
    return min(found, key=lambda each: (not each.fits, not each.serving.concurrency, each.step_s))


def num_gpus(config: PlanConfig) -> int:
    return config.gpus.total or config.assume.gpus_per_node


def divisions(config: PlanConfig) -> Iterator[tuple[int, int, int]]:
    """Yields (trainer, inference, teacher) GPUs: of one machine any numbers, of several whole machines."""
    total, per_node = num_gpus(config), config.assume.gpus_per_node
    size, model = config.inference.gpus_per_server, config.trainer.model
    unit = 1 if total <= per_node else per_node
    teacher = -(-(config.gpus.teacher or size) // unit) * unit if config.serves_teacher else 0
    together = math.lcm(model.dp_replicate * model.cp, unit)
    given = config.gpus.trainer or (
        config.trainer.num_processes if config.trainer.num_processes > 1 else None
    )
    candidates = [given] if given else range(together, total, together)
    for trainer in candidates:
        left = total - teacher - trainer
        inference = config.gpus.inference or left - left % size
        if trainer % (model.dp_replicate * model.cp) == 0 and size <= inference <= left:
            yield trainer, inference, teacher


def estimate_of(config: PlanConfig, model: ModelSize, trainer: int, inference: int, teacher: int) -> Estimate:
    gpu, assume, work = config.gpu_model, config.assume, workload(config)
    part, size = trainer_of(config, model, trainer), config.inference.gpus_per_server
    ranks = config.inference.ranks_per_server
    rank = PlannedServer(
        config.inference.gpus_per_rank,
        config.inference.max_concurrent // ranks or 1,
        memory_share=config.inference.vllm.gpu_memory_utilization
        if config.inference.backend == "vllm"
        else 1.0,
    )
    served, num_servers = serving(model, rank, work, gpu, assume), inference // size
    compute, moved = training_s(model, part, work, gpu, assume)
    is_synchronous = config.max_async_level == 0
    sampling = (
        sampling_s(work, served, ranks * num_servers, is_synchronous=is_synchronous) / assume.kept_share
    )
    transfer = transfer_s(model, assume, publish_bytes(config))
    micro_batches = num_micro_batches(work, part)
    return Estimate(
        trainer=part,
        inference_gpus=inference,
        teacher_gpus=teacher,
        idle_gpus=num_gpus(config) - trainer - inference - teacher,
        num_servers=num_servers,
        memory=trainer_memory(model, part),
        memory_limit=(gpu.memory_gb - assume.reserve_gb) * _GB,
        traced_peak=None,
        traffic=traffic(model, part, assume.gpus_per_node, micro_batches),
        micro_batches=micro_batches,
        serving=served,
        compute_s=compute,
        traffic_s=moved,
        sampling_s=sampling,
        transfer_s=transfer,
        step_s=step_s(sampling, max(compute, moved), transfer, is_synchronous=is_synchronous),
    )


def trainer_of(config: PlanConfig, model: ModelSize, num_trainer_gpus: int) -> PlannedTrainer:
    settings, memory = config.trainer, config.gpu_model.memory_gb * _GB
    # Runs that share a trainer reduce every micro batch, and one process has nothing to reduce.
    is_alone = settings.join is None and num_trainer_gpus > 1
    return PlannedTrainer(
        num_trainer_gpus,
        settings.model.dp_replicate,
        settings.model.cp,
        # A sample that is longer than the cap has a micro batch to itself.
        max(settings.max_tokens, workload(config).longest),
        settings.model.activation_checkpointing,
        compute_bytes=FLOAT32 if settings.model.precision == "float32" else BFLOAT16,
        max_logits=int(memory * LOGIT_SHARE) // LOGIT_BYTES,
        reduces_once=is_alone and settings.model.reduces_once(model.num_trained, memory),
    )


def publish_bytes(config: PlanConfig) -> int:
    """Returns the bytes of a published weight on a GPU; those of adapters are float32 anyway."""
    wanted = config.trainer.publish_dtype
    if wanted == "auto":
        wanted = "float32" if config.trainer.model.precision == "float32" else "bfloat16"
    return FLOAT32 if wanted == "float32" else BFLOAT16


def _traced(
    config: PlanConfig, hf_config: Any, model: ModelSize, estimate: Estimate
) -> tuple[float | None, str]:
    """Returns the peak by torch's tracker, or None and the reason why there is none."""
    from pellucid.launch.trace import trace_trainer

    if model.num_experts:
        return None, "shapes inside experts depend on the data"
    part = estimate.trainer
    try:
        trace = trace_trainer(
            hf_config,
            config.trainer,
            part.num_gpus,
            tokens=part.micro_batch_tokens,
            in_bfloat16=part.compute_bytes == BFLOAT16,
            max_logits=part.max_logits,
        )
    except Exception as error:  # of any kind, by torch, for a model that it cannot trace
        logger.debug("not traced", exc_info=True)
        return None, f"torch's tracker cannot trace this model ({type(error).__name__})"
    # The optimizer needs one more array as large as the gradients. Whole gradients are not traced.
    states = trace.weights + trace.gradients + trace.optimizer
    whole = estimate.memory.peak - trainer_memory(model, replace(part, reduces_once=False)).peak
    return max(trace.peak, states + trace.gradients) + whole, "torch's tracker"


def find_remedies(config: PlanConfig, model: ModelSize, estimate: Estimate) -> Iterator[Remedy]:
    """Yields settings, each on top of those before it, until the run fits; ends early if nothing does."""
    if not estimate.trainer_fits:
        yield from _trainer_remedies(config, model, estimate)
    if not estimate.serving.concurrency:
        yield from _server_remedies(config, model)


def _trainer_remedies(config: PlanConfig, model: ModelSize, estimate: Estimate) -> Iterator[Remedy]:
    """Yields changes that save at least `_WORTHWHILE` of the memory, on top of each other."""
    trainer, longest = estimate.trainer, workload(config).longest
    # Where torch's tracker finds more than the formulas, its word counts.
    correction = max(0.0, estimate.peak - estimate.memory.peak)
    peak = estimate.peak
    tried = True
    while tried and peak > estimate.memory_limit:
        tried = False
        for key, value, changed in _changes(trainer, model, longest):
            found = trainer_memory(model, changed).peak + correction
            if found < (1 - _WORTHWHILE) * peak:
                trainer, peak, tried = changed, found, True
                yield Remedy(key, value, peak / _GB)
                break


def _changes(
    trainer: PlannedTrainer, model: ModelSize, longest: int
) -> Iterator[tuple[str, object, PlannedTrainer]]:
    """Yields single changes that save memory, the cheapest in time first."""
    if trainer.reduces_once:
        yield "trainer.model.reduce_gradients", "micro_batch", replace(trainer, reduces_once=False)
    if trainer.dp_replicate > 1:
        yield "trainer.model.dp_replicate", 1, replace(trainer, dp_replicate=1)
    if (tokens := trainer.micro_batch_tokens // 2) >= longest:
        yield "trainer.micro_batch_max_tokens", tokens, replace(trainer, micro_batch_tokens=tokens)
    if not trainer.checkpoints_activations:
        key = "trainer.model.activation_checkpointing"
        yield key, True, replace(trainer, checkpoints_activations=True)
    cp = 2 * trainer.cp
    if model.num_heads % cp == 0 and trainer.num_gpus % cp == 0:
        yield "trainer.model.cp", cp, replace(trainer, cp=cp)
    more = 2 * trainer.num_gpus
    if more <= _MAX_GPUS:
        yield "gpus.trainer", more, replace(trainer, num_gpus=more)


def _server_remedies(config: PlanConfig, model: ModelSize) -> Iterator[Remedy]:
    size, gpu, work = config.inference.gpus_per_rank, config.gpu_model, workload(config)
    slots = config.inference.max_concurrent // config.inference.ranks_per_server or 1
    share = config.inference.vllm.gpu_memory_utilization
    while (size := 2 * size) <= config.assume.gpus_per_node and model.num_heads % size == 0:
        server = PlannedServer(size, slots, memory_share=share)
        found = serving(model, server, work, gpu, config.assume)
        yield Remedy("inference.vllm.tensor_parallel_size", size, found.weights / size / _GB)
        if found.concurrency:
            return


def settings_of(config: PlanConfig, estimate: Estimate) -> dict[str, object]:
    """Returns the keys that put this division into practice: of `pellucid rl`, or of `pellucid render`."""
    per_node = config.assume.gpus_per_node
    if num_gpus(config) <= per_node:
        return {"gpus.trainer": estimate.trainer_gpus, "gpus.inference": estimate.inference_gpus}
    return {
        "cluster.trainer_nodes": -(-estimate.trainer_gpus // per_node),
        "cluster.inference_nodes": -(-estimate.inference_gpus // per_node),
        "cluster.gpus_per_node": per_node,
    }


def _report(
    config: PlanConfig, model: ModelSize, estimate: Estimate, source: str, remedies: Sequence[Remedy]
) -> dict[str, object]:
    return {
        "model": {"name": config.model.name, **asdict(model)},
        "gpu": {"name": config.gpu, "total": num_gpus(config), **asdict(config.gpu_model)},
        "workload": asdict(workload(config)),
        "estimate": asdict(estimate) | {"peak": estimate.peak, "peak_from": source, "fits": estimate.fits},
        "assume": config.assume.model_dump(),
        "settings": settings_of(config, estimate),
        "remedies": [asdict(each) for each in remedies],
    }


def _show(
    config: PlanConfig, model: ModelSize, estimate: Estimate, source: str, remedies: Sequence[Remedy]
) -> None:
    console = make_console()
    for table in tables(config, model, estimate, source, remedies):
        console.print(table)


def tables(
    config: PlanConfig, model: ModelSize, estimate: Estimate, source: str, remedies: Sequence[Remedy]
) -> Iterator[Table | str]:
    gpu, work, assume = config.gpu_model, workload(config), config.assume
    active = f", {model.num_active / _GB:.2f} active per token" if model.num_experts else ""
    adapter = f", {model.num_adapter / 1e6:.1f} M in the adapter" if model.num_adapter else ""
    yield (
        f"{config.model.name}: {model.num_params / _GB:.2f} billion parameters{active}{adapter}\n"
        f"{num_gpus(config)} × {config.gpu} ({gpu.memory_gb:g} GB, {gpu.tflops:g} TFLOPS): "
        f"{estimate.trainer_gpus} train, {estimate.inference_gpus} serve ({estimate.num_servers} servers)"
        + (f", {estimate.teacher_gpus} teach" if estimate.teacher_gpus else "")
        + (f", {estimate.idle_gpus} idle" if estimate.idle_gpus else "")
    )
    yield _table("memory of a trainer's GPU, GB", _memory_rows(model, estimate, source))
    yield _table("memory of a server", _server_rows(config, estimate))
    traffic_title = f"traffic of a trainer's GPU in a step of {estimate.micro_batches} micro batches, GB"
    yield _table(traffic_title, _traffic_rows(config, estimate))
    yield _table("a step", _step_rows(config, estimate, work))
    yield "assumed: " + ", ".join(f"{key} = {value:g}" for key, value in assume.model_dump().items())
    if estimate.fits:
        chosen = ", ".join(f"{key} = {value}" for key, value in settings_of(config, estimate).items())
        yield f"it fits; set {chosen}"
        return
    yield "it does not fit; what would help, one on top of the other:" if remedies else "it does not fit"
    for each in remedies:
        yield f"  {each.key} = {str(each.value).lower()}  ->  {each.peak_gb:.1f} GB"


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(min_width=24)
    table.add_column(justify="right", min_width=10)
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GB:,.2f}"


def _memory_rows(model: ModelSize, estimate: Estimate, source: str) -> list[tuple[str, str, str]]:
    memory, trainer = estimate.memory, estimate.trainer
    is_half = bool(model.num_adapter) and trainer.compute_bytes < FLOAT32
    traced = estimate.traced_peak is not None
    whole = "float32, whole until the last micro batch"
    rows = [
        ("weights", _gb(memory.weights), f"{'bfloat16, the adapter ' if is_half else ''}float32, sharded"),
        ("gradients", _gb(memory.gradients), whole if trainer.reduces_once else "float32, sharded"),
        ("optimizer", _gb(memory.optimizer), "two moments, float32, sharded"),
        ("activations", _gb(memory.activations), "of a full micro batch"),
        ("gathered", _gb(memory.gathered), "weights and gradients of layers in flight, embedding, head"),
        ("working", _gb(memory.working), "logits, gradients of activations"),
        ("peak", _gb(memory.peak), "by formula" if traced else f"by formula: {source}"),
    ]
    if traced:
        rows.append(("peak", _gb(estimate.peak), f"by {source}"))
    fits = "fits" if estimate.trainer_fits else "DOES NOT FIT"
    return [*rows, ("room", _gb(estimate.memory_limit), f"{fits}; assume.reserve_gb is left out")]


def _server_rows(config: PlanConfig, estimate: Estimate) -> list[tuple[str, str, str]]:
    served, ranks = estimate.serving, config.inference.ranks_per_server
    fits = "" if served.concurrency else "DOES NOT FIT"
    return [
        ("GPUs", str(config.inference.gpus_per_rank), "inference.vllm.tensor_parallel_size"),
        *(
            [("ranks", str(ranks), "inference.vllm.data_parallel_size; what follows is of one")]
            if ranks > 1
            else []
        ),
        ("weights", _gb(served.weights), "bfloat16"),
        ("keys and values", _gb(served.kv_cache), f"{served.kv_per_token / 1e3:,.1f} kB a token {fits}"),
        (
            "sequences at a time",
            str(served.concurrency),
            "of the mean length; inference.max_concurrent bounds it",
        ),
    ]


def _traffic_rows(config: PlanConfig, estimate: Estimate) -> list[tuple[str, str, str]]:
    moved = estimate.traffic
    link = f"between machines, {config.assume.network_gb_s:g} GB/s per GPU"
    inside = f"inside a machine, {config.gpu_model.link_gb_s:g} GB/s"
    over = link if moved.spans_machines else inside
    rows = [
        ("all-gather", _gb(moved.all_gather), over),
        ("reduce-scatter", _gb(moved.reduce_scatter), over),
    ]
    if moved.all_reduce:
        rows.append(("all-reduce", _gb(moved.all_reduce), link))
    if moved.all_to_all:
        rows.append(("all-to-all", _gb(moved.all_to_all), inside))
    return rows


def _step_rows(config: PlanConfig, estimate: Estimate, work: Workload) -> list[tuple[str, str, str]]:
    served = estimate.serving
    is_float32 = config.model.lora is not None or publish_bytes(config) == FLOAT32
    published = "float32" if is_float32 else "bfloat16"
    trains = "computing" if estimate.compute_s >= estimate.traffic_s else "TRAFFIC"
    slower = "training"
    if estimate.transfer_s / 2 >= estimate.step_s:
        slower = "WRITING WEIGHTS: a faster file system, or model.lora"
    if estimate.sampling_s >= estimate.step_s:
        slower = "sampling"
    if config.max_async_level == 0:
        slower = "all parts in turn (max_async_level = 0)"
    return [
        ("rollouts", f"{work.num_rollouts:,}", f"{work.num_groups:,} groups of {work.group_size}"),
        ("tokens", f"{work.num_packed:,}", f"{work.num_sampled:,} sampled, {work.num_computed:,} computed"),
        ("sampling", f"{estimate.sampling_s:,.1f} s", f"{served.tokens_per_s:,.0f} tokens/s a server"),
        ("training", f"{max(estimate.compute_s, estimate.traffic_s):,.1f} s", f"bound by {trains}: computing "
         f"{estimate.compute_s:,.1f} s, traffic {estimate.traffic_s:,.1f} s"),
        ("new weights", f"{estimate.transfer_s:,.1f} s", f"written and read in {published}"),
        ("step", f"{estimate.step_s:,.1f} s", f"bound by {slower}"),
    ]  # fmt: skip
