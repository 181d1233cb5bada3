"""Books of runs that died: by hand, and whatever was lost where."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pellucid.ledger import LedgerEntry, Stage, State, settle
from pellucid.ledger.reconcile import reconcile_journals

RUN = ("run", "env")


def entry(stage: Stage, step: int, **counts: int) -> LedgerEntry:
    return LedgerEntry(stage, step, *RUN, counts)


def after(entries: list[LedgerEntry], **settings) -> Counter[str]:
    """The states of all tokens once the run was settled and its waiting batches were trained."""
    held = settings.pop("held", 0)
    settlement = settle(entries, held={RUN: held}, **settings)
    books = [
        *(each for each in entries if each.stage is not Stage.TRAINER),
        *settlement.orchestrator,
        *settlement.inference,
        *settlement.trainer,
    ]
    report = reconcile_journals([[each for each in books if each.stage is stage] for stage in Stage])
    assert report.balanced
    assert sum(report.states[RUN].values()) == report.sampled[RUN]
    return report.states[RUN]


def test_replayed_steps_are_neither_lost_nor_counted_twice() -> None:
    entries = [
        entry(Stage.INFERENCE, 0, sampled=30, delivered=30),
        *(entry(Stage.ORCHESTRATOR, step, received=10, sent=10) for step in range(3)),
        *(entry(Stage.TRAINER, step, received=10, trained=9, masked=1, computed=10) for step in range(3)),
    ]
    settlement = settle(entries, checkpoint=1, next_batch=3, held={})
    assert settlement.trainer == entries[4:5] and not settlement.orchestrator and not settlement.inference
    assert after(entries, checkpoint=1, next_batch=3) == {"trained": 9, "masked": 1, "in_flight": 20}


def test_discarded_steps_are_rolled_back_if_they_were_trained_and_lost_otherwise() -> None:
    entries = [
        entry(Stage.INFERENCE, 0, sampled=33, delivered=33),
        *(entry(Stage.ORCHESTRATOR, step, received=11, sent=10, zero_advantage=1) for step in range(3)),
        *(entry(Stage.TRAINER, step, received=10, trained=10, computed=10) for step in range(2)),
    ]
    states = after(entries, checkpoint=1, next_batch=1)
    assert states == {"trained": 10, "rolled_back": 10, "lost": 10, "zero_advantage": 3}


def test_settling_twice_changes_nothing_more() -> None:
    entries = [
        entry(Stage.INFERENCE, 0, sampled=50, delivered=40),
        entry(Stage.ORCHESTRATOR, 0, received=10, sent=10),
        entry(Stage.ORCHESTRATOR, 1, received=10, sent=10),
    ]
    settings = {"checkpoint": 0, "next_batch": 1, "held": {RUN: 5}}
    first = settle(entries, **settings)
    assert (first.total(State.LOST), first.total(State.ROLLED_BACK)) == (10 + 10 + 15, 0)
    second = settle([*entries, *first.orchestrator, *first.inference], **settings)
    assert second.orchestrator == second.inference == []


def test_what_arrived_was_sampled_even_if_a_killed_engine_did_not_write_it_down() -> None:
    """10 tokens are in the engine's journal, 3 of them still running; 12 arrived."""
    entries = [
        entry(Stage.INFERENCE, 0, sampled=10, delivered=7),
        entry(Stage.ORCHESTRATOR, 0, received=12, sent=12),
        entry(Stage.TRAINER, 0, received=12, trained=12, computed=12),
    ]
    settlement = settle(entries, checkpoint=1, next_batch=1, held={})
    assert settlement.inference == [entry(Stage.INFERENCE, 0, sampled=2, delivered=5)]
    assert after(entries, checkpoint=1, next_batch=1) == {"trained": 12}


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
    arrived = sum(sent) + held
    known = max(0, arrived + vanished - unwritten)
    entries = [
        entry(
            Stage.INFERENCE,
            0,
            sampled=known + running + cancelled + delivered,
            delivered=known + delivered,
            cancelled=cancelled,
        ),
        *(entry(Stage.ORCHESTRATOR, step, received=n, sent=n) for step, n in enumerate(sent)),
        *(
            entry(Stage.TRAINER, step, received=n, trained=n, computed=n)
            for step, n in enumerate(sent[:num_trained])
        ),
    ]
    states = after(entries, checkpoint=checkpoint, next_batch=next_batch, held=held)
    assert states["trained"] == sum(sent[:checkpoint])
    assert states["in_flight"] == held + sum(sent[checkpoint:next_batch])
    assert states["rolled_back"] == sum(sent[next_batch:num_trained])
    assert states["cancelled"] == cancelled
