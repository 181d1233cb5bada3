"""Which sinks a process gets, and what happens when one of them fails."""

import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from full_disk import full_disk
from pellucid.config import RunConfig
from pellucid.errors import ConfigError, DataError
from pellucid.metrics import Guarded, JsonlSink, Tee, open_sinks, read_metrics


def config(folder: Path, **monitors) -> RunConfig:
    return RunConfig.model_validate(
        {"output_dir": folder, "run_id": "demo", "model": {"name": "m"}, "monitors": monitors}
    )


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, step, values) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


class Failing(Recorder):
    def log(self, step, values) -> None:
        super().log(step, values)
        raise OSError("No space left on device")

    def close(self) -> None:
        super().close()
        raise RuntimeError("cannot close either")


def test_jsonl_is_always_there(tmp_path):
    (sink,) = open_sinks(config(tmp_path), "orchestrator")
    sink.log(3, {"reward/all": 0.5})
    sink.close()

    (record,) = read_metrics(tmp_path / "metrics" / "orchestrator.jsonl")
    assert (record["step"], record["reward/all"]) == (3, 0.5)


def test_a_tracker_that_fails_is_reported_once_and_switched_off(caplog):
    tracker, other = Failing(), Recorder()
    sink = Tee([Guarded(tracker, "monitors.wandb"), other])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sink.log(step, {})
        sink.close()

    assert (tracker.steps, tracker.closed) == ([0], True)
    assert (other.steps, other.closed) == ([0, 1, 2], True)
    assert caplog.messages == [
        "monitors.wandb failed and is switched off (OSError: No space left on device); "
        "the run and its JSONL go on"
    ]


def test_a_failure_to_close_is_reported_too(caplog):
    class OnlyCloseFails(Failing):
        def log(self, step, values) -> None:
            pass

    sink = Guarded(OnlyCloseFails(), "monitors.wandb")
    sink.log(0, {})
    sink.close()
    assert "monitors.wandb failed and is switched off (RuntimeError: cannot close either)" in caplog.text


def test_a_record_that_cannot_be_written_stops_the_run(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        sink.log(0, {})
    sink.close()


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_names_the_key_and_the_remedy(tmp_path, monkeypatch, name):
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=rf"monitors.{name} needs .*pip install 'pellucid\[{name}\]'"):
        open_sinks(config(tmp_path, **{name: {}}), "trainer")


def test_a_port_in_use_names_the_key(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = config(tmp_path, prometheus={"orchestrator_port": port})
        with pytest.raises(
            ConfigError,
            match=f"monitors.prometheus.orchestrator_port = {port} cannot be used on "
            r"monitors.prometheus.host = 127.0.0.1 \(Address already in use\); choose another port",
        ):
            open_sinks(settings, "orchestrator")


def test_event_files_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(config(tmp_path, tensorboard={}), "trainer")
    for step, loss in enumerate([0.5, 0.25]):
        for sink in sinks:
            sink.log(step, {"loss": loss, "tokens": 3})
    events = EventAccumulator(str(tmp_path / "tensorboard" / "trainer"))
    events.Reload()  # before closing: a run can be watched
    for sink in sinks:
        sink.close()

    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.5), (1, 0.25)]
    assert [event.value for event in events.Scalars("tokens")] == [3.0, 3.0]


def test_a_resumed_run_replaces_its_steps(tmp_path):
    """Steps 2 and 3 were logged before the run died; it is resumed at step 2."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, steps in ((False, range(4)), (True, range(2, 6))):
        settings = config(tmp_path, tensorboard={}).model_copy(update={"resume": resume})
        sink = Tee(open_sinks(settings, "trainer"))
        for step in steps:
            sink.log(step, {"loss": step + 0.5 * resume})
        sink.close()

    expected = [(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5), (5, 5.5)]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "trainer"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == expected
    records = read_metrics(tmp_path / "metrics" / "trainer.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == expected


def test_no_tracker_needs_torch(tmp_path):
    pytest.importorskip("tensorboard")
    program = (
        "import sys; from pathlib import Path; import pellucid.metrics.prometheus; "
        "from pellucid.metrics.sinks import TensorboardSink; sink = TensorboardSink(Path(sys.argv[1])); "
        "sink.log(0, {'loss': 1.0}); sink.close(); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, env=os.environ).returncode == 0


WANDB_PROGRAM = """
import sys
from pellucid.config import RunConfig
from pellucid.metrics import Tee, open_sinks

config = RunConfig.model_validate_json(sys.argv[1])
for process, loss in (("trainer", 0.5), ("trainer", 0.25), ("orchestrator", 0.125)):
    sink = Tee(open_sinks(config, process))
    for step in range(2):
        sink.log(step, {"loss": loss + step, "mismatch_kl/all/mean": float("nan")})
    sink.close()
sinks = [Tee(open_sinks(config, process)) for process in ("inference", "eval")]  # at the same time
for step in range(2):
    for sink, loss in zip(sinks, (0.0625, 0.03125), strict=True):
        sink.log(50 * step, {"loss": loss + step, "mismatch_kl/all/mean": float("nan")})
for sink in sinks:
    sink.close()
"""


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    """In a process of its own: wandb starts a service that stays until its process ends."""
    pytest.importorskip("wandb")
    settings = config(tmp_path, wandb={"offline": True})
    command = [sys.executable, "-c", WANDB_PROGRAM, settings.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    folder = tmp_path / "metrics" / "wandb"
    expected = {
        "trainer": [b"1.5", b"1.25"],
        "orchestrator": [b"1.125"],
        "inference": [b"1.0625"],
        "eval": [b"1.03125"],
    }
    ids = {process: (folder / f"{process}.id").read_text() for process in expected}
    for process, losses in expected.items():
        files = sorted(folder.glob(f"offline-run-*/run-{ids[process]}.wandb"))
        assert len(files) == len(losses), "a run that is continued keeps its id"
        for path, loss in zip(files, losses, strict=True):
            data = path.read_bytes()  # its records are not compressed
            assert loss in data
            assert b"mismatch_kl/all/mean" in data
            assert f"demo/{process}".encode() in data


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "trainer.jsonl"
    path.write_bytes(b'{"step": 0}\n\0\0\0\n{"step": 2}\n')
    with pytest.raises(DataError, match=rf"^{path}:2 is damaged: .*; delete that line$"):
        list(read_metrics(path))


@pytest.mark.parametrize("content", [b"../../x", b"\xff", b"two words", b"x" * 5000])
def test_the_id_of_a_wandb_run_is_kept_and_nothing_but_a_word(tmp_path, content):
    pytest.importorskip("wandb")
    from pellucid.metrics.sinks import stable_id

    path = tmp_path / "wandb" / "trainer.id"
    made = stable_id(path)
    assert re.fullmatch("[0-9a-f]{16}", made) and stable_id(path) == made
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"trainer\.id (holds no id|has 5,000 bytes)"):
        stable_id(path)
