"""Parquet files whose footers lie: of rows and values, by one, by billions, or below zero."""

import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pellucid.errors import DataError
from pellucid.export import parquet
from pellucid.export.parquet import MAX_VALUES, ParquetSource

NUM_ROWS = 77
IN_THE_FILE, IN_A_COLUMN, IN_THE_ROW_GROUP = 0, 1, -1
EVERYWHERE = None


def written(path: Path, *, with_keys: bool) -> Path:
    """77 sequences of 3 tokens; `with_keys`: with the columns that pellucid finds records by."""
    columns: dict[str, list[object]] = {"token_ids": [[1, 2, 3]] * NUM_ROWS}
    if with_keys:
        columns = {"step": [0] * NUM_ROWS, "rank": [0] * NUM_ROWS, **columns}
    pq.write_table(pa.table(columns), path, use_dictionary=False, compression="none", write_statistics=False)
    return path


def number(value: int) -> bytes:
    """A 64-bit field of Thrift's compact protocol that follows its predecessor."""
    left = value << 1 if value >= 0 else ((-value) << 1) - 1
    found = b"\x16"
    while left > 127:
        found += bytes([left & 127 | 128])
        left >>= 7
    return found + bytes([left])


def lie(path: Path, place: int | None, claim: int) -> None:
    """Every count of 77 in the footer is one of rows; the one at `place`, or each, is replaced."""
    data = path.read_bytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    parts = data[-8 - size : -8].split(number(NUM_ROWS))
    truths = [number(NUM_ROWS)] * (len(parts) - 1)
    for index in range(len(truths)) if place is EVERYWHERE else [place]:
        truths[index] = number(claim)
    footer = b"".join(part + truth for part, truth in zip(parts, [*truths, b""], strict=True))
    path.write_bytes(data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1")


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("claim", [-5, 0, 76, 78, 200, MAX_VALUES, MAX_VALUES + 1, 1 << 40])
@pytest.mark.parametrize("place", [IN_THE_FILE, IN_A_COLUMN, IN_THE_ROW_GROUP, EVERYWHERE])
def test_a_footer_that_lies_is_an_error_or_fewer_rows(tmp_path: Path, place, claim, with_keys) -> None:
    """Billions of rows that are not there filled the memory; one too many was a traceback."""
    path = written(tmp_path / "rank_0.parquet", with_keys=with_keys)
    lie(path, place, claim)
    if place is EVERYWHERE and 0 <= claim < NUM_ROWS:  # then it is true of the rows before
        source = ParquetSource(path, pytest.fail)
        assert len(source.keys) == claim
        assert source.batch(range(claim), ["token_ids"]).lengths.tolist() == [3] * claim
        return
    with pytest.raises(DataError) as told:
        ParquetSource(path, pytest.fail)
    assert str(told.value).startswith(str(path))
    assert f"{claim:,}" in str(told.value)
    assert str(told.value).endswith(("; copy it again", "write it with smaller row groups"))


def test_a_row_group_has_as_many_values_as_the_limit_and_not_one_more(tmp_path, monkeypatch) -> None:
    path = written(tmp_path / "rank_0.parquet", with_keys=True)
    monkeypatch.setattr(parquet, "MAX_VALUES", 3 * NUM_ROWS)
    assert len(ParquetSource(path, pytest.fail).keys) == NUM_ROWS
    monkeypatch.setattr(parquet, "MAX_VALUES", 3 * NUM_ROWS - 1)
    with pytest.raises(DataError, match="row group 0 unpacks to columns of 231 values; at most 230 are read"):
        ParquetSource(path, pytest.fail)
