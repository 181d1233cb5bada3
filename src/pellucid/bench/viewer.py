"""The viewer against its budgets, in headless Chromium: first content, switching, nodes, sizes, the server.

The baseline of each line is its budget: a ratio of at most 1 is within it.

    1M      1,000,000 tokens in one file, as a page
    long    one record of 131,072 tokens, as a page
    write   64 records of 4,096 tokens: writing the page, in a process of its own
    server  100 steps of 1,000,000 tokens as Parquet, with the summaries that training leaves
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.bench.result import Result
from pellucid.bench.viewer_inputs import make_batch, write_file, write_run
from pellucid.errors import ConfigError

NUM_SERVED_STEPS = 100
OPENINGS = 3
SWITCHES = 12
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

FIRST_CONTENT = """(selector) => new Promise((resolve) => {
  const isThere = () => document.querySelector(selector);
  const look = () => (isThere() ? resolve(performance.now()) : requestAnimationFrame(look));
  requestAnimationFrame(look);
})"""
SWITCH = """(record) => new Promise((resolve) => {
  const started = performance.now();
  $main.app.go({ record });
  const look = () => (document.querySelector('.record-title h2').textContent.startsWith(`Record ${record} `)
    && document.querySelector('.token') ? requestAnimationFrame(() => resolve(performance.now() - started))
    : requestAnimationFrame(look));
  look();
})"""

WRITE = """
import resource, sys, time
from pathlib import Path
from pellucid.viewer.access import Exports
from pellucid.viewer.page import write_page
started = time.perf_counter()
write_page(Exports(Path(sys.argv[1])), Path(sys.argv[2]))
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def run() -> list[Result]:
    folder = Path(tempfile.mkdtemp(prefix="pellucid-viewer-"))
    try:
        with _browser() as browser:
            return [
                *_million(folder, browser),
                *_long(folder, browser),
                *_write(folder),
                *_server(folder, browser),
            ]
    finally:
        shutil.rmtree(folder)


def _million(folder: Path, browser: Any) -> list[Result]:
    write_file(folder / "million.jsonl", make_batch(245, 4096))
    page = _make_page(folder, "million")
    address = f"{page.as_uri()}#record?step=0&record=0"
    first = min(_open(browser, address)[0] for _ in range(OPENINGS))
    tab = browser.new_page()
    tab.goto(address)
    tab.wait_for_selector(".token")
    generator = np.random.default_rng(0)
    times = [tab.evaluate(SWITCH, int(record)) for record in generator.permutation(245)[:SWITCHES]]
    heap = tab.evaluate("performance.memory.usedJSHeapSize")
    tab.close()
    return [
        _within("1M tokens: first content", first, 1000, "ms"),
        _within("1M tokens: switching records", statistics.median(times), 100, "ms"),
        _within("1M tokens: page", page.stat().st_size / 1e6, 20, "MB"),
        _within("1M tokens: heap", heap / 1e6, 500, "MB"),
    ]


def _long(folder: Path, browser: Any) -> list[Result]:
    write_file(folder / "long.jsonl", make_batch(1, 131_072))
    page = _make_page(folder, "long")
    opened = [_open(browser, f"{page.as_uri()}#record") for _ in range(OPENINGS)]
    return [
        _within("131,072 tokens: first content", min(first for first, _ in opened), 300, "ms"),
        _within("131,072 tokens: nodes", max(nodes for _, nodes in opened), 5000, "nodes"),
    ]


def _write(folder: Path) -> list[Result]:
    write_file(folder / "write.jsonl", make_batch(64, 4096))
    times, sizes = [], []
    for _ in range(OPENINGS):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pellucid.bench.viewer",
                str(folder / "write.jsonl"),
                str(folder / "w.html"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds, megabytes = map(float, done.stdout.split())
        times.append(seconds)
        sizes.append(megabytes)
    return [
        _within("262,144 tokens: writing the page", min(times), 2, "s"),
        _within("262,144 tokens: memory", max(sizes), 300, "MB"),
    ]


def _server(folder: Path, browser: Any, num_steps: int = NUM_SERVED_STEPS) -> list[Result]:
    write_run(folder / "run", make_batch(245, 4096), num_steps)
    with _serve(folder / "run") as address:
        unseen = iter(range(3, num_steps))
        run_view = min(_open(browser, address, ".strip canvas")[0] for _ in range(OPENINGS))
        record = [
            _open(browser, f"{address}#record?step={next(unseen)}&record=77")[0] for _ in range(OPENINGS)
        ]
        bins = [
            _open(browser, f"{address}#step?step={next(unseen)}", ".histogram canvas")[0]
            for _ in range(OPENINGS)
        ]
        blank = min(_open(browser, f"{address}assets/page.css", "body")[0] for _ in range(OPENINGS))
    return [
        _within("100M tokens, server: a record", min(record), 150, "ms"),
        _within("100M tokens, server: a step's histograms", min(bins), 200, "ms"),
        _within("100M tokens, server: the run", run_view, 300, "ms"),
        _within("100M tokens, server: an empty answer, for comparison", blank, 150, "ms"),
    ]


def _within(name: str, ours: float, budget: float, unit: str) -> Result:
    return Result(name, ours, budget, unit, "its budget")


def _open(browser: Any, address: str, ready: str = ".token") -> tuple[float, int]:
    """Milliseconds from navigation to the first frame with content, and the nodes in the document then."""
    tab = browser.new_page()
    tab.goto(address, wait_until="commit")
    first = tab.evaluate(FIRST_CONTENT, ready)
    nodes = tab.evaluate("document.getElementsByTagName('*').length")
    tab.close()
    return first, nodes


def _make_page(folder: Path, name: str) -> Path:
    from pellucid.viewer.access import Exports
    from pellucid.viewer.page import write_page

    write_page(Exports(folder / f"{name}.jsonl"), folder / f"{name}.html")
    return folder / f"{name}.html"


@contextmanager
def _browser() -> Iterator[Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise ConfigError("bench viewer: no browser; install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise ConfigError("bench viewer needs playwright; pip install 'pellucid[dev]'") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def _serve(folder: Path) -> Iterator[str]:
    import uvicorn

    from pellucid.viewer.access import Exports
    from pellucid.viewer.server import make_app
    from pellucid.viewer.source import ServedRun

    run = ServedRun(Exports(folder))
    server = uvicorn.Server(uvicorn.Config(make_app(run), port=0, log_level="error"))
    threads = [threading.Thread(target=work, daemon=True) for work in (server.run, run.summarise)]
    for thread in threads:
        thread.start()
    # The run's points are read in the background from the moment that the server starts.
    while not server.started or run.pulse()["summarised"] < run.pulse()["steps"]:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    run.close()
    server.should_exit = True
    threads[0].join()
