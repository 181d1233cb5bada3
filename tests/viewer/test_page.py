"""The page as a file: its policy, its blocks, its notes; and the bytes that it is made of."""

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pellucid.errors import DataError, ModelError
from pellucid.viewer import View, run_view
from pellucid.viewer.access import Exports, Selection
from pellucid.viewer.blob import BlobWriter
from pellucid.viewer.frame import bundle
from pellucid.viewer.page import Size, write_page

BLOCK = re.compile(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>')


def blocks(page: Path) -> dict[str, bytes]:
    return {
        name: zlib.decompress(base64.b64decode(data))
        for name, data in BLOCK.findall(page.read_text(encoding="utf-8"))
    }


def source_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_allows_exactly_what_is_inlined(made_run: Any, tmp_path: Path) -> None:
    write_page(Exports(made_run.folder), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    allowed = " ".join(f"'{source_hash(script)}'" for script in scripts)
    assert policy == (
        f"default-src 'none'; script-src {allowed}; style-src '{source_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    markup = re.sub(r"<(script|style)\b[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"""\b(src|href)=|\sstyle=|\son\w+=""", markup)


def test_nothing_of_a_run_reaches_the_markup(
    tmp_path: Path, write_export: Any, make_record: Any, hostile: str
) -> None:
    record = make_record([("user", "x")], env_name=hostile, example_id=hostile, role_spans=[[hostile, 0, 5]])
    record["loss_mask"] = [True] * len(record["token_ids"])
    page = tmp_path / "page.html"
    write_page(Exports(write_export(record)), page)
    assert "onerror" not in page.read_text(encoding="utf-8")
    assert hostile.encode() in blocks(page)["step/0"].replace(b"\\/", b"/")


def test_a_page_holds_what_fits_and_says_what_it_leaves_out(made_run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(Exports(made_run.folder), page, budget=Size(records=40, tokens=100_000))
    found = blocks(page)
    head = json.loads(found["run"])
    assert head["held"] == [0, 2] and [summary["step"] for summary in head["steps"]] == [0, 1, 2]
    assert "step/1" not in found and "chunk/2/0" in found
    assert head["notes"][0].startswith("This page shows 32 of 48 records, from 2 of 3 steps")
    assert "`--all-records` puts all of them into it" in head["notes"][0]


def test_of_steps_that_are_too_long_the_first_records_are_shown(made_run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    step = made_run.folder / "token_exports" / "step_0"
    lengths = np.cumsum([len(record["token_ids"]) for record in made_run.steps[0]])
    write_page(Exports(step), page, budget=Size(records=100, tokens=int(lengths[4])))
    head = json.loads(blocks(page)["run"])
    assert "This page shows 5 of 16 records" in head["notes"][0]
    assert head["steps"][0]["points"]["all"]["records"] == 16


def test_points_by_rank_and_weights_are_exact(made_run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    written = write_page(Exports(made_run.folder), page, budget=None)
    assert written.is_whole and str(written).startswith("48 of 48 records from 3 of 3 steps, ")
    found = blocks(page)
    head = json.loads(found["run"])
    assert [(step["ranks"], step["versions"]) for step in head["steps"]] == [
        ([0, 1], [0]), ([0, 1], [0, 1]), ([0, 1], [1, 2])
    ]  # fmt: skip
    assert "slices" not in head["steps"][0]
    points = {(p["env"], p["rank"], p["version"]): p for p in json.loads(found["slices"])["2"]}
    # Three environments, ranks and versions each with "any": less what is empty, less what is no slice.
    assert len(points) == 3 * 3 * 3 - 3 - 3
    for (env, rank, version), point in points.items():
        records = [
            record
            for record in made_run.steps[2]
            if env in ("all", record["env_name"])
            and rank in (None, record["rank"])
            and version in (None, max(record["policy_versions"]))
        ]
        kl = np.concatenate([np.array(r["mismatch_kl"])[np.array(r["loss_mask"])] for r in records])
        masked = sum(sum(record["is_masked_low"]) for record in records)
        assert point["records"] == len(records) and point["trainable"] == len(kl)
        assert point["kl_mean"] == pytest.approx(kl.mean(), rel=1e-6)
        assert point["kl_max"] == pytest.approx(kl.max(), rel=1e-6)
        assert point["masked_low"] == pytest.approx(masked / len(kl))
        assert point["reward"] == np.mean([record["reward"] for record in records])
        cut = [record["stop_reason"] == "length" for record in records]
        assert point["truncated"] == np.mean(cut)


def test_points_of_a_step_are_exact(made_run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(Exports(made_run.folder), page)
    points = json.loads(blocks(page)["run"])["steps"][1]["points"]
    chosen = made_run.column(1, "loss_mask") == 1
    kl = made_run.column(1, "mismatch_kl")[chosen]
    assert points["all"]["trainable"] == chosen.sum() and points["all"]["records"] == 16
    assert points["all"]["kl_mean"] == pytest.approx(kl.mean(), rel=1e-6)
    assert points["all"]["kl_max"] == pytest.approx(kl.max(), rel=1e-6)
    assert points["all"]["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=0.15)
    high = made_run.column(1, "is_masked_high").sum() / chosen.sum()
    assert points["all"]["masked_high"] == pytest.approx(high)
    assert points["all"]["truncated"] == 0.25 and points["math"]["reward"] == 0.5
    assert points["tools"]["records"] == 8


def test_selections_show_some_records_only(made_run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(Exports(made_run.folder, Selection(step=1, env="tools")), page)
    head = json.loads(blocks(page)["run"])
    assert head["held"] == [1] and head["steps"][0]["points"].keys() == {"all", "tools"}
    assert head["steps"][0]["points"]["all"]["records"] == 8


def test_a_torn_line_is_a_note(write_export: Any, make_record: Any, tmp_path: Path) -> None:
    path = write_export(make_record([("user", "x"), ("assistant", "y")]))
    with path.open("a") as file:
        file.write('{"step": 0, "tok')
    write_page(Exports(path), tmp_path / "page.html")
    notes = json.loads(blocks(tmp_path / "page.html")["run"])["notes"]
    assert any("rank_0.jsonl:2 is cut short" in note for note in notes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "holds no records"),
        ('{"a": 1}\n', "expected a record with token_ids"),
        ("[1]\n", "one JSON object per line"),
    ],
)
def test_an_unknown_shape_is_an_error_and_no_page(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        View(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank_0.jsonl"]


def test_a_tokenizer_that_was_asked_for_must_load(made_run: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        write_page(Exports(made_run.folder), tmp_path / "page.html", tokenizer=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(made_run: Any) -> None:
    html = View(made_run.folder / "token_exports" / "step_0")._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts allow-downloads"' in html and html.count("<") == 2


def test_the_command_writes_a_page(made_run: Any, tmp_path: Path) -> None:
    from pellucid.config.tools import ViewSettings

    run_view(ViewSettings(path=made_run.folder, output=tmp_path / "new" / "page.html", record_index=3))
    head = json.loads(blocks(tmp_path / "new" / "page.html")["run"])
    assert head["start_record"] == 3 and head["losses"][0][1]["type"] == "dppo"


@pytest.mark.parametrize(
    ("flag", "said"),
    [(False, "of 48 records from 2 of 3 steps"), (True, "48 of 48 records from 3 of 3 steps")],
)
def test_the_command_says_how_much_a_page_holds(
    made_run: Any, tmp_path: Path, caplog: Any, monkeypatch: Any, flag: bool, said: str
) -> None:
    monkeypatch.setattr("pellucid.viewer.PAGE_BUDGET", Size(records=20, tokens=100_000))

    from pellucid.config.tools import ViewSettings

    caplog.set_level("INFO")
    run_view(ViewSettings(path=made_run.folder, output=tmp_path / "page.html", all_records=flag))
    assert said in caplog.text and ("--all-records" in caplog.text) is not flag


def test_modules_become_one_script_in_the_order_of_their_imports() -> None:
    script = bundle()
    assert (
        script.index("const $data_source = ")
        < script.index("const $data_run = ")
        < script.index("const $main = ")
    )
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def read_back(raw: bytes, name: str, lengths: list[int]) -> np.ndarray[Any, Any]:
    """What `readColumn` in the browser does."""
    size = int.from_bytes(raw[:4], "little")
    header, payload = json.loads(raw[4 : 4 + size]), raw[4 + size :]
    column = header["columns"][name]
    total = sum(lengths)
    if "fill" in column:
        return np.full(total, np.nan if column["fill"] is None else column["fill"])
    width = int(column["type"][1])
    data = np.frombuffer(payload, np.uint8, column["length"] * width, column["at"])
    if column.get("split"):
        data = data.reshape(width, -1).T.copy().ravel()
    values = data.view(f"<{column['type']}")
    if "against" in column:
        folded = values.view(np.uint32).astype(np.int64)
        change = (folded >> 1) ^ -(folded & 1)
        reference = read_back(raw, column["against"], lengths).astype(np.float32)
        values = (reference.view(np.int32) + change).astype(np.int32).view(np.float32)
    return np.repeat(values, lengths) if column.get("per") else values


NUMBERS = arrays.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.floats(-50, 50, width=32) | st.just(float("nan")) | st.sampled_from([0, 1]),
)


@given(NUMBERS, st.floats(-0.0625, 0.0625, width=32))
def test_columns_come_back_bit_for_bit(values: Any, shift: float) -> None:
    blob = BlobWriter()
    near = (values + np.float32(shift)).astype(np.float32)
    blob.add("a", values)
    blob.add_near("b", near, "a", values)
    blob.add("c", values.astype(np.float64) / 3)
    raw = zlib.decompress(blob.finish({}))
    for name, expected in (("a", values), ("b", near), ("c", values.astype(np.float64) / 3)):
        got = read_back(raw, name, [len(values)])
        assert np.array_equal(got, expected, equal_nan=True)
