"""Token exports: what the loss did with every token, one record per sequence.

export = pellucid.export.open("outputs/reverse_text/rl")
export.steps                                       (0, 1, 2, …)
export.step(3)[0]["mismatch_kl"]                   one record's column, as an array
export.step(3).column("mismatch_kl")               all of the step's, end to end
export.records(env_name="math").arrow()            a view for other tools
"""

from pellucid.data.schema import FIELDS
from pellucid.export.jsonl import SCHEMA_VERSION
from pellucid.export.reader import Export, Record, Records, open, read_records
from pellucid.export.writer import TokenExporter

__all__ = [
    "FIELDS",
    "SCHEMA_VERSION",
    "Export",
    "Record",
    "Records",
    "TokenExporter",
    "open",
    "read_records",
]
