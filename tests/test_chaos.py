"""`make chaos` in short: some blows, and its checks; what a blow cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos import (
    ALL,
    Blow,
    arguments_of,
    costs,
    draw,
    num_steps,
    rampage,
    start_warm,
    struck,
    table,
    wait_for_new_step,
)


def one_after_the_other(*blows: Blow) -> Callable[[int, float], Blow]:
    return lambda number, start_s: blows[number]


@pytest.mark.slow
def test_kills_in_training_and_in_a_resume_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = (Blow("kill", ALL, 0.3), Blow("resume", "launcher", 0.2), Blow("kill", "orchestrator", 0.5))
    states = rampage(tmp_path, 3, one_after_the_other(*kills))
    assert "balanced: every one of the" in capsys.readouterr().out
    blows = struck(tmp_path)
    assert [blow.name for blow in blows] == ["kill, all at once", "resume, launcher", "kill, orchestrator"]
    assert [blow.resumed_s is None for blow in blows] == [False, True, False]
    assert states["trained"] > 0 and states["in_flight"] == 0


@pytest.mark.slow
def test_a_checkpoint_a_hang_and_a_full_disk_lose_nothing_though_the_blows_are_interrupted(
    tmp_path: Path,
) -> None:
    choose = one_after_the_other(
        Blow("checkpoint", "trainer", 0.005), Blow("hang", ALL, 0.5), Blow("full disk", "inference", 0.0)
    )
    starts = iter(range(2))

    def start_once(arguments: list[str]) -> Any:
        if next(starts):
            raise KeyboardInterrupt
        return start_warm(arguments)

    with pytest.raises(KeyboardInterrupt):
        rampage(tmp_path, 3, choose, start_once)
    (first,) = struck(tmp_path)
    assert first.name == "checkpoint, trainer"
    left = start_warm(arguments_of(tmp_path, 1_000_000))  # whoever struck was killed
    wait_for_new_step(left, tmp_path / "run", num_steps(tmp_path / "run"))
    rampage(tmp_path, 3, choose)
    assert left.wait() == 1
    assert [blow.name for blow in struck(tmp_path)[1:]] == ["hang, all at once", "full disk, inference"]


def test_a_blow_is_the_same_for_a_seed_and_a_number() -> None:
    assert draw(7, 12, 1.0) == draw(7, 12, 1.0)
    assert {draw(0, number, 1.0).name for number in range(400)} >= {
        "kill, ctrl-c",
        "resume, launcher",
        "checkpoint, all at once",
        "weights, trainer",
        "hang, inference",
        "full disk, orchestrator",
    }


LOST = "resuming at step 4; 1,010 sampled tokens were lost"
BLOWS = [
    Blow("kill", ALL, 1.0, resumed_s=3.0, ended_s=0.1, resumed="new run", given_up={}),
    Blow("resume", "launcher", 0.1, ended_s=0.2, given_up={"lost": 0}),  # before it could say anything
    Blow("kill", ALL, 1.0, resumed_s=5.0, ended_s=0.3, resumed=LOST, given_up={"lost": 1010}),
    Blow("hang", "trainer", 2.0, resumed_s=4.0, resumed="resuming at step 8", given_up={"lost": 1020}),
]
STATES = {"lost": 1050, "cancelled": 3, "trained": 900}


def test_tokens_are_those_of_the_last_blow_that_struck_a_run_which_sampled() -> None:
    found = [(blow.name, cost["lost"], cost["cancelled"], s) for blow, cost, s in costs(BLOWS, STATES)]
    assert found == [
        ("kill, all at once", 1010, 0, None),
        ("resume, launcher", 0, 0, 5.0),
        ("kill, all at once", 0, 0, 4.0),
        ("hang, trainer", 10 + 30, 3, None),
    ]


def test_the_table_has_a_row_per_way_and_victim() -> None:
    assert table(BLOWS, STATES).splitlines()[2:] == [
        "| hang | trainer | 1 | – | – | 40.0 | 3.0 | 0.0 |",
        "| kill | all at once | 2 | 0.2 s, 0.3 s | 4.0 s, 4.0 s | 505.0 | 0.0 | 0.0 |",
        "| resume | launcher | 1 | 0.2 s, 0.2 s | 5.0 s, 5.0 s | 0.0 | 0.0 | 0.0 |",
    ]
