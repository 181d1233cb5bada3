"""Folders that appear whole: written beside, renamed into place, marked `STABLE`.

A reader trusts a `step_N` folder only once it holds `STABLE`, so that a killed writer leaves nothing
that anybody misreads.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

MARKER = "STABLE"


def publish_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Makes `target` with what `write` puts into it, replacing an earlier one."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
        (partial / MARKER).touch()
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_stable(folder: Path) -> bool:
    return (folder / MARKER).exists()


def stable_steps(parent: Path) -> list[int]:
    """The N of every finished `step_N` below `parent`, ascending."""
    found = []
    for folder in parent.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdigit() and is_stable(folder):
            found.append(int(number))
    return sorted(found)
