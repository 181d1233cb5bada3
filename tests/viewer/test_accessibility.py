"""axe finds nothing serious in any view, in either theme, in a narrow window."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow

VIEWS = ("run", "timeline", "rollouts", "step", "record", "group", "across", "worst", "whatif")


@pytest.mark.parametrize(("theme", "width"), [("light", 1300), ("dark", 1300), ("light", 400)])
def test_nothing_serious_in_any_view(
    browser: Any, violations: Any, study: str, theme: str, width: int
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 850}, color_scheme=theme, bypass_csp=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"{study}#record?step=1&record=4&token=30")
    page.wait_for_selector(".token.pinned")
    for view in VIEWS:
        page.evaluate(f"() => $main.app.go({{view: '{view}'}})")
        page.wait_for_selector(f"[data-view='{view}'] .view")
        page.wait_for_timeout(150)
        found = violations(page)
        assert found == [], f"{view}: {found}"
        overflow = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{view} is wider than its window"
    context.close()


def test_tokens_are_reached_and_spoken_by_keyboard_alone(visit: Any, study: str) -> None:
    page = visit(f"{study}#record?step=0&record=0&token=0", ".token.pinned")
    assert page.locator('.token[tabindex="0"]').count() == 1
    page.locator('.token[tabindex="0"]').focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.activeElement.dataset.i === '1'")
    assert page.locator("#spoken").inner_text().startswith("Token 1 of ")
    page.keyboard.press("t")
    page.wait_for_selector(".token-table table")
    assert page.locator('.token-table tr[aria-current="true"]').count() == 1
