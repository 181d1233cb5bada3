"""A real browser, for whatever a page may see or do."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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
