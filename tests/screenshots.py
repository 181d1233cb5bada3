"""Takes the pictures of the viewer that README and docs show, from a run of `make demo`.

    PYTHONPATH=. python tests/screenshots.py outputs/reverse_text/rl docs/images

Which steps and records the pictures show is part of the story that docs/viewer.md tells: of a run of its own,
change both.
"""

import argparse
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from browser import chromium
from pellucid.viewer.access import Exports
from pellucid.viewer.server import make_app
from pellucid.viewer.source import ServedRun

SIZE = {"width": 1360, "height": 800}
SHOTS = (
    ("viewer", "light", "#run", ".strip canvas"),
    ("viewer-closer", "light", "#run?steps=205:265", ".strip:nth-child(8) canvas"),
    ("viewer-step", "light", "#step?step=228", ".histogram canvas"),
    ("viewer-ids", "light", "#step?step=228&ids=1&sort=kl", '[aria-label="Tokens by id"] tbody tr[data-row]'),
    ("viewer-worst", "light", "#worst?step=228&kind=masked", "tbody tr[data-row]"),
    ("viewer-record", "light", "#record?step=228&record=RECORD&token=TOKEN", ".token.pinned"),
    ("viewer-group", "light", "#group?step=228&record=RECORD", ".member"),
    (
        "viewer-what-if",
        "light",
        "#whatif?step=228&loss=icepop&bounds=min_ratio%3D0.5,max_ratio%3D2,kl_tau%3D0",
        ".plain-table",
    ),
    ("viewer-dark", "dark", "#record?step=228&record=RECORD&token=TOKEN&fill=delta", ".token.pinned"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--record", type=int, default=83, help="record of the step that the pictures show")
    parser.add_argument("--token", type=int, default=33)
    arguments = parser.parse_args()
    run = ServedRun(Exports(arguments.run.resolve()))
    server = uvicorn.Server(uvicorn.Config(make_app(run), port=0, log_level="error"))
    for work in (server.run, run.summarise):
        threading.Thread(target=work, daemon=True).start()
    while not server.started or run.pulse()["summarised"] < run.pulse()["steps"]:
        time.sleep(0.1)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    with chromium() as browser:
        for name, theme, place, ready in SHOTS:
            place = place.replace("RECORD", str(arguments.record)).replace("TOKEN", str(arguments.token))
            take(browser, address + place, arguments.output / f"{name}.png", theme, ready)
    run.close()
    server.should_exit = True


def take(browser: Any, address: str, path: Path, theme: str, ready: str) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme=theme)
    page.goto(address)
    page.wait_for_selector(ready)
    page.wait_for_timeout(700)
    page.locator(ready).first.scroll_into_view_if_needed()
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    main()
