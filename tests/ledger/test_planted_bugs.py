"""Planted bugs, in a run of real parts: the ledger finds each, and says at which stage and step."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pellucid.checks.ledger import run_ledger
from pellucid.config.tools import LedgerSettings
from pellucid.data import TokenTable
from pellucid.ledger import reconcile
from pellucid.orchestrator.verdict import Verdict
from pellucid.trainer.observer import StepObserver
from small_run import Attempt, Said, SmallRun, TrainerSide, steady


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    small = SmallRun(tmp_path)
    small.go_on()
    return small


def settled_group(run: SmallRun) -> list[Verdict]:
    """The first group, of `math`: two rollouts of 4 tokens that are equally good, so that none trains."""
    first, second, *_ = run.orchestrator.inflight.values()
    assert first.group_id == second.group_id and first.env_name == "math"
    for rollout in (first, second):
        run.orchestrator.play(rollout, Attempt([Said(4)]))
    [group] = run.orchestrator.scheduler.take_settled()
    return group


def found(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The last lines of `pellucid ledger`, which fails, once the run is over."""
    run.finish()
    assert run_ledger(LedgerSettings(run=run.folder, json=True)) == 1
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert run_ledger(LedgerSettings(run=run.folder)) == 1
    lines = capsys.readouterr().out.splitlines()[-len(differences) :]
    assert [line.partition(":")[0] for line in lines] == [each["where"] for each in differences]
    return lines


def test_nothing_is_found_where_there_is_no_bug(run: SmallRun) -> None:
    run.orchestrator.books.account(0, settled_group(run))
    run.finish()
    assert run_ledger(LedgerSettings(run=run.folder)) == 0


def test_rollouts_that_were_delivered_and_never_settled(run: SmallRun, capsys) -> None:
    settled_group(run)
    assert found(run, capsys) == [
        "inference to orchestrator: 8 tokens missing (run 'run', environment 'math')"
    ]


def test_a_rollout_that_was_settled_twice(run: SmallRun, capsys) -> None:
    group = settled_group(run)
    run.orchestrator.books.account(0, [*group, group[0]])
    assert found(run, capsys) == [
        "inference to orchestrator: 4 tokens counted twice (run 'run', environment 'math')"
    ]


def test_a_rollout_that_lost_a_turn_on_its_way(run: SmallRun, capsys) -> None:
    """The engine delivered a turn that the orchestrator did not record."""
    rollout, *_ = run.orchestrator.inflight.values()
    run.engine.sample(rollout, 5)
    run.engine.answer(rollout)
    assert found(run, capsys) == [
        "inference to orchestrator: 5 tokens missing (run 'run', environment 'math')"
    ]


class BuggyTrainer(TrainerSide):
    """Does something to the samples of step 2."""

    def __init__(self, run: SmallRun, bug: Callable[[TokenTable, TokenTable], TokenTable]) -> None:
        super().__init__(run.folder, resume=True, num_ranks=1)
        self._bug = bug
        self._last: TokenTable | None = None

    def observe(self, step: int, table: TokenTable) -> list[StepObserver]:
        received = table if step != 2 else self._bug(table, self._last)
        self._last = table
        return super().observe(step, received)


def again(table: TokenTable, _: TokenTable) -> TokenTable:
    return TokenTable.concat([table, table.select([0])])


def from_the_step_before(table: TokenTable, last: TokenTable) -> TokenTable:
    return TokenTable.concat([table, last.select([0])])


def without_the_first(table: TokenTable, _: TokenTable) -> TokenTable:
    return table.select(list(range(1, table.num_sequences)))


@pytest.mark.parametrize(
    ("bug", "fault", "env"),
    [
        pytest.param(again, "8 tokens counted twice", "math", id="twice in one step"),
        pytest.param(from_the_step_before, "13 tokens counted twice", "debate", id="in two steps"),
        pytest.param(without_the_first, "8 tokens missing", "math", id="sent, not received"),
    ],
)
def test_a_sample_that_is_trained_twice_or_not_at_all(
    run: SmallRun, capsys, bug, fault: str, env: str
) -> None:
    """Found as soon as the next step is booked, not only in the end.

    The batches of steps 0, 1, 2 are a group of `math`, `debate`, `math`, of 3 + 8, 13 + 3 and 8 + 13 tokens.
    """
    run.trainer = BuggyTrainer(run, bug)
    attempts = steady()
    for _ in range(3):
        run.advance(attempts)
        assert reconcile(run.ledger_dir).balanced
    run.advance(attempts)
    difference = f"orchestrator to trainer, step 2: {fault} (run 'run', environment '{env}')"
    assert [str(each) for each in reconcile(run.ledger_dir).differences] == [difference]
    assert found(run, capsys) == [difference]
