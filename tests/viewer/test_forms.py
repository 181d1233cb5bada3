"""Exports of other kinds open, too: sft, opd, other trainers' columns, the older form, ids without text."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

VIEWS = ("run", "step", "record", "group", "across", "worst", "whatif")
BASE = (
    "step",
    "rank",
    "export_sequence_idx",
    "env_name",
    "token_ids",
    "position_ids",
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "trainer_logprobs",
)


def visit_all(page: Any) -> dict[str, str]:
    """The text of every view; an error on the way fails in `visit`."""
    texts = {}
    for view in VIEWS:
        page.evaluate(f"() => $main.app.go({{view: '{view}'}})")
        page.wait_for_function(f"$main.app.viewName === '{view}' && document.querySelector('.view')")
        page.wait_for_timeout(80)
        texts[view] = page.locator("#main").inner_text()
        assert page.locator(".notice.error").count() == 0, texts[view]
    return texts


@pytest.fixture
def record(make_record: Any) -> dict[str, Any]:
    return make_record([("user", "hi"), ("assistant", "hello there")])


def test_sft_has_no_ratios_and_says_so(visit: Any, page_of: Any, write_export: Any, record: Any) -> None:
    absent = [None] * len(record["token_ids"])
    names = ("mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta", "is_masked")
    names += ("is_masked_high", "is_masked_low", "advantages", "rewards")
    nulls = dict.fromkeys(names, absent)
    sft = record | nulls | {"training_mode": "sft", "reward": None, "advantage": None}
    page = visit(page_of(write_export(sft, sft)))
    texts = visit_all(page)
    assert "Mismatch KL is without meaning here" in texts["record"]
    assert "There is no trust region here" in texts["whatif"]
    page.evaluate("() => $main.app.go({view: 'record', token: 25})")
    page.wait_for_selector(".details-body")
    assert "A supervised target: its loss is −log π." in page.locator(".details").inner_text()


def test_opd_is_masked_by_its_own_bounds(visit: Any, page_of: Any, write_export: Any, record: Any) -> None:
    teacher = [value - 0.5 for value in record["trainer_logprobs"]]
    opd = record | {"training_mode": "opd", "teacher_logprobs": teacher}
    page = visit(page_of(write_export(opd)))
    texts = visit_all(page)
    assert "tokens of other training modes left out" in texts["whatif"]
    kept = next(i for i, m in enumerate(record["loss_mask"]) if m and not record["is_masked"][i])
    page.evaluate(f"() => $main.app.go({{view: 'record', token: {kept}}})")
    page.wait_for_selector(".details-body")
    details = page.locator(".details").inner_text()
    assert "Distilled" in details and "dppo_mask_high = 0.2" in details and "teacher logprob" in details


def test_the_columns_of_other_trainers_are_enough(
    visit: Any, page_of: Any, write_export: Any, record: Any, tokenizer_folder: Path
) -> None:
    foreign = {name: record[name] for name in BASE}
    page = visit(page_of(write_export(foreign, foreign), tokenizer=str(tokenizer_folder)))
    texts = visit_all(page)
    assert "This record belongs to no group" in texts["group"]
    assert "This record has no example id" in texts["across"]
    assert "masks are not recorded" in texts["whatif"]
    assert page.evaluate("async () => (await $main.app.run.record(0, 0)).segments.map(([role]) => role)") == [
        "user",
        "assistant",
    ]


def test_the_older_form_with_an_object_per_token(
    visit: Any, page_of: Any, write_export: Any, record: Any
) -> None:
    names = {"id": "token_ids", "loss_mask": "loss_mask", "inference_logprob": "inference_logprobs"}
    names |= {"trainer_logprob": "trainer_logprobs", "entropy": "entropy", "mismatch_kl": "mismatch_kl"}
    size = len(record["token_ids"])
    older = {"tokens": [{key: record[name][i] for key, name in names.items()} for i in range(size)]}
    page = visit(page_of(write_export(older)))
    visit_all(page)
    entropy = page.evaluate("async () => [...(await $main.app.run.record(0, 0)).column('entropy')]")
    assert entropy == pytest.approx(record["entropy"])
    assert page.locator("#notes").inner_text().startswith("Tokens are shown as ids: no tokenizer was given")


def test_every_number_reaches_the_browser_unchanged(study_page: Any, made_run: Any) -> None:
    names = (
        "token_ids",
        "inference_logprobs",
        "trainer_logprobs",
        "entropy",
        "token_loss",
        "policy_versions",
    )
    derived = (
        "mismatch_kl",
        "log_importance_ratio",
        "importance_ratio",
        "prob_delta",
        "rewards",
        "position_ids",
    )
    code = (
        """async (name) => { const all = await $main.app.run.stepTokens(2); return [...all.column(name)]; }"""
    )
    for name in names:
        assert study_page.evaluate(code, name) == made_run.column(2, name).astype("float32").tolist(), name
    for name in derived:
        assert study_page.evaluate(code, name) == pytest.approx(made_run.column(2, name), rel=1e-5, abs=1e-6)
