"""One export file, read as little as possible: by rows, and by columns."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pellucid.export.batch import ColumnBatch

Key = tuple[int, ...]
Report = Callable[[str], object]


class RecordSource(Protocol):
    """Rows are records, numbered as they lie in the file; one that is torn or damaged is not among them."""

    path: Path
    keys: list[Key]
    """(step, rank, index) of each row."""

    def names(self, row: int) -> Sequence[str]:
        """The columns that a record has."""

    def batch(self, rows: Sequence[int], names: Sequence[str]) -> ColumnBatch:
        """Returns these columns of these rows; a column that one of the rows lacks is left out."""
