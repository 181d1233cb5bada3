"""Records and tokens in a real browser: every token as text, its numbers, and why it did or did not train."""

import csv
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


def tokens(page: Any) -> list[str]:
    return page.locator(".token").evaluate_all("nodes => nodes.map((node) => node.textContent)")


def test_every_token_is_text_and_nothing_of_a_run_is_markup(visit: Any, study: str, hostile: str) -> None:
    page = visit(f"{study}#record?step=1&record=0", ".token")
    shown = tokens(page)
    text = "".join(shown)
    assert text.startswith("<|im_start|>user⏎" + hostile.replace(" ", "·"))
    assert text.count(hostile.replace(" ", "·")) == 2
    assert "⟨U+202E⟩no·é👩‍🚀" in text.replace("‥", "")
    assert shown[-1] == "<|im_end|>"
    assert page.locator("img").count() == 0 and page.title() == "study · pellucid"


def test_a_character_of_several_tokens_is_shown_by_its_first(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#record?step=0&record=8", ".token")
    assert len(tokens(page)) == len(made_run.steps[0][8]["token_ids"])
    text = "".join(tokens(page))
    assert "4·é‥🙂‥‥‥<|im_end|>" in text
    assert page.locator(".gutter b").all_inner_texts() == ["user", "assistant", "tool", "assistant"]


def test_a_token_tells_its_numbers_and_the_rule_that_decided(visit: Any, study: str, made_run: Any) -> None:
    record = made_run.steps[2][1]  # advantage −0.25
    masked = record["is_masked"].index(True)
    page = visit(f"{study}#record?step=2&record=1&token={masked}", ".details-body")
    details = page.locator(".details").inner_text()
    delta = f"{record['prob_delta'][masked]:.4f}".replace("-", "−")
    assert "Masked low" in details
    assert f"A ≤ 0 and Δ = {delta} < −dppo_mask_low = −0.2" in details
    kl = np.float32(record["mismatch_kl"][masked])
    assert f"{kl:.7g}"[:8] in details.replace("\n", " ")
    assert page.locator(".token.pinned").get_attribute("class") == "token masked-low pinned"
    kept = next(i for i, m in enumerate(record["loss_mask"]) if m and not record["is_masked"][i])
    page.locator(f'.token[data-i="{kept}"]').click()
    assert "Its advantage −0.250 pushes its probability down." in page.locator(".details").inner_text()
    page.locator('.token[data-i="2"]').click()
    assert "the policy did not sample it" in page.locator(".details").inner_text()
    assert page.locator("#spoken").inner_text().startswith("Token 2 of")


def test_in_a_skipped_step_no_token_is_trained_or_masked(
    visit: Any, page_of: Any, made_run: Any, tmp_path: Path
) -> None:
    """By the page and by the terminal."""
    run = tmp_path / "run"
    shutil.copytree(made_run.folder, run)
    lines = [
        {"step": step, "loss": None if step == 2 else 0.1, "skipped_steps": int(step == 2)}
        for step in range(3)
    ]
    (run / "metrics" / "trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    token = made_run.steps[2][1]["is_masked"].index(True)
    study = page_of(run)
    page = visit(f"{study}#record?step=2&record=1&token={token}", ".details-body")
    assert "Skipped" in page.locator(".details").inner_text()
    assert "no weights moved" in page.locator(".details-why").inner_text()
    for address, fact in (
        ("run", "1 step"),
        ("step?step=2", "loss or gradient not finite: no weights moved"),
    ):
        page = visit(f"{study}#{address}", ".facts")
        facts = page.locator(".facts > div").evaluate_all(
            "nodes => nodes.map((node) => [...node.children].map((child) => child.textContent))"
        )
        assert ["skipped", fact] in facts
    console = Console(file=io.StringIO(), record=True, width=120, markup=False)
    show(Exports(run), tokenizer=None, record_index=1, console=console)
    text = console.export_text()
    assert "skipped: its loss or gradient is not finite, no weights moved" in text
    states = {
        line.split()[-1] for line in text.partition("outliers")[2].partition("ledger")[0].splitlines() if line
    }
    assert "trained" not in states and "masked" not in states and "skipped" in states


def test_colours_follow_the_values_and_context_has_none(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#record?step=0&record=0&fill=delta&scope=record", ".token")
    record = made_run.steps[0][0]
    trainable = [i for i, m in enumerate(record["loss_mask"]) if m]
    backgrounds = page.locator(".token").evaluate_all("nodes => nodes.map((node) => node.style.background)")
    assert all(bool(background) == record["loss_mask"][i] for i, background in enumerate(backgrounds))
    high = max(trainable, key=lambda i: record["prob_delta"][i])
    low = min(trainable, key=lambda i: record["prob_delta"][i])

    def channels(colour: str) -> list[int]:
        return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]

    assert channels(backgrounds[high])[2] > channels(backgrounds[high])[0]  # blue above 0
    assert channels(backgrounds[low])[0] > channels(backgrounds[low])[2]  # orange below


def test_keys_move_through_tokens_records_steps_and_looks(visit: Any, study: str, made_run: Any) -> None:
    page = visit(f"{study}#record?step=1&record=2", ".token")
    state = "() => $state.parse(location.hash)"
    press = page.keyboard.press

    def after(key: str) -> dict[str, Any]:
        press(key)
        page.wait_for_timeout(60)
        return page.evaluate(state)

    assert after("j")["record"] == 3 and after("k")["record"] == 2
    assert after("l")["step"] == 2 and after("h")["step"] == 1
    assert after("Escape")["token"] == -1  # a record opens with the token that stands out
    assert after("ArrowRight")["token"] == 0 and after("ArrowRight")["token"] == 1
    assert after("Escape")["token"] == -1
    record = made_run.steps[1][2]
    masked = [i for i, value in enumerate(record["is_masked"]) if value]
    first = after("n")["token"]
    assert record["loss_mask"][first] and first <= masked[0]
    assert after("n")["token"] > first and after("N")["token"] == first
    assert after("2")["fill"] == "entropy" and after("9")["fill"] == "stale"
    assert after("m")["masks"] is False and page.locator(".masked-high, .masked-low").count() == 0
    assert after("t")["table"] is True
    assert page.locator(".token-table tbody tr[data-row]").count() > 10
    assert page.locator(".token-table tbody td.text").first.bounding_box()["width"] > 100  # tokens have room
    assert after("g")["view"] == "group" and after("r")["view"] == "record" and after("w")["view"] == "worst"
    press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Search"
    press("Escape")
    press("?")
    assert page.locator("#help dt").count() >= 17
    press("Escape")
    assert not page.locator("#help").is_visible()


def test_a_link_restores_exactly_what_was_seen(visit: Any, study: str) -> None:
    look = "fill=entropy&scope=step&masks=0&filter=kl+%3E+0.01&search=answer"
    address = f"{study}#record?step=1&record=5&token=20&{look}"
    first = visit(address, ".token.pinned")
    second = visit(first.url, ".token.pinned")
    assert second.url == first.url == address

    def picture(page: Any) -> Any:
        return page.evaluate(
            """() => [document.querySelector('.token.pinned').dataset.i,
            document.querySelector('.look select').value,
            [...document.querySelectorAll('.token')].map((n) => [n.className, n.style.background]),
            document.querySelector('.details').textContent, document.querySelector('.tokens').scrollTop]"""
        )

    assert picture(first) == picture(second)
    assert picture(first)[0] == "20" and first.locator(".token.match").count() > 0
    first.keyboard.press("j")
    first.wait_for_function("location.hash.includes('record=6')")
    first.go_back()
    first.wait_for_selector(".token.pinned")
    assert first.url == address


def test_a_record_leaves_as_json_csv_parquet_and_picture(
    visit: Any, study: str, made_run: Any, tmp_path: Any
) -> None:
    page = visit(f"{study}#record?step=0&record=0", ".token")
    record = made_run.steps[0][0]
    copied = json.loads(
        page.evaluate("async () => $data_save.recordAsJson(await $main.app.run.record(0, 0))")
    )
    assert copied["token_ids"] == record["token_ids"] and copied["is_masked"] == record["is_masked"]
    assert np.array_equal(np.float32(copied["trainer_logprobs"]), np.float32(record["trainer_logprobs"]))
    saved = {}
    for name in ("CSV", "Parquet", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=name, exact=True).click()
        saved[name] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[name])
    rows = list(csv.DictReader(io.StringIO(saved["CSV"].read_text(encoding="utf-8"), newline="")))
    assert [int(row["token_ids"]) for row in rows] == record["token_ids"]
    table = pq.read_table(saved["Parquet"])
    assert table["token_ids"].to_pylist() == record["token_ids"]
    assert table["text"].to_pylist()[:1] == ["<|im_start|>"]
    assert table["entropy"].to_pylist() == pytest.approx(record["entropy"])
    assert saved["PNG"].read_bytes()[:4] == b"\x89PNG"


def test_a_record_that_contradicts_itself_is_said_to(
    visit: Any, page_of: Any, write_export: Any, make_record: Any
) -> None:
    record = make_record([("user", "hi"), ("assistant", "ok")])
    at = record["loss_mask"].index(True)
    record["mismatch_kl"][at] = 0.75
    page = visit(f"{page_of(write_export(record))}#record?token={at}", ".details-warning")
    assert (
        "mismatch_kl was recorded as 0.75, but r − ℓ − 1 gives"
        in page.locator(".details-warning").inner_text()
    )
    page.keyboard.press("ArrowRight")
    page.wait_for_function("(at) => document.querySelector('.token.pinned').dataset.i !== at", arg=str(at))
    assert page.locator(".details-warning").count() == 0


def test_of_a_very_long_record_only_what_is_in_sight_is_in_the_document(
    visit: Any, page_of: Any, write_export: Any
) -> None:
    size = 131_072
    generator = np.random.default_rng(0)
    record = {
        "step": 0,
        "token_ids": generator.integers(0, 50_000, size).tolist(),
        "loss_mask": [i > 1000 for i in range(size)],
        "mismatch_kl": generator.exponential(0.01, size).round(5).tolist(),
    }
    page = visit(f"{page_of(write_export(record))}#record?token=130000", ".token.pinned")
    assert page.locator(".token.pinned").inner_text() == f"#{record['token_ids'][130_000]}"
    assert page.evaluate("document.getElementsByTagName('*').length") < 5000
    page.locator(".tokens").evaluate("node => { node.scrollTop = 0; }")
    page.wait_for_selector('.token[data-i="0"]')
    assert page.locator('.token[data-i="130000"]').count() == 0


def test_another_record_is_drawn_once_and_keeps_its_token_in_sight(
    visit: Any, page_of: Any, write_export: Any
) -> None:
    """Lines in sight first, then those around them. A new width keeps the token there."""
    size = 4096
    generator = np.random.default_rng(0)
    records = [
        {
            "step": 0,
            "export_sequence_idx": index,
            "token_ids": generator.integers(0, 50_000, size).tolist(),
            "loss_mask": [True] * size,
            "mismatch_kl": [9.0 if i == 3000 else 0.01 for i in range(size)],
        }
        for index in range(2)
    ]
    page = visit(f"{page_of(write_export(*records))}#record?record=0&token=5", ".token.pinned")
    page.evaluate("""() => {
      const { text } = $main.app.view;
      const make = text.token.bind(text);
      window.made = [];
      text.token = (at) => { made.push(at); return make(at); };
    }""")
    page.keyboard.press("j")
    page.wait_for_selector('.token.pinned[data-i="3000"]')
    page.wait_for_function("() => $main.app.view.text.overscan > 1")
    made = page.evaluate("window.made")
    shown = page.locator(".token").evaluate_all("nodes => nodes.map((node) => Number(node.dataset.i))")
    assert sorted(made) == sorted(shown)  # so none of them twice
    assert page.evaluate("document.activeElement.dataset.i") == "3000"

    page.set_viewport_size({"width": 1000, "height": 850})
    page.wait_for_function("() => $main.app.view.text.laidOutFor === $main.app.view.text.root.clientWidth")
    pinned, tokens = page.locator(".token.pinned").bounding_box(), page.locator(".tokens").bounding_box()
    assert tokens["y"] <= pinned["y"] <= tokens["y"] + tokens["height"]


def test_a_token_is_explained_by_the_rule_that_trained_its_step(
    visit: Any, page_of: Any, made_run: Any, tmp_path: Path
) -> None:
    """A run that was resumed at step 2 with another loss, in a page of its own."""
    run = tmp_path / "study"
    shutil.copytree(made_run.folder, run)
    losses = {
        0: 'type = "dppo"\ndppo_mask_low = 0.2\ndppo_mask_high = 0.2\nkl_tau = 0.001\n',
        2: 'type = "icepop"\nmin_ratio = 0.5\nmax_ratio = 5.0\n',
    }
    for step, loss in losses.items():
        (run / "configs" / f"step_{step}").mkdir()
        (run / "configs" / f"step_{step}" / "trainer.toml").write_text(f"[trainer.loss]\n{loss}")
    address = page_of(run)
    token = made_run.steps[1][1]["loss_mask"].index(True)
    page = visit(f"{address}#record?step=1&record=1&token={token}", ".details-body")
    assert "dppo_mask_low = −0.2" in page.locator(".details-rule").inner_text()
    token = made_run.steps[2][1]["loss_mask"].index(True)
    page = visit(f"{address}#record?step=2&record=1&token={token}", ".details-body")
    assert "min_ratio = 0.5" in page.locator(".details-rule").inner_text()
    page = visit(f"{address}#whatif?step=1", ".verdict .good")
    assert "the run's: 0.2" in page.locator(".controls").inner_text()
    page = visit(f"{address}#whatif?step=2", ".plain-table")
    assert "the run's: 5" in page.locator(".controls").inner_text()
    page = visit(f"{address}#run", ".facts")
    assert "dppo, icepop from step 2" in page.locator(".facts").inner_text()
