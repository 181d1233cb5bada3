"""Records as Arrow, pandas, Polars and DuckDB have them; each package is imported when it is asked for.

DuckDB reads whole Parquet files itself, so that a query over a long run takes the columns and row groups that
it needs. Any other selection goes through Arrow, in memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pellucid.errors import DataError
from pellucid.export.arrow import to_arrow
from pellucid.export.optional import require
from pellucid.export.parquet_source import ParquetSource
from pellucid.export.schema import BY_NAME, FIELDS

if TYPE_CHECKING:
    from pellucid.export.record import Records


def arrow(records: "Records", columns: Sequence[str] | None = None) -> Any:
    require("pyarrow", "arrow()")
    for name in columns or ():
        if name not in BY_NAME:
            raise DataError(f"arrow(columns=…): {name!r} is not a field; see docs/read-an-export.md")
    chosen = records.fields() if columns is None else [BY_NAME[name] for name in columns]
    batch = records.batch([field.name for field in chosen])
    return to_arrow(batch, [field for field in chosen if field.name in batch.columns])


def pandas(records: "Records", columns: Sequence[str] | None = None) -> Any:
    require("pandas", "pandas()")
    return arrow(records, columns).to_pandas()


def polars(records: "Records", columns: Sequence[str] | None = None) -> Any:
    return require("polars", "polars()").from_arrow(arrow(records, columns))


def duckdb(records: "Records") -> Any:
    connection = require("duckdb", "duckdb()").connect()
    if (files := whole_parquet_files(records)) is not None:
        names = ", ".join(f"'{file.replace(chr(39), chr(39) * 2)}'" for file in files)
        connection.execute(
            f"CREATE VIEW sequences AS SELECT * FROM read_parquet([{names}], union_by_name = true)"
        )
        stored = {row[0] for row in connection.execute("DESCRIBE sequences").fetchall()}
    else:
        table = arrow(records)
        connection.register("sequences", table)
        stored = set(table.schema.names)
    known = [field for field in FIELDS if field.name in stored]
    sequence = [field.name for field in known if not field.per_token]
    token = [f"unnest({field.name}) AS {field.name}" for field in known if field.per_token]
    place = "unnest(range(len(token_ids))) AS token"
    connection.execute(f"CREATE VIEW tokens AS SELECT {', '.join([*sequence, place, *token])} FROM sequences")
    return connection


def whole_parquet_files(records: "Records") -> list[str] | None:
    """Their paths, if the records are all there is in Parquet files that leave out nothing."""
    files = []
    for source, rows in records.files():
        if (
            not isinstance(source, ParquetSource)
            or source.num_damaged
            or rows != list(range(len(source.keys)))
        ):
            return None
        if any(field.derivable and field.name not in source.columns for field in FIELDS):
            return None
        files.append(str(source.path))
    return files
