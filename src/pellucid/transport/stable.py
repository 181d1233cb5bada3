"""Folders that appear whole: written beside, renamed into place, marked `STABLE`.

A reader trusts a `step_N` folder only once it holds `STABLE`, so that a killed writer leaves nothing
that anybody misreads. What is published as durable is trusted after a power failure, too: its content is on
the disk before `STABLE` is. Of the rest, readers compare checksums.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pellucid.data.files import step_folders, sync, sync_tree, writing

MARKER = "STABLE"


def publish_folder(target: Path, write: Callable[[Path], None], *, durable: bool = False) -> None:
    """Makes `target` with what `write` puts into it, replacing an earlier one."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with writing(target):
            partial.mkdir(parents=True)
            write(partial)
            if durable:
                sync_tree(partial)
            (partial / MARKER).touch()
            if durable:
                sync(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            if durable:
                sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def retract_folder(folder: Path) -> None:
    """Deletes it, the marker first: killed in between, it is not trusted any more.

    Of a link it deletes the link alone: what it leads to may be anybody's.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def retract_steps(parent: Path, start: int) -> None:
    """Deletes every `step_N` below `parent` from N = `start` on, finished or not."""
    for step, folder in step_folders(parent).items():
        if step >= start:
            retract_folder(folder)


def is_stable(folder: Path) -> bool:
    return (folder / MARKER).exists()


def stable_steps(parent: Path) -> list[int]:
    """Returns the N of every finished `step_N` below `parent`, ascending."""
    return sorted(step for step, folder in step_folders(parent).items() if is_stable(folder))
