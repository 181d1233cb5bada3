"""`[trainer]`: packing, loss, optimizer, export; and `[data]`, which sft trains on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pellucid.config.base import ImportPath, Section
from pellucid.errors import ConfigError

_GRADIENT_SHARE = 0.1
"""Share of the device's memory that whole gradients may take before they are reduced per micro batch."""

DEFAULT_SPLIT = "train"


class DatasetConfig(Section):
    """A source of examples: a file, a folder, or the hub."""

    KEY: ClassVar[str]
    """Dotted key of this section, for messages."""

    path: Path | None = None
    """JSONL file, or folder of a data set: one that `save_to_disk` wrote, or Parquet or JSONL files. A folder
    needs `pip install 'pellucid[datasets]'`. See docs/fine-tune.md for the form of an example."""

    name: str | None = Field(default=None, min_length=1)
    """Data set on the hub, instead of `path`; needs `pip install 'pellucid[datasets]'`."""

    subset: str | None = Field(default=None, min_length=1)
    """Subset (configuration) of a data set that has several."""

    split: str | None = Field(default=None, min_length=1)
    """Split of a folder or a hub data set; default: `train`."""

    @property
    def part(self) -> tuple[str | None, str]:
        """(subset, split), with the default split filled in."""
        return self.subset, self.split or DEFAULT_SPLIT


class ValidationConfig(DatasetConfig):
    """Examples that are never trained on: a data set of their own (`path`, `name`), another `split` of the
    training data, or examples held out of it (`fraction`, `num_examples`)."""

    KEY: ClassVar[str] = "data.validation"

    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training data to hold out; the same examples whatever the `seed`."""

    num_examples: int | None = Field(default=None, ge=1)
    """Examples of the training data to hold out; the same ones whatever the `seed`."""

    interval: int = Field(default=50, ge=1)
    """Steps between two measurements. There is also one before the first step and one after the last."""

    @property
    def holds_out(self) -> bool:
        return self.fraction is not None or self.num_examples is not None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        places = ("path", "name", "fraction", "num_examples")
        given = [f"data.validation.{name}" for name in places if getattr(self, name) is not None]
        part = [f"data.validation.{name}" for name in ("split", "subset") if getattr(self, name) is not None]
        if len(given) > 1 or (self.holds_out and part):
            first, second = [*given, *part][:2]
            yield f"{first} and {second} are both set; examples come from one place: keep one"
        if not given and not part:
            yield (
                "data.validation does not say where examples come from; set path, name or split, or hold "
                "examples out of the training data with fraction or num_examples"
            )


class DataConfig(DatasetConfig):
    KEY: ClassVar[str] = "data"

    batch_size: int = Field(default=64, ge=1)
    """Examples per optimizer step."""

    validation: ValidationConfig | None = None
    """Present: the run measures the loss on examples that it never trains on."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.path is not None and self.name is not None:
            yield f"data.path = {self.path} and data.name = {self.name} are both set; keep one"
        if self.path is None and self.name is None:
            yield "data.path is missing; set it to a file or folder, or data.name to a hub name"
        held = self.validation_source()
        if held is not None and (held.path, held.name, held.part) == (self.path, self.name, self.part):
            yield (
                f"data.validation reads what the run trains on ({self.path or self.name}, split "
                f"{self.part[1]}); choose another split or data set, or hold examples out with "
                "data.validation.fraction"
            )

    def validation_source(self) -> ValidationConfig | None:
        """Returns the data set to validate on; None if examples are held out of this one, or none are."""
        held = self.validation
        if held is None or held.holds_out:
            return None
        if held.path is not None or held.name is not None:
            return held
        taken_over = {"path": self.path, "name": self.name, "subset": held.subset or self.subset}
        return held.model_copy(update=taken_over)


Reduction = Literal["token", "sequence", "group"]


class _Loss(Section):
    reduction: Reduction = "token"
    """Unit of the step's mean: every trainable token, sequence or group weighs the same. The mean is over the
    whole batch, so that packing and ranks cannot change it. `gspo` has `sequence` by default."""


class _RatioLoss(_Loss):
    kl_tau: float = Field(default=0.0, ge=0)
    """Weight of the squared log-ratio, over every trainable token; `dppo` has 1e-3 by default."""


class PpoClipLossConfig(_RatioLoss):
    """PPO's clipped surrogate: −min(r·A, clip(r)·A)."""

    type: Literal["ppo_clip"]
    """Selects PPO's clipped surrogate."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """With a negative advantage a token has no gradient once its ratio is below 1 − this. `gspo` has 3e-4
    by default, of the sequence's ratio; `cispo` bounds its weights by it, and has 1 by default."""

    clip_high: float = Field(default=0.2, ge=0)
    """With a positive advantage a token has no gradient once its ratio is above 1 + this. `gspo` has 4e-4
    by default, of the sequence's ratio; `cispo` bounds its weights by it, and has 4 by default."""


class CispoLossConfig(_RatioLoss):
    """CISPO: −stopgrad(clip(r))·A·log π. Every token keeps a gradient, however far off its ratio is."""

    type: Literal["cispo"]
    """Selects CISPO."""

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Importance weights are at least 1 − this; 1: no lower bound."""

    clip_high: float = Field(default=4.0, ge=0)
    """Importance weights are at most 1 + this."""


class GspoLossConfig(_RatioLoss):
    """GSPO: the clipped surrogate with one ratio per sequence, the geometric mean over its tokens."""

    type: Literal["gspo"]
    """Selects GSPO."""

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """With a negative advantage a token has no gradient once its sequence's ratio is below 1 − this."""

    clip_high: float = Field(default=4e-4, ge=0)
    """With a positive advantage a token has no gradient once its sequence's ratio is above 1 + this."""

    reduction: Reduction = "sequence"
    """Unit of the step's mean: every trainable token, sequence (as published) or group weighs the same."""


class IcepopLossConfig(_RatioLoss):
    """IcePop: −keep·r·A; a token whose ratio is out of bounds has no gradient, whatever its advantage."""

    type: Literal["icepop"]
    """Selects IcePop."""

    min_ratio: float = Field(default=0.5, ge=0, le=1)
    """A token with a lower ratio is masked."""

    max_ratio: float = Field(default=5.0, ge=1)
    """A token with a higher ratio is masked."""


class TisLossConfig(_RatioLoss):
    """Truncated importance sampling: −stopgrad(min(r, cap))·A·log π."""

    type: Literal["tis"]
    """Selects truncated importance sampling."""

    max_ratio: float = Field(default=2.0, gt=0)
    """Importance weights are at most this."""


class DppoLossConfig(_Loss):
    """DPPO + KL: the policy gradient with a trust region on the change of probability."""

    type: Literal["dppo"] = "dppo"
    """`dppo`: DPPO + KL, the default rl loss; `ppo_clip`, `cispo`, `gspo`, `icepop`, `tis`: see
    docs/losses.md; `custom`: a function of your own."""

    dppo_mask_low: float = Field(default=0.2, ge=0)
    """A token with advantage ≤ 0 is masked once its probability fell by more than this."""

    dppo_mask_high: float = Field(default=0.2, ge=0)
    """A token with advantage > 0 is masked once its probability rose by more than this."""

    adv_tau: float = 1.0
    """Weight of the advantage."""

    teacher_tau: float = 0.0
    """Weight of (teacher logprob − trainer logprob) where a sample has teacher logprobs."""

    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of the squared log-ratio, over every trainable token."""


class CustomLossConfig(_Loss):
    """A loss of your own; see docs/write-a-loss.md."""

    type: Literal["custom"]
    """Selects the custom loss."""

    import_path: ImportPath
    """`package.module:function`, called as `function(inputs, **kwargs) -> LossRecord`."""

    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments for the function."""


# The default comes last: `--help` describes `type` as the last variant does.
LossConfig = Annotated[
    CustomLossConfig
    | PpoClipLossConfig
    | CispoLossConfig
    | GspoLossConfig
    | IcepopLossConfig
    | TisLossConfig
    | DppoLossConfig,
    Field(discriminator="type"),
]


SequenceLayout = Literal["auto", "packed", "rows"]


class TrainerModelConfig(Section):
    seq_len: int = Field(default=2048, ge=2)
    """Longest sample in tokens; the rest of a longer one is truncated and counted. Filled by `seq_len`."""

    cp: int = Field(default=1, ge=1)
    """Processes that share the tokens of each micro batch (Ulysses context parallelism), for long sequences.
    Has to divide the model's attention heads and, times `dp_replicate`, the number of processes."""

    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the model (HSDP), each sharded over its share of the processes. 1: one copy over all of
    them."""

    layout: SequenceLayout = "auto"
    """How the sequences of a micro batch go through the model: `packed` side by side in one row, without
    padding, and with a shared prompt once; `rows` each in a row of its own, padded to the longest. `auto`
    packs a model if that is proved right when it is loaded, and takes rows otherwise; one log line says
    which, and why. `packed` is refused for a model for which it is not right. Rows share no prompts, do
    without `trainer.pad_to_multiple_of`, and cannot be combined with `cp` above 1 or `compile`."""

    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of weights and activations while they are computed with: `auto` is bfloat16 on a GPU and float32
    on a CPU. Weights that are trained, their gradients and the optimizer's state stay in float32; weights
    beside an adapter are held in this dtype, too. There is no float16, whose gradients underflow, and no fp8;
    matrix products in float32 are never rounded to TF32."""

    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    """When processes add up their gradients: `step` once, after the last micro batch, which sends less and
    keeps the gradient of all trained weights in float32 in every process; `micro_batch` after each, which
    keeps that of a shard. `auto`: `step` where it takes at most a tenth of the device's memory. A trainer of
    many runs does it after each."""

    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the rest again: less memory, about
    a third more time. Values and gradients stay the same."""

    router_aux_loss_coef: float = Field(default=0.0, ge=0, lt=float("inf"))
    """For models with experts: weight of the loss that keeps experts equally busy over a step, beside the
    loss of the tokens; transformers' formula, as in pre-training (often 0.001). 0: none, whatever
    `config.json` says. Without `enable_router_replay` a step computes one more forward. Not with
    `trainer.many_runs`."""

    compile: bool = False
    """Compile the decoder layers with `torch.compile` (inductor), apart from attention and experts. The first
    micro batch waits for the compilers, and later ones of any size use its graphs. Needs g++, and Triton for
    a GPU. Values differ by rounding; dropout draws other numbers. Not with `trainer.many_runs`."""

    def reduces_once(self, num_trained: int, memory_bytes: float) -> bool:
        """Returns whether processes with so much memory each add up their gradients once per step."""
        if self.reduce_gradients != "auto":
            return self.reduce_gradients == "step"
        return 4 * num_trained <= _GRADIENT_SHARE * memory_bytes


class OptimConfig(Section):
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's moment decays."""

    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class SchedulerConfig(Section):
    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` reach 0 at `max_steps`."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""


class CkptConfig(Section):
    """Checkpoints, to resume a run from. One is also written after the last step and when a run stops."""

    interval: int = Field(default=50, ge=1)
    """Steps between two checkpoints. Batches stay on disk until every kept checkpoint covers them, so that
    the steps after one are trained again instead of being sampled again."""

    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept on disk; older ones are deleted. `--resume` skips a damaged one."""

    asynchronous: bool = False
    """Write checkpoints in a thread while training goes on, from a copy of the state in CPU memory."""


class ProfileConfig(Section):
    """Profiles of some steps: `profiles/step_N.rank_R.json`, for chrome://tracing or Perfetto."""

    first_step: int = Field(default=1, ge=0)
    """First step that is profiled; step 0 includes the costs of starting."""

    num_steps: int = Field(default=1, ge=1)
    """Steps that are profiled, each into a file of its own. Profiling slows them down."""

    @property
    def steps(self) -> range:
        return range(self.first_step, self.first_step + self.num_steps)


TrainerPrecision = Literal["float32", "bfloat16", "float16"]
ExportFormat = Literal["jsonl", "parquet"]
ExportColumns = Literal["all", "essential"]


class TokenExportConfig(Section):
    path: Path | None = None
    """Another place for the records, from `output_dir` if relative: one file per rank, for Parquet one per
    step, too. Ends as `format` says and belongs to one run. Default: `token_exports/step_N/rank_R.jsonl` or
    `.parquet`."""

    format: ExportFormat = "jsonl"
    """`jsonl`: one JSON record per sequence and line. `parquet`: the same in columns, about a fifth of the
    size and read much faster."""

    columns: ExportColumns = "all"
    """`essential` leaves out columns that follow from others (ratios, mismatch KL, positions, rewards per
    token): half the size. `pellucid` derives them when it reads; other tools do not."""

    own_process: bool = True
    """A process beside each rank's trainer encodes and writes (about 60 MB). `false`: a thread of the trainer
    does, and training waits while it holds Python's lock."""

    max_bytes: int = Field(default=20_000_000_000, ge=1)
    """Bytes that the files of one rank may take, 20 GB by default: about 770 million tokens as Parquet, 125
    million as JSONL. The export ends at the step that would exceed it, with one warning; training goes on."""

    def problems(self) -> Iterator[str]:
        if self.path is not None and self.path.suffix not in ("", f".{self.format}"):
            yield (
                f"trainer.experimental.token_export.path = {self.path} does not end in .{self.format}, but "
                f'format = "{self.format}"; change one of them'
            )


class ExperimentalConfig(Section):
    token_export: TokenExportConfig | None = None
    """Present: every trainable sequence of every step is written with its per-token values."""


class FakeDataConfig(Section):
    """Samples of random tokens instead of an orchestrator's, to measure speed and memory of training."""

    batch_size: int = Field(default=8, ge=1)
    """Samples per optimizer step. Each has `trainer.model.seq_len` tokens and is a micro batch of its own."""


class TrainerDataConfig(Section):
    fake: FakeDataConfig | None = None
    """Present: `pellucid trainer` trains on random tokens, without an orchestrator, weights or ledger."""


class ManyRunsConfig(Section):
    """One model for several runs, each with a LoRA adapter, an optimizer and a folder of its own. They join
    with `trainer.join`, and leave, while the others go on."""

    max_runs: int = Field(default=4, ge=1)
    """Runs that are trained at a time; the trainer makes as many adapters at its start. Further runs wait."""

    stay: bool = True
    """Wait for further runs when all are done; otherwise the trainer ends then."""


class TrainerConfig(Section):
    model: TrainerModelConfig = TrainerModelConfig()
    """How the trainer runs the model."""

    micro_batch_max_tokens: int | None = Field(default=None, ge=2)
    """Tokens packed into one micro batch; default: `trainer.model.seq_len`. Changes memory and speed, never
    the gradient. A longer sample gets a micro batch alone."""

    pad_to_multiple_of: int = Field(default=1, ge=1)
    """Pad micro batches to a multiple of this many tokens, by a sequence without loss. Has to divide the
    tokens of a micro batch."""

    data: TrainerDataConfig = TrainerDataConfig()
    """Source of batches, if not an orchestrator."""

    optim: OptimConfig = OptimConfig()
    """Optimizer."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning-rate schedule."""

    ckpt: CkptConfig = CkptConfig()
    """Checkpoints."""

    loss: LossConfig = DppoLossConfig()
    """Loss of rl samples; sft and opd samples have their own."""

    max_skipped_steps: int = Field(default=3, ge=1)
    """Steps in a row whose loss or gradient is not finite before the run ends after a checkpoint. Such a step
    moves no weights, and its tokens are `skipped` in the ledger."""

    share_prompts: bool = True
    """Compute the common prompt of a group's members once; values and gradients stay the same."""

    enable_router_replay: bool = False
    """For models with experts: send each token to the experts that the engine chose, weighed by the trainer's
    own router. Fills `inference.record_experts` of `rl`. Samples without routed experts are refused."""

    replay_expert_weights: bool = False
    """With `enable_router_replay`: the engine's weights of the experts are replayed, too, as constants. Then
    the token losses have no gradient for the routers. Fills `inference.record_expert_weights` of `rl`."""

    many_runs: ManyRunsConfig | None = None
    """Present: `pellucid trainer` trains the runs that join it, and has no run of its own."""

    join: Path | None = None
    """`output_dir` of a trainer with `many_runs`: this run is trained there, with an adapter of its own."""

    keep_weights: int = Field(default=4, ge=2)
    """Published weight versions kept on disk; older ones are deleted."""

    publish_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of published weights. `auto` is that which the trainer computes in, so that engines get the very
    numbers; bfloat16 takes half the bytes of float32. Adapters, and `model/`, the result, stay in float32."""

    num_processes: int = Field(default=1, ge=1)
    """Processes that `pellucid rl` starts the trainer in. On your own, start them with `torchrun`."""

    collective_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds after which the trainer's processes give up a collective (NCCL, gloo) that does not end, since
    one of them hangs or a link is down. Waiting for batches does not count."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer, divided among its processes; default: all cores that it may use, half of
    them in `rl`."""

    profile: ProfileConfig | None = None
    """Present: some steps are profiled."""

    experimental: ExperimentalConfig = ExperimentalConfig()
    """Opt-in features."""

    @property
    def max_tokens(self) -> int:
        """Tokens packed into one micro batch."""
        return self.micro_batch_max_tokens or self.model.seq_len

    def check_num_processes(self, num_processes: int) -> None:
        """Raises ConfigError if `num_processes` does not fit `dp_replicate`, `cp` or `num_processes`."""
        replicate, cp = self.model.dp_replicate, self.model.cp
        if num_processes % (replicate * cp):
            raise ConfigError(
                f"trainer.model.dp_replicate = {replicate} × trainer.model.cp = {cp} does not divide the "
                f"{num_processes} process(es) of the trainer; lower one of them, or start a multiple of "
                f"{replicate * cp} (`torchrun --nproc-per-node`; for `pellucid rl`, trainer.num_processes)"
            )
        if self.num_processes not in (1, num_processes):
            raise ConfigError(
                f"trainer.num_processes = {self.num_processes}, but the trainer runs in {num_processes}; "
                f"leave it out, or start `torchrun --nproc-per-node {self.num_processes} -m pellucid.cli …`"
            )

    def problems(self) -> Iterator[str]:
        cap, seq_len = self.micro_batch_max_tokens, self.model.seq_len
        if cap is not None and cap > seq_len:
            yield (
                f"trainer.micro_batch_max_tokens = {cap} exceeds trainer.model.seq_len = {seq_len}; "
                "lower it or raise seq_len"
            )
        if self.data.fake is not None and cap is not None:
            yield (
                f"trainer.micro_batch_max_tokens = {cap} has no effect on fake data, whose samples are micro "
                "batches of their own; leave it out, and set trainer.data.fake.batch_size"
            )
        if self.data.fake is not None and self.enable_router_replay:
            yield (
                "trainer.enable_router_replay = true has nothing to replay on trainer.data.fake: no engine "
                "sent these tokens to experts; leave one of them out"
            )
        if self.replay_expert_weights and not self.enable_router_replay:
            yield (
                "trainer.replay_expert_weights = true weighs the experts that trainer.enable_router_replay "
                "sends tokens to; set that to true as well"
            )
        if self.join is not None and self.many_runs is not None:
            yield (
                f"trainer.join = {self.join} and trainer.many_runs are both set: a trainer serves other runs "
                "or is one of them; leave one out"
            )
        if self.join is not None and self.num_processes > 1:
            yield (
                f"trainer.num_processes = {self.num_processes} with trainer.join = {self.join}: the trainer "
                "that is joined has its own processes; leave it out"
            )
        export = self.experimental.token_export
        for key, value in {"micro_batch_max_tokens": cap, "experimental.token_export": export}.items():
            if self.many_runs is not None and value is not None:
                yield f"trainer.{key} has no effect with trainer.many_runs; set it in the runs instead"
        shares = [key for key in ("many_runs", "join") if getattr(self, key) is not None]
        if self.model.router_aux_loss_coef and shares:
            yield (
                f"trainer.model.router_aux_loss_coef = {self.model.router_aux_loss_coef} with "
                f"trainer.{shares[0]}: a step of one run among several is trained in parts, and the loss is "
                "one of the whole step; set it to 0"
            )
        if self.model.compile and self.many_runs is not None:
            yield (
                "trainer.model.compile = true with trainer.many_runs: each run's adapter would need compiled "
                "graphs of its own; leave one of them out"
            )
        if self.max_tokens % self.pad_to_multiple_of:
            key = "model.seq_len" if cap is None else "micro_batch_max_tokens"
            yield (
                f"trainer.pad_to_multiple_of = {self.pad_to_multiple_of} does not divide trainer.{key} = "
                f"{self.max_tokens}, so that a full micro batch would be padded beyond it; change one of them"
            )
