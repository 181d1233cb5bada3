"""Bands of the ledger lead to tokens or rollouts, nothing ends in a blank page, all metrics can be shown."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pellucid.viewer import rollouts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dropped(
    made_run: Any, rollout: Any, save_rollouts: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run with rollouts of many outcomes, and metrics of all kinds."""
    folder = tmp_path_factory.mktemp("dropped") / "dropped"
    shutil.copytree(made_run.folder, folder)
    save_rollouts(folder, 0, rollout(0, "sent", rollout_id="s0g0-r0"), rollout(1, "stale"))
    save_rollouts(
        folder, 2, *(rollout(n, "zero_advantage") for n in range(2, 6)), rollout(6, "failed_rollout")
    )
    metrics = [
        {
            "step": step,
            "lr": 10.0**-step,
            "grad_norm": step,
            "time/step_s": 2.0,
            "metrics/math/exact": 0.5,
            "mismatch_kl/all/mean": 0.1,
            "mismatch_kl/all/max": 0.2,
        }
        for step in range(3)
    ]
    (folder / "metrics" / "trainer.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    return folder


@pytest.fixture(scope="module")
def address(dropped: Path, page_of: Any) -> str:
    return str(page_of(dropped))


@pytest.mark.parametrize("kind", ["page", "server"])
def test_a_band_of_the_flow_opens_what_it_holds(
    visit: Any, address: str, served: Any, dropped: Path, kind: str
) -> None:
    page = visit(address if kind == "page" else served(dropped), ".flow-link")
    page.wait_for_function("() => $main.app.run.numRollouts() === 7")
    page.get_by_role("link", name="zero advantage 80 8 %").click()
    page.wait_for_selector(".rollouts-view tr[data-row]")
    assert page.locator(".rollouts-view tr[data-row]").count() == 4
    details = page.locator(".rollouts-view .details").inner_text()
    assert "because of zero_advantage" in details and "2 + 2" in details and "version 3" in details
    page.go_back()
    page.get_by_role("link", name="masked 50 5 %").press("Enter")
    page.wait_for_selector(".worst-view tr[data-row]")
    assert page.evaluate("() => [$main.app.state.kind, $main.app.state.within]") == ["masked", "run"]
    page.go_back()
    page.get_by_role("link", name="cancelled 20 2 %").click()
    page.wait_for_selector(".notice:has-text('No saved rollout is cancelled')")
    assert "The ledger counts 20 such tokens" in page.locator(".notice").inner_text()
    page.get_by_role("button", name="all 7 rollouts").click()
    page.wait_for_selector(".rollouts-view tr[data-row] >> nth=6")


def test_rollouts_are_searched_filtered_and_lead_to_their_tokens(visit: Any, address: str) -> None:
    page = visit(f"{address}#rollouts", ".rollouts-view tr[data-row]")
    search = page.get_by_role("searchbox", name="Search")
    search.fill("is 4")
    search.press("Enter")
    page.wait_for_function("() => $main.app.view.found.length === 1")
    assert page.locator(".results").is_hidden()
    search.fill("")
    search.press("Enter")
    for expression, number in (
        ("reward > 0.35 & outcome = zero_advantage", 2),
        ('reason ~ "failed"', 1),
        ("stale > 0", 0),
    ):
        field = page.get_by_role("searchbox", name="Filter")
        field.fill(expression)
        field.press("Enter")
        page.wait_for_function(
            f"() => $main.app.view.found.length === {number} "
            f"&& $main.app.state.filter === {json.dumps(expression)}"
        )
    page.get_by_role("button", name="clear them").click()
    page.wait_for_function("() => $main.app.view.found.length === 7")
    page.evaluate("() => $main.app.go({ rollout: '0/s0g0-r0' })")
    page.get_by_role("button", name="its tokens").click()
    page.wait_for_selector(".record-view")
    assert page.evaluate("() => [$main.app.state.step, $main.app.state.record]") == [0, 0]


def test_an_empty_class_names_the_nearest_step_that_has_some(visit: Any, address: str, made_run: Any) -> None:
    page = visit(f"{address}#worst?kind=untrainable&step=1", ".notice")
    page.get_by_role("button", name="look in the whole run").click()
    page.wait_for_selector(".notice:has-text('No exported token of the run')")
    page.get_by_role("button", name="all trainable tokens").click()
    page.wait_for_selector(".worst-view tr[data-row]")


def test_opening_a_record_selects_its_worst_token(visit: Any, address: str, made_run: Any) -> None:
    page = visit(f"{address}#record?step=1&record=3", ".token.pinned")
    record = made_run.steps[1][3]
    known = [kl if mask else -1 for kl, mask in zip(record["mismatch_kl"], record["loss_mask"], strict=True)]
    assert page.evaluate("() => $main.app.state.token") == known.index(max(known))
    details = page.locator(".details").inner_text()
    assert "π\u00a0=" in details and "μ\u00a0=" in details
    page.keyboard.press("Escape")
    page.wait_for_selector(".details .notice")
    page.evaluate("() => $main.app.go({ token: 0, table: true })")  # a token of the prompt
    page.wait_for_selector(".token-table tr[data-row='0']")
    cells = page.locator(".token-table tr[data-row='0'] td").all_inner_texts()
    heads = page.locator(".token-table th:visible").all_inner_texts()
    assert cells[heads.index("Mismatch KL")] == "" and cells[heads.index("Entropy")] != ""
    assert not {"Advantage", "Reward"} & set(heads)  # the same for all tokens: the record's head tells them
    assert "not sampled" in page.locator(".details").inner_text()


def test_every_metric_is_shown_in_groups_smoothed_and_on_log_axes(visit: Any, address: str) -> None:
    page = visit(f"{address}#run", ".strip canvas")
    titles = "() => $main.app.view.drawn.map(({ title }) => title)"
    assert {"Gradient norm", "Learning rate"} <= set(page.evaluate(titles))
    page.get_by_role("combobox", name="Curves").select_option("Everything")
    page.wait_for_function(f"() => ({titles})().includes('time/step_s')")
    assert page.evaluate(titles) == [
        "grad_norm",
        "lr",
        "reward",
        "metrics/exact",
        "mismatch_kl",
        "time/step_s",
    ]
    strip = "$main.app.view.drawn.find(({ title }) => title === 'mismatch_kl')"
    lines = f"() => {strip}.lines.map(({{ label }}) => label)"
    assert page.evaluate(lines) == ["all mean", "all max"]
    page.get_by_role("searchbox", name="Find metrics").fill("grad")
    page.get_by_role("searchbox", name="Find metrics").press("Enter")
    page.wait_for_function(f"() => ({titles})().length === 1")
    page.evaluate("() => $main.app.go({ smooth: 5, log: true })")
    page.wait_for_function("() => $main.app.view.drawn[0].log")
    assert page.evaluate("() => $main.app.view.drawn[0].lines[0].values") == [0, 0.5, 1]
    page.get_by_role("searchbox", name="Find metrics").fill("nothing")
    page.get_by_role("searchbox", name="Find metrics").press("Enter")
    page.get_by_role("button", name="show the overview").click()
    page.wait_for_function(f"() => ({titles})().includes('Entropy')")


def test_hovering_a_step_tells_its_values_in_all_curves(visit: Any, address: str) -> None:
    page = visit(f"{address}#run", ".strip canvas")
    page.wait_for_function("() => $main.app.view.charts.length === $main.app.view.drawn.length")
    over = page.locator(".strip-chart .u-over").first
    over.scroll_into_view_if_needed()
    over.hover(position={"x": 2, "y": 40})
    page.wait_for_function(
        "() => [...document.querySelectorAll('.strip-value')]"
        ".every((node) => node.innerText.includes('step 0'))"
    )


def test_a_range_of_steps_counts_its_own_rollouts_and_counts_have_whole_ticks(
    visit: Any, address: str
) -> None:
    page = visit(f"{address}#run?steps=1:2&pick=grad", ".strip canvas")
    page.wait_for_function("() => $main.app.view.charts.length === 1")
    facts = page.locator(".run-view .facts")
    assert facts.locator("dt:has-text('rollouts') + dd").inner_text() == "5"
    assert page.evaluate("() => $main.app.view.charts[0].axes[1]._values") == ["1", "2"]
    assert page.evaluate("() => [32150, 9999, -1e4, 123456].map((one) => $draw_format.short(one))") == [
        "32,200",
        "10,000",
        "−10,000",
        "1.2e5",
    ]


CUT = """() => [...document.querySelectorAll("th, h3, #views button, .save-bar button")]
  .filter((node) => node.checkVisibility() && node.clientWidth && node.scrollWidth > node.clientWidth + 1)
  .map((node) => node.innerText)"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_fits_1440_and_390_pixels(visit: Any, address: str, theme: str) -> None:
    for width in (1440, 390):
        page = visit(address, color_scheme=theme, viewport={"width": width, "height": 844})
        for name in ("run", "rollouts", "step", "record", "group", "across", "worst", "whatif"):
            page.evaluate(f"() => $main.app.go({{ view: '{name}' }})")
            page.wait_for_selector(f".view[aria-label]:is(.{name}-view, .{name}-view *)")
            page.wait_for_timeout(150)
            wide = page.evaluate(
                "() => [document.documentElement.scrollWidth, document.querySelector('#main').scrollWidth]"
            )
            assert max(wide) <= width, (name, wide)
            assert page.locator("#top").bounding_box()["height"] <= (48 if width == 1440 else 844 * 0.12)
            if width == 1440:
                assert page.evaluate(CUT) == [], name


def test_the_records_of_a_step_are_read_by_their_ends(visit: Any, address: str) -> None:
    page = visit(f"{address}#step?step=2", ".step-view .ending")
    row = page.locator("tr[data-row='0']")
    assert row.locator(".ending").nth(0).inner_text().endswith("2 + 0 = ?⏎".replace(" ", "·"))
    assert row.locator(".ending").nth(1).inner_text() == "the·answer·is·4,·step·2"
    heads = page.locator(".step-view th:visible").all_inner_texts()
    assert "hits" not in heads and "reward" in heads
    page.evaluate("() => $main.app.go({ env: 'math' })")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.step-view th')]"
        ".some((head) => head.hidden && head.textContent.includes('environment'))"
    )


def test_histograms_and_scatter_work_by_keyboard(visit: Any, address: str) -> None:
    page = visit(f"{address}#step?step=2", ".histogram canvas")
    page.wait_for_function("() => $main.app.view.all")
    first = page.locator(".histogram canvas").first
    first.press("End")
    first.press("Shift+Home")
    first.press("Enter")
    page.wait_for_function("() => $main.app.state.brush.startsWith('kl:')")
    page.locator(".histogram canvas").first.press("Delete")
    page.wait_for_function("() => $main.app.state.brush === ''")
    scatter = page.locator(".scatter canvas")
    card = page.locator(".scatter").bounding_box()
    assert scatter.bounding_box()["width"] == pytest.approx(card["width"], abs=2)
    scatter.press("ArrowRight")
    scatter.press("Enter")
    page.wait_for_selector(".record-view .token.pinned")


def test_masks_that_are_not_recorded_are_not_0_percent(
    visit: Any, page_of: Any, write_export: Any, make_record: Any
) -> None:
    record = make_record([("user", "hi"), ("assistant", "hello")])
    bare = {name: value for name, value in record.items() if not name.startswith("is_masked")}
    page = visit(f"{page_of(write_export(bare, bare))}#run", ".strip")
    assert "Masked" not in page.evaluate("() => $main.app.view.drawn.map(({ title }) => title)")
    page.evaluate("() => $main.app.go({ view: 'step' })")
    page.wait_for_selector(".step-view .facts")
    assert "masked" not in page.locator(".step-view .facts").inner_text()


def test_counting_looks_at_each_step_a_fixed_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 30
    for step in range(num_steps):
        folder = tmp_path / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "train_rollouts.jsonl").write_text('{"rollout_id": "r", "outcome": "sent"}\n')
    looked: list[Path] = []

    def files_of(folder: Path) -> list[Path]:
        looked.append(folder)
        return [folder / "train_rollouts.jsonl"]

    monkeypatch.setattr(rollouts, "_files_of", files_of)
    counts = rollouts.SavedRollouts(tmp_path).counts()
    assert counts == {str(step): {"sent": 1} for step in range(num_steps)}
    assert len(looked) == 2 * num_steps
