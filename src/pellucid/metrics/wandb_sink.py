"""Weights & Biases. Two processes cannot share one of its runs, so each has its own, in one group.

Evaluations have one, too, in the orchestrator's process: their steps are policy versions, and the steps of
one of its runs never go back. The id of each is kept in the run folder, so that a run that is continued
there continues here.
"""

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from pellucid.config import RunConfig, WandbConfig
from pellucid.data.files import read_whole, replace_file
from pellucid.errors import ConfigError, DataError

FINISH_TIMEOUT_S = 60.0
"""wandb would wait for its upload for ever, and with it the end of the run; the rest stays on disk."""


_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_ID_BYTES = 4096


class WandbSink:
    def __init__(self, config: RunConfig, settings: WandbConfig, process: str) -> None:
        folder = config.output_dir / "metrics"
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=f"{settings.name or config.run_name}/{process}",
                group=settings.group or config.run_name,
                job_type=process,
                id=stable_id(folder / "wandb" / f"{process}.id"),
                resume="allow",
                dir=folder,
                mode="offline" if settings.offline else None,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    reinit="create_new",
                    finish_timeout=FINISH_TIMEOUT_S,
                    finish_timeout_raises=True,
                ),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"monitors.wandb cannot start a run in project {settings.project!r} ({error}); "
                "run `wandb login`, check the network, or set monitors.wandb.offline"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def stable_id(path: Path) -> str:
    """Returns the id in `path`; a new one is written there first."""
    if not path.exists():
        replace_file(path, secrets.token_hex(8).encode())
    found = read_whole(path, _MAX_ID_BYTES).decode(errors="replace")
    if not _ID.fullmatch(found):
        raise DataError(f"{path} holds no id of a wandb run; delete it, and wandb shows a new run")
    return found
