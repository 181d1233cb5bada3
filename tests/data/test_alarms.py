"""An alarm rings once, in log, file and metrics; it is read from a file that may be anybody's."""

import json
import logging
import os

import pytest

from pellucid.data.alarms import MAX_ALARMS, Alarm, Bell, alarms_path, read_alarms
from pellucid.errors import DataError
from pellucid.launch.console import AlarmFollower

GOOD = {
    "name": "surprise",
    "step": 3,
    "statistic": "nats",
    "value": 0.25,
    "threshold": 0.05,
    "causes": "Top-k.",
}
ALARM = Alarm(**GOOD)


def write(run, *lines: bytes) -> None:
    path = alarms_path(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines))


def line(**changes) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


FOUND = {"statistic": "nats", "value": 0.25, "threshold": 0.05, "p_value": 1e-9, "example": "x\x1b"}
CAUSES = {"surprise": "Top-k.", "update": "Another rate."}


def test_an_alarm_rings_once_in_log_file_and_metrics(tmp_path, caplog) -> None:
    bell = Bell(tmp_path, CAUSES)
    assert bell.metrics() == {"alarms/surprise": 0, "alarms/update": 0}
    assert read_alarms(tmp_path) == [] and not alarms_path(tmp_path).exists()
    with caplog.at_level(logging.WARNING):
        bell.ring("surprise", 3, **FOUND)
        bell.ring("surprise", 4, **FOUND)
    assert bell.metrics() == {"alarms/surprise": 1, "alarms/update": 0}
    assert [record.getMessage() for record in caplog.records] == [
        "ALARM surprise at step 3: nats: 0.25 (threshold 0.05, p = 1e-09 < 1e-06); first seen: x\\x1b. Top-k."
    ]
    assert read_alarms(tmp_path) == [Alarm(**GOOD | FOUND)]


def test_a_resumed_run_rings_again_and_is_read_once(tmp_path) -> None:
    for step in (3, 9):
        Bell(tmp_path, CAUSES).ring("surprise", step, **FOUND)
    assert len(alarms_path(tmp_path).read_bytes().splitlines()) == 2
    assert read_alarms(tmp_path) == [Alarm(**GOOD | FOUND)]


def test_a_number_that_is_not_finite_is_said_in_words(tmp_path) -> None:
    write(tmp_path, line(value=None, p_value=1e-9), b"")
    (alarm,) = read_alarms(tmp_path)
    assert alarm.line() == (
        "ALARM surprise at step 3: nats: not finite (threshold 0.05, p = 1e-09 < 1e-06). Top-k."
    )


def test_nothing_of_an_alarm_redraws_a_terminal_or_starts_a_line(tmp_path) -> None:
    write(tmp_path, line(name="a\x1b[2J", example="one\ntwo", causes="x\rbalanced"), b"")
    (alarm,) = read_alarms(tmp_path)
    assert alarm.line() == (
        "ALARM a\\x1b[2J at step 3: nats: 0.25 (threshold 0.05); first seen: one\\ntwo. x\\rbalanced"
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"no JSON",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"{}",
        line(step=-1),
        line(step=10**18),
        line(step=1.5),
        line(value="high"),
        line(name=["x"]),
        line(name="x" * 1000),
        line(causes="x" * 100_000),
        b'{"name": "surprise", "step": 3' + line(),
    ],
)
def test_a_damaged_line_is_reported_and_the_others_are_read(tmp_path, bad) -> None:
    write(tmp_path, line(name="first"), bad, b"", line(name="last"), b'{"name": "torn')
    problems = []
    assert [alarm.name for alarm in read_alarms(tmp_path, problems.append)] == ["first", "last"]
    assert problems == [f"{alarms_path(tmp_path)}: 1 lines are no alarms, or too many; they are left out"]


def test_there_are_not_endlessly_many(tmp_path) -> None:
    write(tmp_path, *(line(name=f"n{number}") for number in range(MAX_ALARMS + 5)), b"")
    problems = []
    assert len(read_alarms(tmp_path, problems.append)) == MAX_ALARMS
    assert "5 lines are no alarms, or too many" in problems[0]


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    alarms_path(tmp_path).parent.mkdir()
    os.mkfifo(alarms_path(tmp_path))
    problems = []
    assert read_alarms(tmp_path, problems.append) == []
    assert "is a pipe" in problems[0]
    with pytest.raises(DataError, match="is a pipe"):
        AlarmFollower(tmp_path)


def test_alarms_are_followed_past_damaged_lines(tmp_path) -> None:
    write(tmp_path, line(name="before"), b"torn by a kill")
    follower = AlarmFollower(tmp_path)
    with alarms_path(tmp_path).open("ab") as file:
        file.write(line(name="glued to it") + b"\n" + line() + b"\n")
    assert follower.read() == [ALARM]
    assert follower.read() == []
