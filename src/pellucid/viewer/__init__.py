"""Every token of a run, and why it did or did not train: in the browser, as a page to send, in a terminal.

    access, roles, vocabulary   read: exports and run folders, who speaks, the text of ids
    rows, summary, encode       rows per record, points per step, blobs for the browser
    page, server, terminal      the three ways to show it
    source, queries             the server's answers: bytes by name, questions about a whole run
    frame, assets/              the page itself: ES modules without a build step (data, draw, views)

Whatever comes from a run is shown as text and never as markup. What a page leaves out it says so.
"""

import html
import logging
from pathlib import Path

from pellucid.config.tools import ViewSettings
from pellucid.errors import ConfigError, DataError
from pellucid.viewer.access import Exports, Selection
from pellucid.viewer.page import PAGE_BUDGET, page_text, write_page
from pellucid.viewer.source import ServedRun

__all__ = ["View", "run_view"]

log = logging.getLogger(__name__)


def run_view(settings: ViewSettings) -> None:
    if settings.output is not None:
        _require_file(settings.output)
    exports = _open(settings.path, Selection(settings.step, settings.rank, settings.env_name))
    if settings.terminal:
        from pellucid.viewer.terminal import show

        show(
            exports,
            tokenizer=settings.tokenizer,
            record_index=settings.record_index,
            trust_remote_code=settings.trust_remote_code,
        )
    elif settings.output is not None:
        page = write_page(
            exports,
            settings.output,
            tokenizer=settings.tokenizer,
            budget=None if settings.all_records else PAGE_BUDGET,
            start_record=settings.record_index,
            max_mismatch=settings.max_mismatch,
            trust_remote_code=settings.trust_remote_code,
        )
        rest = "" if page.is_whole else " (--all-records for the rest)"
        log.info("%s: %s%s; opens in any browser without a server", settings.output, page, rest)
    else:
        from pellucid.viewer.server import serve

        run = ServedRun(
            exports,
            tokenizer=settings.tokenizer,
            start_record=settings.record_index,
            max_mismatch=settings.max_mismatch,
            trust_remote_code=settings.trust_remote_code,
        )
        serve(run, host=settings.host, port=settings.port, open_browser=settings.open_browser)


class View:
    """An export in a notebook: the last expression of a cell shows it.

    View("outputs/demo/token_exports/step_40")
    """

    def __init__(self, path: str | Path, *, tokenizer: str | None = None, height: int = 760) -> None:
        self._exports = _open(Path(path), Selection())
        self._tokenizer = tokenizer
        self._height = height

    def _repr_html_(self) -> str:
        page = html.escape(page_text(self._exports, tokenizer=self._tokenizer), quote=True)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" title="pellucid viewer" '
            f'width="100%" height="{self._height}" frameborder="0"></iframe>'
        )


def _require_file(output: Path) -> None:
    """Refuses a page that could not be written where it is wanted."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file, such as {output / 'page.html'}")
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConfigError(f"--output {output} is below {above}, which is a file; name a file in a folder")


def _open(path: Path, selection: Selection) -> Exports:
    exports = Exports(path.resolve(), selection)
    if not exports.steps():
        raise DataError(f"{path} holds no records of {selection}")
    return exports
