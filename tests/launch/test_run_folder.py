"""A run gets a folder of its own, and cleaning one deletes nothing that a run did not write."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from pellucid.config import InferenceRunConfig
from pellucid.data.files import OUTCOME
from pellucid.errors import ConfigError, ProcessError
from pellucid.launch.run_folder import LOCK, WRITTEN_BY_A_RUN, claimed, noting_outcome, prepare
from pellucid.ledger import Flow, Journal, Stage


def config(
    folder: Path, *, clean: bool = False, resume: bool = False, model: str = "some/model"
) -> InferenceRunConfig:
    return InferenceRunConfig.model_validate(
        {"output_dir": folder, "clean_output_dir": clean, "resume": resume, "model": {"name": model}}
    )


def write_run(folder: Path) -> None:
    for name in WRITTEN_BY_A_RUN:
        path = folder / name
        if path.suffix:
            path.write_text("")
        else:
            (path / "step_1").mkdir(parents=True)


def test_a_missing_folder_is_made_with_its_parents(tmp_path):
    with claimed(tmp_path / "outputs" / "run"):
        assert [path.name for path in (tmp_path / "outputs" / "run").iterdir()] == [LOCK]


def test_a_folder_in_use_is_refused_until_its_run_is_over(tmp_path):
    with claimed(tmp_path):
        with pytest.raises(ConfigError) as refused, claimed(tmp_path):
            pytest.fail("two runs share a folder")
        assert str(refused.value) == (
            f"output_dir = {tmp_path} is in use by a run that is still going on; choose another folder, or "
            "stop that run first"
        )
    with claimed(tmp_path):
        pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "finished"),
        (ProcessError("trainer failed: \ud83d"), "failed\ntrainer failed: \\ud83d"),
        (SystemExit(130), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_run_writes_down_how_it_ended(tmp_path, error, expected):
    path = tmp_path / OUTCOME
    with suppress(BaseException), noting_outcome(tmp_path):
        assert path.read_text() == ""
        if error is not None:
            raise error
    assert path.read_text() == expected
    with noting_outcome(tmp_path):  # resumed
        assert path.read_text() == ""


def test_an_outcome_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "OUTCOME").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").symlink_to(tmp_path / "mine")
    with noting_outcome(tmp_path / "run"):
        pass
    assert (tmp_path / "mine" / "OUTCOME").read_text() == "mine"


def test_resuming_takes_a_used_folder_over_and_deletes_nothing(tmp_path):
    write_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    assert prepare(config(tmp_path, resume=True, clean=True))
    assert sorted(tmp_path.rglob("*")) == before


def test_resuming_an_unused_folder_starts_afresh(tmp_path):
    assert not prepare(config(tmp_path, resume=True))


def test_logs_of_the_earlier_part_are_kept(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for part in ("first", "second", "third"):
        (logs / "trainer.log").write_text(part)
        prepare(config(tmp_path, resume=True))

    texts = {path.name: path.read_text() for path in logs.iterdir()}
    assert texts == {"trainer.1.log": "first", "trainer.2.log": "second", "trainer.3.log": "third"}


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "page.html").touch()

    with pytest.raises(ConfigError) as refused:
        prepare(config(tmp_path))

    assert str(refused.value) == (
        f"output_dir = {tmp_path} already holds a run (metrics, page.html); "
        "choose another folder, set resume to go on with that run, or clean_output_dir to delete what "
        "it wrote"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics", "page.html"]


def test_cleaning_deletes_what_a_run_wrote_and_nothing_else(tmp_path):
    write_run(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "data").mkdir()

    prepare(config(tmp_path, clean=True))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "notes.md"]


def test_cleaning_removes_a_link_but_not_what_it_points_to(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights.safetensors").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "weights").symlink_to(elsewhere)
    (folder / "model").symlink_to(tmp_path / "gone")

    prepare(config(folder, clean=True))

    assert list(folder.iterdir()) == []
    assert (elsewhere / "weights.safetensors").exists()


def test_cleaning_never_deletes_the_model_to_train(tmp_path):
    (tmp_path / "model").mkdir()

    with pytest.raises(ConfigError, match=r"would delete model\.name = .*; choose another output_dir"):
        prepare(config(tmp_path, clean=True, model=str(tmp_path / "model")))

    assert (tmp_path / "model").exists()


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_is_no_folder_is_refused(tmp_path, path):
    (tmp_path / "file").touch()

    refused = pytest.raises(ConfigError, match=r"output_dir = .* is not a folder; choose another path")
    with refused, claimed(tmp_path / path):
        pytest.fail("claimed")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)

    refused = pytest.raises(ConfigError, match=r"output_dir = .* cannot be written to \(Permission denied\)")
    with refused, claimed(tmp_path):
        pytest.fail("claimed")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody may write to")
def test_a_folder_of_a_read_only_file_system_is_refused():
    refused = pytest.raises(ConfigError, match=r"output_dir = /proc/self cannot be written to")
    with refused, claimed(Path("/proc/self")):
        pytest.fail("claimed")


PARTIALS = (".model.partial-7", "weights/.step_3.partial-7", "checkpoints/.step_3.partial-7")


@pytest.mark.parametrize("options", [{"resume": True}, {"clean": True}])
def test_what_a_killed_process_left_half_written_goes(tmp_path, options):
    write_run(tmp_path)
    for name in (*PARTIALS, ".notes.partial-7"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").touch()

    prepare(config(tmp_path, **options))

    assert list(tmp_path.rglob(".step*")) == [] and [path.name for path in tmp_path.glob(".*")] == [
        ".notes.partial-7"
    ]


def test_a_full_disk_is_refused(small_disk):
    reason = r"output_dir = .* cannot be written to \(No space left on device\); .* or free some space"
    with small_disk("256k") as disk:
        with (disk / "mine").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1024))
        with pytest.raises(ConfigError, match=reason), claimed(disk / "run"):
            pytest.fail("claimed")


def test_a_start_that_failed_before_its_first_token_does_not_block_its_folder(tmp_path):
    """It leaves settings, logs, journals without a count, and snapshot and status of an idle orchestrator."""
    for name in ("configs", "logs", "ledger", "metrics", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "configs" / "rl.toml").write_text("max_steps = 3\n")
    (tmp_path / "logs" / "trainer.log").write_text("error: no such model\n")
    (tmp_path / "metrics" / "trainer.jsonl").touch()
    for name in ("progress.json", ".progress.json.partial"):
        (tmp_path / "metrics" / name).write_text('{"step": 0, "num_ready": 0, "num_running": 0}')
    (tmp_path / "checkpoints" / "orchestrator.bin").write_bytes(b"nothing was sent")
    journal = Journal(tmp_path / "ledger" / "inference.jsonl", Stage.INFERENCE)
    journal.close(0)

    assert not prepare(config(tmp_path))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["logs", "logs/trainer.1.log"]
    assert (tmp_path / "logs" / "trainer.1.log").read_text() == "error: no such model\n"


def test_one_sampled_token_is_a_run(tmp_path):
    journal = Journal(tmp_path / "ledger" / "inference.jsonl", Stage.INFERENCE)
    journal.count("run", "env", Flow.SAMPLED, 1)
    journal.close(0)

    with pytest.raises(ConfigError, match=r"already holds a run \(ledger\)"):
        prepare(config(tmp_path))
    assert prepare(config(tmp_path, resume=True))
