"""What the next batch waits for, moment by moment, by a clock that the test sets."""

from contextlib import ExitStack
from pathlib import Path

from pellucid.data.spans import SpanLog, read_spans
from pellucid.orchestrator.tasks import Pace


class SteppedSpans(SpanLog):
    """Spans by a clock that a test sets."""

    now = 0.0

    def clock(self) -> float:  # type: ignore[override]
        return self.now


def test_pace_tells_at_every_moment_what_the_next_batch_waits_for(tmp_path: Path) -> None:
    log, look = SteppedSpans(tmp_path, "orchestrator"), [False, 0]
    pace = Pace(log, 7, lambda: (bool(look[0]), int(look[1])))

    def change(now: float, blocked: bool, num_inflight: int) -> None:
        log.now = now
        look[:] = blocked, num_inflight
        pace.note()

    change(1, False, 2)  # idle until here, then in the environment
    with ExitStack() as asking:
        log.now = 2
        asking.enter_context(pace.asking())
        log.now = 2.001
        with pace.asking():
            log.now = 4
        change(5, False, 4)
        log.now = 8
    log.now = 8.002  # fleeting: all answers are there, and the next request is sent
    with pace.asking():
        change(10, True, 4)  # weights are waited for, whatever is in flight
        change(13, False, 4)
        log.now = 14
        assert pace.lap() == (14, 3)
        log.now = 15
        assert pace.lap() == (1, 0)
    log.flush()
    start, *spans = read_spans(tmp_path / "spans" / "orchestrator.jsonl")
    found = [(each.name, each.start - start.start, each.end - start.start, each.step) for each in spans]
    assert [(name, round(begin, 4), round(end, 4), step) for name, begin, end, step in found] == [
        ("idle", 0, 1, 7),
        ("environment", 1, 2, 7),
        ("sample", 2, 10, 7),
        ("wait_weights", 10, 13, 7),
        ("sample", 13, 14, 7),
        ("sample", 14, 15, 8),
    ]
    assert [round(each.load or 0, 3) for each in spans] == [0, 2, 3.25, 4, 4, 4]
