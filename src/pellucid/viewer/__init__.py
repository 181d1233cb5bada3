"""Every token of a run, and why it did or did not train: in the browser, as a page to send, in a terminal.

    access, rollouts            read: exports and run folders, saved rollouts
    digest, runs                several runs: a run as a row of a list, what lays them over each other
    roles, vocabulary           who speaks, the text of ids
    rows, summary, encode       rows per record, points per step, blobs for the browser
    page, server, terminal      the three ways to show it
    timeline, trace             who worked and who waited, for the page and for Perfetto
    source, queries             the server's answers: bytes by name, questions about a whole run
    frame, assets/              the page itself: ES modules without a build step (data, draw, views)

Whatever comes from a run is shown as text and never as markup. What a page leaves out it says so.
"""

import html
import logging
import os
import shlex
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pellucid.config.tools import ViewSettings
from pellucid.errors import ConfigError, DataError
from pellucid.export.dumps import find_dump
from pellucid.viewer.access import Exports, RunFolder, Selection
from pellucid.viewer.page import PAGE_BUDGET, page_text, write_page, write_runs_page
from pellucid.viewer.runs import RunList, differing, find_runs, run_table, settings_table
from pellucid.viewer.source import ServedRun

__all__ = ["View", "run_view"]

log = logging.getLogger(__name__)


def run_view(settings: ViewSettings) -> None:
    if settings.output is not None:
        _require_file(settings.output)
    if settings.path is None or settings.others or _holds_runs(settings.path):
        _show_list(settings)
        return
    exports = _open(settings.path, Selection(settings.step, settings.rank, settings.env_name))
    _require_record(exports, settings.record_index)
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
        from pellucid.viewer.server import make_app

        run = _served(exports, settings)
        threading.Thread(target=run.summarise, daemon=True).start()
        try:
            _serve(partial(make_app, run), settings)
        finally:
            run.close()


def _show_list(settings: ViewSettings) -> None:
    """Serves, writes or prints several runs; without a path those in the current folder and in `outputs`."""
    if settings.path is None:
        places = [Path.cwd()]
        if not find_runs(places[0]):
            raise DataError(
                f"there is no run in {places[0]} and in its outputs; name a run folder, an export or a file: "
                "`pellucid view PATH`"
            )
    else:
        places = [
            RunFolder.around(path.resolve()).folder or path for path in (settings.path, *settings.others)
        ]
    runs = RunList(places)
    if (settings.step, settings.rank, settings.env_name, settings.record_index) != (None, None, None, 0):
        raise ConfigError(
            f"--step, --rank, --env-name and --record-index are of one run; name it: {runs.path(0)}"
        )
    if settings.output is not None:
        page = write_runs_page(runs, settings.output)
        log.info("%s: %s; opens in any browser without a server", settings.output, page)
    elif settings.path is None or settings.terminal:
        listed = runs.runs()
        console = Console(markup=False, emoji=False)
        console.print(run_table(listed, console.width))
        if settings.path is not None and differing(listed):
            console.print()
            console.print(settings_table(listed))
        console.print(
            f"\npellucid view {shlex.quote(os.path.relpath(listed[0].path))}   opens the newest one"
        )
    else:
        from pellucid.viewer.server import make_list_app

        def opened(run: Path) -> ServedRun:
            return _served(Exports(run), settings, home="../")

        _serve(partial(make_list_app, runs, opened), settings)


def _served(exports: Exports, settings: ViewSettings, home: str = "") -> ServedRun:
    return ServedRun(
        exports,
        tokenizer=settings.tokenizer,
        start_record=settings.record_index,
        max_mismatch=settings.max_mismatch,
        trust_remote_code=settings.trust_remote_code,
        home=home,
    )


def _serve(make: Callable[..., Any], settings: ViewSettings) -> None:
    from pellucid.viewer.server import serve

    serve(make, host=settings.host, port=settings.port, open_browser=settings.open_browser)


def _holds_runs(path: Path) -> bool:
    """Whether a folder holds runs, and is neither a run, nor part of one, nor an export.

    Files that lie beside runs, a data set say, are left alone.
    """
    folder = path.resolve()
    if not folder.is_dir() or RunFolder.around(folder).folder is not None:
        return False
    is_export = any(folder.glob("step_*")) or find_dump(folder) is not None
    return not is_export and bool(find_runs(folder))


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
    """Opens a path; `rollouts`, `metrics` and other parts of a run stand for the run."""
    path = path.resolve()
    run = RunFolder.around(path).folder
    is_other_part = run is not None and not path.is_relative_to(run / "token_exports") and path.is_dir()
    exports = Exports(run if run is not None and is_other_part else path, selection)
    if exports.steps():
        return exports
    if (dump := exports.dump) is not None and not dump.steps():
        raise DataError(f"{path} holds no rollouts of {dump.title}; {'; '.join(dump.problems)}")
    if not exports.lacks_tokens():
        raise DataError(f"{path} holds no records of {selection}")
    if selection != Selection() and dump is not None:
        raise DataError(f"{path} is {dump.title}: it has no tokens, so there are no records of {selection}")
    if selection != Selection():
        raise DataError(
            f"{path} has no token export, so there are no records of {selection}; leave that out, or "
            "run with --export, which writes every token"
        )
    return exports


def _require_record(exports: Exports, index: int) -> None:
    steps = exports.steps()
    if index and not steps:
        raise ConfigError(f"--record-index {index}: {exports.path} has no token export, so it has no records")
    if index and index >= (number := len(exports.records(steps[-1]))):
        raise ConfigError(f"--record-index {index}: step {steps[-1]} has {number:,} records, from 0 on")
