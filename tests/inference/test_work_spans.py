"""Steps of an engine become spans: joined while they follow each other, apart where it paused or loaded."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pellucid.data.spans import SpanLog, read_spans
from pellucid.inference.client import Account
from pellucid.inference.engine_thread import WorkSpans
from pellucid.inference.slots import EngineCounts


def test_steps_are_joined_until_a_pause_a_load_or_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(SpanLog, "clock", staticmethod(lambda: now[0]))
    log = SpanLog(tmp_path, "inference", load=8)
    engine = SimpleNamespace(counts=EngineCounts(), version=3)
    work = WorkSpans(engine, log)

    def step(at: float, num_tokens: int) -> None:
        now[0] = 100 + at
        with work.step() as started:
            engine.counts.sampled[Account()] += num_tokens
            engine.counts.decode_steps += 1
            now[0] += 0.01
        assert started == 100 + at

    step(0.0, 4)
    step(0.02, 2)  # 10 ms after the first: the same span
    step(0.5, 6)  # after a pause
    with work.loading(4):
        now[0] += 0.25
    engine.version = 4
    for number in range(250):  # without a pause, for 2.5 seconds
        step(1 + 0.01 * number, 8)
    now[0] += 0.1
    work.flush()  # it has paused: written while the engine is idle
    path = tmp_path / "spans" / "inference.jsonl"
    start, *spans = read_spans(path)
    found = [
        (
            each.name,
            round(each.start - start.start, 2),
            round(each.end - start.start, 2),
            each.step,
            each.load,
        )
        for each in spans
    ]
    assert start.load == 8
    assert found[:3] == [
        ("decode", 0, 0.03, 3, 3),
        ("decode", 0.5, 0.51, 3, 6),
        ("load", 0.51, 0.76, 4, None),
    ]
    assert [(name, begin, step, load) for name, begin, _, step, load in found[3:]] == [
        ("decode", 1, 4, 8),
        ("decode", found[4][1], 4, 8),
    ]
    assert 3.0 <= found[3][2] <= 3.02 and found[4][2] == 3.5
    work.close()
    assert len(read_spans(path)) == 6
