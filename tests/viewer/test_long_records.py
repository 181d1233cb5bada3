"""Long records: their beginning is shown first, lines are laid out when needed, charts draw extremes."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pellucid.viewer.access import Exports
from pellucid.viewer.encode import LEAD_TOKENS, LONG_TOKENS
from pellucid.viewer.page import write_page
from pellucid.viewer.source import ServedRun

LENGTH = LONG_TOKENS + 700


@pytest.fixture(scope="module")
def long_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    record = {
        "token_ids": generator.integers(0, 5000, LENGTH).tolist(),
        "loss_mask": [place >= 8 for place in range(LENGTH)],
        "trainer_logprobs": (-generator.exponential(1, LENGTH)).astype(np.float32).tolist(),
        "inference_logprobs": (-generator.exponential(1, LENGTH)).astype(np.float32).tolist(),
        "role_spans": [["user", 0, 8], ["assistant", 8, LENGTH]],
    }
    short = {name: values[:20] for name, values in record.items()} | {"role_spans": []}
    path = tmp_path_factory.mktemp("long") / "rank_0.jsonl"
    lines = [short | {"export_sequence_idx": 0}, record | {"export_sequence_idx": 1}]
    path.write_text("".join(json.dumps({"step": 0, **line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def long_page(long_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("page") / "page.html"
    write_page(Exports(long_export), page)
    return page


def test_a_lead_holds_the_first_tokens_of_a_long_record(long_page: Path, long_export: Path) -> None:
    html = long_page.read_text()
    found = dict(re.findall(r'id="(lead/[^"]+)">([^<]*)<', html))
    assert list(found) == ["lead/0/1"]
    raw = zlib.decompress(base64.b64decode(found["lead/0/1"]))
    served = ServedRun(Exports(long_export))
    assert served.lead(0, 1) == raw
    size = int.from_bytes(raw[:4], "little")
    header, payload = json.loads(raw[4 : 4 + size]), raw[4 + size :]
    assert header["meta"]["segments"] == [[["user", 0, 8], ["assistant", 8, LEAD_TOKENS]]]
    column = header["columns"]["token_ids"]
    pieces = np.frombuffer(payload, np.uint8, 2 * LEAD_TOKENS, column["at"]).reshape(2, -1)
    expected = json.loads(long_export.read_text().splitlines()[1])["token_ids"][:LEAD_TOKENS]
    assert (pieces[0] + 256 * pieces[1].astype(np.int64)).tolist() == expected


def test_what_a_page_opens_with_stands_before_the_scripts_and_the_rest_after(
    long_export: Path, tmp_path: Path
) -> None:
    write_page(Exports(long_export), tmp_path / "page.html", start_record=1)
    html = (tmp_path / "page.html").read_text()
    marks = ('id="run"', 'id="texts"', 'id="step/0"', 'id="lead/0/1"', "<script>", 'id="chunk/0/1"')
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)


def test_the_beginning_is_drawn_first_and_the_whole_follows(visit: Any, long_page: Path) -> None:
    page = visit(f"{long_page.as_uri()}#record?record=0", ".token")
    lengths = page.evaluate(
        """async () => {
          const { app } = $main;
          const { view } = app;
          const seen = [];
          const present = view.present.bind(view);
          view.present = (record, ...rest) => { seen.push(record.length); return present(record, ...rest); };
          app.go({ record: 1 });
          const isWhole = () => !view.isLead && view.record.record === 1 && view.text.laid.isDone;
          while (!isWhole()) await new Promise((resolve) => setTimeout(resolve, 5));
          const { laid, sheet } = view.text;
          return [seen, laid.starts.at(-1), laid.height, sheet.offsetHeight];
        }"""
    )
    assert lengths[0] == [LEAD_TOKENS, LENGTH] and lengths[1] == LENGTH
    assert lengths[3] == pytest.approx(lengths[2], abs=1)
    assert f"{LENGTH:,}" in page.inner_text("dl.facts")
    page.evaluate("() => { document.querySelector('.tokens').scrollTop = 1e9; }")
    page.wait_for_selector(f'.token[data-i="{LENGTH - 1}"]')


def test_a_link_deep_into_a_long_record_finds_its_token(visit: Any, long_page: Path) -> None:
    page = visit(f"{long_page.as_uri()}#record?record=1&token={LENGTH - 30}", ".token.pinned")
    box, frame = page.locator(".token.pinned").bounding_box(), page.locator(".tokens").bounding_box()
    assert frame["y"] <= box["y"] <= frame["y"] + frame["height"]
    assert page.locator(".token.pinned").get_attribute("data-i") == str(LENGTH - 30)


def test_lines_laid_out_bit_by_bit_are_those_laid_out_at_once(study_page: Any) -> None:
    whole, parts, first = study_page.evaluate(
        """() => {
          const words = ["·a", "bcd", "·efghij", "⏎", "kl", "·m", "<s>", "nopqrstuvwx"];
          const show = (at) => words[(at * 7 + (at >> 3)) % words.length];
          const segments = [["user", 0, 40], ["", 40, 41], ["assistant", 41, 5000]];
          const make = () => new $draw_tokens.Lines(segments, 300, show, (shown) => 8 * shown.length);
          const whole = make();
          whole.reach({});
          const parts = make();
          for (let top = 0; top < 4000; top += 100) parts.reach({ top });
          const first = parts.length;
          parts.of(3000);
          parts.reach({});
          const said = ({ starts, tops, owners, height }) => ({ starts, tops, owners, height });
          return [said(whole), said(parts), first];
        }"""
    )
    assert parts == whole and 0 < first < len(whole["tops"])
    assert whole["starts"][0] == 0 and whole["starts"][-1] == 5000
    assert np.diff(whole["starts"]).min() > 0


def test_a_chart_of_many_points_keeps_every_extreme(study_page: Any) -> None:
    assert study_page.evaluate("() => $draw_chart.extremes([5, 1, 9, 2, 2, 7], () => true, 4)") == [
        0,
        1,
        2,
        3,
        5,
    ]
    assert study_page.evaluate("() => $draw_chart.extremes([5, 1, 9], () => true, 4)") == [0, 1, 2]
    values = np.random.default_rng(1).normal(size=10_000)
    values[::7] = np.nan
    places = study_page.evaluate(
        """(values) =>
          $draw_chart.extremes(Float64Array.from(values, (v) => v ?? NaN), (i) => i % 2 === 0, 200)""",
        [None if np.isnan(value) else float(value) for value in values],
    )
    counted = np.where(np.arange(10_000) % 2 == 0, values, np.nan).reshape(100, 100)
    assert places == sorted(set(places)) and len(places) <= 202
    kept = values[places]
    assert set(np.nanmax(counted, 1)) <= set(kept) and set(np.nanmin(counted, 1)) <= set(kept)


def test_counts_are_grouped_as_the_browser_would(study_page: Any) -> None:
    numbers = [0, 7, 999, 1000, 12345, 100_000, 1_234_567, -4321, 1234.5678, 0.25]
    ours, theirs = study_page.evaluate(
        "(numbers) => [numbers.map($draw_format.count), numbers.map((n) => n.toLocaleString('en'))]", numbers
    )
    assert ours == theirs
