"""How several processes end: told to stop, all after the same step; if one dies, the others do not wait."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

import warm
from pellucid.checkpoint import newest_intact
from pellucid.cli import main
from pellucid.launch.rl import places
from pellucid.metrics import read_metrics
from pellucid.trainer.run import Run
from tolerance import near, update_bound

pytestmark = pytest.mark.slow


def start(*arguments: str) -> list[warm.Running]:
    return [warm.start(arguments, env={**os.environ, **place}, merged=True) for place in places(2)]


def wait_for_step(folder: Path, step: int, processes: list[warm.Running]) -> None:
    path = folder / "run" / "metrics" / "trainer.jsonl"
    while not path.exists() or step not in {record["step"] for record in read_metrics(path)}:
        assert all(process.poll() is None for process in processes), processes[0].communicate()[0]
        time.sleep(0.05)


def test_all_stop_after_the_same_step_and_go_on_from_there(tiny_model, tmp_path) -> None:
    arguments = [
        *("trainer", "--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run")),
        *("--seq-len", "16", "--max-steps", "1000000"),
        *("--trainer.data.fake.batch-size", "3", "--trainer.threads", "2"),
    ]
    processes = start(*arguments)
    wait_for_step(tmp_path, 2, processes)
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in processes] == [128 + signal.SIGTERM] * 2
    progress = newest_intact(tmp_path / "run")
    assert progress is not None
    steps = [record["step"] for record in read_metrics(tmp_path / "run" / "metrics" / "trainer.jsonl")]
    assert steps == list(range(progress.step))

    processes = start(*arguments, "--resume")
    wait_for_step(tmp_path, progress.step + 1, processes)
    processes[1].kill()
    assert processes[0].wait() == 1
    last = processes[0].communicate()[0].splitlines()[-1]
    assert last.startswith("error: another process of the trainer is gone; its log tells why (")
    assert processes[1].wait() == -signal.SIGKILL


def test_a_trainer_that_fails_is_not_ended_by_a_signal_before_all_is_closed(
    tiny_model, tmp_path, monkeypatch
) -> None:
    """The launcher tells all to stop once one has failed: the second that fails must be heard out."""
    closed = []
    close = Run.close

    def fail(run: Run) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "weights/step_1")

    def close_slowly(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        close(run)
        closed.append(run)

    monkeypatch.setattr("pellucid.trainer.train", fail)
    monkeypatch.setattr(Run, "close", close_slowly)
    arguments = [
        *("trainer", "--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run")),
        *("--seq-len", "16", "--max-steps", "1", "--trainer.data.fake.batch-size", "3"),
    ]
    assert main(arguments) == 74
    assert len(closed) == 1


def test_sft_in_two_processes(tiny_model, tmp_path) -> None:
    for name, words in (("data", ("abc", "xyz", "hello", "tomato")), ("held_out", ("potato", "world"))):
        chats = [[("user", word), ("assistant", word[::-1])] for word in words]
        rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        *("sft", "--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run"), "--seq-len", "64"),
        *("--max-steps", "3", "--data.path", str(tmp_path / "data.jsonl"), "--data.batch-size", "3"),
        *("--data.validation.path", str(tmp_path / "held_out.jsonl"), "--trainer.threads", "2"),
    ]
    processes = start(*arguments)
    logs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "".join(logs)
    assert main([*arguments, "--output-dir", str(tmp_path / "alone")]) == 0
    both = [list(read_metrics(tmp_path / name / "metrics" / "trainer.jsonl")) for name in ("run", "alone")]
    allowed = update_bound(tiny_model, 3 * 64)
    for own, other in zip(*both, strict=True):
        for name in ("loss", "grad_norm", "loss_tokens", "samples"):
            assert own[name] == near(other[name], within=allowed * other[name]), name
    own, other = (records[2]["validation/loss"] for records in both)
    assert own == near(other, within=allowed * other)
    assert ["3 steps" in log for log in logs] == [True, False]
