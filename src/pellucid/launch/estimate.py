"""Memory, traffic and time of a run on GPUs that are not here: numbers in, numbers out.

    ModelSize, PlannedTrainer  ->  trainer_memory, traffic     bytes on one GPU, bytes per step
    ModelSize, PlannedServer   ->  serving                     concurrency, tokens per second
    Workload, both             ->  training_s, sampling_s      seconds per step

Sizes follow from what FSDP2 and HF's modules keep, and are held to torch's own memory tracker and to real
runs. Times follow from `AssumeConfig` alone: no GPU has been measured. Bytes are bytes, rates are per second.
"""

import math
from dataclasses import dataclass

from pellucid.config.gpus import GpuModel
from pellucid.config.tools import AssumeConfig
from pellucid.data.shared_prompts import takes_part

FLOAT32, BFLOAT16 = 4, 2
MAX_LOGITS = 1 << 24
"""Logits that the head keeps for the backward pass, and computes at a time on a CPU: `MAX_LOGITS` of
`model.head`, which needs torch; a test holds this and the next two to it."""

LOGIT_BYTES = 8
"""Most bytes of a logit in a chunk."""

LOGIT_SHARE = 1 / 16
"""Share of a GPU's memory that the logits of a chunk may take."""

_LOGIT_COPIES = 4
"""Float32 arrays as large as the logits that live at once where they are kept: log-softmax, its exponential,
two factors of the entropy; in the backward pass as many gradients, and one in bfloat16."""

_MLP_GRADIENTS = 3
"""Gradients as wide as the MLP that live at once in its backward pass."""

BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's KV cache; a sequence wastes half of one on average."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model as sizes follow from it. Llama 3.1 8B: 8.03e9 parameters, of which 1.05e9 are in no layer."""

    num_params: int
    num_outside: int
    """Parameters of no decoder layer: embedding, head, last norm."""

    num_layers: int
    largest_layer: int
    """Parameters of the largest decoder layer, the unit in which FSDP2 gathers."""

    num_active: float
    """Weights that a token is multiplied with, the head's included, the embedding's not."""

    attended: int
    """Sum of the widths of all attention heads of all layers."""

    hidden: int
    query_width: int
    """Width of all query heads of a layer."""

    kv_width: int
    """Width of all key heads of a layer."""

    mlp_width: int
    """Width of a layer's MLP, or of all the experts that a token meets."""

    vocabulary: int
    kv_numbers: int
    """Numbers per token in the KV cache, over all layers."""

    num_heads: int = 1
    num_experts: int = 0
    """Experts of a layer; 0: the model is dense."""

    top_k: int = 0
    """Experts that a token is sent to."""

    norms_heads: bool = False
    """Whether queries and keys are normalised by head, as in Qwen3."""

    num_adapter: int = 0
    """Parameters of a LoRA adapter; 0: all weights are trained."""

    @property
    def num_trained(self) -> int:
        return self.num_adapter or self.num_params

    @property
    def head_size(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding have the same weights."""
        return self.num_outside < 2 * self.head_size

    @property
    def num_rooted(self) -> int:
        """Parameters that stay gathered for a whole micro batch: not those of a head and an embedding of
        their own."""
        return self.num_outside - (0 if self.is_tied else 2 * self.head_size)

    def layer_activations(self, size: int) -> int:
        """Bytes per token that a layer keeps for its backward pass, computing in numbers of `size` bytes.

        Norms keep a float32 copy of their input, its normalised form and their output; attention keeps
        queries, keys and values of all heads and its output twice; the MLP keeps gate, its activation, up,
        and their product. Experts also keep their share of the input and of the output.
        """
        norms = 2 * (FLOAT32 + 2 * size) * self.hidden
        attention = 5 * size * self.query_width
        if self.norms_heads:
            attention += (FLOAT32 + size) * (self.query_width + self.kv_width)
        mlp = 4 * size * self.mlp_width + 2 * size * self.top_k * self.hidden
        return norms + attention + mlp


@dataclass(frozen=True, slots=True)
class PlannedTrainer:
    """The trainer as its memory and traffic follow from it."""

    num_gpus: int
    dp_replicate: int
    cp: int
    micro_batch_tokens: int
    checkpoints_activations: bool
    compute_bytes: int = BFLOAT16
    """Bytes of a number in forward and backward, and of weights beside an adapter; weights that are trained,
    gradients' sums and moments are float32."""

    is_sharded: bool = True
    """False: one process without a process group, which gathers nothing."""

    max_logits: int = MAX_LOGITS
    """Logits of a chunk of the head, by the device's memory; the default is a CPU's."""

    reduces_once: bool = False
    """Whether gradients are reduced once per step, and whole in every process until then."""

    @property
    def shards(self) -> int:
        return self.num_gpus // self.dp_replicate

    @property
    def num_ranks(self) -> int:
        return self.num_gpus // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens of a full micro batch that one GPU computes."""
        return -(-self.micro_batch_tokens // self.cp)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one GPU of the trainer; `peak` is that of the fullest moment, not the sum of all parts."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    """Gathered weights, and gradients of a layer and of the head before they are scattered."""

    working: int
    """Logits and gradients of activations."""

    peak: int


def trainer_memory(model: ModelSize, trainer: PlannedTrainer) -> TrainerMemory:
    """Computes the bytes on one GPU of the trainer at the fullest of four moments.

    The forward pass ends with all activations and the logits, whose backward pass takes as much. Then two
    layers are gathered, one of them is computed again under activation checkpointing, and there are gradients
    of that layer and of the head. Gradients are copied to float32 to be scattered: those of a tied head at
    the end, those of another at once, so that their copy is what is left of them by then. The optimizer, at
    last, needs one more array as large as its shard.
    """
    size, tokens = trainer.compute_bytes, trainer.own_tokens
    held = size if model.num_adapter else FLOAT32  # what is not trained has the dtype of the forward
    weights = (held * model.num_params + FLOAT32 * model.num_adapter) // trainer.shards
    trained = FLOAT32 * model.num_trained // trainer.shards
    gradients = FLOAT32 * model.num_trained if trainer.reduces_once else trained
    per_layer = model.layer_activations(size) * tokens
    kept = again = model.num_layers * per_layer
    if trainer.checkpoints_activations:
        kept = model.num_layers * size * model.hidden * tokens
        again = kept + per_layer
    differentiated = _MLP_GRADIENTS * size * model.mlp_width * tokens
    rooted, layer, of_head = size * model.num_rooted, size * model.largest_layer, size * model.head_size
    head, left, scattered = 0 if model.is_tied else of_head, of_head, 0
    if not trainer.is_sharded:
        rooted = layer = head = of_head = left = 0  # gathered is what is there anyway, and so are gradients
    elif model.num_adapter:
        of_head = left = 0
    elif model.is_tied:
        scattered = trained + (FLOAT32 + (FLOAT32 if trainer.reduces_once else size)) * model.num_rooted
    else:
        copied = FLOAT32 * model.head_size
        scattered = gradients + kept + rooted + layer + copied + (0 if trainer.reduces_once else of_head)
        left = 0 if trainer.reduces_once else copied  # the copy takes the place of the whole gradient
    is_chunked = tokens * model.vocabulary > min(trainer.max_logits, MAX_LOGITS)
    logits = _chunk_bytes(model, trainer) if is_chunked else _logit_bytes(model, trainer)
    of_kept = 0 if is_chunked else of_head  # those of another head come after its logits, and are scattered
    moments = {
        "logits": gradients + kept + rooted + (head or of_kept) + layer + logits,
        "backward": gradients + again + rooted + 3 * layer + left + differentiated,
        "scatter": scattered,
        "optimizer": trained + trained,
    }
    return TrainerMemory(
        weights=weights,
        gradients=gradients,
        optimizer=2 * trained,
        activations=again,
        gathered=rooted + 3 * layer + left,
        working=max(logits, differentiated),
        peak=weights + 2 * trained + max(moments.values()),
    )


def _logit_bytes(model: ModelSize, trainer: PlannedTrainer) -> int:
    """Bytes of logits that are kept for the backward pass."""
    cast = trainer.compute_bytes if trainer.compute_bytes < FLOAT32 else 0
    return (_LOGIT_COPIES * FLOAT32 + cast) * trainer.own_tokens * model.vocabulary


def _chunk_bytes(model: ModelSize, trainer: PlannedTrainer) -> int:
    """Bytes of the head that computes logits in chunks, at its fullest moment.

    Backward, a chunk's gradients in float32 are cast beside the float32 sum of the weight's gradient; then
    their product is there until it is added to that sum. Without a cast, the product is added as it is made.
    """
    size, num_logits = (
        trainer.compute_bytes,
        min(trainer.max_logits, trainer.own_tokens * model.vocabulary),
    )
    of_weight = 0 if model.num_adapter else FLOAT32 * model.head_size
    forward, backward = LOGIT_BYTES * num_logits, FLOAT32 * num_logits + of_weight
    if size < FLOAT32:
        backward = max(backward + size * num_logits, size * num_logits + 2 * of_weight)
    return max(forward, backward)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each GPU of the trainer sends, and receives, per step."""

    all_gather: float
    reduce_scatter: float
    all_reduce: float
    """Between copies of the model (`dp_replicate`)."""

    all_to_all: float
    """Tokens for heads and back (`cp`)."""

    spans_machines: bool
    """Whether the shards of one copy are on several machines; gradients of copies then are, too."""


def traffic(model: ModelSize, trainer: PlannedTrainer, gpus_per_node: int, micro_batches: int) -> Traffic:
    """Counts what FSDP2 moves in a step of so many micro batches.

    Each gathers layers and an embedding of its own twice, the head and the rest once; gradients are float32,
    and are reduced after each or once.
    """
    size, shards = trainer.compute_bytes, trainer.shards
    moved = (shards - 1) / shards
    once = model.num_rooted + (0 if model.is_tied else model.head_size)
    gathered = size * (2 * model.num_params - once)
    reduced = FLOAT32 * model.num_trained * (1 if trainer.reduces_once else micro_batches)
    replicas = trainer.dp_replicate
    # Queries, keys, values and outputs cross forward and backward, but for the share that stays.
    exchanged = 2 * 4 * size * model.query_width * model.num_layers * trainer.own_tokens
    return Traffic(
        all_gather=micro_batches * gathered * moved,
        reduce_scatter=reduced * moved,
        all_reduce=2 * reduced / shards * (replicas - 1) / replicas,
        all_to_all=micro_batches * exchanged * (trainer.cp - 1) / trainer.cp,
        spans_machines=shards > gpus_per_node,
    )


def traffic_s(moved: Traffic, gpu: GpuModel, assume: AssumeConfig) -> float:
    """Seconds of a step's traffic, one collective after the other.

    Rings use all network cards of a machine together, so that a collective over machines is as fast as
    those, and never faster than the links inside.
    """
    inside = gpu.link_gb_s * 1e9 * assume.link_efficiency
    between = min(inside, assume.network_gb_s * 1e9 * assume.gpus_per_node * assume.link_efficiency)
    of_shards = between if moved.spans_machines else inside
    gathered = (moved.all_gather + moved.reduce_scatter) / of_shards
    return gathered + moved.all_reduce / between + moved.all_to_all / inside


@dataclass(frozen=True, slots=True)
class Workload:
    """One step's rollouts. Lengths are means; `longest` is that of prompt and completion together."""

    num_groups: int
    group_size: int
    prompt: int
    completion: int
    longest: int
    shares_prompts: bool = True

    @property
    def num_rollouts(self) -> int:
        return self.num_groups * self.group_size

    @property
    def num_sampled(self) -> int:
        return self.num_rollouts * self.completion

    @property
    def num_packed(self) -> int:
        return self.num_rollouts * (self.prompt + self.completion)

    @property
    def num_computed(self) -> int:
        """Tokens that go through the trainer, with the prompt once per group where sharing it pays."""
        if self.shares_prompts and self.group_size > 1 and takes_part(self.prompt, self.completion):
            return self.num_sampled + self.num_groups * self.prompt
        return self.num_packed

    @property
    def num_pairs(self) -> float:
        """Pairs of a token and one that it attends to, in the whole batch."""
        return self.num_rollouts * (self.prompt + self.completion) ** 2 / 2


def num_micro_batches(work: Workload, trainer: PlannedTrainer) -> int:
    """Micro batches of the fullest rank: whole sequences of the mean length, as many as fit."""
    per_rollout = -(-work.num_computed // work.num_rollouts)
    per_micro_batch = max(1, trainer.micro_batch_tokens // per_rollout)
    return math.ceil(math.ceil(work.num_rollouts / trainer.num_ranks) / per_micro_batch)


def training_flops(model: ModelSize, work: Workload) -> float:
    """Counts as `trainer.step.ModelShape.flops` does: 3 × (2 per weight and token, 4 per pair and width)."""
    of_weights = 2 * model.num_active * work.num_computed
    return (2 if model.num_adapter else 3) * of_weights + 3 * 4 * model.attended * work.num_pairs


def training_s(
    model: ModelSize, trainer: PlannedTrainer, work: Workload, gpu: GpuModel, assume: AssumeConfig
) -> tuple[float, float]:
    """Returns seconds of computing and of traffic per step; they overlap, so that the longer one counts.

    Activation checkpointing repeats the forward pass: a third of the operations more. A rank that has fewer
    sequences than the fullest one waits for it.
    """
    flops = training_flops(model, work) * (4 / 3 if trainer.checkpoints_activations else 1)
    even = work.num_rollouts / trainer.num_ranks
    compute = flops * math.ceil(even) / even / (trainer.num_gpus * gpu.tflops * 1e12 * assume.mfu)
    moved = traffic(model, trainer, assume.gpus_per_node, num_micro_batches(work, trainer))
    return compute, traffic_s(moved, gpu, assume)


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """One inference server."""

    num_gpus: int
    max_concurrent: int
    weight_bytes: int = BFLOAT16
    memory_share: float = 0.9


@dataclass(frozen=True, slots=True)
class Serving:
    """Memory and speed of one server, of all its GPUs together."""

    weights: float
    kv_cache: float
    """Bytes left for keys and values; negative: the weights do not fit."""

    kv_per_token: int
    concurrency: int
    """Sequences decoded at a time: as many of the mean length as fit, and at most
    `inference.max_concurrent`. One of the longest has to fit, too."""

    decode_step_s: float
    tokens_per_s: float


def serving(
    model: ModelSize, server: PlannedServer, work: Workload, gpu: GpuModel, assume: AssumeConfig
) -> Serving:
    """Computes what a server holds and samples per second.

    A step of decoding reads the weights that its tokens meet, and the keys and values of all sequences,
    half of their completion on average; or it computes for longer than that takes.
    """
    num_gpus, size = server.num_gpus, server.weight_bytes
    weights = float(size * (model.num_params + model.num_adapter))
    memory = num_gpus * (gpu.memory_gb * server.memory_share - assume.engine_gb) * 1e9
    kv_per_token = size * model.kv_numbers
    kv_cache = memory - weights
    fits = kv_cache / (kv_per_token * (work.prompt + work.completion + BLOCK_TOKENS / 2))
    concurrency = min(server.max_concurrent, max(0, math.floor(fits)))
    if not concurrency or kv_cache < kv_per_token * (work.longest + BLOCK_TOKENS):
        return Serving(weights, kv_cache, kv_per_token, 0, math.inf, 0.0)
    read = size * _met(model, concurrency)
    read += kv_per_token * concurrency * (work.prompt + work.completion / 2)
    reading_s = read / (num_gpus * gpu.memory_gb_s * 1e9 * assume.decode_bandwidth)
    computing_s = 2 * model.num_active * concurrency / (num_gpus * gpu.tflops * 1e12 * assume.prefill_mfu)
    step_s = max(reading_s, computing_s) + assume.decode_overhead_s
    prefill_flops = 2 * model.num_active * work.prompt / work.group_size
    prefill_s = prefill_flops / (num_gpus * gpu.tflops * 1e12 * assume.prefill_mfu)
    # A rollout takes `completion` steps of its slot, and a share of its group's prompt.
    rate = concurrency * work.completion / (work.completion * step_s + concurrency * prefill_s)
    return Serving(weights, kv_cache, kv_per_token, concurrency, step_s, rate)


def _met(model: ModelSize, num_tokens: int) -> float:
    """Weights that `num_tokens` tokens meet together; each expert is met by a random share of them."""
    if not model.num_experts:
        return model.num_active
    one = model.top_k / model.num_experts
    # num_active = others + one · experts, and num_params = others + experts + embedding
    experts = (model.num_params - model.vocabulary * model.hidden - model.num_active) / (1 - one)
    met = 1 - (1 - one) ** num_tokens
    return model.num_active + experts * (met - one)


def sampling_s(work: Workload, server: Serving, num_servers: int, *, is_synchronous: bool) -> float:
    """Seconds in which all servers sample a step's rollouts.

    On-policy runs wait for the longest rollout besides: the servers idle while it ends.
    """
    if not server.tokens_per_s:
        return math.inf
    even = work.num_sampled / (num_servers * server.tokens_per_s)
    if not is_synchronous:
        return even
    return max(even, (work.longest - work.prompt) * server.decode_step_s)


def transfer_s(model: ModelSize, assume: AssumeConfig, published: int = BFLOAT16) -> float:
    """Seconds until the servers have new weights: written once, then read by all at once.

    A published number has so many bytes; those of an adapter are float32.
    """
    size = FLOAT32 if model.num_adapter else published
    return 2 * size * model.num_trained / (assume.storage_gb_s * 1e9)


def step_s(sampling: float, training: float, transfer: float, *, is_synchronous: bool) -> float:
    """Seconds of a step: all parts in turn, or the longest of them where they overlap.

    The trainer writes weights, the first half of their transfer, while it trains the next step.
    """
    return sampling + training + transfer if is_synchronous else max(sampling, training, transfer / 2)
