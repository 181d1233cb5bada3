"""Files that a run may bring to a shared trainer: one line of error, and nobody waits for a pipe."""

import os
from pathlib import Path

import pytest

from pellucid.config import TrainerRunConfig
from pellucid.errors import ConfigError, DataError
from pellucid.trainer.many import Roster, read_run

OWN = TrainerRunConfig.model_validate({"output_dir": "x", "model": {"name": "none"}})


@pytest.mark.parametrize(
    "content", [b"= [", b"\xff\xfe", b"a = " + b"[" * 50_000, b"[trainer]\nwarp = 9\n", None], ids=repr
)
def test_a_run_that_brings_no_configuration_is_refused_with_the_reason(tmp_path: Path, content) -> None:
    path = tmp_path / "run.toml"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml is not the configuration of a run"):
        read_run(path, OWN)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"won\n", "does not say what became of the run"), (b"\xff", "does not say"), (None, "is a pipe")],
)
def test_an_outcome_that_is_none_ends_the_run_that_it_is_about_alone(tmp_path: Path, content, reason) -> None:
    roster = Roster(tmp_path)
    with roster.joined("run", "max_steps = 3"):
        assert (roster.waiting(), roster.outcome("run")) == (["run"], None)
        path = tmp_path / "runs" / "run" / "OUTCOME"
        os.mkfifo(path) if content is None else path.write_bytes(content)
        assert roster.waiting() == []  # the trainer has nothing to do with it any more
        with pytest.raises(DataError, match=reason):
            roster.outcome("run")


def test_nobody_locks_what_is_no_file(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    os.mkfifo(tmp_path / ".serving")
    assert not roster.has_trainer()
    with pytest.raises(DataError, match="is a pipe"), roster.serving():
        pass
