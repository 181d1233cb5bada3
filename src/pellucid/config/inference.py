"""`[inference]`: the server that samples rollouts."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pellucid.config.base import Section
from pellucid.errors import ConfigError

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
    """Memory for keys and values; default: 1 GiB on a CPU; on a GPU, the memory that `gpu_memory_utilization`
    leaves."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM may take. The trainer needs GPUs of its own, or most of the rest."""

    args: dict[str, Any] = Field(default={})
    """Further arguments of vLLM's engine by its own names (`{max_num_batched_tokens = 4096}`). Those that
    follow from other settings are refused."""


class InferenceConfig(Section):
    backend: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: pellucid's own engine, the same forward as the trainer's. `vllm`: vLLM behind the same
    server, for large models; it has to be installed where the server runs (`make vllm`, `python`)."""

    python: Path | None = None
    """Interpreter that runs the server in `pellucid rl`, such as that of an environment with vLLM
    (`.venv-vllm/bin/python`); default: the one that runs `pellucid rl`."""

    vllm: VllmConfig = VllmConfig()
    """Settings of `backend = "vllm"`."""

    host: str = "127.0.0.1"
    """Address the server binds to and the orchestrator calls."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server; 0 lets `pellucid rl` pick a free one. The parts on their own need a number."""

    key_file: Path | None = None
    """File with the key that the server demands and the orchestrator shows: for all that changes the server
    or a run's books, and beyond loopback for every request but `/health`. Default: `key` in `output_dir`,
    which the run makes."""

    servers: tuple[ServerAddress, ...] = ()
    """Addresses of several servers (`http://host:port`) for the orchestrator; default: the one at `host` and
    `port`. Each is a `pellucid inference` with a `replica` of its own."""

    replica: int = Field(default=0, ge=0)
    """Number of this server among several of a run; each keeps metrics and ledger of its own."""

    role: Literal["policy", "teacher"] = "policy"
    """`teacher`: the server of `orchestrator.teacher.model`, which `pellucid rl` starts; its metrics and
    ledger are `inference_teacher.jsonl`."""

    max_concurrent: int = Field(default=64, ge=1)
    """Sequences decoded together (slots of the KV cache); further requests wait in line."""

    max_queued: int = Field(default=4096, ge=1)
    """Requests that may wait for a slot; beyond that the server answers 503."""

    max_model_len: int = Field(default=2048, ge=2)
    """Longest prompt + completion in tokens. Filled by `seq_len`."""

    record_experts: bool | None = None
    """Answer `/inference/v1/generate` with the experts that each token was sent to; default: in `rl`, if
    `trainer.enable_router_replay` needs them. Set it for a server that you start on
    its own. For models with experts."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; default: all cores that the process may use (affinity, CPU limit of its
    container) alone, half of them in `rl`."""

    def problems(self) -> Iterator[str]:
        if self.backend == "embedded" and self.vllm != VllmConfig():
            yield (
                'inference.vllm is for inference.backend = "vllm", and the backend is "embedded"; leave it '
                "out or set the backend"
            )
        if self.backend == "vllm" and self.record_experts:
            yield (
                'inference.record_experts = true with inference.backend = "vllm": only the embedded engine '
                "records them; leave one of them out"
            )

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
