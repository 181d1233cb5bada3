"""Connects to the servers of a run, and states what each has to be.

A run has an identity, `NAME-1f0c9a3e`, made when it first starts and kept in its folder. It travels with
every weight update, so that a server can tell whose weights it serves.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.config.inference import base_url
from pellucid.config.orchestrator import TeacherConfig
from pellucid.data.files import read_whole, replace_file
from pellucid.data.model_folder import model_fingerprint
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import DataError
from pellucid.guard import read_key, server_key
from pellucid.inference.pool import ServerPool
from pellucid.inference.servers import Expected
from pellucid.orchestrator.session import group_of_request
from pellucid.transport import stable_steps

_MAX_IDENTITY_BYTES = 4096

Claims = dict[str, str]
"""Pool that uses a server, by server id: a server serves the policy or a teacher, never both."""


def connect_policy(
    config: OrchestratorRunConfig, tokenizer: Any, claims: Claims, process: str = ""
) -> ServerPool:
    """Makes the pool of policy servers; needs a running event loop. `process`: our name in the ledger."""
    expected = Expected(
        role="policy server",
        model=config.model.name,
        vocabulary=fingerprint(tokenizer),
        max_model_len=config.inference.max_model_len,
        run=run_identity(config.output_dir, config.run_name),
        model_fingerprint=model_fingerprint(config.model.name),
        has_weights=bool(stable_steps(config.output_dir / "weights")),
    )
    key = server_key(config.output_dir, config.inference.key_file)
    return _connect(config, config.inference.urls, expected, claims, key, process)


def connect_teacher(
    config: OrchestratorRunConfig, tokenizer: Any, claims: Claims, process: str = ""
) -> ServerPool | None:
    teacher = config.orchestrator.teacher
    if teacher is None:
        return None
    urls = teacher.servers or (base_url(config.inference.host, teacher.port),)
    expected = expected_of_teacher(config, teacher, tokenizer)
    return _connect(config, urls, expected, claims, _teacher_key(config, teacher), process)


def expected_of_teacher(config: OrchestratorRunConfig, teacher: TeacherConfig, tokenizer: Any) -> Expected:
    return Expected(
        "teacher",
        config.model.name,
        fingerprint(tokenizer),
        config.inference.max_model_len,
        access="all" if teacher.mode == "sft" else "sampling",
        key_setting="orchestrator.teacher.key_file",
    )


def _teacher_key(config: OrchestratorRunConfig, teacher: TeacherConfig) -> str | None:
    """Returns the run's key if its launcher serves the teacher; else the key of `orchestrator.teacher`, if
    any.

    The run's key is never sent to somebody else's server.
    """
    if not teacher.servers:
        return server_key(config.output_dir, config.inference.key_file)
    return None if teacher.key_file is None else read_key(teacher.key_file, "orchestrator.teacher.key_file")


def _connect(
    config: OrchestratorRunConfig,
    urls: Sequence[str],
    expected: Expected,
    claims: Claims,
    key: str | None,
    process: str,
) -> ServerPool:
    from pellucid.inference.http import HttpInferenceClient

    return ServerPool(
        {url: HttpInferenceClient(url, key, process) for url in urls},
        group_of_request,
        expected,
        claims=claims,
        hang_s=config.orchestrator.server_timeout_s,
    )


def run_identity(run_dir: Path, name: str) -> str:
    """Returns the identity of the run in this folder; makes and stores one if there is none."""
    path = run_dir / "checkpoints" / "identity"
    if not path.exists():
        replace_file(path, f"{name}-{uuid.uuid4().hex[:8]}".encode())
    identity = read_whole(path, _MAX_IDENTITY_BYTES).decode(errors="replace")
    if not identity or not identity.isprintable():
        raise DataError(f"{path} is damaged: it holds no name; delete it, and restart the run's servers")
    return identity
