"""`pellucid rl`: what is decided before the first process starts, and what is said after the last."""

import io
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from pellucid.config import InferenceRunConfig, OrchestratorRunConfig, RLConfig, TrainerRunConfig
from pellucid.data.alarms import Bell
from pellucid.errors import ConfigError, LedgerError, ProcessError
from pellucid.launch.console import RL_COLUMNS, PlainView
from pellucid.launch.preflight import check_rl, free_port, resolve
from pellucid.launch.rl import StepProgress, rl_children, run_processes, write_configs
from pellucid.launch.supervisor import Child
from pellucid.orchestrator.records import BatchProgress, progress_path, write_progress


def config(output_dir: Path, **changes: object) -> RLConfig:
    return RLConfig.model_validate(
        {
            "output_dir": output_dir,
            "clean_output_dir": True,
            "max_steps": 3,
            "model": {"name": "some/model"},
            "orchestrator": {"env": [{"id": "reverse-text"}]},
            **changes,
        }
    )


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 4)])
def test_engine_and_trainer_share_the_cores(tmp_path, cores, threads):
    resolved = resolve(config(tmp_path), cores)

    assert (resolved.trainer.threads, resolved.inference.threads) == (threads, threads)


def test_threads_that_are_set_are_kept(tmp_path):
    resolved = resolve(config(tmp_path, trainer={"threads": 3}, inference={"threads": 1}), 8)

    assert (resolved.trainer.threads, resolved.inference.threads) == (3, 1)


def test_port_0_becomes_a_port_that_stays_free_for_its_server(tmp_path):
    port = resolve(config(tmp_path), 2).inference.port

    assert port > 0
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("127.0.0.1", port))  # as one who looks for any free port: this one is spoken for
    with socket.create_server(("127.0.0.1", port)):  # with SO_REUSEADDR
        pass


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            free_port("127.0.0.1", port)

    assert str(refused.value).startswith(
        f"inference.port = {port} cannot be used on inference.host = 127.0.0.1"
    )
    assert "already in use" in str(refused.value)
    assert str(refused.value).endswith("choose another port, or 0 for any that is free")


def test_every_process_finds_its_own_config(tmp_path):
    run = resolve(config(tmp_path, seq_len=64), 2)

    write_configs(run)

    kinds = {
        "rl": RLConfig,
        "inference": InferenceRunConfig,
        "orchestrator": OrchestratorRunConfig,
        "trainer": TrainerRunConfig,
    }
    written = {
        name: kind.model_validate(tomllib.loads((tmp_path / "configs" / f"{name}.toml").read_text()))
        for name, kind in kinds.items()
    }
    assert written.pop("rl") == run
    assert written == {
        name: run.part(kind, clean_output_dir=False) for name, kind in kinds.items() if name != "rl"
    }


def test_the_processes_of_a_run(tmp_path):
    children = rl_children(resolve(config(tmp_path, trainer={"threads": 4}), 2))

    assert [(child.name, child.service) for child in children] == [
        ("inference", True),
        ("orchestrator", False),
        ("trainer", False),
    ]
    trainer = children[2]
    assert trainer.argv == (
        sys.executable, "-m", "pellucid.cli", "trainer", "@", str(tmp_path / "configs" / "trainer.toml"),
    )  # fmt: skip
    assert trainer.log_path == tmp_path / "logs" / "trainer.log"
    assert trainer.env == {
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_a_trainer_in_several_processes_divides_its_threads(tmp_path):
    trainer = {"threads": 4, "num_processes": 2, "model": {"cp": 2}}
    first, second = rl_children(resolve(config(tmp_path, trainer=trainer), 2))[2:]

    assert (first.name, second.name) == ("trainer", "trainer_1")
    assert first.argv == second.argv
    assert second.log_path == tmp_path / "logs" / "trainer_1.log"
    assert first.env["OMP_NUM_THREADS"] == second.env["OMP_NUM_THREADS"] == "2"
    assert first.env["MASTER_PORT"] == second.env["MASTER_PORT"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [first.env[name] for name in names] == ["0", "0", "2", "2"]
    assert [second.env[name] for name in names] == ["1", "1", "2", "2"]


def test_processes_that_cannot_share_the_work_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="does not divide the 1 process"):
        check_rl(config(tmp_path, trainer={"model": {"cp": 2}}))


def test_the_server_runs_under_its_own_interpreter(tmp_path):
    resolved = resolve(config(tmp_path, inference={"python": ".venv-vllm/bin/python"}), 2)
    children = {child.name: child.argv[0] for child in rl_children(resolved)}

    assert children == {
        "inference": ".venv-vllm/bin/python",
        "orchestrator": sys.executable,
        "trainer": sys.executable,
    }


@pytest.mark.parametrize(
    ("inference", "reason"),
    [
        ({"backend": "vllm"}, "vLLM is not installed here; `make vllm`"),
        ({"backend": "vllm", "python": "no/python"}, "'no/python' cannot be run .*; `make vllm`"),
        ({"backend": "vllm", "python": "/bin/false"}, "'/bin/false' is no Python interpreter; `make vllm`"),
        ({"backend": "vllm", "python": sys.executable}, "has no vllm; install it there; `make vllm`"),
        ({"python": "no/python"}, "'no/python' cannot be run .No such file or directory.$"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_refused_before_anything_starts(tmp_path, inference, reason):
    with pytest.raises(ConfigError, match=reason):
        check_rl(config(tmp_path, inference=inference))


def test_servers_of_ones_own_are_not_for_the_launcher(tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_rl(config(tmp_path, inference={"servers": ["http://a:8000"]}))
    assert str(refused.value) == (
        "inference.servers = ['http://a:8000']: `pellucid rl` starts the policy's server itself; leave "
        "the key out, or start the parts on their own (`pellucid inference`, `pellucid "
        f"orchestrator`, `pellucid trainer`), which share output_dir = {tmp_path}"
    )


INFERENCE = """
import signal, sys
from pathlib import Path
from pellucid.ledger import Flow, Journal, Stage
folder = Path(sys.argv[1])
journal = Journal(folder / "ledger/inference.jsonl", Stage.INFERENCE)
journal.count("demo", "reverse-text", Flow.SAMPLED, 30)
journal.count("demo", "reverse-text", Flow.DELIVERED, 30)

def stop(*_):
    journal.close(3)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
(folder / "serving").touch()
signal.pause()
"""

ORCHESTRATOR = """
import sys, time
from pathlib import Path
from pellucid.ledger import Flow, Journal, Stage
from pellucid.metrics import JsonlSink
folder = Path(sys.argv[1])
while not (folder / "serving").exists():
    time.sleep(0.01)
journal = Journal(folder / "ledger/orchestrator.jsonl", Stage.ORCHESTRATOR)
journal.count("demo", "reverse-text", Flow.RECEIVED, 30)
journal.count("demo", "reverse-text", Flow.SENT, 30)
metrics = JsonlSink(folder / "metrics/orchestrator.jsonl")
for step in range(3):
    metrics.log(step, {"reward/all": step / 4})
metrics.close()
evaluations = JsonlSink(folder / "metrics/eval.jsonl")
for version in (0, 3):
    own = {"avg@1": version / 4, "pass@1": 0.5, "num_failed": 0, "completion_length": 9, "time_s": 1}
    evaluations.log(version, {f"eval/held-out/{name}": value for name, value in own.items()})
evaluations.close()
(folder / "sent").touch()
journal.close(3)
"""

TRAINER = """
import sys, time
from pathlib import Path
from pellucid.ledger import Flow, Journal, Stage, State
from pellucid.metrics import JsonlSink
folder, trained = Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(folder / "ledger/trainer.jsonl", Stage.TRAINER)
journal.count("demo", "reverse-text", Flow.RECEIVED, 30)
journal.count("demo", "reverse-text", State.TRAINED, trained)
journal.count("demo", "reverse-text", Flow.COMPUTED, trained)
metrics = JsonlSink(folder / "metrics/trainer.jsonl")
for step in range(3):
    metrics.log(step, {"loss": 0.5, "tokens": 12, "padding_tokens": 2})
metrics.close()
if trained == 0:
    while not (folder / "sent").exists():
        time.sleep(0.01)
    raise RuntimeError("out of tokens")
journal.close(3)
"""


def processes(folder: Path, *, trained: int) -> list[Child]:
    """Stand-ins that keep books and report steps as the real processes do."""
    programs = {"inference": INFERENCE, "orchestrator": ORCHESTRATOR, "trainer": TRAINER}
    return [
        Child(
            name,
            (sys.executable, "-c", program, str(folder), str(trained)),
            folder / "logs" / f"{name}.log",
            service=name == "inference",
        )
        for name, program in programs.items()
    ]


def test_a_run_ends_with_its_steps_and_a_balanced_ledger(tmp_path):
    out = io.StringIO()

    run_processes(config(tmp_path), processes(tmp_path, trained=30), Console(file=out, width=100))

    text = out.getvalue()
    assert text.startswith(f"{tmp_path.name}: 3 steps; logs in {tmp_path / 'logs'}\n")
    assert "steps       3" in text
    assert "reward      0.0000 (first 1) → 0.5000 (last 1)" in text
    assert "balanced: every one of the 30 sampled tokens is accounted for" in text
    assert "eval        held-out avg@1 0.0000 (version 0) → 0.7500 (version 3)" in text
    assert "through the trainer, prompts included, over the whole run" in text
    lines = (tmp_path / "logs" / "rl.log").read_text().splitlines()
    _, *rows = [line for line in lines if not line.startswith("eval")]
    assert [line for line in lines if line.startswith("eval")] == [
        "eval    0  held-out  avg@1 0.000  pass@1 0.500  9.0 tokens  1.0 s",
        "eval    3  held-out  avg@1 0.750  pass@1 0.500  9.0 tokens  1.0 s",
    ]
    assert [row.split()[:3] for row in rows] == [
        ["0", "0.0000", "0.5000"],
        ["1", "0.2500", "0.5000"],
        ["2", "0.5000", "0.5000"],
    ]
    assert all(row in text for row in rows)


def test_one_missing_token_fails_a_finished_run(tmp_path):
    out = io.StringIO()

    with pytest.raises(LedgerError) as failure:
        run_processes(config(tmp_path), processes(tmp_path, trained=29), Console(file=out, width=100))

    assert str(failure.value) == f"1 tokens are unaccounted for; see `pellucid ledger {tmp_path}`"
    assert "1 token missing (run 'demo', environment 'reverse-text')" in out.getvalue()


def test_a_journal_that_was_not_closed_fails_a_finished_run(tmp_path):
    children = processes(tmp_path, trained=30)
    silent = Child(
        "inference", (sys.executable, "-c", SILENT_INFERENCE, str(tmp_path)), tmp_path / "i.log", service=True
    )

    with pytest.raises(LedgerError, match=r"^the journal of inference was not closed"):
        run_processes(config(tmp_path), [silent, *children[1:]], Console(file=io.StringIO(), width=100))


SILENT_INFERENCE = INFERENCE.replace("journal.close(3)", "journal.flush(3)")


def test_the_steps_before_a_failure_are_shown(tmp_path):
    out = io.StringIO()

    with pytest.raises(
        ProcessError, match=r"^trainer exited with code 1\n(?s:.*)RuntimeError: out of tokens"
    ) as failure:
        run_processes(config(tmp_path), processes(tmp_path, trained=0), Console(file=out, width=100))

    assert str(failure.value).endswith("\nonce that is mended, go on with the same command and --resume")
    assert (tmp_path / "metrics" / "trainer.jsonl").exists()
    assert "trainer exited with code 1; stopping the others" in out.getvalue()


STOPPED_TRAINER = """
import os, signal, sys
from pathlib import Path
folder = Path(sys.argv[1]) / "metrics"

def stop(*_):
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("orchestrator", "trainer"):
        record = '{"step": 0, "loss": 0.5, "tokens": 12, "padding_tokens": 2}\\n'
        (folder / f"{name}.jsonl").write_text(record)
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


def test_the_last_line_of_a_run_that_is_stopped_says_how_to_go_on(tmp_path):
    """The trainer finishes a step after Ctrl-C; that is shown before."""
    out = io.StringIO()
    trainer = Child(
        "trainer", (sys.executable, "-c", STOPPED_TRAINER, str(tmp_path)), tmp_path / "logs" / "trainer.log"
    )

    with pytest.raises(SystemExit) as stopped:
        run_processes(config(tmp_path), [trainer], Console(file=out, width=100))

    assert stopped.value.code == 130
    *_, step, last = out.getvalue().splitlines()
    assert step.split()[0] == "0"
    assert last == "stopped; go on with the same command and --resume"


def test_the_launcher_starts_without_torch():
    code = "import sys, pellucid.launch.rl, pellucid.checks.ledger; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_status_goes_with_the_orchestrators_progress(tmp_path):
    class Shown(PlainView):
        lines: list[str] | None = None

        def status(self, lines):
            self.lines = list(lines)

    view = Shown(RL_COLUMNS, print)
    progress = StepProgress(tmp_path / "metrics", [view])
    write_progress(tmp_path, BatchProgress(step=3, num_ready=96, num_running=32))
    progress.update()
    assert view.lines == ["step 3: 96 rollouts ready, 32 running"]
    progress_path(tmp_path).unlink()
    progress.update()
    assert view.lines == []


def test_alarms_are_shown_as_they_ring_and_those_before_a_resume_are_not(tmp_path):
    def ring(name, step):
        Bell(tmp_path, {name: "Top-k."}).ring(name, step, "nats", value=0.5, threshold=0.05, example="")

    ring("update", 2)
    lines = []
    progress = StepProgress(tmp_path / "metrics", [PlainView(RL_COLUMNS, lines.append)])
    ring("surprise", 7)
    progress.update()
    progress.update()
    assert lines == ["ALARM surprise at step 7: nats: 0.5 (threshold 0.05). Top-k."]
