"""Whom a launcher waits for, and what it shows, from what its children said."""

import pytest

from pellucid.ending import Word
from pellucid.launch.last_words import SHOW_AFTER_S, SHOW_EVERY_S, SHOW_SPARE_AFTER_S, LastWords


class Watch:
    """A clock that is set by hand, and the words of two children."""

    def __init__(self) -> None:
        self.now = 100.0
        self.words = LastWords(["trainer", "trainer_1", "inference"], 10.0, lambda: self.now)

    def hear(self, name: str, doing: str = "", at_stake: str = "", silence_s: float = 10.0) -> None:
        self.words.hear(name, Word(self.now, doing, at_stake, silence_s))

    def beat(self, name: str) -> None:
        self.words.hear(name, Word(self.now, beat=True))


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_child_that_says_nothing_has_the_grace_period_from_sigterm_on(watch: Watch) -> None:
    watch.words.tell_to_stop(["trainer"])
    watch.now += 10.0
    assert not watch.words.is_silent("trainer")
    watch.now += 0.1
    assert watch.words.is_silent("trainer")
    assert watch.words.epitaph("trainer") == (
        "trainer was killed after 10 s of silence; it had not said what it was doing"
    )


def test_a_child_has_as_long_as_it_said_from_its_last_beat_on(watch: Watch) -> None:
    watch.words.tell_to_stop(["trainer"])
    watch.hear("trainer", "writing the checkpoint of step 40", "the steps since 30", silence_s=60)
    for _ in range(50):
        watch.now += 60
        assert not watch.words.is_silent("trainer")
        watch.beat("trainer")
    watch.now += 60.1
    assert watch.words.is_silent("trainer")
    assert watch.words.epitaph("trainer") == (
        "trainer was killed after 60 s of silence while writing the checkpoint of step 40; "
        "lost may be the steps since 30"
    )


def test_what_is_done_no_longer_counts(watch: Watch) -> None:
    watch.hear("trainer", "writing the checkpoint of step 40", silence_s=600)
    watch.hear("trainer")
    watch.words.tell_to_stop(["trainer"])
    watch.now += 10.1
    assert watch.words.is_silent("trainer")
    assert watch.words.lines(["trainer"]) == []


def test_a_child_with_nothing_at_stake_is_spare_unless_it_failed(watch: Watch) -> None:
    assert not watch.words.is_spare("trainer")
    watch.hear("trainer", "writing the model", "the model")
    assert not watch.words.is_spare("trainer")
    watch.hear("trainer", "exiting")
    assert watch.words.is_spare("trainer")
    assert watch.words.epitaph("trainer").endswith(" while exiting; nothing is lost")
    watch.words.hear("trainer", Word(watch.now, failed="no room"))
    assert not watch.words.is_spare("trainer")


def test_a_failure_is_as_old_as_its_first_word_and_reads_like_its_last(watch: Watch) -> None:
    assert watch.words.failure("inference") is None
    watch.words.hear("inference", Word(3.0, failed="OSError: [Errno 28]"))
    watch.words.hear("inference", Word(9.0, failed="ledger/inference.jsonl cannot be written"))
    failed = Word(3.0, failed="ledger/inference.jsonl cannot be written")
    assert watch.words.failure("inference") == failed


def test_what_takes_longer_than_a_moment_is_shown_and_now_and_then_again(watch: Watch) -> None:
    names = ["trainer", "trainer_1", "inference"]
    for name in ("trainer_1", "trainer"):
        watch.hear(name, "writing the checkpoint of step 40", "it")
    watch.hear("inference", "closing its books", "them")
    assert watch.words.lines(names) == []
    watch.now += SHOW_AFTER_S
    assert watch.words.lines(names) == [
        "inference: closing its books",
        "trainer, trainer_1: writing the checkpoint of step 40",
    ]
    watch.hear("inference")
    assert watch.words.lines(names) == []
    watch.now += SHOW_EVERY_S
    watch.beat("trainer")
    assert watch.words.lines(names) == ["trainer, trainer_1: writing the checkpoint of step 40 (21 s so far)"]


def test_an_exit_is_shown_only_if_it_takes_long(watch: Watch) -> None:
    watch.hear("inference", "exiting")
    watch.now += SHOW_SPARE_AFTER_S - 0.1
    assert watch.words.lines(["inference"]) == []
    watch.now += 0.1
    assert watch.words.lines(["inference"]) == ["inference: exiting"]


def test_many_processes_that_do_the_same_are_one_line() -> None:
    names = [f"trainer_{number}" for number in range(8)]
    now = 0.0
    words = LastWords(names, 10.0, lambda: now)
    for name in names:
        words.hear(name, Word(0.0, "finishing step 3"))
    now = 5.0
    assert words.lines(names) == ["trainer_0 and 7 others: finishing step 3"]
