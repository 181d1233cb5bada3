"""`[model]`, `[inference]`, `[transport]`, `[monitors]`: sections that several processes of a run read."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pellucid.config.base import Section
from pellucid.errors import ConfigError
from pellucid.guard import is_loopback, server_key


class LoraConfig(Section):
    """Train a low-rank adapter beside the frozen weights: W x + (alpha / rank) · B A x."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B: a higher rank can learn more and makes a larger adapter."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are set to 0 in training. The server sets none to 0, so that dropout
    adds to the mismatch: leave it at 0 for rl."""

    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Linear layers of the decoder that get an adapter, by the end of their name: `q_proj`, `mlp.gate_proj`.
    Default: all of them, fused ones such as `qkv_proj` included, without routers. The head, the embedding and
    experts cannot be among them."""


class ModelConfig(Section):
    name: str
    """Hub name or local folder of a causal language model with its tokenizer."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the engine; `auto` is float32 on CPU and bfloat16 on GPU. The trainer keeps float32."""

    lora: LoraConfig | None = None
    """Present: the weights stay frozen, and the run trains and publishes a LoRA adapter."""


VLLM_REMEDY = (
    "`make vllm` makes an environment with it in .venv-vllm: set inference.python = "
    '".venv-vllm/bin/python" for `pellucid rl`, or start `.venv-vllm/bin/pellucid inference`'
)


def _check_address(value: str) -> str:
    scheme, _, rest = value.partition("://")
    if scheme not in ("http", "https") or not rest or "/" in rest:
        raise ValueError("is not the address of a server; write it as http://host:port")
    return value


def base_url(host: str, port: int) -> str:
    """Writes an address: `http://127.0.0.1:8000`, `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


ServerAddress = Annotated[str, AfterValidator(_check_address)]


class VllmConfig(Section):
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one copy of the model is spread over."""

    enforce_eager: bool | None = None
    """Compile nothing and capture no graphs: a quick start, slower decoding. Default: on a CPU only."""

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values; default: 1 GiB on a CPU, on a GPU what `gpu_memory_utilization` leaves."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM may take. The trainer needs GPUs of its own, or most of the rest."""

    args: dict[str, Any] = Field(default={})
    """Further arguments of vLLM's engine by its own names. Those that follow from other settings are
    refused."""


class InferenceConfig(Section):
    backend: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: pellucid's own engine, the same forward as the trainer's. `vllm`: vLLM behind the same
    server, for large models; it has to be installed where the server runs (`make vllm`, `python`)."""

    python: Path | None = None
    """Interpreter that runs the server in `pellucid rl`, such as `.venv-vllm/bin/python`; default: that of
    `pellucid rl`."""

    vllm: VllmConfig = VllmConfig()
    """Settings of `backend = "vllm"`."""

    host: str = "127.0.0.1"
    """Address the server binds to and the orchestrator calls."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server; 0 lets `pellucid rl` pick a free one. The parts on their own need a number."""

    key_file: Path | None = None
    """File with the server's key. Changing the server or a run's books needs it, and beyond loopback every
    request but `/health`. Default: `key` in `output_dir`, which the run makes."""

    servers: tuple[ServerAddress, ...] = ()
    """Addresses of several servers (`http://host:port`) for the orchestrator; default: the one at `host` and
    `port`. Each is a `pellucid inference` with a `replica` of its own."""

    replica: int = Field(default=0, ge=0)
    """Number of this server among several of a run; each keeps metrics and ledger of its own."""

    role: Literal["policy", "teacher"] = "policy"
    """`teacher`: the server of `orchestrator.teacher.model`; its metrics and ledger are
    `inference_teacher.jsonl`."""

    max_concurrent: int = Field(default=64, ge=1)
    """Sequences decoded together (slots of the KV cache); further requests wait in line."""

    max_queued: int = Field(default=4096, ge=1)
    """Requests that may wait for a slot; beyond that the server answers 503."""

    max_model_len: int = Field(default=2048, ge=2)
    """Longest prompt + completion in tokens. Filled by `seq_len`."""

    record_experts: bool | None = None
    """For models with experts: answer with the experts that each token was sent to. Default: in `rl`, if
    `trainer.enable_router_replay` needs them; set it for a server that you start on its own."""

    record_expert_weights: bool | None = None
    """Answer with the weights of these experts, too: 4 bytes per token, layer and expert. Includes
    `record_experts`. Default: in `rl`, if `trainer.replay_expert_weights` needs them. Not with vLLM."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; default: all cores that the process may use, half of them in `rl`."""

    def problems(self) -> Iterator[str]:
        if self.backend == "embedded" and self.vllm != VllmConfig():
            yield (
                'inference.vllm is for inference.backend = "vllm", and the backend is "embedded"; leave it '
                "out or set the backend"
            )

        if self.record_expert_weights and self.record_experts is False:
            yield (
                "inference.record_experts = false contradicts inference.record_expert_weights = true, which "
                "needs it; leave one out"
            )
        if self.record_expert_weights and self.backend == "vllm":
            yield (
                'inference.record_expert_weights = true with inference.backend = "vllm": vLLM tells which '
                "experts it sent tokens to, not how it weighed them; leave it out, or set the backend to "
                '"embedded"'
            )

    @property
    def gpus_per_server(self) -> int:
        """GPUs that one server needs where there are some."""
        return self.vllm.tensor_parallel_size if self.backend == "vllm" else 1

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the policy's servers, as the orchestrator calls them."""
        return self.servers or (base_url(self.host, self.port),)

    @property
    def label(self) -> str | int:
        """Suffix that tells this server's files from those of the run's other servers; "" for the first."""
        return "teacher" if self.role == "teacher" else self.replica or ""


def require_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # the latter: a folder of that name that happens to be there
        raise ConfigError(f'inference.backend = "vllm", and vLLM is not installed here; {VLLM_REMEDY}')


class BaseTransportConfig(Section):
    hwm: int = Field(default=8, ge=1)
    """Batches that may wait for the trainer before sending blocks (high-water mark). Has to exceed
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


class WeightsConfig(Section):
    """How policy versions get from the trainer to the inference servers."""

    transport: Literal["filesystem", "http", "object-store"] = "filesystem"
    """`filesystem`: folders below the run folder, which all parts see; `http`: the trainer listens, and the
    others read from it into folders of their own; `object-store`: by way of `store`."""

    store: str | None = None
    """URL of a folder in an object store, for this run alone: `s3://bucket/run`, `gs://…`, what fsspec knows
    with the packages that are installed. Credentials are where these look for them, never in the URL."""

    host: str = "127.0.0.1"
    """Address that the trainer listens on and the others read from. Every request needs the run's key."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the trainer for weights; 0 lets `pellucid rl` pick a free one. The parts on their own need a
    number."""

    key_file: Path | None = None
    """File with the run's key, from which the key for weights is derived; the one that `inference.key_file`
    names, for parts that share no run folder. Default: `inference.key_file`, else `key` in `output_dir`. A
    trainer on its own has no `[inference]`: set this for it."""

    cache_dir: Path | None = None
    """Folder on a disk of the machine's own below which each inference server keeps the two versions that it
    read last, in a folder of the run's. Default: `weights_cache` in `output_dir`, which may be shared."""

    deltas: bool = False
    """Offer each version also as its difference from the one before, where that is less than half of it; a
    server that has that one, or one before it, reads the differences alone. Pays on most networks, with
    weights published in bfloat16 and small learning rates. The trainer's setting; servers take what is
    offered."""

    def problems(self) -> Iterator[str]:
        is_served = self.port or self.host != "127.0.0.1"
        if self.transport == "filesystem" and (is_served or self.cache_dir or self.deltas):
            yield (
                'weights.host and port are for weights.transport = "http", cache_dir and deltas for "http" '
                'and "object-store", and the transport is "filesystem"; leave them out or set the transport'
            )
        if self.transport == "object-store" and is_served:
            yield 'weights.host and port are for weights.transport = "http", not for a store; leave them out'
        if (self.transport == "object-store") != (self.store is not None):
            yield (
                f'weights.transport = "{self.transport}" with weights.store = {self.store!r}: a store goes '
                'with "object-store"; set both or neither'
            )

    def cache(self, output_dir: Path, server: str) -> Path:
        """Returns the folder in which a server of the run in `output_dir` keeps what it read."""
        if self.cache_dir is None:
            return output_dir / "weights_cache" / server
        run = hashlib.sha256(bytes(output_dir.resolve())).hexdigest()[:8]
        return self.cache_dir / f"{output_dir.name}-{run}" / server

    @property
    def url(self) -> str:
        """Address of the trainer's offer; "" with a shared folder."""
        if self.store is not None:
            return self.store.rstrip("/")
        return base_url(self.host, self.port) if self.transport == "http" else ""

    def check_address(self) -> None:
        """Raises ConfigError if a part on its own is not told where the trainer listens for it."""
        if self.transport == "http" and self.port == 0:
            raise ConfigError(
                'weights.port = 0 with weights.transport = "http": parts on their own need a number; set '
                "weights.port, the same for all"
            )

    def run_key(self, output_dir: Path, servers_key: Path | None = None) -> str:
        """Returns the key of the run; `servers_key` is `inference.key_file`, where the part has it."""
        return server_key(output_dir, self.key_file or servers_key)


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
