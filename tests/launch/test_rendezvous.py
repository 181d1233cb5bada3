"""The trainer on several machines, as docs/scale-out.md starts it: here two of torchrun's nodes on one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.cli import main
from pellucid.launch.preflight import free_port
from pellucid.metrics import read_metrics
from tolerance import near, update_bound

PAGE = Path(__file__).parents[2] / "docs" / "scale-out.md"


def documented(port: int) -> list[str]:
    """What the page has every machine run, up to the module, with one process on each of two."""
    text = PAGE.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^\$ torchrun (.*--rdzv-backend.* -m pellucid\.cli) trainer @", text, re.MULTILINE)
    changes = {"machine-a:29500": f"127.0.0.1:{port}", "--nproc-per-node 8": "--nproc-per-node 1"}
    for written, here in changes.items():
        assert written in line
        line = line.replace(written, here)
    return line.split()


@pytest.mark.slow
def test_machines_that_meet_at_a_rendezvous_train_what_one_process_does(tiny_model, tmp_path) -> None:
    def arguments(folder: Path) -> list[str]:
        job = "trainer --seq-len 32 --max-steps 2 --trainer.data.fake.batch-size 3 --trainer.threads 1"
        return [*job.split(), "--model.name", str(tiny_model), "--output-dir", str(folder)]

    port = free_port("127.0.0.1", 0)
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *documented(port), *arguments(tmp_path / "two")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    try:
        assert main(arguments(tmp_path / "one")) == 0
        assert [node.wait() for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    one, two = (list(read_metrics(tmp_path / name / "metrics" / "trainer.jsonl")) for name in ("one", "two"))
    assert [record["step"] for record in two] == [0, 1]
    for alone, together in zip(one, two, strict=True):
        for name in ("loss", "grad_norm"):
            within = update_bound(tiny_model, 3 * 32) * max(1.0, abs(alone[name]))
            assert together[name] == near(alone[name], within=within), name
        assert (together["samples"], together["local/samples"]) == (3, 2)
