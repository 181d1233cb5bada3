"""Every view in a real browser, against numbers computed from the same records."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pellucid.config import GspoLossConfig, LossConfig
from pellucid.loss import LossInputs, Ratios, sequence_weights
from pellucid.loss.functions import RL_LOSSES, gspo_loss
from pellucid.loss.script import script
from pellucid.viewer.frame import asset
from tolerance import near

pytestmark = pytest.mark.slow


def trainable(run: Any, step: int) -> np.ndarray[Any, Any]:
    return run.column(step, "loss_mask") == 1


def owners(run: Any, step: int) -> np.ndarray[Any, Any]:
    records = run.steps[step]
    return np.repeat(np.arange(len(records)), [len(record["token_ids"]) for record in records])


def test_a_brush_over_a_histogram_selects_tokens_and_their_records(
    visit: Any, study: str, made_run: Any
) -> None:
    page = visit(f"{study}#step?step=1", ".histogram canvas")
    page.wait_for_selector("text=16 records")
    canvas = page.locator(".histogram canvas").first
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.92, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] + 5, box["y"] + 20)
    page.mouse.up()
    page.wait_for_function("location.hash.includes('brush=kl')")
    [brush] = page.evaluate("() => $data_select.parseBrushes($main.app.state.brush)")
    kl = made_run.column(1, "mismatch_kl")
    chosen = trainable(made_run, 1) & (kl >= brush["low"]) & (kl <= brush["high"])
    records = np.unique(owners(made_run, 1)[chosen])
    assert 0 < len(records) < 16
    page.wait_for_selector(f"text={chosen.sum()} tokens in {len(records)} of 16 records")
    rows = page.locator("tbody tr[data-row]").evaluate_all("nodes => nodes.map((n) => Number(n.dataset.row))")
    assert rows == records.tolist()
    with page.expect_download() as download:
        page.get_by_role("button", name="Parquet").click()
    table = pq.read_table(download.value.path())
    assert table["record"].to_pylist() == owners(made_run, 1)[chosen].tolist()
    assert table["mismatch_kl"].to_pylist() == pytest.approx(kl[chosen], rel=1e-5)
    page.get_by_role("button", name="clear selection").click()
    page.wait_for_selector("text=16 records")


def test_records_sort_by_any_column(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#step?step=0", "tbody tr[data-row]")
    page.get_by_role("button", name="KL max").click()
    page.wait_for_selector('th[aria-sort="descending"]')
    rows = page.locator("tbody tr[data-row]").evaluate_all("nodes => nodes.map((n) => Number(n.dataset.row))")
    largest = [
        max(kl for kl, m in zip(record["mismatch_kl"], record["loss_mask"], strict=True) if m)
        for record in made_run.steps[0]
    ]
    assert rows == sorted(range(16), key=lambda index: -largest[index])[: len(rows)]
    page.locator("tbody tr[data-row]").first.click()
    page.wait_for_selector(".record-view .token")
    assert page.evaluate("() => $main.app.state.record") == rows[0]
    page.keyboard.press("j")  # follows the table's order
    page.wait_for_function(f"$main.app.state.record === {rows[1]}")


def test_tokens_are_counted_by_id(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#step?step=2&ids=1")
    page.wait_for_selector('[aria-label="Tokens by id"] tbody tr[data-row]')
    table = page.locator('.scroller[aria-label="Tokens by id"]')
    first = table.locator("tbody tr[data-row]").first.locator("td").all_inner_texts()
    chosen = trainable(made_run, 2)
    ids, counts = np.unique(made_run.column(2, "token_ids")[chosen], return_counts=True)
    most = ids[np.argmax(counts)]
    kl = made_run.column(2, "mismatch_kl")[chosen][made_run.column(2, "token_ids")[chosen] == most]
    assert first[0] == str(int(most)) and first[2] == str(counts.max())
    assert float(first[3].replace("e−", "e-")) == pytest.approx(kl.mean(), rel=5e-3)


def test_the_run_shows_its_curves_and_where_its_tokens_went(visit: Any, study: str) -> None:
    page = visit(study, ".strip canvas")
    titles = page.locator(".strip h3").all_inner_texts()
    assert titles == ["Reward", "Mismatch KL", "Entropy", "Masked", "Cut by length"]
    labels = page.locator(".flow-label").evaluate_all(
        "nodes => nodes.map((n) => [...n.querySelectorAll('tspan')].map((t) => t.textContent).join(''))"
    )
    assert labels == ["trained 850 85.0 %", "masked 50 5 %", "zero advantage 80 8 %", "cancelled 20 2 %"]
    assert "balanced: every one of the 1,000 sampled tokens" in page.locator(".ledger").inner_text()
    assert "0.6" in page.locator(".strip").first.inner_text()
    page.locator(".strip-chart .u-over").first.click(position={"x": 4, "y": 40})
    page.wait_for_selector(".step-view h2:has-text('Step 0')")


def test_worst_tokens_are_the_worst_and_lead_to_their_record(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#worst?step=1&top=kl", "tbody tr[data-row]")
    kl = np.where(trainable(made_run, 1), made_run.column(1, "mismatch_kl"), -1)
    at = int(np.argmax(kl))
    record = int(owners(made_run, 1)[at])
    position = at - int((owners(made_run, 1) < record).sum())
    cells = page.locator("tbody tr[data-row]").first.locator("td").all_inner_texts()
    assert float(cells[0]) == pytest.approx(kl.max(), rel=1e-3)
    assert cells[-1] == f"1 / {record} / {position}"
    page.locator("tbody tr[data-row]").first.click()
    page.wait_for_selector(".token.pinned")
    assert page.locator(".token.pinned").get_attribute("data-i") == str(position)
    for kind, column in [("high", "is_masked_high"), ("low", "is_masked_low"), ("masked", "is_masked")]:
        page.evaluate(f"() => $main.app.go({{view: 'worst', kind: '{kind}'}})")
        number = int(made_run.column(1, column).sum())
        page.wait_for_selector(f".worst-view p:has-text('{number} token')")
    against = trainable(made_run, 1) & (
        made_run.column(1, "advantages") * made_run.column(1, "log_importance_ratio") < 0
    )
    page.evaluate("() => $main.app.go({kind: 'against'})")
    page.wait_for_selector(f".worst-view p:has-text('{min(200, against.sum())} token')")


def test_the_runs_own_bounds_give_back_the_record(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#whatif?step=1", ".verdict .good")
    assert "masks and loss are those recorded" in page.locator(".verdict").inner_text()
    loss = made_run.column(1, "token_loss").sum() / 100
    cells = page.locator(".plain-table tbody tr").first.locator("td").all_inner_texts()
    assert float(cells[3].replace("−", "-")) == pytest.approx(loss, abs=2e-6)
    assert cells[3] == cells[4] and cells[0] == cells[1]


def test_other_bounds_mask_other_tokens(visit: Any, study: str, made_run: Any) -> None:
    page = visit(
        f"{study}#whatif?step=1&bounds=dppo_mask_high=0.05,dppo_mask_low=0.4,kl_tau=0", ".plain-table"
    )
    chosen, A = trainable(made_run, 1), made_run.column(1, "advantages")
    delta, ratio = made_run.column(1, "prob_delta"), made_run.column(1, "importance_ratio")
    out = chosen & np.where(A > 0, delta > 0.05, delta < -0.4)
    was = made_run.column(1, "is_masked") == 1
    note = f"{(out & ~was).sum()} tokens would be masked, {(was & ~out).sum()} would train"
    page.wait_for_selector(f"text={note}")
    loss = -(A * ratio)[chosen & ~out].sum() / 100
    cells = page.locator(".plain-table tbody tr").first.locator("td").all_inner_texts()
    assert float(cells[4].replace("−", "-")) == pytest.approx(loss, abs=2e-6)
    assert cells[2] == f"{(out & (A > 0)).sum()} / {(out & (A < 0)).sum()}"
    assert page.locator(".plain-table tbody th").all_inner_texts() == ["all", "math", "tools"]
    page.get_by_role("spinbutton", name="high, as a number").fill("1")
    page.get_by_role("spinbutton", name="high, as a number").press("Enter")
    page.wait_for_function("location.hash.includes('dppo_mask_high%3D1')")


def test_what_if_is_of_the_tokens_that_filters_leave(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#whatif?step=1&rank=1&filter=adv%20%3C%200", ".plain-table")
    rank = np.array([record["rank"] for record in made_run.steps[1]])[owners(made_run, 1)]
    chosen = trainable(made_run, 1) & (rank == 1) & (made_run.column(1, "advantages") < 0)
    low = (chosen & (made_run.column(1, "is_masked_low") == 1)).sum()
    page.wait_for_function(
        f"() => document.querySelectorAll('.plain-table td')[2].textContent === '0 / {low}'"
    )
    loss = made_run.column(1, "token_loss")[chosen].sum() / 100
    cells = page.locator(".plain-table tbody tr").first.locator("td").all_inner_texts()
    assert float(cells[4].replace("−", "-")) == pytest.approx(loss, abs=2e-6)
    assert not page.locator(".changed-cell").count()


def test_further_histograms_and_places_that_do_not_exist(visit: Any, study: str) -> None:
    page = visit(f"{study}#step?step=1", "text=16 records")
    titles = page.locator(".histograms h3:visible").all_inner_texts()
    page.get_by_label("all histograms").check()
    page.wait_for_selector("text=Staleness >> visible=true")
    further = page.locator(".histograms h3:visible").all_inner_texts()
    assert further == [*titles, "Log ratio", "Reward", "Staleness"]
    page.get_by_label("all histograms").uncheck()
    page.evaluate("() => $main.app.go({ brush: 'stale:1:1' })")  # one that filters is never hidden
    page.wait_for_selector("text=/[0-9]+ tokens in 4 of 16 records/")
    assert page.locator(".histograms h3:visible").all_inner_texts() == [*titles, "Staleness"]


@pytest.mark.parametrize("view", ["record", "group", "across"])
def test_a_record_that_is_not_there_is_said_so(browser: Any, study: str, view: str) -> None:
    page = browser.new_page()
    page.goto(f"{study}#{view}?step=1&record=99")
    page.wait_for_selector("text=Step 1 has 16 records, from 0 on; there is no record 99.")
    page.evaluate("() => $main.app.go({ record: 3 })")
    page.wait_for_selector(f".{view}-view")
    page.close()


@pytest.mark.parametrize(
    ("loss", "bounds", "masked", "value"),
    [
        ("dppo", {"dppo_mask_high": 0.2, "kl_tau": 0.1}, True, 0.1 * 0.25),
        (
            "dppo",
            {"dppo_mask_high": 0.4, "adv_tau": 2, "teacher_tau": 0.5},
            False,
            -(2 * 0.5 - 0.5 * 0.75) * 1.6487212707,
        ),
        ("icepop", {"min_ratio": 0.5, "max_ratio": 5}, False, -0.5 * 1.6487212707),
        ("ppo_clip", {"clip_high": 0.2}, True, -0.5 * 1.2),
        ("gspo", {"clip_high": 0.2}, False, -0.5 * 1.1051709181),
        ("cispo", {"clip_high": 0.4}, False, -1.4 * 0.5 * -0.25),
        ("tis", {"max_ratio": 2}, False, -1.6487212707 * 0.5 * -0.25),
    ],
)
def test_losses_by_hand(
    study_page: Any, loss: str, bounds: dict[str, float], masked: bool, value: float
) -> None:
    """A = 0.5, log π = −0.25, log μ = −0.75, log teacher = −1: ℓ = 0.5 (mean 0.1), r = e^0.5, Δ = 0.306."""
    token = {
        "advantages": 0.5,
        "prob_delta": 0.3064,
        "importance_ratio": 1.6487212707,
        "log_importance_ratio": 0.5,
        "sequence_log_ratio": 0.1,
        "trainer_logprobs": -0.25,
        "teacher_logprobs": -1,
    }
    decided = study_page.evaluate(
        """([loss, bounds, token]) =>
          $data_losses.LOSSES[loss].decide($views_what_if.boundsOf(loss, bounds, null), token)""",
        [loss, {"kl_tau": 0, **bounds}, token],
    )
    assert decided == {"loss": pytest.approx(value), "masked": masked, "high": masked, "low": False}


def test_the_page_has_every_loss_and_every_parameter_as_python_has_it(study_page: Any) -> None:
    """Each parameter at both ends of its slider and at its default, on tokens of every kind.

    Losses are below 10; torch rounds the bounds of a clip to float32, the page does not.
    """
    assert asset("data/losses.js") == script()
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 1, 30, 20]
    columns = {name: torch.rand(sum(lengths), generator=generator, dtype=torch.float64) for name in "ABCD"}
    pi, mu, teacher = (-3 * columns[name] for name in "ABC")
    advantages = torch.where(columns["D"] < 0.2, 0.0, columns["D"] - 0.6)
    teacher[::3] = torch.nan
    inputs = LossInputs(pi, mu, advantages, torch.full((60,), True), teacher, Ratios.of(pi, mu), lengths)
    tokens = {
        "advantages": advantages,
        "prob_delta": inputs.ratios.prob_delta,
        "importance_ratio": inputs.ratios.importance_ratio,
        "log_importance_ratio": inputs.ratios.log_importance_ratio,
        "sequence_log_ratio": inputs.mean_per_sequence(inputs.ratios.log_importance_ratio),
        "trainer_logprobs": pi,
        "teacher_logprobs": teacher,
    }
    page = {name: [None if math.isnan(x) else x for x in values.tolist()] for name, values in tokens.items()}
    losses = study_page.evaluate("() => $data_losses.LOSSES")
    assert losses.keys() == RL_LOSSES.keys()
    union, *_ = get_args(LossConfig)
    kinds = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(union)}
    for name, loss in losses.items():
        keys = {parameter["key"] for parameter in loss["parameters"]}
        assert keys == kinds[name].model_fields.keys() - {"type", "reduction"}
        assert loss["reduction"] == kinds[name].model_fields["reduction"].default
        for parameter, end in itertools.product(loss["parameters"], ("low", "usual", "high")):
            if name == "tis" and parameter["key"] == "max_ratio" and end == "low":
                continue  # a cap of 0 is refused: no token would have a weight
            config = kinds[name](type=name, **{parameter["key"]: parameter[end]})
            record = RL_LOSSES[name](inputs, config)
            found = study_page.evaluate(DECIDE, [name, {parameter["key"]: parameter[end]}, page])
            where = f"{name}, {parameter['key']} = {parameter[end]}"
            assert found["loss"] == near(record.token_loss, scale=10.0), where
            for side in ("masked", "high", "low"):
                mask = getattr(record, "is_masked" if side == "masked" else f"is_masked_{side}")
                assert found[side] == ([False] * 60 if mask is None else mask.tolist()), where


DECIDE = """([loss, chosen, columns]) => {
  const bounds = $views_what_if.boundsOf(loss, chosen, null);
  const decisions = columns.advantages.map((_, i) => $data_losses.LOSSES[loss].decide(bounds,
    Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i] ?? NaN]))));
  const keys = ["loss", "masked", "high", "low"];
  return Object.fromEntries(keys.map((key) => [key, decisions.map((each) => each[key])]));
}"""


@pytest.mark.parametrize("reduction", ["token", "sequence", "group"])
def test_a_mean_over_sequences_or_groups_weighs_tokens_as_python_does(
    study_page: Any, made_run: Any, reduction: str
) -> None:
    records = made_run.steps[1]
    counts = np.array([sum(record["loss_mask"]) for record in records])
    expected = sequence_weights(reduction, counts, [record["group_id"] for record in records])
    found = study_page.evaluate(
        """async (reduction) => {
          const { weights, means } = $views_what_if.recordsOf(await $main.app.run.stepTokens(1), reduction);
          return [[...weights], [...means]];
        }""",
        reduction,
    )
    assert found[0] == near(expected, terms=4, each=True)
    means = [np.array(r["log_importance_ratio"])[np.array(r["loss_mask"])].mean() for r in records]
    assert found[1] == near(means, terms=max(counts), scale=4.0)


def test_a_run_that_weighs_by_sequence_gives_back_its_record(
    visit: Any, made_run: Any, page_of: Any, tmp_path: Path
) -> None:
    """Under GSPO, whose mean is over sequences; the address keeps another choice."""
    loss = GspoLossConfig(type="gspo", clip_low=0.1, clip_high=0.1)
    folder = tmp_path / "gspo"
    shutil.copytree(made_run.folder, folder)
    (folder / "configs" / "rl.toml").write_text(
        '[trainer.loss]\ntype = "gspo"\nclip_low = 0.1\nclip_high = 0.1\nreduction = "sequence"\n'
    )
    path = folder / "token_exports" / "step_1" / "rank_0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    weights = sequence_weights(
        "sequence", np.array([sum(r["loss_mask"]) for r in records]), [""] * len(records)
    )
    for record, weight in zip(records, weights.tolist(), strict=True):
        pi, mu, advantages = (
            torch.tensor(record[name], dtype=torch.float64)
            for name in ("trainer_logprobs", "inference_logprobs", "advantages")
        )
        mask = torch.tensor(record["loss_mask"])
        made = gspo_loss(LossInputs(pi, mu, advantages, mask, None, Ratios.of(pi, mu), [len(pi)]), loss)
        decisions = {"token_loss": weight * made.token_loss, "is_masked": made.is_masked}
        decisions |= {"is_masked_high": made.is_masked_high, "is_masked_low": made.is_masked_low}
        record |= {name: values.tolist() for name, values in decisions.items()}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = visit(f"{page_of(folder)}#whatif?step=1", ".verdict .good")
    assert "masks and loss are those recorded" in page.locator(".verdict").inner_text()
    page.get_by_label("Mean over").select_option("group")
    page.wait_for_function("location.hash.includes('reduction%3Dgroup')")
    assert not page.locator(".verdict .good").count()


@pytest.mark.parametrize(
    ("advantage", "rule"),
    [
        (0.5, "A > 0 and r = 0.5 ≤ 1 + clip_high = 1.2"),
        (-0.5, "A < 0 and r = 0.5 < 1 − clip_low = 0.8"),
        (0, "A = 0: nothing to clip"),
    ],
)
def test_the_rule_of_ppo_clip_by_the_sign_of_the_advantage(
    study_page: Any, advantage: float, rule: str
) -> None:
    masked = int(advantage < 0)
    token = {
        **{"loss_mask": 1, "sampled": 1, "advantages": advantage, "importance_ratio": 0.5},
        **{"is_masked": masked, "is_masked_low": masked, "is_masked_high": 0},
    }
    found = study_page.evaluate(
        """(token) => $views_token.reasonOf(
            { value: (name) => token[name], field: () => "rl" }, 3,
            { type: "ppo_clip", clip_low: 0.2, clip_high: 0.2 }, false).rule""",
        token,
    )
    assert found == rule


def test_a_group_stands_side_by_side_from_best_to_worst(visit: Any, study: str) -> None:
    page = visit(f"{study}#group?step=0&record=2", ".member")
    assert page.locator(".member .link").all_inner_texts() == [f"record {index}" for index in (0, 2, 1, 3)]
    assert page.locator(".member[aria-current] .link").inner_text() == "record 2"
    text = page.locator(".member").nth(2).inner_text()
    assert "0.250" in text and "−0.250" in text
    # “the answer is 4” and “the answer is 5” part at the last character; “no idea” at the first.
    header = page.evaluate("async () => (await $main.app.run.record(0, 0)).segments[1][1]")
    leaves = [
        int(text.partition("own way from token ")[2].split()[0])
        for text in page.locator(".member header small").all_inner_texts()[1:]
    ]
    start = header + 1 + len("assistant\n")
    assert leaves == [start + len("the "), start + len("the answer is "), start]


def test_an_example_is_followed_across_steps(visit: Any, study: str) -> None:
    page = visit(f"{study}#across?step=2&record=1", ".diff")
    assert "12 rollouts in 3 steps" in page.locator(".across-view").inner_text()
    page.locator(".compare select").first.select_option(label="step 0, record 1, reward 0.25")
    page.wait_for_function("document.querySelectorAll('.diff del').length === 1")
    assert page.locator(".diff del").inner_text() == "0" and page.locator(".diff ins").inner_text() == "2"


def test_search_finds_text_patterns_and_ids(visit: Any, study: str, made_run: Any, encode: Any) -> None:
    page = visit(f"{study}#step?step=1", "tbody tr[data-row]")

    def find(text: str, within: str) -> str:
        page.get_by_role("combobox", name="Search in").select_option(within)
        page.get_by_role("searchbox", name="Search").fill(text)
        page.get_by_role("searchbox", name="Search").press("Enter")
        page.wait_for_function("$main.app.topBar.results.status.textContent.includes('hit')")
        page.wait_for_timeout(150)
        return page.locator(".results-status").inner_text()

    assert find("ANSWER is", "step").startswith("7 hits in 7 records")
    assert find("/answer is [45]/", "run").startswith("23 hits in 23 records")
    ids = encode("calc(")
    assert find("#" + " ".join(map(str, ids)), "step").startswith("8 hits in 8 records")
    page.locator(".results li button").first.click()
    page.wait_for_selector(".token.pinned")
    assert page.locator(".token.match").all_inner_texts() == list("calc(")
    page.get_by_role("searchbox", name="Search").fill("/(/")
    page.get_by_role("searchbox", name="Search").press("Enter")
    assert "Invalid regular expression" in page.locator(".fault").inner_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kl > 0.05 & adv < 0", lambda c: (c["mismatch_kl"] > 0.05) & (c["advantages"] < 0)),
        ("env = tools & masked", lambda c: (c["env"] == "tools") & (c["is_masked"] == 1)),
        ("!(adv > 0) | entropy >= 2.5", lambda c: ~(c["advantages"] > 0) | (c["entropy"] >= 2.5)),
        ("logratio < -0.5", lambda c: c["log_importance_ratio"] < -0.5),
        ("stop = length & at > 30", lambda c: (c["stop"] == "length") & (c["position_ids"] > 30)),
    ],
)
def test_filters_mean_what_they_say(study_page: Any, made_run: Any, text: str, expected: Any) -> None:
    names = ("mismatch_kl", "advantages", "is_masked", "entropy", "log_importance_ratio", "position_ids")
    columns: dict[str, Any] = {name: made_run.column(1, name) for name in names}
    records = made_run.steps[1]
    columns["env"] = np.array([record["env_name"] for record in records])[owners(made_run, 1)]
    columns["stop"] = np.array([record["stop_reason"] for record in records])[owners(made_run, 1)]
    found = study_page.evaluate(
        """async (filter) => { const { run } = $main.app; const all = await run.stepTokens(1);
        return [...$data_select.select(all, run.vocabulary, { env: "", filter, brush: "" }).tokens]; }""",
        text,
    )
    assert np.array_equal(np.array(found) == 1, trainable(made_run, 1) & expected(columns))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kl >", "kl > what?"),
        ("kll > 1", "no field “kll”"),
        ("(kl > 1", "a ( is not closed"),
        ("kl > big", "kl is a number, “big” is not"),
        ("kl > 1 adv < 0", "expected & or | before “adv”"),
    ],
)
def test_a_wrong_filter_says_what_is_wrong(study_page: Any, text: str, reason: str) -> None:
    code = "(text) => { try { $data_select.parseFilter(text); } catch (error) { return error.message; } }"
    assert study_page.evaluate(code, text).startswith(reason)


def test_what_differs_between_two_sequences(study_page: Any) -> None:
    parts = study_page.evaluate("() => $views_across.diff([1, 2, 3, 4, 9], [1, 3, 4, 5, 9])")
    assert [(part["kind"], part["start"], part["end"]) for part in parts] == [
        ("same", 0, 1),
        ("first", 1, 2),
        ("same", 1, 3),
        ("second", 3, 4),
        ("same", 4, 5),
    ]


def test_every_ink_reads_on_its_colour(study_page: Any) -> None:
    worst = study_page.evaluate(
        """() => Math.min(...["light", "dark"].flatMap((theme) =>
        ["log", "sequential", "diverging"].flatMap((kind) => $draw_scale.palette(theme, kind).map(
        ([paper, ink]) => $draw_scale.contrast(paper, ink)))))"""
    )
    assert worst >= 4.5


def test_the_hash_says_everything_and_takes_anything(study_page: Any) -> None:
    turned = study_page.evaluate(
        """() => { const state = { ...$state.DEFAULTS, view: "worst", step: 3, token: 0, masks: false,
        filter: "kl > 1 & env = a=b", bounds: "kl_tau=0", up: true };
        const turned = $state.parse($state.serialise(state));
        return [turned, state, $state.parse("#?step=x&nonsense=1")]; }"""
    )
    assert turned[0] == turned[1] and turned[2] == study_page.evaluate("() => $state.DEFAULTS")
