"""Metrics are read once, whole, and joined by step."""

from hypothesis import given
from hypothesis import strategies as st

from pellucid.launch.console import JsonlFollower, StepJoin
from pellucid.metrics import JsonlSink, parse_metrics


def test_a_file_may_appear_and_grow(tmp_path):
    path = tmp_path / "metrics" / "trainer.jsonl"
    follower = JsonlFollower(path, parse_metrics)
    assert follower.read() == []

    sink = JsonlSink(path)
    assert follower.read() == []
    sink.log(0, {"loss": 0.5})
    sink.log(1, {"loss": float("nan")})
    assert [(record["step"], record["loss"]) for record in follower.read()] == [(0, 0.5), (1, None)]
    sink.close()
    assert follower.read() == []


def test_a_torn_line_is_read_once_it_is_complete(tmp_path):
    path = tmp_path / "trainer.jsonl"
    follower = JsonlFollower(path, parse_metrics)

    with path.open("wb", buffering=0) as file:
        file.write(b'{"step": 0}\n{"st')
        assert follower.read() == [{"step": 0}]
        file.write(b'ep": 1')
        assert follower.read() == []
        file.write(b"}\n")
        assert follower.read() == [{"step": 1}]


def test_a_step_is_complete_when_every_source_has_reported_it():
    join = StepJoin(2)

    assert join.add(1, [{"step": 0, "loss": 0.1, "time/step_s": 2.0}]) == []
    orchestrator = [{"step": 0, "reward/all": 0.5, "time/step_s": 9.0}, {"step": 1, "reward/all": 0.6}]
    assert join.add(0, orchestrator) == [{"step": 0, "reward/all": 0.5, "time/step_s": 2.0, "loss": 0.1}]
    assert join.add(0, []) == []


@given(st.permutations([(source, step) for source in range(2) for step in range(5)]))
def test_every_step_is_handed_out_once_in_any_order_of_arrival(arrivals):
    join = StepJoin(2)
    rows = []
    for source, step in arrivals:
        rows += join.add(source, [{"step": step, f"from_{source}": step}])

    assert sorted(rows, key=lambda row: row["step"]) == [
        {"step": step, "from_0": step, "from_1": step} for step in range(5)
    ]
