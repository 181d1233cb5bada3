"""Records that a process of its own writes: the same files, and training goes on when it is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exported_steps import WHOLE_STEPS, exported, observed, samples, write_steps
from pellucid.export import TokenExporter
from pellucid.export.writer import WriterProcess


def process_of(exporter: TokenExporter) -> subprocess.Popen[bytes]:
    assert isinstance(exporter._writer, WriterProcess) and exporter._writer._process is not None
    return exporter._writer._process


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_it_writes_what_a_thread_writes(tmp_path, format) -> None:
    for where in (thread := tmp_path / "thread", process := tmp_path / "process"):
        exporter = TokenExporter(where, format=format, own_process=where == process)
        write_steps(exporter, range(2))
        exporter.close()
    assert len(exported(thread)) == 6
    assert exported(thread) == exported(process)
    for name in exported(thread):
        assert (process / name).read_bytes() == (thread / name).read_bytes(), name


def test_killed_it_ends_the_export_and_training_goes_on(tmp_path, caplog) -> None:
    exporter = TokenExporter(tmp_path, own_process=True)
    write_steps(exporter, range(2))
    table = samples()
    exporter.add(table, observed(table.num_tokens), step=2, micro_step=0, denominator=1)
    exporter.flush()
    assert (tmp_path / "token_exports" / "step_2" / ".rank_0.jsonl.partial").exists()
    process_of(exporter).kill()
    exporter.add(table, observed(table.num_tokens), step=2, micro_step=1, denominator=1)
    exporter.finish(2)
    write_steps(exporter, [3])
    exporter.close()
    assert exported(tmp_path) == WHOLE_STEPS
    assert exporter.num_lost == 3
    (warning,) = caplog.records
    assert "ends with step 2: its process is gone (exit code -9); training goes on" in warning.getMessage()


def test_signals_that_end_a_run_do_not_end_it(tmp_path) -> None:
    """The trainer hears them, too, and finishes its step."""
    exporter = TokenExporter(tmp_path, own_process=True)
    write_steps(exporter, [0])
    process = process_of(exporter)
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    write_steps(exporter, [1])
    assert process.poll() is None
    exporter.close()
    assert process.returncode == 0
    assert exported(tmp_path) == WHOLE_STEPS


ENDS_AT_ONCE = """
import os, sys
from pathlib import Path
from pellucid.export.paths import ExportPaths
from pellucid.export.writer import StepWriter, WriterProcess
from pellucid.data.schema import FIELDS

writer = WriterProcess(StepWriter(ExportPaths(Path(sys.argv[1]), ".jsonl"), 0, FIELDS))
writer.complete(0)
print(writer._process.pid, flush=True)
os._exit(1)
"""


def test_it_does_not_outlive_the_trainer(tmp_path) -> None:
    arguments = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    while (Path("/proc") / str(int(done.stdout))).exists():
        time.sleep(0.02)
    assert (tmp_path / "token_exports" / "step_0" / "rank_0.jsonl").read_bytes() == b""
