"""The viewer against its budgets, in headless Chromium: first content, switching, nodes, sizes, the server.

The baseline of each line is its budget: a ratio of at most 1 is within it.

    1M      1,003,520 tokens in one file (245 records of 4,096), as a page
    long    one record of 131,072 tokens, as a page
    write   64 records of 4,096 tokens: writing the page, in a process of its own
    server  100 steps of 1,003,520 tokens, a Parquet file of 23 MB for each, with the summaries, metrics and
            ledger that training leaves; `pellucid view` in a process of its own, once it has read those
    scan    400 steps of 4,224 tokens as JSONL (1,689,600; 300 MB), with the summaries that training leaves:
            from the click to the rows of the 200 worst tokens of the whole run, and the server's CPU time for
            it; none of the steps was opened before
    list    200 runs of 400 steps in one folder: `pellucid view` lists them, as soon as it answers for the
            first time, and again
    time    the spans of 1,000 steps (16,000), as a page: from the click on Timeline until it is drawn, and
            drawing it once more, as every zoom does

"First content" is when the first frame with tokens (for the run: charts) has been drawn, from the start of
the navigation; "complete" is when all lines are laid out and overview, chart and numbers are there, too.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result import Result
from benchmarks.viewer_inputs import make_batch, write_file, write_run, write_spans, write_sweep
from pellucid.errors import ConfigError

NUM_SERVED_STEPS = 100
NUM_LISTED_RUNS = 200
OPENINGS = 5
SCANS = 3
SWITCHES = 12
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""In order of preference: the shell takes two fifths of the CPU time of a browser that could have windows."""

FIRST_CONTENT = """firstContent = new Promise((resolve) => {
  const next = { priority: "user-blocking" };  // right after this frame
  const drawn = () => scheduler.postTask(() => resolve(performance.now()), next);
  const look = () => (document.querySelector(%r) ? drawn() : requestAnimationFrame(look));
  requestAnimationFrame(look);
})"""
"""Runs before anything of the page does: asked for later, the answer would wait for the page."""

GO = """([changes, title, ready]) => new Promise((resolve) => {
  const started = performance.now();
  $main.app.go(changes);
  const isTitled = () => document.querySelector("h2")?.textContent.startsWith(title);
  const isThere = () => isTitled() && document.querySelector(ready);
  const look = () => (isThere() ? resolve(performance.now() - started) : requestAnimationFrame(look));
  requestAnimationFrame(look);
})"""

COMPLETE = """() => new Promise((resolve) => {
  const isDrawn = ({ text, isLead, chart }) => text.laid.isDone && !isLead && chart;
  const isRead = ({ record }) => document.readyState === "complete" && record.index.measures;
  const isThere = () => isDrawn($main.app.view) && isRead($main.app.view);
  const look = () => (isThere() ? resolve(performance.now()) : requestAnimationFrame(look));
  look();
})"""

WRITE = """
import sys, time
from pathlib import Path
from pellucid.viewer.access import Exports
from pellucid.viewer.page import write_page
started = time.perf_counter()
write_page(Exports(Path(sys.argv[1])), Path(sys.argv[2]))
seconds = time.perf_counter() - started
most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(seconds, int(most.split()[1]) / 1e3)
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
                *_scan(folder, browser),
                *_list(folder, browser),
                *_timeline(folder, browser),
            ]
    finally:
        shutil.rmtree(folder)


def _million(folder: Path, browser: Any) -> list[Result]:
    write_file(folder / "million.jsonl", make_batch(245, 4096))
    page = _make_page(folder, "million")
    address = f"{page.as_uri()}#record?step=0&record=0"
    opened = [_open(browser, address) for _ in range(OPENINGS)]
    tab = browser.new_page()
    tab.goto(address)
    tab.wait_for_selector(".token")
    generator = np.random.default_rng(0)
    times = [_go(tab, {"record": record}) for record in generator.permutation(245)[:SWITCHES].tolist()]
    heap = tab.evaluate("performance.memory.usedJSHeapSize")
    tab.close()
    return [
        _within("1M tokens: first content", min(found.first_ms for found in opened), 1000, "ms"),
        _within("1M tokens: complete", min(found.complete_ms for found in opened), 2000, "ms"),
        _within("1M tokens: switching records", statistics.median(times), 100, "ms"),
        _within("1M tokens: page", page.stat().st_size / 1e6, 20, "MB"),
        _within("1M tokens: heap", heap / 1e6, 500, "MB"),
    ]


def _long(folder: Path, browser: Any) -> list[Result]:
    write_file(folder / "long.jsonl", make_batch(1, 131_072))
    page = _make_page(folder, "long")
    opened = [_open(browser, f"{page.as_uri()}#record") for _ in range(OPENINGS)]
    return [
        _within("131,072 tokens: first content", min(found.first_ms for found in opened), 300, "ms"),
        _within("131,072 tokens: complete", min(found.complete_ms for found in opened), 1000, "ms"),
        _within("131,072 tokens: nodes", max(found.num_nodes for found in opened), 5000, "nodes"),
    ]


def _write(folder: Path) -> list[Result]:
    write_file(folder / "write.jsonl", make_batch(64, 4096))
    times, sizes = [], []
    for _ in range(OPENINGS):
        done = subprocess.run(
            [sys.executable, "-c", WRITE, str(folder / "write.jsonl"), str(folder / "write.html")],
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
    with _serve(folder / "run") as server:
        run_view = min(_open_first(browser, server.address, ".strip canvas") for _ in range(OPENINGS))
        tab = browser.new_page()
        tab.goto(server.address)
        tab.wait_for_selector(".strip canvas")
        records, steps = [], []
        for step in range(3, 3 + 2 * OPENINGS, 2):  # none of them was looked at before
            records.append(_go(tab, {"view": "record", "step": step, "record": 77}))
            changes = {"view": "step", "step": step + 1}
            steps.append(tab.evaluate(GO, [changes, f"Step {step + 1}", ".histogram canvas"]))
        tab.close()
        memory = server.peak_bytes()
    return [
        _within("100M tokens, server: a record", min(records), 150, "ms"),
        _within("100M tokens, server: a step's histograms", min(steps), 200, "ms"),
        _within("100M tokens, server: the run, page and all", run_view, 300, "ms"),
        _within("100M tokens, server: its memory", memory / 1e6, 1000, "MB"),
    ]


def _scan(folder: Path, browser: Any) -> list[Result]:
    write_run(folder / "scanned", make_batch(128, 33), 400, suffix=".jsonl")
    shown, spent = [], []
    for _ in range(SCANS):
        with _serve(folder / "scanned") as server:
            tab = browser.new_page()
            tab.goto(server.address)
            tab.wait_for_selector(".strip canvas")
            before = server.cpu_s()
            asked = {"view": "worst", "within": "run", "kind": "all"}
            shown.append(float(tab.evaluate(GO, [asked, "Worst tokens", "tbody tr[data-row]"])) / 1e3)
            spent.append(server.cpu_s() - before)
            tab.close()
    return [
        _within("1.7M tokens as JSONL: the worst of the run", min(shown), 3, "s"),
        _within("1.7M tokens as JSONL: the server's CPU", min(spent), 3, "s"),
    ]


def _list(folder: Path, browser: Any) -> list[Result]:
    write_sweep(folder / "sweep", NUM_LISTED_RUNS, 400)
    with _serve(folder / "sweep") as server:
        first, *others = [_open_first(browser, server.address, "tr[data-row]") for _ in range(OPENINGS)]
    return [
        _within("200 runs, server: the list at first", first, 300, "ms"),
        _within("200 runs, server: the list", min(others), 300, "ms"),
    ]


def _timeline(folder: Path, browser: Any) -> list[Result]:
    write_spans(folder / "timed", num_steps=1000)
    page = _make_page(folder, "timed", ending="")
    shown, drawn = [], []
    for _ in range(OPENINGS):
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_selector(".strip canvas")
        shown.append(float(tab.evaluate(GO, [{"view": "timeline"}, "Timeline", ".gantt-legend span"])))
        drawn.append(float(tab.evaluate("$main.app.view.draw(), $main.app.view.drawnIn")))
        tab.close()
    return [
        _within("1,000 steps: the time line", min(shown), 300, "ms"),
        _within("1,000 steps: drawing it again", min(drawn), 50, "ms"),
    ]


def _go(tab: Any, changes: dict[str, Any]) -> float:
    """Milliseconds until a record is shown."""
    title = f"Record {changes['record']} of"
    return float(tab.evaluate(GO, [changes, title, ".record-view .token"]))


def _within(name: str, ours: float, budget: float, unit: str) -> Result:
    return Result(name, ours, budget, unit, "its budget")


@dataclass(frozen=True, slots=True)
class _Opened:
    first_ms: float
    complete_ms: float
    num_nodes: int


def _open(browser: Any, address: str) -> _Opened:
    """From navigation to the first frame with tokens, and to the last thing that is drawn."""
    tab = browser.new_page()
    tab.add_init_script(FIRST_CONTENT % ".token")
    tab.goto(address, wait_until="commit")
    first = tab.evaluate("firstContent")
    complete = tab.evaluate(COMPLETE)
    num_nodes = tab.evaluate("document.getElementsByTagName('*').length")
    tab.close()
    return _Opened(first, complete, num_nodes)


def _open_first(browser: Any, address: str, selector: str) -> float:
    """Milliseconds from navigation to the first frame that has such an element."""
    tab = browser.new_page()
    tab.add_init_script(FIRST_CONTENT % selector)
    tab.goto(address, wait_until="commit")
    first: float = tab.evaluate("firstContent")
    tab.close()
    return first


def _make_page(folder: Path, name: str, ending: str = ".jsonl") -> Path:
    from pellucid.viewer.access import Exports
    from pellucid.viewer.page import write_page

    write_page(Exports(folder / f"{name}{ending}"), folder / f"{name}.html")
    return folder / f"{name}.html"


def find_browser() -> str | None:
    """Returns the path of the first of `BROWSERS` that is installed."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@contextmanager
def _browser() -> Iterator[Any]:
    path = find_browser()
    if path is None:
        raise ConfigError("benchmark viewer: no browser; install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise ConfigError("benchmark viewer needs playwright; pip install 'pellucid[dev]'") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass(frozen=True, slots=True)
class _Server:
    address: str
    process: Path
    """Its folder below `/proc`."""

    def peak_bytes(self) -> float:
        status = (self.process / "status").read_text().splitlines()
        most = next(line for line in status if line.startswith("VmHWM"))
        return float(most.split()[1]) * 1024

    def cpu_s(self) -> float:
        """CPU time of all threads so far."""
        user, system = (self.process / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _serve(folder: Path) -> Iterator[_Server]:
    """A viewer, in a process of its own, that has read all summaries."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pellucid.cli", "view", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/"
        while (pulse := _pulse(address)) is None or pulse.get("summarised", 0) < pulse.get("steps", 0):
            if server.poll() is not None:
                raise ConfigError(
                    f"benchmark viewer: {' '.join(command)} ended with status {server.returncode}"
                )
            time.sleep(0.1)
        yield _Server(address, Path(f"/proc/{server.pid}"))
    finally:
        server.terminate()
        server.wait()


def _pulse(address: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{address}api/pulse") as answer:
            pulse: dict[str, Any] = json.load(answer)
            return pulse
    except OSError:  # it does not listen yet
        return None
