"""The server: live following in a browser, and who it answers to."""

import base64
import hashlib
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pellucid.bench.viewer_inputs import make_batch, write_file
from pellucid.viewer.access import Exports
from pellucid.viewer.rows import MEASURED_FIELDS, measure
from pellucid.viewer.server import headers, make_app
from pellucid.viewer.source import TOKENS_AT_A_TIME, ServedRun, Urgent


@pytest.fixture
def client(made_run: Any) -> TestClient:
    return TestClient(make_app(ServedRun(Exports(made_run.folder))), base_url="http://127.0.0.1:7357")


def test_it_follows_a_run_and_keeps_its_place(served: Any, visit: Any, made_run: Any, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    shutil.copytree(made_run.folder, growing)
    last = growing / "token_exports" / "step_2"
    (last / "STABLE").unlink()
    requests: list[int] = []
    address = served(growing)
    page = visit(
        f"{address}#record?step=1&record=8&token=20", ".token.pinned", viewport={"width": 700, "height": 600}
    )
    page.on("request", lambda request: requests.append(1) if "pulse" in request.url else None)
    options = "nodes => nodes.map((node) => node.value)"
    assert page.locator("select[aria-label=Step] option").evaluate_all(options) == ["0", "1"]
    before = page.evaluate("() => [document.querySelector('.tokens').scrollTop, location.hash]")
    (last / "STABLE").touch()
    page.wait_for_selector('select[aria-label=Step] option[value="2"]', state="attached", timeout=15_000)
    assert page.evaluate("() => [document.querySelector('.tokens').scrollTop, location.hash]") == before
    page.keyboard.press("l")
    page.wait_for_selector("text=in step 2")


def test_it_is_back_when_its_server_is(browser: Any, client: TestClient) -> None:
    page = browser.new_page()
    is_up = True

    def answer(route: Any) -> None:
        if not is_up:
            route.abort()
            return
        path = route.request.url.removeprefix("http://127.0.0.1:7357")
        found = client.request(route.request.method, path, content=route.request.post_data_buffer)
        route.fulfill(status=found.status_code, headers=dict(found.headers), body=found.content)

    page.route("http://127.0.0.1:7357/**", answer)
    page.goto("http://127.0.0.1:7357/#record?step=1&record=3")
    page.wait_for_selector(".record-view .token")
    is_up = False
    page.evaluate("() => $main.app.go({ step: 2 })")
    page.wait_for_selector("text=Is `pellucid view` still running?")
    page.wait_for_selector(".live.gone")
    is_up = True
    page.wait_for_selector(".record-view .token", timeout=10_000)
    assert "in step 2" in page.locator(".record-view h2").inner_text()
    page.close()


def test_its_answers_are_those_of_the_page(client: TestClient, made_run: Any) -> None:
    page = client.get("/")
    run = ServedRun(Exports(made_run.folder))
    head = base64.b64encode(run.run()).decode()
    assert f'<script type="text/plain" id="run" data-served>{head}</script>' in page.text
    assert client.get("/api/run").content == run.run()
    assert client.get("/api/step/1").content == run.step(1)
    assert client.get("/api/chunk/1/0").content == run.chunk(1, 0)
    assert client.post("/api/texts", json=[65, 66]).content == run.texts([65, 66])
    assert client.get("/api/pulse").json() == {"steps": 3, "last": 2, "summarised": 1}
    assert client.get("/api/step/9").text == "there is no finished step 9"
    assert client.get("/api/chunk/1/7").status_code == 404
    assert client.get("/api/lead/1/0").text == "step 1 has no lead/1/0"
    assert client.post("/api/texts", json=["x"]).status_code == 400


def test_every_answer_refuses_frames_and_foreign_content(client: TestClient) -> None:
    for path in ("/", "/api/run", "/api/step/9", "/nothing"):
        found = client.get(path).headers
        assert {name: found[name] for name in headers()} == headers()
    policy = headers()["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.endswith("connect-src 'self'; frame-ancestors 'none'")


def test_the_page_is_all_that_a_browser_has_to_load(client: TestClient) -> None:
    html = client.get("/").text
    markup = re.sub(r"<(script|style)\b[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"""\b(src|href)=""", markup)
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert f"script-src {allowed};" in client.get("/").headers["content-security-policy"]


def test_the_head_follows_the_files_of_the_run(made_run: Any, tmp_path: Path) -> None:
    shutil.copytree(made_run.folder, tmp_path / "growing")
    run = ServedRun(Exports(tmp_path / "growing"))
    first = run.run()
    assert run.run() is first
    with (tmp_path / "growing" / "metrics" / "orchestrator.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/all": 0.9}\n')
    assert json.loads(run.run())["metrics"]["reward/all"][-1] == [2, 0.9]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 200),
        ({"host": "localhost:7357"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:7357"}, 403),
        ({"origin": "http://127.0.0.1:7357"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_it_answers_to_its_own_name_and_page_only(
    client: TestClient, sent: dict[str, str], status: int
) -> None:
    assert client.get("/api/pulse", headers=sent).status_code == status


def test_beyond_this_machine_it_asks_for_the_token(made_run: Any) -> None:
    app = make_app(ServedRun(Exports(made_run.folder)), host="0.0.0.0", token="secret")
    stranger = TestClient(app, base_url="http://box:7357")
    assert stranger.get("/").status_code == 403
    assert stranger.get("/?token=guess").status_code == 403
    assert stranger.get("/api/run").status_code == 403
    friend = TestClient(app, base_url="http://box:7357")
    entered = friend.get("/?token=secret", follow_redirects=False)
    assert entered.status_code == 303 and "httponly" in entered.headers["set-cookie"].lower()
    assert friend.get("/api/pulse").status_code == 200
    far = friend.get("/api/step/1", headers={"accept-encoding": "deflate"})
    assert far.headers["content-encoding"] == "deflate"
    assert far.content == friend.get("/api/step/1", headers={"accept-encoding": "identity"}).content


def test_a_step_read_bit_by_bit_adds_up_to_the_same(tmp_path: Path) -> None:
    batch = make_batch(40, 4096)
    write_file(tmp_path / "rank_0.parquet", batch)
    exports = Exports(tmp_path / "rank_0.parquet")
    assert batch.num_tokens > TOKENS_AT_A_TIME
    whole = measure([exports.records(0).batch(MEASURED_FIELDS)])
    assert ServedRun(exports).rows(0) == whole.encode(level=None)


def test_what_can_wait_gives_way_until_nothing_is_urgent() -> None:
    urgent, passed = Urgent(), threading.Event()

    def wait() -> None:
        urgent.give_way(60)
        passed.set()

    with urgent:
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not passed.wait(0.05)
    assert passed.wait(30)
    waiting.join()
