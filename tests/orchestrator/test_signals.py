"""Real processes and signals: whoever stops an orchestrator can tell from its exit code."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.orchestrator.servers import base_url

PROGRAM = """
import asyncio
from pellucid.orchestrator.signals import run_until_signalled
from pellucid.orchestrator.tasks import outlast

async def wind_down():
    print("winding down", flush=True)
    await asyncio.sleep(0.3)
    print("done", flush=True)

async def main():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        await outlast(wind_down())

run_until_signalled(main)
"""

SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


@SIGNALS
def test_a_signal_winds_down_and_is_the_exit_code(number: signal.Signals, code: int) -> None:
    argv = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "winding down\n"
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
        assert process.stdout.readline() == "done\n"
    assert process.returncode == code


@SIGNALS
@pytest.mark.slow
def test_the_command_says_which_signal_stopped_it(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = [
            *(sys.executable, "-m", "pellucid.cli", "orchestrator", "--model.name", str(tiny_model)),
            *("--output-dir", str(tmp_path), "--inference.port", str(server.getsockname()[1])),
            *("--orchestrator.env", '[{"id": "reverse-text"}]'),
        ]
        with subprocess.Popen(argv) as process:
            try:
                asks_whether_it_is_ready, _ = server.accept()
                with asks_whether_it_is_ready:
                    process.send_signal(number)
                    assert process.wait() == code
            finally:
                process.kill()


def test_an_ipv6_host_is_put_into_brackets() -> None:
    assert base_url("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert base_url("::1", 8000) == "http://[::1]:8000"
