"""`[transport]`: how batches travel from the orchestrator to the trainer."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.config.base import Section
from pellucid.guard import is_loopback


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

    @model_validator(mode="after")
    def _keeps_strangers_out(self) -> "ZmqTransportConfig":
        if self.keys is None and not is_loopback(self.host):
            raise ValueError(
                f"transport.host = {self.host} is reached from other machines, and transport.keys is not "
                "set; make keys with `pellucid keys DIR`, or use 127.0.0.1"
            )
        return self


# The default comes last: `--help` describes `type` as the last variant does.
TransportConfig = Annotated[ZmqTransportConfig | FilesystemTransportConfig, Field(discriminator="type")]
