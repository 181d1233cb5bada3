"""Settings of the commands that start no run here, or read a finished one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from pellucid.config.base import Section
from pellucid.config.commands import RLConfig


class ViewSettings(Section):
    """`pellucid view`: see every token of a run in the browser."""

    model_config = SettingsConfigDict(cli_shortcuts={"output": "o"})

    path: CliPositionalArg[Path | None] = None
    """Run folder, folder of runs, folder of token exports, step folder, or one export file. Without it, the
    runs in the current folder and in `outputs` are listed."""

    output: Path | None = None
    """Write one self-contained HTML page here instead of serving the viewer."""

    terminal: bool = False
    """Show records, outliers and the ledger in the terminal."""

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

    processes_per_node: int = Field(default=1, ge=1)
    """Processes of the trainer on each of them; one per GPU."""

    inference_nodes: int = Field(default=1, ge=1)
    """Machines with an inference server each."""

    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs to ask for on every machine."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the inference servers."""

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
    """Kubernetes: the claim of a volume that all pods can write to. It is mounted at `/pellucid`, where all
    relative paths begin: model, data and run folder."""


class RenderConfig(RLConfig):
    """`pellucid render`: write the files that start a run on many machines; nothing is started."""

    cluster: ClusterConfig
    """The machines."""

    files: Path = Path("cluster")
    """Folder that the files are written to; earlier ones of the same name are replaced."""


class RecordedConfig(Section):
    by: str = ""
    """Name and version of that trainer."""

    no_loss: str = ""
    """Reason why there is no `[trainer.loss]`: the part of that trainer's loss that no built-in loss has."""

    no_sum: str = ""
    """Reason why the loss that it optimised is not the mean of its tokens' losses."""
