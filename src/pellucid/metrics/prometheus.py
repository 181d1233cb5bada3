"""The latest step over HTTP: `/metrics` in Prometheus' text format, `/health` as JSON.

    mismatch_kl/all/mean     pellucid_mismatch_kl_mean{env="all"}
    reward/reverse-text      pellucid_reward{env="reverse-text"}
    time/step_s              pellucid_time_step_s
    eval/reverse-text/avg@8  pellucid_eval_avg_8{env="reverse-text"}

A name's second part is an environment if the first is `eval`, or if the same name is also reported for `all`.
"""

import logging
import math
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread

import orjson

from pellucid.metrics.evaluation import EVAL

logger = logging.getLogger(__name__)

ALL = "all"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The latest step; before the first one, the start of the process."""

    time: float
    values: Mapping[str, float]
    step: int | None = None


class PrometheusSink:
    """Serves from a thread of its own; a step replaces the snapshot whole, so that none is seen half."""

    def __init__(self, process: str, host: str, port: int) -> None:
        self._process = process
        self._snapshot = Snapshot(time.monotonic(), {})
        self._server = _Server(host, port, self)
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._snapshot = Snapshot(time.monotonic(), dict(values), step)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def metrics(self) -> bytes:
        snapshot = self._snapshot
        return b"" if snapshot.step is None else exposition(snapshot.step, snapshot.values).encode()

    def health(self) -> bytes:
        """Seconds since the last step, or since the start if there was none."""
        snapshot = self._snapshot
        idle_s = round(time.monotonic() - snapshot.time, 3)
        return orjson.dumps(
            {"process": self._process, "step": snapshot.step, "seconds_since_last_step": idle_s}
        )


class _Server(ThreadingTCPServer):
    # Not http.server.HTTPServer: it looks up the host's full name, which can hang on a cluster's DNS.
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, sink: PrometheusSink) -> None:
        self.sink = sink
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that left early is no news; the default prints a traceback."""
        logger.debug("a request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(HTTPStatus.OK, METRICS_TYPE, self.server.sink.metrics())
            case "/health":
                self._answer(HTTPStatus.OK, "application/json", self.server.sink.health())
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"this is /metrics and /health\n")

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def exposition(step: int, values: Mapping[str, float]) -> str:
    """The values as gauges, all samples of one name together."""
    gauges: dict[str, dict[str, float]] = {"pellucid_step": {"": step}}
    environments = environments_in(values)
    for name, value in values.items():
        gauge, labels = gauge_name(name, environments)
        gauges.setdefault(gauge, {})[labels] = value
    lines = []
    for gauge, samples in gauges.items():
        lines.append(f"# TYPE {gauge} gauge")
        lines += [f"{gauge}{labels} {_number(value)}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"


def environments_in(values: Mapping[str, float]) -> set[str]:
    """`reward/all` and `reward/reverse-text` -> {"all", "reverse-text"}."""
    split = [name.split("/") for name in values if "/" in name]
    return {
        parts[1] for parts in split if parts[0] == EVAL or "/".join([parts[0], ALL, *parts[2:]]) in values
    }


def gauge_name(name: str, environments: set[str]) -> tuple[str, str]:
    """(name, labels) of a metric."""
    first, *rest = name.split("/")
    labels = ""
    if rest and rest[0] in environments:
        labels = f'{{env="{_escape(rest.pop(0))}"}}'
    return re.sub(r"[^a-zA-Z0-9_]", "_", "_".join(["pellucid", first, *rest])), labels


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
