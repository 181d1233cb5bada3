"""`[monitors]`: where metrics go besides the JSONL files that every run writes."""

from pydantic import Field, model_validator

from pellucid.config.base import Section


class WandbConfig(Section):
    """Weights & Biases: one of its runs per process, all in one group. The configuration is uploaded too."""

    project: str = Field(default="pellucid", min_length=1)
    """Project that the run appears in."""

    name: str | None = None
    """Name of the run there, with the process after a slash; default: the name of this run."""

    entity: str | None = None
    """User or team that owns the project; default: that of the account logged in."""

    group: str | None = None
    """Group that holds the run's processes; default: the name of this run."""

    offline: bool = False
    """Write below `metrics/wandb` only, without network or account; `wandb sync` uploads it later."""


class TensorboardConfig(Section):
    """TensorBoard: event files in `tensorboard/PROCESS` below the run folder. It has no keys."""


class PrometheusConfig(Section):
    """Prometheus: each process serves `/metrics` and `/health` on a port of its own."""

    host: str = "127.0.0.1"
    """Address to bind to; 0.0.0.0 lets other machines read, without a password."""

    trainer_port: int = Field(default=9100, ge=1, le=65535)
    """Port of the trainer. 9100 is also the default of Prometheus' node exporter: change it beside one."""

    orchestrator_port: int = Field(default=9101, ge=1, le=65535)
    """Port of the orchestrator."""

    inference_port: int = Field(default=9102, ge=1, le=65535)
    """Port of the inference server's metrics; not the one that it serves completions on."""

    eval_port: int = Field(default=9103, ge=1, le=65535)
    """Port of the latest evaluation; the orchestrator serves it if there is an `[[orchestrator.eval]]`."""

    @model_validator(mode="after")
    def _ports_differ(self) -> "PrometheusConfig":
        owners: dict[int, str] = {}
        for name in ("trainer_port", "orchestrator_port", "inference_port", "eval_port"):
            port = getattr(self, name)
            if port in owners:
                raise ValueError(
                    f"monitors.prometheus.{name} = {port} is also monitors.prometheus.{owners[port]}; "
                    "each process needs a port of its own"
                )
            owners[port] = name
        return self


class MonitorsConfig(Section):
    wandb: WandbConfig | None = None
    """Present: metrics also go to Weights & Biases; needs `pip install 'pellucid[wandb]'`."""

    tensorboard: TensorboardConfig | None = None
    """Present: metrics are also written for TensorBoard; needs `pip install 'pellucid[tensorboard]'`."""

    prometheus: PrometheusConfig | None = None
    """Present: the latest step of each process can be scraped over HTTP."""
