"""The server: live following in a browser, and who it answers to."""

import base64
import hashlib
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from benchmarks.viewer_inputs import make_batch, write_file
from pellucid.data.tokenizer import byte_tokenizer
from pellucid.viewer import server
from pellucid.viewer.access import Exports
from pellucid.viewer.rows import MEASURED_FIELDS, Measures
from pellucid.viewer.server import MAX_BODY_BYTES, PromptHttp, headers, make_app
from pellucid.viewer.source import TOKENS_AT_A_TIME, ForegroundWork, ServedRun

pytestmark = pytest.mark.slow


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
    page.wait_for_selector('select[aria-label=Step] option[value="2"]', state="attached", timeout=120_000)
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
    page.wait_for_selector("text=Is pellucid view still running?")
    page.wait_for_selector(".live.gone")
    is_up = True
    page.wait_for_selector(".record-view .token", timeout=120_000)
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
    pulse = client.get("/api/pulse").json()
    assert (pulse["steps"], pulse["summarised"]) == (3, 1)
    assert pulse["state"] == client.get("/api/run").json()["state"]
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
    whole = Measures()
    whole.add(exports.records(0).batch(MEASURED_FIELDS))
    assert ServedRun(exports).rows(0) == whole.encode(level=None)


def test_what_can_wait_gives_way_until_nothing_is_urgent() -> None:
    foreground, passed = ForegroundWork(), threading.Event()

    def wait() -> None:
        foreground.give_way(60)
        passed.set()

    with foreground:
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not passed.wait(0.05)
    assert passed.wait(30)
    waiting.join()


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("texts", b"not JSON", 400, "the body is not JSON"),
        ("texts", b"", 400, "the body is not JSON"),
        ("texts", b"[" * 100_000, 400, "the body is not JSON"),
        ("texts", b"\xff\xfe", 400, "the body is not JSON"),
        ("texts", b"[1, " + b" " * MAX_BODY_BYTES + b"2]", 413, "the body is larger than 4,194,304 bytes"),
        ("texts", b'{"a": 1}', 400, "expected a list"),
        ("query", b"5", 400, "expected a question"),
        ("query", b'{"ask": "find", "ids": "all"}', 404, "expected a list of token ids"),
    ],
)
def test_a_body_that_is_no_question_is_refused_in_a_line(
    client: TestClient, path: str, body: bytes, status: int, reason: str
) -> None:
    answer = client.post(f"/api/{path}", content=body)
    assert answer.status_code == status or (path, status) == ("query", 404)  # without DuckDB: no answer
    assert reason in answer.text or answer.json() == {"answer": None}
    assert client.get("/api/pulse").status_code == 200


def test_a_filter_of_any_depth_gets_an_answer(tmp_path: Path) -> None:
    write_file(tmp_path / "rank_0.parquet", make_batch(4, 64))
    client = TestClient(
        make_app(ServedRun(Exports(tmp_path / "rank_0.parquet"))), base_url="http://127.0.0.1"
    )
    tree: Any = {"field": "kl"}
    for _ in range(300):
        tree = {"not": tree}
    answer = client.post("/api/query", json={"ask": "worst", "metric": "kl", "kind": "all", "filter": tree})
    assert answer.status_code in (200, 404)


def test_no_path_is_worth_a_traceback(client: TestClient) -> None:
    for path in (
        "/api/step/" + "9" * 5000,
        "/api/step/99999999999999999999",
        "/api/step/-1",
        "/api/chunk/1/x",
    ):
        assert client.get(path).status_code == 404


@pytest.fixture
def impatient(made_run: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The address of a server that waits for a tenth of a second."""
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.1)
    app = make_app(ServedRun(Exports(made_run.folder)))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", http=PromptHttp))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        thread.join(0.01)
    yield running.servers[0].sockets[0].getsockname()
    running.should_exit = True
    thread.join(30)


HEAD = b"POST /api/texts HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET / HT", b""),
        (HEAD, b""),
        (HEAD + b"Content-Length: 9\r\n\r\n[1,", b"HTTP/1.1 408 "),
        (b"GET /api/pulse HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT", b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "half a second request"],
)
def test_half_a_request_does_not_hold_a_connection(
    impatient: tuple[str, int], sent: bytes, answer: bytes
) -> None:
    with socket.create_connection(impatient, timeout=30) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(65536):  # until the server hangs up
            received += part
    assert received.startswith(answer) and bool(received) == bool(answer)


def test_an_unreadable_step_is_named_and_the_others_are_shown(
    made_run: Any, tmp_path: Path, served: Any, visit: Any
) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(made_run.folder, run)
    damaged = run / "token_exports" / "step_2" / "rank_0.jsonl"
    damaged.write_bytes(b"\xff\xfe\n")
    page = visit(f"{served(run)}#record?step=1&record=3", ".record-view .token")
    page.wait_for_selector(f"text=Step 2 cannot be read: {damaged}:1 is not JSON")
    assert "in step 1" in page.locator(".record-view h2").inner_text()


def test_a_token_of_ten_megabytes_is_shortened(tmp_path: Path, visit: Any, page_of: Any) -> None:
    text = "x" * 10_000_000
    tokenizer = tmp_path / "model"
    made = byte_tokenizer()
    made.add_tokens([text])
    made.save_pretrained(tokenizer)
    record = {"step": 0, "token_ids": [made.convert_tokens_to_ids(text)] * 40, "loss_mask": [True] * 40}
    record |= {"env_name": text, "group_id": text, "role_spans": [[text, 0, 40]]}
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(record) + "\n")
    address = page_of(tmp_path / "rank_0.jsonl", tokenizer=str(tokenizer))
    page = visit(f"{address}#record?step=0&record=0", ".record-view .token")
    shown = page.locator(".record-view .token").first.inner_text()
    assert shown == "x" * 2000 + "…·(10,000,000·characters)"
    assert Path(address.removeprefix("file://")).stat().st_size < 5_000_000
