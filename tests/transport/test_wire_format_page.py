"""docs/wire-format.md describes what is really sent: its example is encoded, and its bytes are decoded."""

import json
import re
from pathlib import Path

import pytest

from pellucid.transport import decode_batch
from pellucid.transport.batch import MAX_HEADER_BYTES, PREAMBLE, VERSION
from pellucid.transport.sections import Form, SectionHead

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()


@pytest.fixture(scope="module")
def example() -> dict:
    """The names that the page's code defines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names


def test_the_example_has_the_documented_header_and_bytes(example) -> None:
    (documented,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(documented) == example["header"]
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?){16})", PAGE, re.MULTILINE)
    bytes_at = {int(start, 16): bytes.fromhex(line) for start, line in lines}
    payload, end = example["payload"], PREAMBLE.size + example["header_bytes"]
    shown = [*range(0, PREAMBLE.size, 16), *range(end + -end % 8, len(payload), 16)]
    assert bytes_at == {start: payload[start : start + 16] for start in shown}


def test_the_documented_bytes_are_the_example(example) -> None:
    batch = decode_batch(example["payload"], sender="the page")
    table = batch.table
    assert (batch.run_id, batch.step, table.lengths.tolist()) == ("run", 7, [3, 4])
    assert table["token_ids"].tolist() == [5, 6, 9, 5, 6, 8, 7]
    assert table["sampled"].tolist() == [False, False, True, False, False, True, True]
    assert table["inference_logprobs"].tolist() == [-0.5, -0.25, -1.0]
    assert table["policy_versions"].tolist() == [3, 3, 4]
    assert table["env_name"].tolist() == ["a", "a"]


def test_the_tables_are_those_of_the_code() -> None:
    assert f"This is version {VERSION}." in PAGE and f"at most {MAX_HEADER_BYTES:,}" in PAGE
    preamble, header, sections = (
        PAGE.split(f"\n## {title}")[1] for title in ("Preamble", "Header", "Sections")
    )
    rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \|", preamble, re.MULTILINE)]
    starts = [start for start, _ in rows]
    assert [start + length for start, length in rows] == [*starts[1:], PREAMBLE.size]
    keys = re.findall(r"^\| `(\w+)` \|", header.split("\n## ")[0], re.MULTILINE)
    assert keys == list(SectionHead.__struct_fields__)
    forms = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", sections.split("\n## ")[0], re.MULTILINE)
    assert forms == [form.value for form in Form]


def test_the_limits_are_those_of_the_code() -> None:
    from pellucid.config import FilesystemTransportConfig
    from pellucid.transport import Limits

    limits = Limits()
    assert (limits.max_tokens, limits.max_sequences, limits.max_text_bytes) == (2**30, 2**20, 16_384)
    assert FilesystemTransportConfig().max_batch_bytes == limits.max_bytes
