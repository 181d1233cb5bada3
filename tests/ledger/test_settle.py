"""Books of runs that died: by hand, and whatever was lost where."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.ledger import (
    LedgerEntry,
    Stage,
    read_journal,
    settle_engines,
    settle_trainer,
    sum_entries,
)
from pellucid.ledger.journal import append_entries, discarded, held_again
from pellucid.ledger.reconcile import Report, reconcile_journals

RUN = ("run", "env")
LINK = "server:client"


def entry(stage: Stage, step: int, link: str = "", **counts: int) -> LedgerEntry:
    return LedgerEntry(stage, step, *RUN, counts, link=link)


def opened(stage: Stage, process: str) -> LedgerEntry:
    return LedgerEntry(stage, opened=process)


def closed(stage: Stage) -> LedgerEntry:
    return LedgerEntry(stage, closed=True)


def report_of(*entries: LedgerEntry) -> Report:
    report = reconcile_journals([[each for each in entries if each.stage is stage] for stage in Stage])
    assert report.balanced, report.verdict()
    return report


# The trainer


def test_the_trainer_forgets_what_it_trains_again(tmp_path: Path) -> None:
    """Of both ranks; the next trainer may have one."""
    booked = [entry(Stage.TRAINER, step, received=10, trained=9, masked=1, computed=10) for step in range(3)]
    append_entries(tmp_path / "trainer.jsonl", booked)
    append_entries(tmp_path / "trainer_1.jsonl", [*booked, closed(Stage.TRAINER)])
    for _ in range(2):
        settle_trainer(tmp_path, 2, sum_entries([*booked[:2], *booked[:2]]))
        assert list(read_journal(tmp_path / "trainer.jsonl")) == [*booked[:2], *booked[:2]]
    assert not (tmp_path / "trainer_1.jsonl").exists()
    settle_trainer(tmp_path, 0, None)
    assert list(read_journal(tmp_path / "trainer.jsonl")) == []


# The orchestrator


def test_discarded_steps_are_rolled_back_if_they_were_trained_and_lost_otherwise() -> None:
    sent = [
        entry(Stage.ORCHESTRATOR, step, received=11, sent=10, zero_advantage=1, link=LINK)
        for step in range(3)
    ]
    settled = discarded(sent, 1, trained={1})
    report = report_of(
        entry(Stage.INFERENCE, 0, sampled=33, delivered=33, link=LINK),
        *sent,
        *settled,
        entry(Stage.TRAINER, 0, received=10, trained=10, computed=10),
    )
    assert report.states[RUN] == {"trained": 10, "rolled_back": 10, "lost": 10, "zero_advantage": 3}
    assert discarded([*sent, *settled], 1, trained=set()) == []


def test_what_is_held_is_noted_once() -> None:
    held = Counter({(*RUN, LINK): 8})
    noted = held_again([], held, 3)
    assert noted == [entry(Stage.ORCHESTRATOR, 3, held=8, link=LINK)]
    assert held_again(noted, held, 3) == []
    assert held_again(noted, Counter(), 4) == [entry(Stage.ORCHESTRATOR, 4, held=-8, link=LINK)]


@pytest.mark.parametrize(
    ("held", "end", "tokens"),
    [
        ([3], [], []),  # they wait for a batch
        ([3], [closed(Stage.ORCHESTRATOR)], [3]),
        ([3, -3], [closed(Stage.ORCHESTRATOR)], []),
        ([-3], [], [-3]),  # they were never noted as held
    ],
)
def test_what_was_held_over_a_resume_is_settled_once(
    held: list[int], end: list[LedgerEntry], tokens: list[int]
) -> None:
    entries = [entry(Stage.ORCHESTRATOR, 0, held=number, link=LINK) for number in held]
    report = reconcile_journals([[opened(Stage.ORCHESTRATOR, "client"), *entries, *end]])
    found = [each.tokens for each in report.differences if each.where == "orchestrator, held over a resume"]
    assert found == tokens


# Links: 20 tokens were sampled, 14 delivered, 2 given up; 11 arrived, 3 of them held by the next process.

AT_ENGINE = entry(Stage.INFERENCE, 0, sampled=20, delivered=14, cancelled=2, link=LINK)
ARRIVED = entry(Stage.ORCHESTRATOR, 0, received=8, stale=8, link=LINK)
HELD = entry(Stage.ORCHESTRATOR, 0, held=3, link=LINK)


def states(server: str, client: str, *others: LedgerEntry) -> Counter[str]:
    """By who has the journals open."""
    at_engine, at_client = opened(Stage.INFERENCE, server), opened(Stage.ORCHESTRATOR, client)
    return report_of(at_engine, AT_ENGINE, at_client, ARRIVED, *others).states[RUN]


def test_between_two_that_live_all_is_in_flight() -> None:
    assert states("server", "client") == {"stale": 8, "cancelled": 2, "in_flight": 10}


def test_an_orchestrator_that_died_took_along_what_was_delivered() -> None:
    """What the engine is sampling for it, it will give up or deliver in vain."""
    assert states("server", "next", HELD) == {"stale": 8, "cancelled": 2, "lost": 3, "in_flight": 4 + 3}
    late = entry(Stage.INFERENCE, 0, delivered=4, link=LINK)
    assert states("server", "next", HELD, late) == {"stale": 8, "cancelled": 2, "lost": 7, "in_flight": 3}


def test_an_engine_that_died_took_along_what_it_was_sampling() -> None:
    """What it delivered may not have arrived; that is known once the orchestrator is done."""
    assert states("next", "client") == {"stale": 8, "cancelled": 2, "lost": 4, "in_flight": 6}
    end = closed(Stage.ORCHESTRATOR)
    assert states("next", "client", end) == {"stale": 8, "cancelled": 2, "lost": 10}


def test_what_arrived_was_sampled_even_if_a_killed_engine_did_not_write_it_down() -> None:
    """20 are in its journal; 25 came, and 2 were given up."""
    more = entry(Stage.ORCHESTRATOR, 0, received=17, stale=17, link=LINK)
    assert states("next", "client", more) == {"stale": 25, "cancelled": 2}
    report = report_of(opened(Stage.INFERENCE, "next"), AT_ENGINE, ARRIVED, more)
    assert report.sampled[RUN] == 27


def test_engines_that_are_gone_are_closed_once(tmp_path: Path) -> None:
    path = tmp_path / "inference_1.jsonl"
    append_entries(path, [opened(Stage.INFERENCE, "server"), AT_ENGINE])
    with path.open("ab") as file:
        file.write(b'{"stage":"infer')
    for _ in range(2):
        settle_engines(tmp_path)
        *_, last = entries = list(read_journal(path))
        assert len(entries) == 3 and last.closed and last.opened != "server"
    assert not (tmp_path / "inference.jsonl").exists()


@given(
    delivered=st.integers(0, 50),
    running=st.integers(0, 50),
    cancelled=st.integers(0, 50),
    unwritten=st.integers(0, 50),
    vanished=st.integers(0, 50),
    held=st.integers(0, 50),
    sent=st.lists(st.integers(1, 30), max_size=6),
    num_trained=st.integers(0, 6),
    checkpoint=st.integers(0, 6),
    next_batch=st.integers(0, 6),
)
def test_whatever_died_the_books_balance(
    delivered: int,
    running: int,
    cancelled: int,
    unwritten: int,
    vanished: int,
    held: int,
    sent: list[int],
    num_trained: int,
    checkpoint: int,
    next_batch: int,
) -> None:
    """`unwritten` tokens are missing from the engine's journal, `vanished` ones from the orchestrator's."""
    num_trained = min(num_trained, len(sent))
    checkpoint = min(checkpoint, num_trained)
    next_batch = min(max(next_batch, checkpoint), len(sent))
    known = max(0, sum(sent) + held + vanished - unwritten)
    booked = [entry(Stage.ORCHESTRATOR, step, received=n, sent=n, link=LINK) for step, n in enumerate(sent)]
    trained = [
        entry(Stage.TRAINER, step, received=n, trained=n, computed=n)
        for step, n in enumerate(sent[:checkpoint])
    ]
    engine = entry(
        Stage.INFERENCE,
        0,
        sampled=known + running + cancelled + delivered,
        delivered=known + delivered,
        cancelled=cancelled,
        link=LINK,
    )
    states = report_of(
        opened(Stage.INFERENCE, "next"),
        engine,
        opened(Stage.ORCHESTRATOR, "next"),
        *booked,
        *discarded(booked, next_batch, range(num_trained)),
        *held_again(booked, Counter({(*RUN, LINK): held}), next_batch),
        *trained,
    ).states[RUN]
    assert states["trained"] == sum(sent[:checkpoint])
    assert states["in_flight"] == held + sum(sent[checkpoint:next_batch])
    assert states["rolled_back"] == sum(sent[next_batch:num_trained])
    assert states["cancelled"] == cancelled
