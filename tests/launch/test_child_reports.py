"""Whom a launcher waits for, and what it shows, from the reports of its children."""

from pathlib import Path

import pytest

from pellucid.ending import ProcessReport
from pellucid.launch.supervisor import (
    SHOW_AFTER_S,
    SHOW_EVERY_S,
    SHOW_SPARE_AFTER_S,
    Child,
    ChildState,
    due_lines,
)


class Watch:
    """A clock that is set by hand, and the reports of some children."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.states = {
            name: ChildState(Child(name, (), Path(f"{name}.log")), 10.0, lambda: self.now) for name in names
        }

    def hear(self, name: str, doing: str = "", at_stake: str = "", silence_s: float = 10.0) -> None:
        self.states[name].hear(ProcessReport(self.now, doing, at_stake, silence_s))

    def beat(self, name: str) -> None:
        self.states[name].hear(ProcessReport(self.now, beat=True))

    def lines(self, *names: str) -> list[str]:
        return due_lines(self.states[name] for name in names or self.states)


@pytest.fixture
def watch() -> Watch:
    return Watch("trainer", "trainer_1", "inference")


def test_a_child_that_says_nothing_has_the_grace_period_from_sigterm_on(watch: Watch) -> None:
    watch.states["trainer"].note_stop()
    watch.now += 10.0
    assert not watch.states["trainer"].is_silent
    watch.now += 0.1
    assert watch.states["trainer"].is_silent
    assert watch.states["trainer"].describe_kill() == (
        "trainer was killed after 10 s of silence; it had not said what it was doing"
    )


def test_a_child_has_as_long_as_it_said_from_its_last_beat_on(watch: Watch) -> None:
    watch.states["trainer"].note_stop()
    watch.hear("trainer", "writing the checkpoint of step 40", "the steps since 30", silence_s=60)
    for _ in range(50):
        watch.now += 60
        assert not watch.states["trainer"].is_silent
        watch.beat("trainer")
    watch.now += 60.1
    assert watch.states["trainer"].is_silent
    assert watch.states["trainer"].describe_kill() == (
        "trainer was killed after 60 s of silence while writing the checkpoint of step 40; "
        "lost may be the steps since 30"
    )


def test_what_is_done_no_longer_counts(watch: Watch) -> None:
    watch.hear("trainer", "writing the checkpoint of step 40", silence_s=600)
    watch.hear("trainer")
    watch.states["trainer"].note_stop()
    watch.now += 10.1
    assert watch.states["trainer"].is_silent
    assert watch.lines("trainer") == []


def test_a_child_with_nothing_at_stake_is_spare_unless_it_failed(watch: Watch) -> None:
    assert not watch.states["trainer"].is_spare
    watch.hear("trainer", "writing the model", "the model")
    assert not watch.states["trainer"].is_spare
    watch.hear("trainer", "exiting")
    assert watch.states["trainer"].is_spare
    assert watch.states["trainer"].describe_kill().endswith(" while exiting; nothing is lost")
    watch.states["trainer"].hear(ProcessReport(watch.now, failed="no room"))
    assert not watch.states["trainer"].is_spare


def test_a_failure_is_as_old_as_its_first_word_and_reads_like_its_last(watch: Watch) -> None:
    assert watch.states["inference"].failure is None
    watch.states["inference"].hear(ProcessReport(3.0, failed="OSError: [Errno 28]"))
    watch.states["inference"].hear(ProcessReport(9.0, failed="ledger/inference.jsonl cannot be written"))
    failed = ProcessReport(3.0, failed="ledger/inference.jsonl cannot be written")
    assert watch.states["inference"].failure == failed


def test_what_takes_longer_than_a_moment_is_shown_and_now_and_then_again(watch: Watch) -> None:
    for name in ("trainer_1", "trainer"):
        watch.hear(name, "writing the checkpoint of step 40", "it")
    watch.hear("inference", "closing its books", "them")
    assert watch.lines() == []
    watch.now += SHOW_AFTER_S
    assert watch.lines() == [
        "inference: closing its books",
        "trainer, trainer_1: writing the checkpoint of step 40",
    ]
    watch.hear("inference")
    assert watch.lines() == []
    watch.now += SHOW_EVERY_S
    watch.beat("trainer")
    assert watch.lines() == ["trainer, trainer_1: writing the checkpoint of step 40 (21 s so far)"]


def test_an_exit_is_shown_only_if_it_takes_long(watch: Watch) -> None:
    watch.hear("inference", "exiting")
    watch.now += SHOW_SPARE_AFTER_S - 0.1
    assert watch.lines("inference") == []
    watch.now += 0.1
    assert watch.lines("inference") == ["inference: exiting"]


def test_many_processes_that_do_the_same_are_one_line() -> None:
    names = [f"trainer_{number}" for number in range(8)]
    watch = Watch(*names)
    for name in names:
        watch.hear(name, "finishing step 3")
    watch.now += SHOW_SPARE_AFTER_S
    assert watch.lines() == ["trainer_0 and 7 others: finishing step 3"]
