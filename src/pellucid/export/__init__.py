"""Token exports: what the loss did with every token, one record per sequence."""

from pellucid.export.reader import read_records
from pellucid.export.schema import FIELDS, SCHEMA_VERSION, Field
from pellucid.export.writer import TokenExporter

__all__ = ["FIELDS", "SCHEMA_VERSION", "Field", "TokenExporter", "read_records"]
