"""Takes the pictures of the viewer that README and docs show, from a run of `make demo`.

    PYTHONPATH=. python tests/screenshots.py outputs/reverse_text/rl docs/images
    PYTHONPATH=. python tests/screenshots.py --agent docs/images        the conversation alone; needs no run

With `--sweep outputs/sweep` also of three runs over each other: 60 steps of the demo, those with
`--trainer.optim.lr 1e-4`, and those with `--max-async-level 0 --trainer.loss.type icepop`.

Which steps and records the pictures show is part of the story that docs/viewer.md tells: of a run of its own,
change both. The conversation is recorded here, by a session as in any run, from scripted replies.
"""

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from browser import chromium
from pellucid.data import Example, Turn
from pellucid.inference.fake import FakeInferenceClient
from pellucid.ledger import Flow
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Environment, Score, Session
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.group import GroupRun
from pellucid.orchestrator.records import RolloutLog
from pellucid.orchestrator.session import Sampler
from pellucid.orchestrator.verdict import Verdict
from pellucid.viewer.access import Exports, is_run
from pellucid.viewer.runs import RunList
from pellucid.viewer.server import make_app, make_list_app
from pellucid.viewer.source import ServedRun

SIZE = {"width": 1440, "height": 860}
Shot = tuple[str, str, str, str]
"""Name, theme, address within the page, and the element whose presence says that all is drawn."""

SHOTS: tuple[Shot, ...] = (
    ("viewer", "light", "#run", ".strip canvas"),
    ("viewer-closer", "light", "#run?steps=240:300", ".strip:nth-child(8) canvas"),
    ("viewer-step", "light", "#step?step=272&sort=kl_max", ".histogram canvas"),
    (
        "viewer-position",
        "light",
        "#step?step=272&sort=kl_max",
        ".step-side:has(.per-position canvas)",
    ),
    ("viewer-worst", "light", "#worst?step=272&kind=masked", "tbody tr[data-row]"),
    ("viewer-record", "light", "#record?step=272&record=117&token=27", ".token.pinned"),
    ("viewer-group", "light", "#group?step=272&record=117", ".member"),
    ("viewer-ids", "light", "#step?step=271&ids=1&sort=kl", '[aria-label="Tokens by id"] tbody tr[data-row]'),
    (
        "viewer-what-if",
        "light",
        "#whatif?step=271&loss=icepop&bounds=min_ratio%3D0.5,max_ratio%3D2,kl_tau%3D0",
        ".plain-table",
    ),
    ("viewer-dark", "dark", "#record?step=271&record=16&token=27&fill=delta", ".token.pinned"),
    ("viewer-timeline", "light", "#timeline?window=56500:59500", ".gantt-legend span"),
)
COMPARE: Shot = (
    "viewer-compare",
    "light",
    "#compare?runs=baseline%2F%2Flr-1e-4%2F%2Ficepop-sync&smooth=5",
    ".strip canvas",
)


CONVERSATION: Shot = (
    "viewer-conversation",
    "light",
    "#rollouts?rollout=7%2Fg54-r2&talk=1",
    ".talk-view h2",
)
CALL = {
    "name": "forecast",
    "arguments": {"city": "Oslo", "days": 3, "units": "metric", "fields": ["low", "wind"]},
}
FOUND = {
    "city": "Oslo",
    "days": [
        {"day": "Tue", "low": -4, "wind": 3},
        {"day": "Wed", "low": -9, "wind": 7},
        {"day": "Thu", "low": -6, "wind": 2},
    ],
}
REPLIES = (
    f"<think>They want a night, so the forecast first.</think><tool_call>{json.dumps(CALL)}</tool_call>",
    "Wednesday is the coldest, with -9 degrees and wind.",
    "Wednesday night: -9 degrees, and wind of 7 m/s.",
)


class Forecast(Environment):
    """A call, an answer, and another one after the history was cut."""

    def example(self, index: int) -> Example:
        system = {
            "role": "system",
            "content": "You plan trips. Look things up before you answer.",
        }
        user = {"role": "user", "content": "Which of the next three nights in Oslo is the coldest?"}
        return Example(str(index), [system, user])

    async def rollout(self, example: Example, session: Session) -> Score:
        messages = list(example.messages)
        called = await session.sample(messages, as_message=self.read)
        await asyncio.sleep(0.35)
        answer = {"role": "tool", "tool_call_id": "call_0", "name": "forecast", "content": json.dumps(FOUND)}
        await session.sample([*messages, self.read(called), answer])
        asked = {
            "role": "user",
            "content": "Which of the next three nights in Oslo is the coldest, and how windy is it?",
        }
        await session.sample([messages[0], asked])
        await asyncio.sleep(0.1)
        metrics = {"right": 1.0, "brief": 0.8, "cited": 0.0, "tool_calls": 1.0}
        return Score(1.4, metrics, weights={"right": 1.0, "brief": 0.5, "cited": 0.25})

    @staticmethod
    def read(turn: Turn) -> dict[str, Any]:
        call = {"id": "call_0", "type": "function", "function": CALL}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def record_agent(run: Path) -> None:
    """Saves one rollout of `Forecast` as step 7 of a run."""
    tokenizer = character_tokenizer()
    replies = (tokenizer.encode(reply, add_special_tokens=False) for reply in REPLIES)
    client = FakeInferenceClient(
        lambda prompt_ids, generator: [*next(replies), tokenizer.eos_token_id], delay_s=lambda generator: 0.6
    )
    client.policy_version = 6
    environment = Forecast(seed=0)
    sampler = Sampler(client, ChatTemplate(tokenizer), "run", 0, 1.0, 400, 4000)
    group = GroupRun("g54", "trips", environment, environment.example(54), 1, sampler, 60.0)
    rollout = group.open_rollout("g54-r2")
    asyncio.run(group.attempt(rollout))
    RolloutLog(run, {}).append(7, [[Verdict(rollout, Flow.SENT, "", 0.45)]])
    tokenizer.save_pretrained(run / "model")
    for folder in ("configs", "logs"):
        (run / folder).mkdir()
    (run / "logs" / "OUTCOME").write_text("finished")
    (run / "configs" / "rl.toml").write_text(f'[model]\nname = "{run / "model"}"\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="outputs/reverse_text/rl")
    parser.add_argument("output", type=Path)
    parser.add_argument("--agent", action="store_true", help="takes the picture of the conversation only")
    parser.add_argument("--sweep", type=Path, help="folder with the runs that are compared")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        record_agent(Path(place, "trips"))
        shots: dict[Path, tuple[Shot, ...]] = {Path(place, "trips"): (CONVERSATION,)}
        if not arguments.agent:
            shots[arguments.run.resolve()] = SHOTS
        if arguments.sweep is not None:
            shots[arguments.sweep.resolve()] = (COMPARE,)
        with chromium() as browser:
            for run, wanted in shots.items():
                with served(run) as address:
                    for name, theme, where, ready in wanted:
                        take(browser, address + where, arguments.output / f"{name}.png", theme, ready)


@contextmanager
def served(path: Path) -> Iterator[str]:
    """The address of a viewer that has read all of a run, or lists the runs of a folder."""
    run = ServedRun(Exports(path)) if is_run(path) else None
    app = make_app(run) if run else make_list_app(RunList([path]), lambda one: ServedRun(Exports(one)))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    for work in (server.run, *([run.summarise] if run else [])):
        threading.Thread(target=work, daemon=True).start()
    while not server.started or (run and not is_read(run)):
        time.sleep(0.1)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    if run:
        run.close()
    server.should_exit = True


def is_read(run: ServedRun) -> bool:
    """Whether all steps have a summary, and saved rollouts are counted."""
    pulse = run.pulse()
    return bool(pulse["summarised"] >= pulse["steps"]) and not json.loads(run.run())["counting"]


def take(browser: Any, address: str, path: Path, theme: str, ready: str) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme=theme)
    page.goto(address)
    page.wait_for_selector(ready)
    page.wait_for_timeout(700)
    page.locator(ready).first.evaluate("element => element.scrollIntoView({ block: 'nearest' })")
    page.screenshot(path=path)
    page.close()


if __name__ == "__main__":
    main()
