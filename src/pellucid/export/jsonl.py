"""Records as JSON lines: one object per sequence, arrays aligned per token, what is not finite as null."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import orjson

from pellucid.export.batch import ColumnBatch
from pellucid.export.schema import Field

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def encode_lines(batch: ColumnBatch, fields: Sequence[Field]) -> Iterator[bytes]:
    """Yields one line per sequence; the digits of a float32 are the fewest that give it back."""
    bounds = batch.offsets.tolist()
    for row, (start, stop) in enumerate(pairwise(bounds)):
        record: dict[str, Any] = {
            field.name: batch.columns[field.name][start:stop]
            if field.per_token
            else batch.columns[field.name][row]
            for field in fields
        }
        yield orjson.dumps(record, option=_OPTIONS)
