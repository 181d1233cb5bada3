"""What a user meets when something is wrong: one clear error, nothing lost, nothing half-written.

The first part is refused before anything is made, deleted or started. In the second, real runs meet a faulty
environment and disks that take no more; each is resumed, and in the end every token is accounted for.
"""

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import warm
from pellucid.cli import main
from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics
from warm import processes_of

SmallDisk = Callable[[str], AbstractContextManager[Path]]

STEPS = 12
REVERSE_TEXT = '[{"id": "reverse-text"}]'


def rl(model: Path | str, folder: Path, *flags: str, env: str = REVERSE_TEXT) -> list[str]:
    return [
        *("rl", "--model.name", str(model), "--output-dir", str(folder), "--max-steps", str(STEPS)),
        *("--seq-len", "256", "--orchestrator.env", env, "--trainer.ckpt.interval", "3"),
        *("--orchestrator.batch-size", "16", "--orchestrator.sampling.max-tokens", "8"),
        *("--orchestrator.rollouts-per-example", "4", "--orchestrator.max-inflight-rollouts", "16"),
        *flags,
    ]


def steps_of(folder: Path, process: str) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics" / f"{process}.jsonl")]


def verdict(folder: Path) -> list[str]:
    return reconcile(folder / "ledger").verdict()


def balanced(folder: Path) -> list[str]:
    sampled = sum(reconcile(folder / "ledger").sampled.values())
    return [f"balanced: every one of the {sampled:,} sampled tokens is accounted for"]


# Before anything starts


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with an earlier run."""
    folder = tmp_path / "run"
    (folder / "metrics").mkdir(parents=True)
    (folder / "metrics" / "trainer.jsonl").write_text('{"step": 0}\n')
    return folder


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was said: one error in one line."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, out + err
    return err.rstrip("\n")


def without(model: Path, folder: Path, *patterns: str) -> Path:
    shutil.copytree(model, folder)
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            path.unlink()
    return folder


def with_vocabulary(model: Path, folder: Path, size: int) -> Path:
    config = json.loads((shutil.copytree(model, folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return folder


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (
            lambda model, folder: folder,
            "model.name = '.*': no such folder; give a local model folder or a hub",
        ),
        (
            lambda model, folder: without(model, folder, "tokenizer*"),
            "no tokenizer in this folder .*; save the",
        ),
        (
            lambda model, folder: without(model, folder, "*.jinja"),
            "its tokenizer has no chat template; use a",
        ),
        (
            lambda model, folder: without(model, folder, "*.safetensors"),
            "no weights in this folder .*; add them",
        ),
        (
            lambda model, folder: with_vocabulary(model, folder, 50),
            "the tokenizer has 101 tokens, the model only 50; use the tokenizer the model was trained with",
        ),
    ],
    ids=["folder", "tokenizer", "chat-template", "weights", "vocabulary"],
)
def test_a_model_that_cannot_work(
    tiny_model: Path,
    used: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: Callable[[Path, Path], Path],
    complaint: str,
) -> None:
    folder = model(tiny_model, tmp_path / "model")
    assert main(rl(folder, used, "--clean-output-dir")) == 1
    assert re.search(complaint, only_line(capsys))
    assert steps_of(used, "trainer") == [0], (
        "what an earlier run wrote is deleted for a run that cannot start"
    )


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (
            '[{"id": "reverse-txt"}]',
            "orchestrator.env.id = 'reverse-txt' is not .*; did you mean 'reverse-text'?",
        ),
        (
            '[{"id": "my.env:Env"}]',
            "orchestrator.env.id = 'my.env:Env' cannot be imported: No module named 'my'",
        ),
        (
            '[{"id": "reverse-text", "args": {"letters": 4}}]',
            "unexpected keyword argument 'letters'; it takes",
        ),
    ],
    ids=["unknown", "not-installed", "arguments"],
)
def test_an_environment_that_cannot_work(
    tiny_model: Path, used: Path, capsys: pytest.CaptureFixture[str], env: str, complaint: str
) -> None:
    assert main(rl(tiny_model, used, "--clean-output-dir", env=env)) == 2
    assert re.search(complaint, only_line(capsys))
    assert steps_of(used, "trainer") == [0]


def test_a_port_in_use(tiny_model: Path, used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(rl(tiny_model, used, "--clean-output-dir", "--inference.port", str(port))) == 2
    assert only_line(capsys) == (
        f"error: inference.port = {port} cannot be used on inference.host = 127.0.0.1 (Address already in "
        "use); choose another port, or 0 for any that is free"
    )
    assert steps_of(used, "trainer") == [0]


def test_a_folder_that_holds_a_run(tiny_model: Path, used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(rl(tiny_model, used)) == 2
    assert only_line(capsys) == (
        f"error: output_dir = {used} already holds a run (metrics); choose another folder, set resume to "
        "go on with that run, or clean_output_dir to delete what it wrote"
    )
    assert steps_of(used, "trainer") == [0]


def test_a_read_only_disk(
    tiny_model: Path, small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk("256k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert main(rl(tiny_model, disk / "run")) == 2
    assert only_line(capsys) == (
        f"error: output_dir = {disk / 'run'} cannot be written to (Read-only file system); choose a folder "
        "that can, or free some space"
    )


def test_a_data_set_that_is_not_there(
    tiny_model: Path, used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--output-dir", str(used), "--clean-output-dir", "--data.path", "no/such.jsonl"]
    assert main(["sft", "--model.name", str(tiny_model), *flags]) == 1
    assert only_line(capsys).startswith(
        "error: data.path = 'no/such.jsonl' does not exist; give a JSONL file"
    )
    assert steps_of(used, "trainer") == [0]


# While it runs

FAULTY = '[{"id": "own:Faulty"}]'
ENVIRONMENTS = '''
from pellucid.data import Example
from pellucid.orchestrator import Score, SingleTurnEnvironment


class Faulty(SingleTurnEnvironment):
    """Every third example raises always, the others for every third answer."""

    def example(self, index):
        return Example(str(index), [{"role": "user", "content": "abc"}], {"index": index, "num_answers": 0})

    def reward(self, example, text):
        example.info["num_answers"] += 1
        if example.info["index"] % 3 == 0 or example.info["num_answers"] % 3 == 0:
            raise KeyError("answer")
        return Score(example.info["num_answers"])


class Unmakeable(Faulty):
    def __init__(self, *, seed):
        open("words.txt")
'''


@pytest.mark.slow
def test_the_cause_in_a_process_is_told_by_the_launcher(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ENVIRONMENTS)
    arguments = rl(tiny_model, tmp_path / "run", env='[{"id": "own:Unmakeable"}]')
    ended = warm.run(arguments, cwd=tmp_path, merged=True)
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-4:] == [
        "error: orchestrator exited with code 2",
        "         error: environment 'own:Unmakeable' cannot be made with orchestrator.env.args = {}: "
        "FileNotFoundError: [Errno 2] No such file or directory: 'words.txt' (own.py:21)",
        f"       log: {tmp_path / 'run' / 'logs' / 'orchestrator.log'}",
        "       once that is mended, start again with the same command",
    ]
    assert processes_of(tmp_path / "run") == {}


@dataclass
class Day:
    folder: Path
    victims: list[str]
    outputs: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, list[str]] = field(default_factory=dict)


DISK = "disk"


@contextmanager
def begun_day(small_disk: SmallDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """On a disk of its own if there can be one; it is filled then, too."""
    victims = ["orchestrator", "inference"]
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk("16m"))
            victims.append(DISK)
        except pytest.skip.Exception:
            disk = tmp_path_factory.mktemp("full-day")
        yield Day(disk / "run", victims)


def strike(day: Day, victim: str) -> None:
    """From now on no file of a process may grow, its log neither; or no file of any."""
    if victim != DISK:
        resource.prlimit(processes_of(day.folder)[victim], resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return
    path = day.folder.parent / "mine"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@pytest.fixture(scope="module")
def day(tiny_model: Path, small_disk: SmallDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """A run in an environment with faults that is struck, and resumed, again and again."""
    if sys.platform != "linux":
        pytest.skip("needs prlimit and /proc")
    with begun_day(small_disk, tmp_path_factory) as day:
        live_through(day, tiny_model)
        yield day


def live_through(day: Day, model: Path) -> None:
    (day.folder.parent / "own.py").write_text(ENVIRONMENTS)
    arguments = rl(model, day.folder, "--trainer.experimental.token-export", "--resume", env=FAULTY)
    for number, victim in enumerate(day.victims):
        run = warm.start(arguments, cwd=day.folder.parent, merged=True)
        try:
            warm.wait_for_step(run, day.folder, 2 + 3 * number)
            strike(day, victim)
            day.outputs[victim], _ = run.communicate()
        finally:
            run.kill()
        assert run.returncode == 74, day.outputs[victim]
        day.verdicts[victim] = verdict(day.folder)
        (day.folder.parent / "mine").unlink(missing_ok=True)
    ended = warm.run(arguments, cwd=day.folder.parent, merged=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["orchestrator", "inference"])
def test_a_process_that_can_write_no_more_is_named_with_the_reason(day: Day, victim: str) -> None:
    """Its log cannot hold the reason: it tells the launcher. What others make of its failure comes after."""
    reason = "(the disk is full, or cannot be written to)"
    causes = re.findall(r"^(?:error: |       then )(\w+ .*)\n +(.*)", day.outputs[victim], re.MULTILINE)
    assert causes[0][0] == f"{victim} exited with code 74 {reason}"
    assert re.match(
        rf"error: {re.escape(str(day.folder))}/\S+ cannot be written \(File too large\)", causes[0][1]
    )
    assert "Traceback" not in day.outputs[victim]


@pytest.mark.slow
def test_a_full_disk_is_named_with_the_file_and_the_remedy(day: Day) -> None:
    if DISK not in day.victims:
        pytest.skip("needs the right to mount a tmpfs")
    output = day.outputs[DISK]
    assert re.search(
        r"^error: \w+ exited with code 74 \(the disk is full, or cannot be written to\)\n"
        rf" +error: {re.escape(str(day.folder))}/\S+ cannot be written \(No space left on device\); "
        "free some space and go on with --resume$",
        output,
        re.MULTILINE,
    ), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_after_a_day_of_full_disks_nothing_is_missing_or_double(day: Day) -> None:
    assert all(lines[0].startswith("balanced: ") for lines in day.verdicts.values())
    assert verdict(day.folder) == balanced(day.folder)
    assert steps_of(day.folder, "trainer") == steps_of(day.folder, "orchestrator") == list(range(STEPS))
    assert list(day.folder.rglob(".*.partial-*")) == []


@pytest.mark.slow
def test_an_environment_that_raises_and_groups_that_are_left_empty(day: Day) -> None:
    """Every failed rollout is known with its reason; what is left of its group trains, if anything is."""
    rollouts = [
        json.loads(line)
        for path in day.folder.glob("rollouts/step_*/train_rollouts.jsonl")
        for line in path.read_text().splitlines()
    ]
    failed = [each for each in rollouts if each["outcome"] == "failed_rollout"]
    assert all(each["error"] for each in failed)  # of the server, too, when that could write no more
    assert sum(each["error"].startswith("KeyError: 'answer'") for each in failed) >= 2 * STEPS
    states = reconcile(day.folder / "ledger").states["run", "own:Faulty"]
    assert sum(each["num_tokens"] for each in failed) == states["failed_rollout"] > 0
    groups: dict[str, set[str]] = {}
    for each in rollouts:
        groups.setdefault(each["group_id"], set()).add(each["outcome"])
    empty = {each["group_id"] for each in rollouts if int(each["example_id"]) % 3 == 0}
    assert all("sent" not in groups[group] for group in empty)
    assert sum("sent" in groups[group] and "failed_rollout" in groups[group] for group in groups) >= STEPS
