"""Real processes and signals: whoever stops an orchestrator can tell from its exit code."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from pellucid.orchestrator.servers import base_url

PROGRAM = """
import asyncio
from pellucid.orchestrator.tasks import run_until_signalled
from pellucid.orchestrator.tasks import finish_despite_cancellation

async def wind_down():
    print("winding down", flush=True)
    await asyncio.sleep(0.3)
    print("done", flush=True)

async def main():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    finally:
        await finish_despite_cancellation(wind_down())

run_until_signalled(main)
"""

LEFT_BEHIND = """
import asyncio, time
from pellucid.orchestrator.tasks import run_until_signalled
from pellucid.workers import Workers

async def stubborn():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def main():
    workers = Workers("threads")
    tasks = [stubborn(), asyncio.to_thread(time.sleep, 600), workers.run(time.sleep, 600)]
    tasks = [asyncio.ensure_future(task) for task in tasks]
    await asyncio.sleep(0.1)
    workers.close()
    {end}

run_until_signalled(main)
"""


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3)])
def test_neither_tasks_nor_threads_that_never_end_keep_the_process(end: str, code: int) -> None:
    program = LEFT_BEHIND.replace("{end}", end)
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == code
    assert done.stderr.startswith(
        "a task will not be cancelled, and is left behind: <coroutine object stubborn"
    )
    assert done.stderr.count("\n") == 1


EXITS = """
import asyncio
from pellucid.errors import RolloutError
from pellucid.orchestrator.environment import ask
from pellucid.orchestrator.tasks import run_until_signalled

async def leave(error):
    await asyncio.sleep(0)
    raise error

async def rollout(error):
    await asyncio.gather(asyncio.sleep(0), leave(error))

async def main():
    for error in (SystemExit(4), KeyboardInterrupt()):
        try:
            await ask(rollout, error)
        except RolloutError as failed:
            print(str(failed).partition(" (")[0], flush=True)
    await asyncio.sleep(60)

run_until_signalled(main)
"""


def test_a_task_of_an_environment_that_exits_fails_its_rollout_and_signals_are_heard_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EXITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        failed = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert failed == ["SystemExit: 4\n", "KeyboardInterrupt\n"]
    assert process.returncode == 130
    assert told.splitlines() == [
        "a task of an environment raised SystemExit; the run goes on",
        "a task of an environment raised KeyboardInterrupt; the run goes on",
        "SIGINT: winding down",
    ]


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
        arguments = [
            *("orchestrator", "--model.name", str(tiny_model)),
            *("--output-dir", str(tmp_path), "--inference.port", str(server.getsockname()[1])),
            *("--orchestrator.env", '[{"id": "reverse-text"}]'),
        ]
        process = warm.start(arguments)
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
