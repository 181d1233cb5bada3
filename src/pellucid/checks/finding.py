"""A finding of a check: a number, how large it may be, and what it means if it is larger."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    what: str
    """Quantity that was measured."""

    value: float
    limit: float
    meaning: str = ""
    """If it fails: what that says, and what to look at."""

    is_held: bool = True
    """Whether anything was measured; if not, `meaning` says why, and the finding decides nothing."""

    @classmethod
    def not_held(cls, check: str, what: str, why: str) -> "Finding":
        """Says that `what` was held to nothing, and what to do so that it is."""
        return cls(check, what, 0.0, 0.0, why, is_held=False)

    @property
    def passed(self) -> bool:
        return not self.is_held or self.value <= self.limit  # a NaN fails

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "what": self.what,
            "value": self.value if self.is_held else None,
            "limit": self.limit if self.is_held else None,
            "passed": self.passed if self.is_held else None,
            "meaning": "" if self.is_held and self.passed else self.meaning,
        }


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    table = Table(box=None, header_style="bold")
    table.add_column("check")
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("verdict")
    for finding in findings:
        verdict = Text("ok", "green") if finding.passed else Text("FAILED", "bold red")
        value, limit = f"{finding.value:.3g}", f"{finding.limit:.3g}"
        table.add_row(finding.check, finding.what, value, limit, verdict)
    failed = [Padding(f"{each.check}: {each.meaning}", (1, 0, 0, 0)) for each in findings if not each.passed]
    return Group(table, *failed)
