"""A real browser, for whatever a page may see or do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.viewer import find_browser

CHROMIUM = find_browser()
NO_BROWSER = "NO BROWSER TEST: install chromium to test for real what a page shows and may do"


@contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """While it is open, no other test could run an event loop of its own: not for a whole session."""
    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    from playwright.sync_api import sync_playwright

    quiet = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*quiet, *options])
        yield browser
        browser.close()
