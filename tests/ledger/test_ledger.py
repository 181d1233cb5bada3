import json
import tracemalloc

import msgspec
import pytest

from full_disk import full_disk
from pellucid.errors import LedgerError
from pellucid.ledger import (
    Flow,
    Journal,
    LedgerEntry,
    Stage,
    State,
    link_of,
    read_journal,
    reconcile,
)
from pellucid.ledger.journal import _summed_up, end_of_mark

RUN, ENV = "run", "env"

BALANCED = {
    Stage.INFERENCE: {Flow.SAMPLED: 100, Flow.DELIVERED: 97, State.CANCELLED: 3},
    Stage.ORCHESTRATOR: {Flow.RECEIVED: 97, State.ZERO_ADVANTAGE: 20, State.FAILED_ROLLOUT: 7, Flow.SENT: 70},
    Stage.TRAINER: {
        Flow.RECEIVED: 70,
        State.TRUNCATED: 5,
        State.UNTRAINABLE: 5,
        State.MASKED: 10,
        State.TRAINED: 50,
        Flow.CONTEXT: 200,
        Flow.PADDING: 8,
        Flow.COMPUTED: 203,
        Flow.SAVED: 70,
    },
}


def write(folder, books, closed=tuple(Stage)) -> None:
    for stage, counts in books.items():
        journal = Journal(folder / f"{stage.value}.jsonl", stage)
        for what, tokens in counts.items():
            journal.count(RUN, ENV, what, tokens)
        if stage in closed:
            journal.close(step=1)
        else:
            journal.flush(step=1)


def changed(stage, what, by):
    books = {s: dict(counts) for s, counts in BALANCED.items()}
    books[stage][what] = books[stage].get(what, 0) + by
    return books


def test_every_token_is_in_exactly_one_state(tmp_path) -> None:
    write(tmp_path, BALANCED)
    report = reconcile(tmp_path)
    assert report.balanced
    assert report.sampled[RUN, ENV] == 100
    assert sum(report.states[RUN, ENV].values()) == 100
    assert report.states[RUN, ENV]["cancelled"] == 3
    assert report.states[RUN, ENV]["trained"] == 50
    assert report.beside[RUN, ENV] == {"context": 200, "padding": 8, "computed": 203, "saved": 70}
    assert report.running == []


def test_several_servers_each_keep_a_journal(tmp_path) -> None:
    write(tmp_path, changed(Stage.INFERENCE, Flow.SAMPLED, -40))
    journal = Journal(tmp_path / "inference_1.jsonl", Stage.INFERENCE)
    journal.count(RUN, ENV, Flow.SAMPLED, 40)
    journal.flush(step=1)
    report = reconcile(tmp_path)
    assert report.balanced and report.running == [Stage.INFERENCE] and report.sampled[RUN, ENV] == 100
    journal.close(step=2)
    report = reconcile(tmp_path)
    assert report.balanced and report.running == []


@pytest.mark.parametrize(
    ("stage", "what", "by", "where"),
    [
        (Stage.INFERENCE, Flow.SAMPLED, 1, "inference: 1 token missing"),
        (Stage.INFERENCE, State.CANCELLED, 1, "inference: 1 token counted twice"),
        (Stage.ORCHESTRATOR, State.ZERO_ADVANTAGE, -1, "orchestrator, step 1: 1 token missing"),
        (Stage.TRAINER, State.MASKED, 1, "trainer, step 1: 1 token counted twice"),
        (Stage.TRAINER, Flow.COMPUTED, 1, "trainer, computed tokens: 1 token missing"),
    ],
)
def test_a_difference_of_one_token_names_the_stage(tmp_path, stage, what, by, where) -> None:
    write(tmp_path, changed(stage, what, by))
    report = reconcile(tmp_path)
    assert not report.balanced
    assert str(report.differences[0]) == f"{where} (run 'run', environment 'env')"


def test_tokens_lost_between_two_stages_are_named(tmp_path) -> None:
    books = changed(Stage.ORCHESTRATOR, Flow.RECEIVED, -2)
    books[Stage.ORCHESTRATOR][State.FAILED_ROLLOUT] -= 2
    write(tmp_path, books)
    assert [str(difference) for difference in reconcile(tmp_path).differences] == [
        "inference to orchestrator: 2 tokens missing (run 'run', environment 'env')"
    ]


def test_what_a_running_stage_has_not_settled_is_in_flight(tmp_path) -> None:
    books = changed(Stage.ORCHESTRATOR, State.ZERO_ADVANTAGE, -15)
    write(tmp_path, books, closed=(Stage.INFERENCE,))
    report = reconcile(tmp_path)
    assert report.balanced
    assert report.states[RUN, ENV]["in_flight"] == 15
    assert sum(report.states[RUN, ENV].values()) == 100
    assert report.running == [Stage.ORCHESTRATOR, Stage.TRAINER]


def test_counts_add_up_over_flushes_and_a_torn_last_line_is_left_out(tmp_path) -> None:
    path = tmp_path / "trainer.jsonl"
    journal = Journal(path, Stage.TRAINER)
    for step in range(3):
        journal.count(RUN, ENV, State.TRAINED, 5)
        journal.flush(step)
    journal.flush(3)
    with path.open("ab") as file:
        file.write(b'{"stage":"trainer","cou')
    entries = list(read_journal(path))
    assert [(entry.step, entry.counts) for entry in entries] == [(step, {"trained": 5}) for step in range(3)]


def test_a_line_that_is_not_an_entry_is_named(tmp_path) -> None:
    (tmp_path / "trainer.jsonl").write_text('{"stage":"nowhere"}\n')
    with pytest.raises(LedgerError, match="trainer.jsonl:1 is not a ledger entry"):
        reconcile(tmp_path)


def test_a_folder_without_a_ledger_says_so(tmp_path) -> None:
    with pytest.raises(LedgerError, match="holds no ledger; give the folder of a run"):
        reconcile(tmp_path)


def test_the_verdict_is_one_line_or_one_per_problem(tmp_path) -> None:
    write(tmp_path, BALANCED)
    assert reconcile(tmp_path).verdict() == ["balanced: every one of the 100 sampled tokens is accounted for"]
    broken = tmp_path / "broken"
    write(broken, changed(Stage.TRAINER, State.TRUNCATED, 1), closed=(Stage.ORCHESTRATOR, Stage.TRAINER))
    assert reconcile(broken).verdict() == [
        "trainer, step 1: 1 token counted twice (run 'run', environment 'env')",
        "not closed: inference (still running, stopped or killed; a resume goes on with them)",
    ]


def test_what_a_full_disk_refused_is_written_later(tmp_path) -> None:
    path = tmp_path / "trainer.jsonl"
    journal = Journal(path, Stage.TRAINER)
    journal.count(RUN, ENV, State.TRAINED, 5)
    with full_disk(), pytest.raises(OSError, match="File too large: '.*trainer.jsonl'"):
        journal.flush(0)
    journal.count(RUN, ENV, State.TRAINED, 2)
    journal.flush(1)
    assert [entry.counts for entry in read_journal(path)] == [{"trained": 7}]


# Journals of long runs


def test_an_engines_journal_does_not_grow_with_time(tmp_path) -> None:
    """Four flushes a second, of two environments; what it tells stays the same."""
    path = tmp_path / "inference.jsonl"
    journal, sizes = Journal(path, Stage.INFERENCE, sum_up_bytes=10_000), []
    link = link_of(journal.process, "client")
    for number in range(2_400):
        for env in ("a", "b"):
            journal.count(RUN, env, Flow.SAMPLED, 3, link)
            journal.count(RUN, env, State.CANCELLED, 2, link)
        journal.flush(number // 100)
        sizes.append(path.stat().st_size)
    assert max(sizes) < 12_000
    report = reconcile(tmp_path)
    assert report.sampled == {(RUN, "a"): 7_200, (RUN, "b"): 7_200}
    assert report.states[RUN, "a"] == {"cancelled": 4_800, "in_flight": 2_400}
    assert {entry.opened for entry in read_journal(path)} == {"", journal.process}


def test_a_journal_that_is_summed_up_keeps_its_steps_and_the_marks_to_go_back_to(tmp_path) -> None:
    """A step takes three lines until it is summed up; the last two snapshots still find what they know."""
    summed_up, whole = (
        tmp_path / "summed up" / "orchestrator.jsonl",
        tmp_path / "whole" / "orchestrator.jsonl",
    )
    for path, settings in ((summed_up, {"sum_up_bytes": 2_000}), (whole, {})):
        journal = Journal(path, Stage.ORCHESTRATOR, **settings)
        for step in range(60):
            for outcome in (State.STALE, State.ZERO_ADVANTAGE, Flow.SENT):
                journal.count(RUN, ENV, Flow.RECEIVED, 4 + step)
                journal.count(RUN, ENV, outcome, 4 + step)
                journal.flush(step)
            journal.mark(step + 1, step)
    assert summed_up.stat().st_size < 0.7 * whole.stat().st_size
    assert reconcile(summed_up.parent).steps == reconcile(whole.parent).steps
    for mark in (58, 59, 60):
        known = summed_up.read_bytes()[: end_of_mark(summed_up, mark)]
        assert sum(json.loads(line).get("counts", {}).get("sent", 0) for line in known.splitlines()) == sum(
            4 + step for step in range(mark)
        )
    assert end_of_mark(summed_up, 3) is None and end_of_mark(summed_up, 0) == 0


def test_reading_a_big_journal_takes_little_memory(tmp_path) -> None:
    """3 MB of lines about ten steps, which would take 20 MB as a list."""
    path = tmp_path / "orchestrator.jsonl"
    counts = {"received": 5, "stale": 2, "zero_advantage": 3}
    lines = b"".join(
        msgspec.json.encode(LedgerEntry(Stage.ORCHESTRATOR, step, RUN, ENV, counts)) + b"\n"
        for step in range(10)
    )
    path.write_bytes(lines * 3_000)
    tracemalloc.start()
    report = reconcile(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.steps[7] == {"stale": 6_000, "zero_advantage": 9_000}
    assert path.stat().st_size > 3e6 and peak < 0.3e6


def test_a_torn_last_line_is_cut_off_before_the_next(tmp_path) -> None:
    path = tmp_path / "trainer.jsonl"
    journal = Journal(path, Stage.TRAINER)
    journal.count(RUN, ENV, State.TRAINED, 5)
    journal.flush(0)
    for torn in (b'{"stage":"trainer","cou', bytes(200_000)):
        with path.open("ab") as file:
            file.write(torn)
        journal = Journal(path, Stage.TRAINER, resume=True)
    journal.count(RUN, ENV, State.TRAINED, 7)
    journal.flush(1)
    assert [entry.counts for entry in read_journal(path)] == [{"trained": 5}, {"trained": 7}]


def test_totals_name_the_last_step_that_they_hold(tmp_path) -> None:
    journal = Journal(tmp_path / "trainer.jsonl", Stage.TRAINER)
    for step in (4, 5):
        journal.count(RUN, ENV, State.TRAINED, 10)
        journal.flush(step)
    assert journal.totals() == [LedgerEntry(Stage.TRAINER, 5, RUN, ENV, {"trained": 20})]
    journal.count(RUN, ENV, State.TRAINED, 1)
    journal.flush(6)
    assert journal.totals() == [LedgerEntry(Stage.TRAINER, 6, RUN, ENV, {"trained": 21})]


def test_summing_up_takes_no_more_memory_for_more_steps(tmp_path) -> None:
    path = tmp_path / "orchestrator.jsonl"
    journal = Journal(path, Stage.ORCHESTRATOR)
    for step in range(3_000):
        journal.count(RUN, ENV, Flow.SENT, 4)
        journal.flush(step)
    tracemalloc.start()
    try:
        num_lines = sum(1 for _ in _summed_up(path, Stage.ORCHESTRATOR, 0))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_lines == 3_000 + 1 and peak_bytes < 500_000
