"""One self-contained HTML page from token exports: every token, its numbers, why it did or did not train.

The page opens from a file, offline. Whatever comes from a run reaches it compressed, never as markup, and
is shown as text only. What a page leaves out it says so, in a line that cannot be missed.
"""

import logging
import os
from pathlib import Path
from typing import Protocol

from pellucid.viewer.collect import collect
from pellucid.viewer.page import render_page
from pellucid.viewer.run_folder import RunFolder

__all__ = ["ViewSettings", "run_view"]

log = logging.getLogger(__name__)


class ViewSettings(Protocol):
    @property
    def path(self) -> Path:
        """Run folder, token_exports folder, step folder or `.jsonl` file."""

    @property
    def output(self) -> Path | None:
        """The page; default: `page.html` in the run folder, or beside any other input."""

    @property
    def tokenizer(self) -> str | None:
        """Folder or hub name; default: the model of the run's configs where that is a local folder."""


def run_view(settings: ViewSettings) -> None:
    """Writes the page, whole or not at all."""
    path = settings.path.resolve()
    run = RunFolder.around(path)
    output = settings.output or (path if path == run.folder else path.parent) / "page.html"
    page = render_page(collect(path, run, settings.tokenizer))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.write_text(page, encoding="utf-8")
    partial.replace(output)
    log.info("%s: %.1f MB, opens in any browser without a server", output, len(page) / 1e6)
