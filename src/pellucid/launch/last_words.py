"""The last reports of a run's children, by which the launcher decides whom to wait for and what to show.

A child that reports nothing has a grace period after the launcher stopped it. One that reports what it is
doing may be silent for as long as it announced, counted from its last report; see `pellucid.ending`. The end
of its log tells why a child ended.
"""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from pellucid.ending import Word

SHOW_AFTER_S = 1.0
"""Seconds after which a child's activity is shown; after that it is shown every `SHOW_EVERY_S`."""

SHOW_SPARE_AFTER_S = 5.0
"""The same in seconds for an activity with nothing at stake, such as the exit."""

SHOW_EVERY_S = 20.0
NUM_NAMES_SHOWN = 3


@dataclass(slots=True)
class _Child:
    word: Word | None = None
    """Latest report of what it does to end; None: it has reported nothing, or is done."""

    failure: Word | None = None
    since: float = 0.0
    """Time at which it began its current activity, or the launcher stopped it."""

    heard: float = 0.0
    """Time of its last report."""

    shown: float | None = None


class LastWords:
    def __init__(
        self, names: Collection[str], grace_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._children = {name: _Child() for name in names}
        self._grace_s = grace_s
        self._clock = clock

    def hear(self, name: str, word: Word) -> None:
        child = self._children[name]
        child.heard = self._clock()
        if word.failed:
            # It may explain itself better later; what counts is when it first knew.
            at = child.failure.at if child.failure is not None else word.at
            child.failure = Word(at, failed=word.failed)
        elif not word.beat:
            child.word = word if word.doing else None
            child.since, child.shown = child.heard, None

    def tell_to_stop(self, names: Collection[str]) -> None:
        """Notes that these children were sent a signal to stop: from now on their silence counts."""
        for name in names:
            child = self._children[name]
            child.heard = self._clock()
            child.since = child.since if child.word is not None else child.heard

    def failure(self, name: str) -> Word | None:
        """Returns a child's report that it fails, with the time at which it first knew."""
        return self._children[name].failure

    def is_spare(self, name: str) -> bool:
        """Whether all that a child had to do is done, and killing it loses nothing."""
        child = self._children[name]
        return child.word is not None and not child.word.at_stake and child.failure is None

    def is_silent(self, name: str) -> bool:
        """Whether a child gave no sign of life for longer than it may."""
        return self._clock() - self._children[name].heard > self._silence_s(name)

    def _silence_s(self, name: str) -> float:
        word = self._children[name].word
        return self._grace_s if word is None else word.silence_s

    def epitaph(self, name: str, when: str = "") -> str:
        """`trainer was killed after 600 s of silence while writing the checkpoint of step 40; lost …`."""
        when = when or f"after {self._silence_s(name):g} s of silence"
        if (word := self._children[name].word) is None:
            return f"{name} was killed {when}; it had not said what it was doing"
        lost = f"lost may be {word.at_stake}" if word.at_stake else "nothing is lost"
        return f"{name} was killed {when} while {word.doing}; {lost}"

    def lines(self, names: Collection[str]) -> list[str]:
        """Returns lines about the children's activities that are due to be shown: those that take long."""
        now = self._clock()
        due: dict[str, list[str]] = {}
        for name in sorted(names):
            child = self._children[name]
            if child.word is None:
                continue
            wait_s = SHOW_AFTER_S if child.word.at_stake else SHOW_SPARE_AFTER_S
            if now - (child.shown or child.since) < (wait_s if child.shown is None else SHOW_EVERY_S):
                continue
            so_far = "" if child.shown is None else f" ({now - child.since:.0f} s so far)"
            due.setdefault(f"{child.word.doing}{so_far}", []).append(name)
            child.shown = now
        return [f"{_enumerate(who)}: {what}" for what, who in due.items()]


def _enumerate(names: list[str]) -> str:
    """`trainer, trainer_1`; `trainer and 7 others`."""
    if len(names) > NUM_NAMES_SHOWN:
        return f"{names[0]} and {len(names) - 1} others"
    return ", ".join(names)


NUM_TAIL_BYTES = 64 * 1024
NUM_TAIL_LINES = 12
TRACEBACK = "Traceback (most recent call last)"


def read_cause(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_TAIL_BYTES))
        return find_cause(file.read().decode(errors="replace"))


def find_cause(log: str) -> list[str]:
    """The last `error: …` with its indented lines, else the last traceback's end, else the last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    if (start := _last(lines, "error: ")) is not None:
        return [lines[start], *_indented(lines[start + 1 :])]
    if (start := _last(lines, TRACEBACK)) is not None:
        return _traceback_end(lines[start:])
    return lines[-NUM_TAIL_LINES:]


def _traceback_end(lines: list[str]) -> list[str]:
    """The innermost frames, the exception, and the first lines after it: a message may have several."""
    exception = 1 + len(_indented(lines[1:]))
    half = NUM_TAIL_LINES // 2
    return lines[max(0, exception - half) : exception + half]


def _last(lines: list[str], prefix: str) -> int | None:
    found = [index for index, line in enumerate(lines) if line.startswith(prefix)]
    return found[-1] if found else None


def _indented(lines: list[str]) -> list[str]:
    return list(takewhile(lambda line: line.startswith(" "), lines))
