"""Settings of the commands that start no run here, or read a finished one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg, CliSuppress, SettingsConfigDict

from pellucid.config.base import Section
from pellucid.config.commands import RLConfig, VerifyOrchestratorConfig
from pellucid.config.gpus import KNOWN_GPUS, GpuModel


class ViewSettings(Section):
    """`pellucid view`: see every token of a run in the browser."""

    model_config = SettingsConfigDict(cli_shortcuts={"output": "o"})

    path: CliPositionalArg[Path | None] = None
    """Run folder, folder of runs, folder of token exports, step folder, or one export file. Several run
    folders, or folders of runs, are listed together and can be laid over each other. Without any, the runs
    in the current folder and in `outputs` are listed."""

    others: CliSuppress[tuple[Path, ...]] = ()
    """The paths after the first."""

    output: Path | None = None
    """Write one self-contained HTML page here instead of serving the viewer."""

    terminal: bool = False
    """Show records, outliers and the ledger in the terminal; of several runs a table, and the settings that
    differ."""

    tokenizer: str | None = None
    """Hub name or folder of the tokenizer that turns ids into text; default: the one the run used."""

    trust_remote_code: bool = False
    """Run the Python code that the tokenizer of `--tokenizer` brings with it, if it brings any."""

    step: int | None = None
    """Show this step only."""

    rank: int | None = None
    """Show the records of this data rank only."""

    env_name: str | None = None
    """Show the records of this environment only."""

    record_index: int = Field(default=0, ge=0)
    """Record to start with."""

    all_records: bool = False
    """Put every record into the page of `--output`. By default a page holds at most 1,000,000 tokens and
    40,000 records, and says how many: whole steps of a folder, evenly spread, or the first records of a
    file."""

    max_mismatch: float | None = Field(default=None, gt=0)
    """Mismatch KL that is drawn deepest; default: the 95th percentile of trainable tokens, at least 0.05."""

    host: str = "127.0.0.1"
    """Address to serve at. Beyond loopback, readers need the token of the printed address."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port to serve at; default: 7357, or a free one where that is taken."""

    open_browser: bool = False
    """Open the viewer in this machine's browser."""


class TraceSettings(Section):
    """`pellucid trace`: write what every process of a run did as a trace for Perfetto or Chrome."""

    model_config = SettingsConfigDict(cli_shortcuts={"output": "o"})

    run: CliPositionalArg[Path]
    """Run folder."""

    output: Path = Path("trace.json")
    """File to write, in Chrome's trace-event format; compressed if the name ends in `.gz`. An earlier one is
    replaced."""


class LedgerSettings(Section):
    """`pellucid ledger`: where every sampled token of a run went."""

    run: CliPositionalArg[Path]
    """Run folder."""

    by: Literal["env", "run", "step"] = "env"
    """A column per environment and run, a column per run, or a line per step."""

    rollout: str | None = None
    """Show the history of this rollout instead (`rollout_id`, as in saved rollouts and exports), or of every
    rollout of this group: its tokens, its outcome, and why its tokens did or did not train."""

    audit: bool = True
    """Compare the rollouts that were dropped with those that were kept, and warn where they differ beyond
    chance. Reads all saved rollouts."""

    as_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of a table."""


class ReplaySettings(Section):
    """`pellucid replay`: recompute what a run recorded of its tokens, or what other settings would do."""

    run: CliPositionalArg[Path]
    """Run folder with token exports, or exports alone."""

    step: int | None = Field(default=None, ge=0)
    """Step to replay; default: every step that is finished."""

    sequence: int | None = Field(default=None, ge=0)
    """Show one record of the step token by token; records count from 0 in the order of ranks and indices."""

    changes: tuple[str, ...] = Field(default=(), alias="set")
    """Change a setting: `trainer.loss.KEY=VALUE` or `orchestrator.advantage.KEY=VALUE`, repeated for several.
    Shows masks and losses under it beside the recorded ones; logprobs stay as they were."""

    weights: bool = False
    """Recompute the trainer's logprobs, too, of steps whose weights are still on disk. Loads the model that
    the run's settings name, and the run's weights and checkpoints; runs no code that they bring."""

    trust_code: bool = False
    """Import and run the Python code that the run's settings name: a custom loss, a custom advantage."""

    as_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of tables."""

    def problems(self) -> Iterator[str]:
        if self.sequence is not None and self.step is None:
            yield f"sequence = {self.sequence} is a record of one step; name it with --step"


class KeysSettings(Section):
    """`pellucid keys`: make CurveZMQ keys for batches that leave the machine."""

    folder: CliPositionalArg[Path]
    """Folder to write the keys of trainer and orchestrator to; existing files are never replaced."""


class EnvSettings(Section):
    """`pellucid env try`: attempt some examples of an environment, without a run, and show what happens."""

    model_config = SettingsConfigDict(cli_shortcuts={"num-examples": "n"})

    action: CliPositionalArg[Literal["try"]]
    """`try`: attempt examples and show prompts, replies and rewards."""

    id: CliPositionalArg[str]
    """The environment, as in `orchestrator.env.id`: a built-in one, `package.module:Class`, or
    `verifiers:TASKSET`."""

    args: dict[str, Any] = Field(default={})
    """Keyword arguments for the environment, as in `orchestrator.env.args`; JSON."""

    num_examples: int = Field(default=3, ge=1)
    """Examples to attempt."""

    start: int = Field(default=0, ge=0)
    """Index of the first example."""

    rollouts_per_example: int | None = Field(default=None, ge=1)
    """Rollouts of each example; default: 1, or 2 where rewards compare the members of a group."""

    reply: tuple[str, ...] = ()
    """Reply to give instead of a model's, repeated for several. Each turn of any rollout takes the next one;
    after the last, the first again."""

    replies: Path | None = None
    """File with such replies: one per line, as JSON strings if it ends in `.jsonl`."""

    server: str | None = None
    """Address of an inference server that replies, such as http://127.0.0.1:8000."""

    key_file: Path | None = None
    """File with the key of that server, `key` in its run folder; needed beyond loopback."""

    model: str | None = None
    """Hub name or folder of a model that is loaded and replies; with `--server` or replies of your own, only
    its tokenizer and chat template are used."""

    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest reply in tokens; default: 512, and no limit for replies of your own."""

    timeout_s: float = Field(default=60.0, gt=0)
    """A rollout that takes longer has failed."""

    seed: int = Field(default=0, ge=0)
    """The `seed` of a run that would see these examples, if its environment has no other name."""

    as_json: bool = Field(default=False, alias="json")
    """Print one JSON object per rollout instead of panels."""

    def problems(self) -> Iterator[str]:
        given = [name for name in ("reply", "replies", "server") if getattr(self, name)]
        if len(given) > 1:
            yield f"{' and '.join(given)} cannot both answer the environment; leave one out"
        if self.key_file is not None and self.server is None:
            yield f"key_file = {str(self.key_file)!r} is that of a server; name it with --server"


class ClusterConfig(Section):
    scheduler: Literal["slurm", "kubernetes"]
    """Scheduler whose files are written."""

    trainer_nodes: int = Field(default=1, ge=1)
    """Machines of the trainer; the orchestrator runs on the first."""

    processes_per_node: int | None = Field(default=None, ge=1)
    """Processes of the trainer on each of them; default: `gpus_per_node`, one per GPU, and 1 without GPUs."""

    inference_nodes: int = Field(default=1, ge=1)
    """Machines with inference servers: one on every `inference.vllm.tensor_parallel_size` of their GPUs (on
    each GPU with the embedded engine), or one each without GPUs."""

    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs to ask for on every machine."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the first inference server of a machine; the next ones have the next ports."""

    rendezvous_port: int = Field(default=29500, ge=1, le=65535)
    """Port at which the processes of the trainer find each other."""

    time_limit: str | None = None
    """Slurm: `--time`, such as `24:00:00`."""

    partition: str | None = None
    """Slurm: `--partition`."""

    image: str = "pellucid"
    """Kubernetes: container image with pellucid installed."""

    namespace: str | None = None
    """Kubernetes: namespace of all objects; default: that of `kubectl`."""

    volume_claim: str = "pellucid"
    """Kubernetes: the claim of a volume that all pods can write to; those of the trainer alone, if the parts
    share no disk. It is mounted at `/pellucid`, where all relative paths begin: model, data, run folder."""

    volume_size: str = "100Gi"
    """Kubernetes: the volume that the orchestrator and each server claim for themselves if the parts share no
    disk. A server keeps its books and two versions of the weights there."""

    @property
    def num_processes(self) -> int:
        """Processes of the trainer on one machine."""
        return self.processes_per_node or max(1, self.gpus_per_node)

    def servers_per_node(self, gpus_per_server: int) -> int:
        return max(1, self.gpus_per_node // gpus_per_server)

    def problems(self) -> Iterator[str]:
        if self.gpus_per_node and self.num_processes > self.gpus_per_node:
            yield (
                f"cluster.processes_per_node = {self.processes_per_node} exceeds cluster.gpus_per_node = "
                f"{self.gpus_per_node}: each process of the trainer needs a GPU of its own; lower it, or "
                "leave it out"
            )


class RenderConfig(RLConfig):
    """`pellucid render`: write the files that start a run on many machines; nothing is started."""

    cluster: ClusterConfig
    """The machines."""

    files: Path = Path("cluster")
    """Folder that the files are written to; earlier ones of the same name are replaced."""


class AssumeConfig(Section):
    """Assumptions of `pellucid plan` about machines; pellucid has measured none of them."""

    mfu: float = Field(default=0.4, gt=0, le=1)
    """Share of a GPU's dense bfloat16 operations that training reaches: `throughput/mfu` of a run, and with
    activation checkpointing, whose repeated operations the metric does not count, a third more."""

    prefill_mfu: float = Field(default=0.5, gt=0, le=1)
    """The same share for a server that computes prompts, or many tokens at a time."""

    decode_bandwidth: float = Field(default=0.6, gt=0, le=1)
    """Share of its memory's bandwidth that a server reaches while it decodes."""

    decode_overhead_s: float = Field(default=0.004, ge=0)
    """Seconds of each step of decoding beside reading and computing: scheduling, sampling, logprobs."""

    link_efficiency: float = Field(default=0.75, gt=0, le=1)
    """Share of a link's bandwidth that collectives reach, inside a machine and between machines."""

    network_gb_s: float = Field(default=50.0, gt=0)
    """Bandwidth between machines per GPU, in 10⁹ bytes per second and direction; 50 is InfiniBand NDR, 400
    Gbit/s."""

    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of one machine."""

    storage_gb_s: float = Field(default=2.0, gt=0)
    """Rate at which one machine writes or reads the shared file system, in 10⁹ bytes per second."""

    reserve_gb: float = Field(default=6.0, ge=0)
    """Memory of a trainer's GPU that no tensor gets, in 10⁹ bytes: CUDA, NCCL, fragments."""

    engine_gb: float = Field(default=4.0, ge=0)
    """Memory of a server's GPU beside weights, keys and values, in 10⁹ bytes: activations, CUDA graphs."""

    kept_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the sampled rollouts that train; the others have no advantage, fail or are stale."""


class PlanConfig(RLConfig):
    """`pellucid plan`: what a run takes on GPUs that need not be here, and how long its steps take."""

    orchestrator: VerifyOrchestratorConfig = VerifyOrchestratorConfig()
    """Its sizes give the workload: `batch_size`, `rollouts_per_example`, `sampling.max_tokens`."""

    gpu: str = "h100"
    """Kind of GPU: a100-40, a100-80, h100, h100-pcie, h200, b200, l40s, l4 or rtx4090. Any other kind needs
    the four figures below."""

    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of a GPU in 10⁹ bytes; default: that of `gpu`."""

    gpu_tflops: float | None = Field(default=None, gt=0)
    """Dense bfloat16 operations per second of a GPU, in 10¹²; default: those of `gpu`."""

    gpu_memory_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth of a GPU's memory in 10⁹ bytes per second; default: that of `gpu`."""

    gpu_link_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between GPUs of a machine per direction, in 10⁹ bytes per second; default: that of `gpu`."""

    prompt_tokens: int = Field(default=512, ge=1)
    """Mean length of a prompt."""

    completion_tokens: int | None = Field(default=None, ge=1)
    """Mean length of a completion; default: half of `orchestrator.sampling.max_tokens`."""

    trace: bool = True
    """Take the trainer's memory from torch's own tracker, in a step without data, where that works; otherwise
    from formulas."""

    assume: AssumeConfig = AssumeConfig()
    """Assumptions about machines."""

    as_json: bool = Field(default=False, alias="json")
    """Print one JSON object instead of tables."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        figures = ("gpu_memory_gb", "gpu_tflops", "gpu_memory_gb_s", "gpu_link_gb_s")
        missing = [name for name in figures if getattr(self, name) is None]
        if self.gpu not in KNOWN_GPUS and missing:
            yield (
                f"gpu = {self.gpu!r} is not known; choose one of {', '.join(KNOWN_GPUS)}, or give "
                f"{', '.join(missing)}, too"
            )

    @property
    def gpu_model(self) -> GpuModel:
        """The GPU with its figures."""
        known = KNOWN_GPUS.get(self.gpu) or GpuModel(self.gpu, 0, 0, 0, 0)
        return GpuModel(
            known.device_name,
            self.gpu_memory_gb or known.memory_gb,
            self.gpu_tflops or known.tflops,
            self.gpu_memory_gb_s or known.memory_gb_s,
            self.gpu_link_gb_s or known.link_gb_s,
        )


class DoctorSettings(Section):
    """`pellucid doctor`: one file about this machine to send along with a question; nothing private."""

    model_config = SettingsConfigDict(cli_shortcuts={"output": "o"})

    output: Path = Path("pellucid-doctor.json")
    """File to write; an earlier one is replaced."""

    verify: bool = True
    """Run `pellucid verify` on its own tiny model, too."""

    timeout_s: float = Field(default=75.0, gt=0)
    """Seconds after which `verify` is ended and recorded as too slow; the other parts take about 20."""


class RecordedConfig(Section):
    by: str = ""
    """Name and version of that trainer."""

    no_loss: str = ""
    """Reason why there is no `[trainer.loss]`: the part of that trainer's loss that no built-in loss has."""

    no_sum: str = ""
    """Reason why the loss that it optimised is not the mean of its tokens' losses."""
