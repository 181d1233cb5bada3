"""What DuckDB answers about a whole run is what the browser finds by reading all of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pellucid.export
from pellucid.data.schema import FIELDS
from pellucid.errors import DataError
from pellucid.export.parquet import ParquetSink
from pellucid.viewer.access import Exports, Selection
from pellucid.viewer.queries import RunQueries

WORST = {"ask": "worst", "metric": "kl", "kind": "all", "limit": 200}
BOTH_WAYS = """async (changes) => {
    const state = { ...$state.DEFAULTS, ...changes };
    const { app } = $main;
    const asked = await $views_worst.WorstView.prototype.ask.call({ app }, state);
    let plain = [];
    for (const step of app.run.steps) {
      const all = await app.run.stepTokens(step);
      const { tokens } = $data_select.select(all, app.run.vocabulary, state);
      plain = [...plain, ...$views_worst.worstTokens(all, state.kind, state.top, tokens, 200)];
      $views_worst.cut(plain, 200);
    }
    return [asked, plain]; }"""


@pytest.fixture(scope="module")
def parquet_run(made_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made run, as Parquet."""
    folder: Path = tmp_path_factory.mktemp("parquet") / "study"
    shutil.copytree(made_run.folder, folder)
    export = pellucid.export.open(made_run.folder)
    for step in export.steps:
        records = export.step(step)
        fields = [field for field in FIELDS if field.name in {known.name for known in records.fields()}]
        sink = ParquetSink(folder / "token_exports" / f"step_{step}" / "rank_0.parquet", fields)
        sink.write(records.batch([field.name for field in fields]))
        sink.close()
        (folder / "token_exports" / f"step_{step}" / "rank_0.jsonl").unlink()
    return folder


@pytest.fixture(scope="module")
def parquet_page(browser: Any, parquet_run: Path, served_module: Any) -> Iterator[Any]:
    page = browser.new_page()
    page.goto(f"{served_module(parquet_run)}#worst?within=run")
    page.wait_for_selector("tbody tr[data-row]")
    yield page
    page.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top": "surprise", "kind": "against"},
        {"top": "delta", "kind": "masked", "env": "tools"},
        {"top": "entropy", "kind": "trained", "rank": 1},
        {"top": "stale", "kind": "high"},
        {"kind": "low", "weights": "age1"},
        {"top": "ratio", "weights": "v1"},
        {"filter": "kl > 0.05 & adv < 0 | !(env = math) & at > 40"},
        {"filter": 'masked & stop = length & tokens >= 40 & rollout ~ "G3"'},
        {"filter": "!(stale > 0) & !low & example"},
    ],
)
def test_worst_tokens_of_a_run_are_the_same_either_way(parquet_page: Any, changes: dict[str, Any]) -> None:
    asked, plain = parquet_page.evaluate(BOTH_WAYS, changes)
    assert plain
    place = ("step", "record", "token")
    assert [[one[name] for name in place] for one in asked] == [
        [one[name] for name in place] for one in plain
    ]
    assert [one["value"] for one in asked] == pytest.approx([one["value"] for one in plain], abs=1e-6)


def test_the_view_shows_them_with_what_stands_around(parquet_page: Any) -> None:
    parquet_page.wait_for_selector("text=/furthest from 0 by the metric · 200 tokens .the first. · 3 steps/")
    parquet_page.wait_for_selector(".context-line .token.pinned")
    cells = parquet_page.locator("tbody tr[data-row]").first.locator("td").all_inner_texts()
    [[step, record, token, value], *_] = parquet_page.evaluate(
        "() => $main.app.view.found.map(({step, record, token, value}) => [step, record, token, value])"
    )
    assert cells[-1] == f"{step} / {record} / {token}" and float(cells[0]) == pytest.approx(value, rel=1e-3)


def test_ids_are_found_in_a_run(parquet_page: Any, parquet_run: Path, encode: Any) -> None:
    ids = encode("calc(")
    queries = RunQueries(Exports(parquet_run))
    found = queries.answer({"ask": "find", "ids": ids})
    assert found == [[step, record] for step in range(3) for record in range(8, 16)]
    assert queries.answer({"ask": "find", "ids": [*ids, 10**6]}) == []
    parquet_page.get_by_role("combobox", name="Search in").select_option("run")
    parquet_page.get_by_role("searchbox", name="Search").fill("#" + " ".join(map(str, ids)))
    parquet_page.get_by_role("searchbox", name="Search").press("Enter")
    parquet_page.wait_for_selector("text=24 hits in 24 records")


@pytest.mark.parametrize(
    "question",
    [
        WORST,
        WORST | {"metric": "delta", "kind": "masked", "env": "tools", "limit": 5},
        WORST | {"kind": "low", "weights": "age1"},
        WORST | {"filter": {"field": "rollout", "is": "~", "value": "G3"}},
        {"ask": "find"},
    ],
)
def test_jsonl_and_parquet_have_the_same_answer(
    made_run: Any, parquet_run: Path, monkeypatch: Any, question: dict[str, Any]
) -> None:
    question = {"ids": made_run.steps[1][8]["token_ids"][2:4], **question}
    expected = RunQueries(Exports(parquet_run)).answer(question)
    assert expected
    assert RunQueries(Exports(made_run.folder)).answer(question) == expected
    monkeypatch.setattr("pellucid.viewer.queries.TOKENS_AT_ONCE", 1)  # a step at a time
    assert RunQueries(Exports(made_run.folder)).answer(question) == expected


def test_a_selection_of_records_is_asked_by_itself(made_run: Any, parquet_run: Path) -> None:
    for folder in (made_run.folder, parquet_run):
        exports = Exports(folder, Selection(env="tools"))
        found = RunQueries(exports).answer(WORST) or []
        whole = RunQueries(Exports(folder)).answer(WORST | {"env": "tools"}) or []
        assert len(found) == 200 and [row[2:] for row in found] == [row[2:] for row in whole]
        assert {row[1] for row in found} <= set(range(8))  # of the records that are shown


def test_what_duckdb_cannot_answer_is_left_to_the_browser(made_run: Any, parquet_run: Path) -> None:
    queries = RunQueries(Exports(parquet_run))
    for tree in (
        {"field": "text", "is": "~", "value": "a"},
        {"field": "record"},
        {"field": "at", "is": "~", "value": "1"},
    ):
        assert queries.answer(WORST | {"filter": tree}) is None
    assert len(queries.answer(WORST | {"limit": 3}) or []) == 3


@pytest.mark.parametrize(
    "question",
    [
        {"ask": "drop"},
        {"ask": "find", "ids": ["1); DROP TABLE tokens"]},
        WORST | {"metric": "kl) FROM read_text('/etc/hostname') --"},
        WORST | {"weights": "v1 OR true"},
        WORST | {"filter": {"field": "kl", "is": "> 0 OR", "value": 1}},
    ],
)
def test_a_question_is_data(parquet_run: Path, question: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        RunQueries(Exports(parquet_run)).answer(question)
