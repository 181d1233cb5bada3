"""The latest step over HTTP: `/metrics` in Prometheus' text format, `/health` as JSON.

    mismatch_kl/all/mean     pellucid_mismatch_kl_mean{env="all"}
    reward/reverse-text      pellucid_reward{env="reverse-text"}
    time/step_s              pellucid_time_step_s
    eval/reverse-text/avg@8  pellucid_eval_avg_8{env="reverse-text"}

A name's second part is an environment if the first is `eval`, or if the same name is also reported for `all`.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from threading import Thread
from types import SimpleNamespace
from typing import cast

import orjson
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from pellucid.guard import answers_to, is_foreign
from pellucid.metrics.evaluation import EVAL

logger = logging.getLogger(__name__)

ALL = "all"
MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 16 * 1024
DEADLINE_S = 5.0


class PrometheusSink:
    """A small HTTP server in one thread: however many connect, and whatever they send, it answers others.

    A request is a head of at most `MAX_HEAD_BYTES`; each connection gets one answer, within `DEADLINE_S`. A
    step replaces the latest one whole, so that none is seen half.
    """

    def __init__(self, process: str, host: str, port: int) -> None:
        self._process = process
        self._host = host
        self._latest: tuple[float, int | None, Mapping[str, float]] = time.monotonic(), None, {}
        """Time, step and values of the latest step; before the first one, the start of the process."""
        self._num_open = 0
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = Thread(target=self._run, args=(listener,), name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._latest = time.monotonic(), step, dict(values)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _page(self, path: str) -> tuple[str, bytes] | None:
        """Returns content type and content; None if there is no such page."""
        logged_at, step, values = self._latest
        if path == "/metrics":
            return CONTENT_TYPE_PLAIN_0_0_4, b"" if step is None else exposition(step, values)
        if path == "/health":
            idle_s = round(time.monotonic() - logged_at, 3)
            health = {"process": self._process, "step": step, "seconds_since_last_step": idle_s}
            return "application/json", orjson.dumps(health)
        return None

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is still open
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._converse, sock=listener, limit=MAX_HEAD_BYTES)
        await self._closing.wait()
        server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_open += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.decode("latin-1")))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("a reader of metrics left, or took too long: %s", error)
            writer.transport.abort()
        finally:
            self._num_open -= 1

    def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, path = request.rpartition(" ")[0].partition(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        host = headers.get("host", "")
        content_type, content = "text/plain", b""
        if not answers_to(self._host, host):
            status = HTTPStatus.MISDIRECTED_REQUEST
        elif is_foreign(headers.get("origin"), host):
            status = HTTPStatus.FORBIDDEN
        elif method != "GET":
            status = HTTPStatus.METHOD_NOT_ALLOWED
        elif (page := self._page(path.partition("?")[0])) is None:
            status, content = HTTPStatus.NOT_FOUND, b"this is /metrics and /health\n"
        else:
            status, (content_type, content) = HTTPStatus.OK, page
        return (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        ).encode() + content


def exposition(step: int, values: Mapping[str, float]) -> bytes:
    """Returns the values as gauges, all samples of one name together, each once."""
    split = [name.split("/") for name in values if "/" in name]
    environments = {
        parts[1] for parts in split if parts[0] == EVAL or "/".join([parts[0], ALL, *parts[2:]]) in values
    }
    samples = {("pellucid_step", ""): ("step", float(step))}
    samples |= {gauge_name(name, environments): (name, value) for name, value in values.items()}
    gauges: dict[str, GaugeMetricFamily] = {}
    for (gauge, env), (name, value) in samples.items():
        family = gauges.setdefault(gauge, GaugeMetricFamily(gauge, name, labels=["env"]))
        family.add_metric([env] if env else [], value)
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=gauges.values)))


def gauge_name(name: str, environments: set[str]) -> tuple[str, str]:
    """(name of the gauge, environment or "") of a metric."""
    first, *rest = name.split("/")
    env = rest.pop(0) if rest and rest[0] in environments else ""
    return re.sub(r"[^a-zA-Z0-9_]", "_", "_".join(["pellucid", first, *rest])), env
