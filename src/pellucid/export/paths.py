"""Where a rank's export lies.

token_exports/step_7/rank_0.jsonl     by default: a file per step and rank
tokens.rank_0.jsonl                   `path = "tokens.jsonl"`: one file for all steps
tokens.step_7.rank_0.parquet          `path = "tokens.parquet"`: Parquet files cannot be appended to
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = "token_exports"
MARKER = "STABLE"


@dataclass(frozen=True, slots=True)
class ExportPaths:
    run_dir: Path
    suffix: str
    """`.jsonl` or `.parquet`."""

    explicit: Path | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the steps of a rank share one file."""
        return self.explicit is not None and self.suffix == ".jsonl"

    def file(self, step: int, rank: int) -> Path:
        if self.explicit is None:
            return self.folder(step) / f"rank_{rank}{self.suffix}"
        suffix = self.explicit.suffix or self.suffix
        which = f"rank_{rank}" if self.is_shared else f"step_{step}.rank_{rank}"
        return self.explicit.with_name(f"{self.explicit.stem}.{which}{suffix}")

    def folder(self, step: int) -> Path:
        return self.run_dir / FOLDER / f"step_{step}"

    def marker(self, step: int) -> Path | None:
        return None if self.explicit is not None else self.folder(step) / MARKER

    def summary(self, step: int, rank: int) -> Path | None:
        return None if self.explicit is not None else self.folder(step) / f"summary.rank_{rank}.json"

    def known(self) -> Iterator[tuple[int | None, int, Path]]:
        """(step, rank, path) of every file that is there, summaries too; no step where they share one."""
        if self.explicit is None:
            for path in (self.run_dir / FOLDER).glob("step_*/*rank_*"):
                step = path.parent.name.removeprefix("step_")
                found = re.fullmatch(r"(?:summary\.)?rank_(\d+)\.(?:jsonl|parquet|json)", path.name)
                if found and step.isdecimal():
                    yield int(step), int(found[1]), path
            return
        stem, suffix = re.escape(self.explicit.stem), re.escape(self.explicit.suffix or self.suffix)
        for path in self.explicit.parent.glob("*rank_*"):
            if found := re.fullmatch(rf"{stem}\.(?:step_(\d+)\.)?rank_(\d+){suffix}", path.name):
                yield (int(found[1]) if found[1] else None), int(found[2]), path


def partial_of(path: Path) -> Path:
    """The name of a file that is being written: hidden, so that no reader takes it for a whole one."""
    return path.with_name(f".{path.name}.partial")
