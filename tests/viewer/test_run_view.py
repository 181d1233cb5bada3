"""The run's curves: filters by rank and weights, a closer look at some steps, and what leaves as a file."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from pellucid.viewer.access import Exports
from pellucid.viewer.terminal import show

pytestmark = pytest.mark.slow

VALUES = """(name) => { const view = $main.app.view;
    return view.drawn.flatMap(({ lines }) => lines).find((line) => line.name === name)?.values ?? null; }"""
SCALES = "() => $main.app.view.charts.map(({ scales }) => [scales.x.min, scales.x.max])"
ALL_DRAWN = "() => $main.app.view.charts.length === 5"  # those below the window come after its first frame


def kl_means(run: Any, keep: Any) -> list[float | None]:
    """Over the trainable tokens of the records that are kept, by step."""
    means: list[float | None] = []
    for step, records in run.steps.items():
        kept = [record for record in records if keep(step, record)]
        values = [np.array(r["mismatch_kl"])[np.array(r["loss_mask"])] for r in kept]
        means.append(float(np.concatenate(values).mean()) if values else None)
    return means


def version(record: Any) -> int:
    return max(record["policy_versions"])


@pytest.mark.parametrize("kind", ["page", "server"])
def test_curves_are_of_the_chosen_rank_and_weights(
    served: Any, visit: Any, study: str, made_run: Any, kind: str
) -> None:
    address = study if kind == "page" else served(made_run.folder)
    page = visit(f"{address}#run?rank=1&weights=age1", ".strip canvas")
    page.wait_for_function("() => $main.app.run.head.pending === 0")
    page.wait_for_function(f"() => ({VALUES})('kl_mean')?.length === 3")
    expected = kl_means(made_run, lambda step, r: r["rank"] == 1 and version(r) == step - 1)
    assert expected[0] is None
    assert page.evaluate(VALUES, "kl_mean") == [None, *(pytest.approx(kl, rel=1e-6) for kl in expected[1:])]
    assert page.evaluate(VALUES, "loss") is None and page.locator(".ledger").is_hidden()
    assert "not kept by rank or weights" in page.locator(".run-view").inner_text()
    page.get_by_role("combobox", name="Weights").select_option(label="version 1")
    page.get_by_role("combobox", name="Rank").select_option(label="all ranks")
    page.wait_for_function("() => location.hash === '#run?weights=v1'")
    expected = kl_means(made_run, lambda step, r: version(r) == 1)
    page.wait_for_function(f"() => ({VALUES})('kl_mean')[1] !== null")
    assert page.evaluate(VALUES, "kl_mean") == [None, *(pytest.approx(kl, rel=1e-6) for kl in expected[1:])]
    assert page.evaluate(VALUES, "reward")[2] == 0.0  # of step 2, only the last members are so old
    page.locator(".strip-chart .u-over").nth(1).click(position={"x": 300, "y": 40})
    page.wait_for_selector("text=/[0-9]+ tokens in 4 of 16 records/")  # the step keeps the filter
    assert page.evaluate("() => $main.app.state.step") == 2


def test_alarms_stand_at_the_top_and_lead_to_their_steps(
    visit: Any, study: str, page_of: Any, made_run: Any, hostile: str, tmp_path: Path
) -> None:
    """By the page and by the terminal, beside a line that is no alarm; a sound run shows nothing of them."""
    page = visit(study, ".strip canvas")
    assert page.locator(".alarms").is_hidden()
    run = tmp_path / "run"
    shutil.copytree(made_run.folder, run)
    common = {"statistic": f"nats of {hostile}", "value": 0.25, "threshold": 0.05, "p_value": 1e-9}
    alarms = [
        {"name": "surprise", "step": 1, "causes": "Top-k, or \x1b[2J.", **common},
        {"name": "reward", "step": 900, "causes": "Another's.", **common},  # beyond what is exported
    ]
    path = run / "metrics" / "alarms.jsonl"
    path.write_text("".join(json.dumps(alarm) + "\nno alarm\n" for alarm in alarms))
    page = visit(page_of(run), ".strip canvas")
    finding = f"nats of {hostile}: 0.25 (threshold 0.05, p = 1e-09 < 1e-06)"
    assert page.locator(".alarms").inner_text().splitlines() == [
        "2 alarms",
        *("surprise at step 1", finding, "Top-k, or \\x1b[2J."),
        *("reward at step 900", finding, "Another's."),
    ]
    problem = f"{path}: 2 lines are no alarms, or too many; they are left out"
    assert page.locator("#notes").inner_text() == problem
    for name, step in (("surprise at step 1", 1), ("reward at step 900", 2)):
        page.get_by_role("button", name=name).click()
        page.wait_for_selector(f".step-view h2:has-text('Step {step}')")
        page.go_back()
        page.wait_for_selector(".alarms")
    console = Console(file=io.StringIO(), record=True, width=1000, markup=False)
    show(Exports(run), tokenizer=None, record_index=1, console=console)
    shown = console.export_text().splitlines()
    assert shown[0].startswith(problem)
    assert shown[1].rstrip() == f"ALARM surprise at step 1: {finding}. Top-k, or \\x1b[2J."
    assert shown[2].rstrip() == f"ALARM reward at step 900: {finding}. Another's."


def test_a_brush_looks_closer_in_all_curves_and_there_is_a_way_back(visit: Any, study: str) -> None:
    page = visit(study, ".strip canvas")
    page.wait_for_function(ALL_DRAWN)
    assert page.evaluate(SCALES) == [[0, 2]] * 5
    over = page.locator(".strip-chart .u-over").nth(1)

    def brush() -> None:
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + 30)
        page.mouse.move(box["x"] + box["width"] + 4, box["y"] + 30)
        page.mouse.up()
        page.wait_for_function("() => location.hash === '#run?steps=1%3A2'")

    brush()
    page.wait_for_function(ALL_DRAWN)
    assert page.evaluate(SCALES) == [[1, 2]] * 5
    assert page.get_by_role("spinbutton", name="first step shown").input_value() == "1"
    assert "2 of 3" in page.locator(".facts").first.inner_text()
    over.dblclick(position={"x": 100, "y": 40})
    page.wait_for_function("() => location.hash === '#run'")
    page.wait_for_timeout(400)
    assert page.evaluate("() => $main.app.viewName") == "run"  # neither click opened a step
    brush()
    page.keyboard.press("Escape")
    page.wait_for_function("() => location.hash === '#run'")
    page.get_by_role("spinbutton", name="last step shown").fill("1")
    page.get_by_role("spinbutton", name="last step shown").press("Enter")
    page.wait_for_function("() => location.hash === '#run?steps=0%3A1'")
    page.reload()
    page.wait_for_selector(".strip canvas")
    page.wait_for_function(ALL_DRAWN)
    assert page.evaluate(SCALES) == [[0, 1]] * 5
    page.get_by_role("button", name="all steps").click()
    page.wait_for_function("() => location.hash === '#run'")


def test_curves_are_used_by_keyboard(visit: Any, study: str) -> None:
    page = visit(study, ".strip canvas")
    page.get_by_role("group", name="Entropy over steps").focus()
    page.keyboard.press("End")
    page.keyboard.press("Shift+ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#run?steps=1%3A2'")
    assert page.locator("#spoken").inner_text() == "Steps 1 to 2"
    page.get_by_role("group", name="Entropy over steps").focus()
    page.keyboard.press("ArrowRight")
    assert "step 1" in page.locator(".strip").nth(2).inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".step-view h2:has-text('Step 1')")
    row = page.locator("tbody tr[data-row]").first
    row.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.activeElement.dataset.row === '1'")
    page.keyboard.press("Enter")
    page.wait_for_selector(".record-view .token")
    assert page.evaluate("() => $main.app.state.record") == 1


def test_curves_leave_as_columns_of_the_steps_in_sight(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#run?steps=1:2", ".strip canvas")
    with page.expect_download() as download:
        page.get_by_role("button", name="Parquet").click()
    assert download.value.suggested_filename == "study_run_steps_1-2.parquet"
    table = pq.read_table(download.value.path())
    assert table["step"].to_pylist() == [1, 2]
    means = kl_means(made_run, lambda step, r: True)
    assert table["kl_mean"].to_pylist() == pytest.approx(means[1:], rel=1e-6)
    assert table["reward/math"].to_pylist() == [0.5, 0.5]


COLOURS = """(selector) => { const canvas = $draw_saving.picture(document.querySelector(selector));
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const seen = new Map();
    for (let i = 0; i < data.length; i += 4) {
      const colour = `${data[i]},${data[i + 1]},${data[i + 2]}`;
      seen.set(colour, (seen.get(colour) ?? 0) + 1);
    }
    return [canvas.width, canvas.height, Object.fromEntries(seen)]; }"""


@pytest.mark.parametrize(
    ("place", "ready", "charts"),
    [
        (
            "run",
            ".strip canvas",
            {
                ".ledger": ("the flow", "study_ledger.png", "47,125,120"),
                ".strip:nth-child(2)": ("Mismatch KL", "study_run_Mismatch_KL.png", "11,107,116"),
            },
        ),
        (
            "step?step=1",
            "text=16 records",
            {
                ".histogram": ("Mismatch KL", "study_step_1_kl.png", "11,107,116"),
                ".step-side .card": ("the scatter", "study_step_1_entropy_over_kl.png", None),
                ".step-side .card:nth-child(2)": (
                    "the mean per position",
                    "study_step_1_kl_per_position.png",
                    "180,84,26",
                ),
            },
        ),
    ],
)
def test_every_chart_leaves_as_a_picture(
    visit: Any, study: str, place: str, ready: str, charts: dict[str, tuple[str, str, str | None]]
) -> None:
    page = visit(f"{study}#{place}", ready)
    page.wait_for_timeout(100)
    for selector, (what, name, ink) in charts.items():
        card = page.locator(selector).first
        with page.expect_download() as download:
            card.get_by_role("button", name=f"save {what} as PNG").click()
        assert download.value.suggested_filename == name
        png = download.value.path().read_bytes()
        width, height, colours = page.evaluate(COLOURS, selector)
        assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (width, height)
        box = card.bounding_box()
        assert (width, height) == (round(box["width"] + 32), round(box["height"] + 32))
        assert ink is None or colours[ink] > 10  # the scatter's dots are translucent
        assert len(colours) > 20 and colours["253,252,250"] > 1000  # soft edges of texts; paper around


def test_a_whole_view_leaves_as_a_picture(visit: Any, study: str) -> None:
    page = visit(f"{study}#record?step=1&record=4&token=30", ".token.pinned")
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    assert download.value.suggested_filename == "study_step_1_record_4.png"
    page.wait_for_timeout(100)
    _, _, colours = page.evaluate(COLOURS, ".record-view")
    fills = page.locator(".token[style]").evaluate_all(
        """nodes => nodes.map((node) => getComputedStyle(node).backgroundColor.slice(4, -1))
        .map((numbers) => numbers.replaceAll(" ", ""))"""
    )
    assert fills and all(colours.get(fill, 0) > 20 for fill in fills)
