"""Summaries of exports that have none beside them, kept between two looks at a run.

They lie in a cache folder and not beside the export: looking at a folder changes nothing in it. A summary
belongs to files of a given size and time of change; when one of them changes, it is made anew.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import orjson

from pellucid.data.files import read_whole, replace_file
from pellucid.errors import DataError
from pellucid.export.summary import VERSION, StepSummary

MAX_SUMMARIES = 4096
"""Summaries that stay; the oldest are deleted. One takes about 65 kB per environment."""


class SummaryCache:
    @cached_property
    def _folder(self) -> Path | None:
        """Where they lie; None where there is no such place. Deletes old ones when it is first asked for."""
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(home) / "pellucid" / "summaries"
            folder.mkdir(parents=True, exist_ok=True)
            aged = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in aged[:-MAX_SUMMARIES]:
                path.unlink(missing_ok=True)
        except (OSError, RuntimeError):  # a disk that is full or read-only, a user without a home
            return None
        return folder

    def get(self, files: Sequence[Path]) -> StepSummary | None:
        """Returns the summary of these files; None where there is none, or it cannot be read."""
        with suppress(OSError, DataError):
            if self._folder is not None and (path := self._folder / _name(files)).exists():
                return StepSummary.from_json(read_whole(path))
        return None

    def put(self, files: Sequence[Path], summary: StepSummary) -> None:
        with suppress(OSError):
            if self._folder is not None:
                replace_file(self._folder / _name(files), orjson.dumps(summary.as_dict()))


def _name(files: Sequence[Path]) -> str:
    stats = [(str(path.resolve()), path.stat()) for path in files]
    identity = [(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats]
    return f"{hashlib.sha256(repr((VERSION, identity)).encode()).hexdigest()[:32]}.json"
