"""The text that Prometheus reads, and the endpoint that serves it."""

import json
import math
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_fuzz import errors_logged, spoilt
from pellucid.metrics import prometheus
from pellucid.metrics.prometheus import PrometheusSink, exposition


@pytest.fixture
def served():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sink = PrometheusSink("trainer", "127.0.0.1", port)
    yield sink, f"http://127.0.0.1:{port}"
    sink.close()


def get(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=120) as response:
        return response.headers["Content-Type"], response.read().decode()


def page(step: int, values: dict[str, float]) -> str:
    return exposition(step, values).decode()


def test_environments_become_labels():
    values = {
        "mismatch_kl/all/mean": 0.5,
        "mismatch_kl/reverse-text/mean": 0.25,
        "reward/all": 1,
        "time/step_s": 2.5,
        "error/Timeout/count": 3,
        "metrics/reverse-text/exact match": 0.125,
    }
    assert page(7, values) == (
        "# HELP pellucid_step step\n"
        "# TYPE pellucid_step gauge\n"
        "pellucid_step 7.0\n"
        "# HELP pellucid_mismatch_kl_mean mismatch_kl/all/mean\n"
        "# TYPE pellucid_mismatch_kl_mean gauge\n"
        'pellucid_mismatch_kl_mean{env="all"} 0.5\n'
        'pellucid_mismatch_kl_mean{env="reverse-text"} 0.25\n'
        "# HELP pellucid_reward reward/all\n"
        "# TYPE pellucid_reward gauge\n"
        'pellucid_reward{env="all"} 1.0\n'
        "# HELP pellucid_time_step_s time/step_s\n"
        "# TYPE pellucid_time_step_s gauge\n"
        "pellucid_time_step_s 2.5\n"
        "# HELP pellucid_error_Timeout_count error/Timeout/count\n"
        "# TYPE pellucid_error_Timeout_count gauge\n"
        "pellucid_error_Timeout_count 3.0\n"
        "# HELP pellucid_metrics_exact_match metrics/reverse-text/exact match\n"
        "# TYPE pellucid_metrics_exact_match gauge\n"
        'pellucid_metrics_exact_match{env="reverse-text"} 0.125\n'
    )


def test_the_environment_of_an_evaluation_is_a_label():
    values = {"eval/held-out/avg@8": 0.5, "eval/held-out/num_failed": 0, "eval/other/avg@8": 0.25}
    assert page(50, values).splitlines()[2:] == [
        "pellucid_step 50.0",
        "# HELP pellucid_eval_avg_8 eval/held-out/avg@8",
        "# TYPE pellucid_eval_avg_8 gauge",
        'pellucid_eval_avg_8{env="held-out"} 0.5',
        'pellucid_eval_avg_8{env="other"} 0.25',
        "# HELP pellucid_eval_num_failed eval/held-out/num_failed",
        "# TYPE pellucid_eval_num_failed gauge",
        'pellucid_eval_num_failed{env="held-out"} 0.0',
    ]


def test_samples_of_one_name_stay_together_and_are_not_repeated():
    """Prometheus refuses the whole page otherwise."""
    lines = page(0, {"a-b": 1, "x/all": 2, "a_b": 3, "x/env": 4}).splitlines()
    assert lines[3:] == [
        "# HELP pellucid_a_b a_b",
        "# TYPE pellucid_a_b gauge",
        "pellucid_a_b 3.0",
        "# HELP pellucid_x x/all",
        "# TYPE pellucid_x gauge",
        'pellucid_x{env="all"} 2.0',
        'pellucid_x{env="env"} 4.0',
    ]


def test_label_values_are_escaped():
    values = {"reward/all": 1.0, 'reward/a"\\\n': 0.5}
    assert page(0, values).endswith('pellucid_reward{env="a\\"\\\\\\n"} 0.5\n')


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf")])
def test_numbers_that_are_not_finite(value, text):
    assert page(0, {"loss": value}).endswith(f"pellucid_loss {text}\n")


def test_the_endpoint_serves_the_latest_step(served):
    sink, url = served
    assert get(f"{url}/metrics")[1] == ""
    assert json.loads(get(f"{url}/health")[1])["step"] is None

    for step in (0, 1):
        sink.log(step, {"loss": step / 2})

    kind, text = get(f"{url}/metrics")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert text == page(1, {"loss": 0.5})
    health = json.loads(get(f"{url}/health")[1])
    assert (health["process"], health["step"]) == ("trainer", 1)
    assert 0 <= health["seconds_since_last_step"] < 5


def test_another_path_is_not_found(served):
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        get(f"{served[1]}/")
    error.value.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:9100"}, 200),
    ],
)
def test_a_page_of_another_site_reads_nothing(served, headers, status):
    request = urllib.request.Request(f"{served[1]}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            found = response.status
    except urllib.error.HTTPError as error:
        found = error.code
        assert error.read() == b""
        error.close()
    assert found == status


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        answer = b""
        with suppress(ConnectionError):
            connection.sendall(data)
            with suppress(OSError):  # the other side has gone already
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
        return answer


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 405 "),
        (b"\r\n\r\n", b"HTTP/1.1 421 "),
        (b"\xff\x00 \r\n:::\r\nhost: localhost\r\n\r\n", b"HTTP/1.1 405 "),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, b""),
    ],
)
def test_whatever_is_sent_gets_an_answer_or_is_cut_off(served, data, answer):
    sink, url = served
    sink.log(1, {"loss": 0.5})
    assert exchange(int(url.rpartition(":")[2]), data).startswith(answer)
    assert get(f"{url}/metrics")[1] == page(1, {"loss": 0.5})


def test_connections_that_ask_nothing_cost_no_threads_and_are_closed(served, monkeypatch):
    sink, url = served
    monkeypatch.setattr(prometheus, "DEADLINE_S", 0.2)
    sink.log(1, {"loss": 0.5})
    num_threads = threading.active_count()
    idle = [
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20)
        for _ in range(2 * prometheus.MAX_CONNECTIONS)
    ]
    try:
        assert threading.active_count() == num_threads
        for connection in idle:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # closed by the other side
        assert get(f"{url}/metrics")[1] == page(1, {"loss": 0.5})
    finally:
        for connection in idle:
            connection.close()


def test_a_closed_endpoint_gives_its_port_back():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for _ in range(2):
        PrometheusSink("trainer", "127.0.0.1", port).close()


PAGES = ("/metrics", "/health")
STARTS = [f"GET {page} HTTP/1.1" for page in PAGES] * 4 + [
    "GET / HTTP/1.1",
    "GET  /metrics?\xff HTTP/9",
    "GET",
    "",
    " ",
    "POST /health HTTP/1.1",
    "GET /metrics/../health",
]
LINES = ["Host: localhost", "Host: 127.0.0.1:1"] * 3 + [
    "Host: [::1",
    "Host: \xe9",
    "Host:",
    "host",
    "Origin: null",
    "Origin: http://localhost",
    ": : :",
    "\x00",
    "X: " + "x" * 20_000,
    "Content-Length: 99999999999999999999",
]


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A request that something may be wrong with."""
    lines = [draw(st.sampled_from(STARTS)), *draw(st.lists(st.sampled_from(LINES), max_size=3))]
    return draw(spoilt(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")))


def test_every_head_gets_a_status_or_is_cut_off_and_nothing_is_logged(served):
    sink, url = served
    sink.log(1, {"loss": 0.5})
    port = int(url.rpartition(":")[2])
    listed = exchange(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert listed.endswith(f"\r\n\r\nthis is {' and '.join(PAGES)}\n".encode())
    statuses = set()

    with errors_logged() as errors:

        @settings(max_examples=300)
        @given(heads())
        def every_head_gets_a_status_or_is_cut_off(head: bytes) -> None:
            answer = exchange(port, head)
            assert re.match(rb"HTTP/1\.1 (200|403|404|405|421) |$", answer)
            assert errors == []
            statuses.add(answer[9:12])

        every_head_gets_a_status_or_is_cut_off()
    assert statuses >= {b"", b"200", b"404", b"405", b"421"}
    assert get(f"{url}/metrics")[1] == page(1, {"loss": 0.5})
