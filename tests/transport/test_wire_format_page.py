"""docs/wire-format.md describes what is really sent: its example is encoded, and its bytes are decoded."""

import re
from pathlib import Path

import pytest

from pellucid.transport import decode_batch
from pellucid.transport.wire import COUNTS, ENTRY, HEADER_BYTES, PREAMBLE, VERSION, Form

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()


@pytest.fixture(scope="module")
def documented() -> bytes:
    """The bytes of the page's dump."""
    (dump,) = re.findall(r"```text\n(0000  .*?)```", PAGE, re.DOTALL)
    return bytes.fromhex("".join(line[6:53] for line in dump.splitlines()))


def test_the_example_gives_the_documented_bytes(documented) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["payload"] == documented


def test_the_documented_bytes_are_the_example(documented) -> None:
    batch = decode_batch(documented, sender="the page")
    table = batch.table
    assert (batch.run_id, batch.step, table.lengths.tolist()) == ("run", 7, [3, 4])
    assert table["token_ids"].tolist() == [5, 6, 9, 5, 6, 8, 7]
    assert table["sampled"].tolist() == [False, False, True, False, False, True, True]
    assert table["inference_logprobs"].tolist() == [-0.5, -0.25, -1.0]
    assert table["policy_versions"].tolist() == [3, 3, 4]
    assert table["env_name"].tolist() == ["a", "a"]


def test_the_tables_are_those_of_the_code() -> None:
    assert f"This is version {VERSION}." in PAGE
    forms = re.findall(r"^\| ([A-Z]+) \| (\d) \|", PAGE, re.MULTILINE)
    assert forms == [(form.name, str(form.value)) for form in Form]
    header, directory = (section.split("\n## ")[0] for section in PAGE.split("\n## ")[1:3])
    for table, size in ((header, PREAMBLE.size + COUNTS.size), (directory, ENTRY.size)):
        rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE)]
        starts = [start for start, _ in rows]
        assert [start + length for start, length in rows] == [*starts[1:], size]
    assert HEADER_BYTES == 64


def test_the_limits_are_those_of_the_code() -> None:
    from pellucid.config import FilesystemTransportConfig
    from pellucid.transport import Limits

    limits = Limits()
    assert (limits.max_tokens, limits.max_sequences, limits.max_text_bytes) == (2**30, 2**20, 16_384)
    assert FilesystemTransportConfig().max_batch_bytes == limits.max_bytes
