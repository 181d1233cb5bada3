"""The folder of a run: made, or refused, before the first process starts.

Only the command that owns the folder (`rl`, `sft`) prepares it. A folder is never shared by two runs,
and cleaning one deletes by name what a run writes: a file of anybody else survives.
"""

import shutil
import tempfile
from pathlib import Path

from pellucid.config import RunConfig
from pellucid.errors import ConfigError

WRITTEN_BY_A_RUN = (
    "configs",
    "logs",
    "metrics",
    "ledger",
    "rollouts",
    "batches",
    "weights",
    "checkpoints",
    "token_exports",
    "tensorboard",
    "model",
    "page.html",
)


def prepare(config: RunConfig) -> None:
    """An `output_dir` that exists, can be written to and holds no run."""
    folder = config.output_dir
    _make_writable(folder)
    used = [folder / name for name in WRITTEN_BY_A_RUN if _exists(folder / name)]
    if used and not config.clean_output_dir:
        names = ", ".join(path.name for path in used)
        raise ConfigError(
            f"output_dir = {folder} already holds a run ({names}); "
            "choose another folder, or set clean_output_dir to delete what that run wrote"
        )
    _keep_model(config, used)
    for path in used:
        _delete(path)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"output_dir = {folder} is not a folder; choose another path") from error
    except OSError as error:
        raise ConfigError(
            f"output_dir = {folder} cannot be written to ({error.strerror}); choose a folder that can"
        ) from error


def _keep_model(config: RunConfig, doomed: list[Path]) -> None:
    """The model to train may be what an earlier run left in this very folder."""
    model = Path(config.model.name).resolve()
    for path in doomed:
        if model.is_relative_to(path.resolve()):
            raise ConfigError(
                f"clean_output_dir would delete model.name = {config.model.name}, the model to train; "
                "choose another output_dir"
            )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
