"""The server: live following in a browser, and who it answers to."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pellucid.viewer.access import Exports
from pellucid.viewer.server import HEADERS, make_app
from pellucid.viewer.source import ServedRun


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
    assert page.status_code == 200 and "assets/bundle.js" in page.text
    assert client.get("/assets/main.js").headers["content-type"].startswith("text/javascript")
    run = ServedRun(Exports(made_run.folder))
    assert client.get("/api/step/1").content == run.step(1)
    assert client.get("/api/chunk/1/0").content == run.chunk(1, 0)
    assert client.post("/api/texts", json=[65, 66]).content == run.texts([65, 66])
    assert client.get("/api/pulse").json() == {"steps": 3, "last": 2, "summarised": 1}
    assert client.get("/api/step/9").text == "there is no finished step 9"
    assert client.get("/api/chunk/1/7").status_code == 404
    assert client.post("/api/texts", json=["x"]).status_code == 400


def test_every_answer_refuses_frames_and_foreign_content(client: TestClient) -> None:
    for path in ("/", "/api/run", "/assets/page.css", "/nothing"):
        headers = client.get(path).headers
        assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path", ["../page.py", "../../errors.py", "%2e%2e/page.py", "vendor", "/etc/passwd", "x.js"]
)
def test_assets_are_confined(client: TestClient, path: str) -> None:
    assert client.get(f"/assets/{path}").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
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
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    assert client.get("/api/pulse", headers=headers).status_code == status


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
