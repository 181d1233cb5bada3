"""The servers of a run: where they are, and what they have to be.

A run has an identity, `NAME-1f0c9a3e`, made when it first starts and kept in its folder. It travels with
every weight update, so that a server can tell whose weights it serves.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.data.files import replace_file
from pellucid.data.model_folder import model_fingerprint
from pellucid.data.vocabulary import fingerprint
from pellucid.inference.examine import Expected
from pellucid.inference.pool import ServerPool
from pellucid.orchestrator.session import group_of_request
from pellucid.transport import stable_steps


def connect_policy(config: OrchestratorRunConfig, tokenizer: Any) -> ServerPool:
    """Must be called inside a running event loop."""
    urls = config.inference.servers or (base_url(config.inference.host, config.inference.port),)
    expected = Expected(
        role="policy server",
        model=config.model.name,
        vocabulary=fingerprint(tokenizer),
        max_model_len=config.inference.max_model_len,
        run=run_identity(config.output_dir, config.run_name),
        model_fingerprint=model_fingerprint(config.model.name),
        has_weights=bool(stable_steps(config.output_dir / "weights")),
    )
    return _connect(urls, expected)


def connect_teacher(config: OrchestratorRunConfig, tokenizer: Any) -> ServerPool | None:
    teacher = config.orchestrator.teacher
    if teacher is None:
        return None
    urls = teacher.servers or (base_url(config.inference.host, teacher.port),)
    return _connect(urls, expected_of_teacher(config, tokenizer))


def expected_of_teacher(config: OrchestratorRunConfig, tokenizer: Any) -> Expected:
    return Expected("teacher", config.model.name, fingerprint(tokenizer), config.inference.max_model_len)


def _connect(urls: Sequence[str], expected: Expected) -> ServerPool:
    from pellucid.inference.http import HttpInferenceClient

    return ServerPool({url: HttpInferenceClient(url) for url in urls}, group_of_request, expected)


def run_identity(run_dir: Path, name: str) -> str:
    """The identity of the run in this folder; a folder without one gets it."""
    path = run_dir / "checkpoints" / "identity"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{name}-{uuid.uuid4().hex[:8]}".encode())
    return path.read_text(encoding="utf-8")


def base_url(host: str, port: int) -> str:
    """`http://127.0.0.1:8000`, `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
