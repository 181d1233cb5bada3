"""What a page of another site, open in a browser on the engine's machine, can do to the engine: nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from browser import chromium
from engine_server import AUTHORIZED, EngineServer, listening
from pellucid.config import ModelConfig
from pellucid.model import load_policy
from pellucid.transport.weights import publish_version, weights_folder, write_version

SITE = "evil.test"

ASK = """async ([url, options]) => {
    try {
        const answer = await fetch(url, options);
        return [answer.type, answer.status, await answer.text()];
    } catch (error) {
        return [error.name];
    }
}"""
SUBMIT = """([url, body]) => {
    const form = document.createElement("form");
    Object.assign(form, {method: "POST", enctype: "text/plain", action: url});
    const field = document.createElement("input");
    Object.assign(field, {name: body.slice(0, -1) + ',"x":"', value: '"}'});
    form.append(field);
    document.body.append(form);
    form.submit();
}"""
"""The oldest way: what it sends reads as JSON, `{…,"x":"="}`."""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><title>page</title><body></body>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def foreign_site() -> Iterator[str]:
    site = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        yield f"http://{SITE}:{site.server_address[1]}/"
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


class Witness:
    """Sees what arrives at the engine, and with which status it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[tuple[str, str, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.seen.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await self._app(scope, receive, noted)

    def take(self) -> set[tuple[str, str, int]]:
        seen, self.seen = self.seen, []
        return {each for each in seen if each[1] != "/favicon.ico"}


class Attacked:
    def __init__(self, page: Any, url: str, witness: Witness, weights: Path) -> None:
        self.page, self.url, self.witness = page, url, witness
        self.bodies = {
            "/update_weights": f'{{"version":1,"folder":"{weights}"}}',
            "/inference/v1/generate": '{"token_ids":[5,6],"sampling_params":{"max_tokens":2}}',
            "/v1/chat/completions": '{"messages":[{"role":"user","content":"hello"}],"max_tokens":2}',
        }

    def ask(self, url: str, **options: Any) -> list[Any]:
        answer: list[Any] = self.page.evaluate(ASK, [url, options])
        return answer


@pytest.fixture(scope="module")
def attacked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """An engine that has something to serve, and a page of another site beside it.

    In the end the engine is what it was, and its own orchestrator can do what the page could not.
    """
    folder = tmp_path_factory.mktemp("attacked")
    policy = load_policy(ModelConfig(name=str(tiny_model)))
    publish_version(folder, 1, lambda path: write_version(policy.hf, path), keep=9)
    served = EngineServer(tiny_model, folder)
    witness = Witness(served.app)
    rules = f"--host-resolver-rules=MAP {SITE} 127.0.0.1"
    with listening(witness) as url, foreign_site() as site, chromium(rules) as browser:
        page = browser.new_context().new_page()
        page.goto(site)
        weights = weights_folder(folder, 1)
        attacked = Attacked(page, url, witness, weights)
        yield attacked
        own = httpx.get(f"{url}/health", headers=AUTHORIZED).json()
        assert (own["policy_version"], own["sampled_tokens"], own["run"]) == (0, 0, "")
        asked = {"version": 1, "folder": str(weights)}
        taken = httpx.post(f"{url}/update_weights", json=asked, headers=AUTHORIZED)
        assert taken.json()["policy_version"] == 1
    assert served.counts() == {}


def test_what_needs_no_leave_arrives_and_is_refused(attacked: Attacked) -> None:
    """A text that happens to be JSON, without asking first: how a page once set policy version 123456."""
    for path, body in attacked.bodies.items():
        for headers in ({"content-type": "text/plain"}, {}):
            answer = attacked.ask(
                attacked.url + path, method="POST", mode="no-cors", headers=headers, body=body
            )
            assert answer == ["opaque", 0, ""]
        assert attacked.witness.take() == {("POST", path, 403)}


def test_a_form_arrives_and_is_refused(attacked: Attacked) -> None:
    page = attacked.page.context.new_page()
    for path, body in attacked.bodies.items():
        page.goto(attacked.page.url)
        with page.expect_navigation():
            page.evaluate(SUBMIT, [attacked.url + path, body])
        assert attacked.witness.take() == {("POST", path, 403)}
    page.close()


def test_what_needs_leave_does_not_get_it(attacked: Attacked) -> None:
    """Of JSON the browser sends the question whether it may be sent, and nothing else."""
    for path, body in attacked.bodies.items():
        headers = {"content-type": "application/json"}
        assert attacked.ask(attacked.url + path, method="POST", headers=headers, body=body) == ["TypeError"]
        assert attacked.witness.take() == {("OPTIONS", path, 403)}


def test_nothing_is_readable(attacked: Attacked) -> None:
    for path in ("/health", "/v1/models"):
        assert attacked.ask(attacked.url + path) == ["TypeError"]
        assert attacked.ask(attacked.url + path, mode="no-cors") == ["opaque", 0, ""]


def test_a_name_that_comes_to_mean_this_machine_is_not_answered_to(attacked: Attacked) -> None:
    """To the browser page and engine are one site then, and it hands over every answer."""
    attacked.witness.take()
    page = attacked.page.context.new_page()
    rebound = attacked.url.replace("127.0.0.1", SITE)
    page.goto(f"{rebound}/health")
    refusal = f"this server does not answer to '{rebound.removeprefix('http://')}'"
    assert refusal in page.inner_text("body")
    for path, body in attacked.bodies.items():
        options = {"method": "POST", "headers": {"content-type": "application/json"}, "body": body}
        _, status, text = page.evaluate(ASK, [path, options])
        assert status == 421 and refusal in text and "policy_version" not in text
    paths = {("POST", path, 421) for path in attacked.bodies}
    assert attacked.witness.take() == paths | {("GET", "/health", 421)}
    page.close()
