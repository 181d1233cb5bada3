"""Every folder that a run writes to gets full, one after the other, on a disk of its own.

The file is named with the remedy, nothing is left half-written, and with some space the run goes on: in the
end it has every step, and every token is accounted for.
"""

import errno
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import warm
from pellucid.cli import main
from pellucid.errors import DiskError
from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics
from small_run import MAX_STEPS, NAMES, SmallRun, steady

SmallDisk = Callable[..., AbstractContextManager[Path]]


def fill(disk: Path, room: int = 0) -> Path:
    """Takes all of the disk but `room` bytes."""
    path = disk / "mine"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    os.truncate(path, path.stat().st_size - room)
    return path


def half_written(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.partial-*"))


@pytest.mark.parametrize("target", ["ledger", "rollouts", "batches", "weights", "checkpoints"])
def test_a_run_whose_folder_is_full_goes_on_once_it_is_not(
    small_disk: SmallDisk, tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "run"
    with small_disk("1m", at=folder / target) as disk:
        run = SmallRun(folder)
        run.go_on()
        if target != "ledger":  # whose lines find room in a page that is there already
            run.advance(steady())
        mine = fill(disk)
        with pytest.raises(OSError) as full:
            for _ in range(2 * MAX_STEPS):
                run.advance(steady())
        assert full.value.errno == errno.ENOSPC
        said = str(DiskError.of(full.value))
        assert re.match(
            rf"{re.escape(str(disk))}/\S+ cannot be written \(No space left on device\); free", said
        )
        run.crash(NAMES)
        mine.unlink()
        run.rewind()
        assert half_written(folder) == []
        run.start(resume=True)
        run.finish()
        (line,) = reconcile(run.ledger_dir).verdict()
        assert line.startswith("balanced: every one of the ")


RL = """rl --resume --max-steps 2 --seq-len 64 --orchestrator.env '[{"id": "reverse-text"}]'
    --orchestrator.batch-size 8 --orchestrator.rollouts-per-example 4 --orchestrator.sampling.max-tokens 4"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ledger", "batches", "weights"])
def test_a_command_whose_folder_is_full_exits_with_74_and_names_the_file_first(
    tiny_model: Path, small_disk: SmallDisk, tmp_path: Path, target: str
) -> None:
    """One page is the room of one file of the ledger, of one batch, or of no weights."""
    folder = tmp_path / "run"
    command = [*shlex.split(RL), "--model.name", str(tiny_model), "--output-dir", str(folder)]
    with small_disk("4k", at=folder / target) as disk:
        struck = warm.run(command, merged=True)
        assert struck.returncode == 74, struck.stdout
        assert re.search(
            r"^error: \w+ exited with code 74 \(the disk is full, or cannot be written to\)\n"
            rf" +error: {re.escape(str(disk))}/\S+ cannot be written \(No space left on device\); "
            "free some space and go on with --resume$",
            struck.stdout,
            re.MULTILINE,
        )
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        resumed = warm.run(command, merged=True)
        assert resumed.returncode == 0, resumed.stdout
        (line,) = reconcile(folder / "ledger").verdict()
    assert line.startswith("balanced: every one of the ")
    assert [record["step"] for record in read_metrics(folder / "metrics" / "trainer.jsonl")] == [0, 1]


SFT = "--seq-len 64 --max-steps 6 --data.batch-size 3 --trainer.threads 1 --trainer.ckpt.interval 2"


@pytest.mark.parametrize(
    ("target", "room"),
    [
        ("metrics", 0),
        ("checkpoints", 64 * 1024),
    ],
    ids=["metrics", "checkpoints"],
)
def test_a_trainer_whose_folder_is_full_says_so_and_goes_on_once_it_is_not(
    tiny_model: Path,
    small_disk: SmallDisk,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    room: int,
) -> None:
    folder = tmp_path / "run"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "abc", "completion": "{number:05}"}}\n' for number in range(9)))
    command = ["sft", "--model.name", str(tiny_model), "--output-dir", str(folder), "--resume"]
    command += ["--data.path", str(data), *shlex.split(SFT)]
    with small_disk("8m", at=folder / target) as disk:
        assert main([*command, "--max-steps", "2"]) == 0
        mine = fill(disk, room)
        capsys.readouterr()
        assert main(command) == 74
        said = re.search(
            r"^error: (\S+) cannot be written \((.*)\); (.*)$", capsys.readouterr().err, re.MULTILINE
        )
        assert said is not None
        assert said[1].startswith(f"{disk}/")
        assert said.groups()[1:] == ("No space left on device", "free some space and go on with --resume")
        mine.unlink()
        assert main(command) == 0
        assert half_written(folder) == []
        steps = [record["step"] for record in read_metrics(folder / "metrics" / "trainer.jsonl")]
        assert steps == list(range(6))
