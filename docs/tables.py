"""Writes the tables of columns and fields into their pages, from the schema: `python docs/tables.py`."""

import re
from pathlib import Path

import numpy as np

from pellucid.data.schema import COLUMNS, FIELDS, Axis, Column
from pellucid.transport.sections import Form, declared

DOCS = Path(__file__).parent
_OWNERS = {Axis.TOKENS: "token", Axis.SAMPLED: "sampled token", Axis.SEQUENCES: "sequence"}


def fields_table() -> list[tuple[str, ...]]:
    """Returns the rows for the fields of an export; a dagger marks those that follow from others."""
    rows = [
        (f"`{each.name}`", ("token" if each.per_token else "sequence") + " †" * each.derivable, each.meaning)
        for each in FIELDS
    ]
    return [("field", "one per", "meaning"), *rows]


def columns_table() -> list[tuple[str, ...]]:
    """Returns the rows for the columns of a batch, in the order of their sections."""
    rows = [
        (
            f"`{column.name}`",
            " × ".join((_OWNERS[column.stored], *column.dims)),
            _type_of(column),
            " or ".join(f"`{form.value}`" for form in Form if form in declared(column.name)[0]),
        )
        for column in COLUMNS.values()
    ]
    return [("column", "one per", "type", "form"), *rows]


def _type_of(column: Column) -> str:
    if not column.is_number:
        return {str: "text", bytes: "bytes"}.get(column.dtype, "[role, start, stop], …")
    kinds = [np.dtype(kind).name for kind in (column.narrow, column.dtype) if kind is not None]
    return " or ".join(kinds)


PAGES = {"read-an-export.md": fields_table, "wire-format.md": columns_table}


def page_with_table(name: str) -> str:
    """Returns the text of a page with its table as the schema has it."""
    head, *rows = PAGES[name]()
    title = f"| {' | '.join(head)} |"
    lines = [title, "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    table = "\n".join(lines) + "\n"
    return re.sub(rf"^{re.escape(title)}\n(\|.*\n)+", lambda _: table, (DOCS / name).read_text(), flags=re.M)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page_with_table(name))
