"""`pellucid render`: files with which a scheduler starts a run on many machines."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pellucid.config.base import Section
from pellucid.config.commands import RLConfig


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
