"""The page in a real browser: it opens from a file, under its own policy, with hostile tokens inert."""

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pellucid.viewer import run_view

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER TEST: install chromium to open the page for real")
def test_the_page_opens_and_shows_every_token_as_text(
    write_run: Any, settings: Any, tokenizer_folder: Path, hostile: str, tmp_path: Path
) -> None:
    run = write_run(env_name=hostile)
    run_view(settings(run, tokenizer=str(tokenizer_folder)))
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", (run / "page.html").as_uri() + "#2/11"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    dom = done.stdout.partition('<script type="application/json"')[0]
    tokens = re.findall(r'<span class="(token[^"]*)" data-index="(\d+)"[^>]*>(.*?)</span>', dom, re.DOTALL)
    assert [int(index) for _, index, _ in tokens] == list(range(12))
    texts = [html.unescape(text) for _, _, text in tokens]
    assert texts[3:6] == ["·two", "<|im_end|>", "⏎"]
    assert texts[9:] == [hostile.replace(" ", "·"), "⟨U+202E⟩", "<|im_end|>"]
    classes = [names.split() for names, _, _ in tokens]
    assert "plain" in classes[0] and "masked-high" in classes[11] and "kl-0" in classes[10]
    assert "Masked high" in dom and "4 records" in dom and "2 steps" in dom
    assert re.findall(r'<tr data-index="(\d)" aria-current="true"', dom) == ["2"]
    assert "<img" not in dom
