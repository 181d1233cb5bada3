"""`[model]`, `[transport]`, `[monitors]`: sections that several processes of a run read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pellucid.config.base import Section
from pellucid.guard import is_loopback


class LoraConfig(Section):
    """Train a low-rank adapter beside the frozen weights: W x + (alpha / rank) · B A x."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B: a higher rank can learn more and makes a larger adapter."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are set to 0 in training. The server sets none to 0, so that dropout
    adds to the mismatch: leave it at 0 for rl."""

    targets: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter, by the last part of their name, in every decoder layer. The head
    and the embedding cannot be among them."""


class ModelConfig(Section):
    name: str
    """Hub name or local folder of a causal language model with its tokenizer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the engine; `auto` is float32 on CPU and bfloat16 on GPU. The trainer keeps float32."""

    lora: LoraConfig | None = None
    """Present: the weights stay frozen, and the run trains and publishes a LoRA adapter."""


class BaseTransportConfig(Section):
    hwm: int = Field(default=8, ge=1)
    """High-water mark: batches that may wait for the trainer before sending blocks. Has to exceed
    `max_async_level`."""

    compression: Literal["none", "zstd"] = "none"
    """`none`: columns as they are, decoded without copying; `zstd`: about 40 % smaller, for slow links."""

    max_batch_bytes: int = Field(default=1 << 30, ge=1024)
    """Largest batch that is sent or taken, before and after decompression."""


class FilesystemTransportConfig(BaseTransportConfig):
    type: Literal["filesystem"] = "filesystem"
    """`filesystem`: atomic folders below the run folder, which both sides see; `zmq`: over the network."""


class ZmqTransportConfig(BaseTransportConfig):
    type: Literal["zmq"]
    """Selects ZMQ."""

    host: str = "127.0.0.1"
    """Address that the trainer listens on and orchestrators connect to. Beyond loopback it needs `keys`."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the trainer; 0 lets `pellucid rl` pick a free one. The parts on their own need a number."""

    keys: Path | None = None
    """Folder with CurveZMQ keys, made by `pellucid keys DIR`: connections are authenticated and encrypted."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.keys is None and not is_loopback(self.host):
            yield (
                f"transport.host = {self.host} is reached from other machines, and transport.keys is not "
                "set; make keys with `pellucid keys DIR`, or use 127.0.0.1"
            )


# The default comes last: `--help` describes `type` as the last variant does.
TransportConfig = Annotated[ZmqTransportConfig | FilesystemTransportConfig, Field(discriminator="type")]


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

    def problems(self) -> Iterator[str]:
        owners: dict[int, str] = {}
        for name in ("trainer_port", "orchestrator_port", "inference_port", "eval_port"):
            port = getattr(self, name)
            if port in owners:
                yield (
                    f"monitors.prometheus.{name} = {port} is also monitors.prometheus.{owners[port]}; "
                    "each process needs a port of its own"
                )
            owners[port] = name


class MonitorsConfig(Section):
    wandb: WandbConfig | None = None
    """Present: metrics also go to Weights & Biases; needs `pip install 'pellucid[wandb]'`."""

    tensorboard: TensorboardConfig | None = None
    """Present: metrics are also written for TensorBoard; needs `pip install 'pellucid[tensorboard]'`."""

    prometheus: PrometheusConfig | None = None
    """Present: the latest step of each process can be scraped over HTTP."""
