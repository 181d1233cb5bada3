"""The time line: lanes, shares, critical path and verdict of spans made by hand; the trace; the view."""

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import chromium
from pellucid.cli import main
from pellucid.config.tools import TraceSettings
from pellucid.data.spans import Span, SpanLog, read_spans
from pellucid.errors import DataError
from pellucid.viewer.access import Exports, RunFolder
from pellucid.viewer.critical_path import Segment
from pellucid.viewer.lanes import PHASES, exclusive, phase_of
from pellucid.viewer.page import write_page
from pellucid.viewer.timeline import approximate, as_page, make_timeline, verdict
from pellucid.viewer.trace import run_trace, trace_events

T0 = 1_760_000_000.0
START = Span("start", T0, T0)


def at(name: str, start: float, end: float, step: int, load: float | None = None) -> Span:
    return Span(name, T0 + start, T0 + end, step, load)


TURNS = {
    "trainer": [
        START,
        at("wait", 0, 10, 0),
        at("compute", 10, 16, 0),
        at("publish", 16, 18, 0),
        at("wait", 18, 30, 1),
        at("compute", 30, 36, 1),
        at("publish", 36, 38, 1),
    ],
    "orchestrator": [
        START,
        at("sample", 0, 8, 0, 16),
        at("send", 8, 10, 0),
        at("update", 18.5, 20, 1),
        at("wait_weights", 8, 20, 1, 0),
        at("sample", 20, 26, 1, 16),
        at("environment", 26, 28, 1, 4),
        at("send", 28, 30, 1),
    ],
    "inference": [
        Span("start", T0, T0, load=64),
        at("decode", 1, 8, 0, 16),
        at("load", 19, 20, 1),
        at("decode", 21, 26, 1, 16),
    ],
}
"""Trainer and orchestrator take turns: two steps, each sampled with the weights of the one before."""


def segments(timeline) -> list[tuple[str, str, float, float, int]]:
    return [(each.lane, each.name, each.start - T0, each.end - T0, each.step) for each in timeline.path]


def test_the_critical_path_goes_back_over_whoever_was_waited_for() -> None:
    assert segments(make_timeline(TURNS)) == [
        ("orchestrator", "sample", 0, 1, 0),
        ("engine", "decode", 1, 8, 0),
        ("batches", "send", 8, 10, 0),
        ("trainer", "compute", 10, 16, 0),
        ("trainer", "publish", 16, 18, 0),
        ("weights", "pick_up", 18, 18.5, 1),
        ("weights", "update", 18.5, 19, 1),
        ("engine", "load", 19, 20, 1),
        ("orchestrator", "sample", 20, 21, 1),
        ("engine", "decode", 21, 26, 1),
        ("orchestrator", "environment", 26, 28, 1),
        ("batches", "send", 28, 30, 1),
        ("trainer", "compute", 30, 36, 1),
        ("trainer", "publish", 36, 38, 1),
    ]


def test_a_version_that_is_written_beside_the_next_step_is_part_of_the_path() -> None:
    """Copied from 16 to 16.5, written from 16.25 to 18: who waits for weights waits for that."""
    trainer = [*TURNS["trainer"][:3], at("publish", 16, 16.5, 0), at("write", 16.25, 18, 1)]
    trainer += [at("wait", 16.5, 30, 1), *TURNS["trainer"][5:]]
    timeline = make_timeline({**TURNS, "trainer": trainer})
    assert list(timeline.lanes) == ["trainer", "batches", "orchestrator", "engine", "versions", "weights"]
    assert segments(timeline)[3:8] == [
        ("trainer", "compute", 10, 16, 0),
        ("trainer", "publish", 16, 16.25, 0),
        ("versions", "write", 16.25, 18, 1),
        ("weights", "pick_up", 18, 18.5, 1),
        ("weights", "update", 18.5, 19, 1),
    ]


def test_lanes_and_shares() -> None:
    timeline = make_timeline(TURNS)
    assert list(timeline.lanes) == ["trainer", "batches", "orchestrator", "engine", "weights"]
    assert timeline.lanes["trainer"].seconds() == {"wait": 22, "compute": 12, "publish": 4}
    assert timeline.lanes["trainer"].lived_s == 38
    assert timeline.lanes["engine"].seconds() == {"decode": 12, "load": 1}
    assert timeline.lanes["engine"].capacity == 64
    assert timeline.share("trainer", "wait") == 22 / 38
    assert timeline.share("orchestrator", "wait_weights") == 12 / 30
    shares = timeline.path_shares(lambda segment: PHASES[phase_of(segment.name)].part)
    assert {part: round(38 * share, 6) for part, share in shares.items()} == {
        "sampling": 14,
        "training": 12,
        "sending": 4,
        "publishing": 4,
        "weights": 2,
        "environments": 2,
    }


def test_the_verdict_says_who_waited_and_which_keys_to_change() -> None:
    assert verdict(make_timeline(TURNS)) == (
        "The trainer waited for batches 58 % of the time: sampling is the bottleneck, with 37 % of the "
        "critical path. Sampling waited for weights 40 % of the time in turn. Engines decoded 16 of 64 "
        "sequences at a time: have more rollouts in flight, or cut the long replies that the "
        "others wait for, or let the two overlap: orchestrator.max_inflight_rollouts, "
        "orchestrator.sampling.max_tokens, max_async_level.",
        ("orchestrator.max_inflight_rollouts", "orchestrator.sampling.max_tokens", "max_async_level"),
        "sampling",
    )


def changed(process: str, *spans: Span) -> dict[str, list[Span]]:
    return {**TURNS, process: [*TURNS[process], *spans]}


@pytest.mark.parametrize(
    ("recorded", "part", "keys"),
    [
        (
            {"trainer": [START, at("wait", 0, 1, 0), at("compute", 1, 9, 0)]},
            "training",
            ("trainer.num_processes", "trainer.micro_batch_max_tokens"),
        ),
        ({"trainer": [START, at("wait", 0, 8, 0), at("compute", 8, 9, 0)]}, "delivery", ("data.path",)),
        (
            {"trainer": [START, at("compute", 0, 1, 0), at("checkpoint", 1, 9, 0)]},
            "checkpoints",
            ("trainer.ckpt.interval", "trainer.ckpt.asynchronous"),
        ),
        (
            {
                "trainer": [START, at("wait", 0, 10, 0), at("compute", 10, 11, 0)],
                "orchestrator": [START, at("environment", 0, 9, 0, 3), at("send", 9, 10, 0)],
            },
            "environments",
            ("orchestrator.max_inflight_rollouts",),
        ),
        (
            {
                "trainer": [START, at("wait", 0, 10, 0), at("compute", 10, 11, 0)],
                "orchestrator": [START, at("idle", 0, 9, 0, 0), at("send", 9, 10, 0)],
            },
            "pauses",
            ("orchestrator.tasks_per_minute", "orchestrator.retry_backoff_s"),
        ),
        (
            changed("orchestrator", at("eval/held-out", 39, 100, 2)),
            "evaluations",
            ("orchestrator.eval.interval", "orchestrator.eval.num_examples"),
        ),
    ],
)
def test_every_part_can_be_the_bottleneck(recorded, part: str, keys: tuple[str, ...]) -> None:
    found = verdict(make_timeline(recorded))
    assert found is not None
    assert (found.part, found.keys) == (part, keys)


def test_an_update_that_waits_for_an_evaluation_is_blamed_on_it() -> None:
    """Version 1 is published at 18; the evaluation of version 0 has the servers until 19.5."""
    recorded = {
        **TURNS,
        "orchestrator": [
            START,
            at("eval/quiz", 0.5, 19.5, 0),
            at("sample", 0, 8, 0),
            at("send", 8, 10, 0),
            at("update", 19.5, 20, 1),
            at("wait_weights", 8, 20, 1),
            at("sample", 20, 28, 1),
            at("send", 28, 30, 1),
        ],
        "inference": [],
    }
    assert segments(make_timeline(recorded))[:4] == [
        ("orchestrator", "sample", 0, 0.5, 0),
        ("evaluations", "eval/quiz", 0.5, 19.5, 0),
        ("weights", "update", 19.5, 20, 1),
        ("orchestrator", "sample", 20, 28, 1),
    ]


def test_a_batch_that_was_there_already_is_no_reason_to_wait() -> None:
    recorded = {
        "trainer": [START, at("compute", 0, 5, 0), at("wait", 5, 5.5, 1), at("compute", 5.5, 9, 1)],
        "orchestrator": [START, at("sample", 0, 2, 1), at("send", 2, 3, 1)],
    }
    assert segments(make_timeline(recorded)) == [
        ("trainer", "compute", 0, 5, 0),
        ("trainer", "wait", 5, 5.5, 1),
        ("trainer", "compute", 5.5, 9, 1),
    ]


def test_of_several_engines_the_path_takes_the_one_that_worked() -> None:
    recorded = {
        "trainer": [START, at("wait", 0, 10, 0), at("compute", 10, 11, 0)],
        "orchestrator": [START, at("sample", 0, 9, 0), at("send", 9, 10, 0)],
        "inference_0": [START, at("decode", 0, 5, 0)],
        "inference_1": [START, at("decode", 3, 8, 0)],
        "inference_teacher": [START, at("decode", 0, 9, 0)],
    }
    timeline = make_timeline(recorded)
    assert list(timeline.lanes) == ["trainer", "batches", "orchestrator", "engine 0", "engine 1", "teacher"]
    assert segments(timeline)[:3] == [
        ("engine 0", "decode", 0, 3, 0),
        ("engine 1", "decode", 3, 8, 0),
        ("orchestrator", "sample", 8, 9, 0),
    ]


def test_a_resumed_run_has_a_gap_and_a_path_in_each_start() -> None:
    again = [Span("start", T0 + 100, T0 + 100), at("wait", 101, 103, 1), at("compute", 103, 110, 1)]
    timeline = make_timeline({"trainer": [*TURNS["trainer"], *again]})
    assert [(start - T0, end - T0) for start, end in timeline.lanes["trainer"].lives] == [(0, 38), (100, 110)]
    assert timeline.lanes["trainer"].lived_s == 48
    assert segments(timeline)[-3:] == [
        ("trainer", "other", 100, 101, -1),
        ("trainer", "wait", 101, 103, 1),
        ("trainer", "compute", 103, 110, 1),
    ]
    assert timeline.path_s == 48.0


def test_a_span_around_others_is_cut() -> None:
    pieces = exclusive([at("wait", 0, 10, 0), at("pack", 4, 6, 0), at("compute", 12, 13, 0)])
    assert [(each.name, each.start - T0, each.end - T0) for each in pieces] == [
        ("wait", 0, 4),
        ("pack", 4, 6),
        ("wait", 6, 10),
        ("compute", 12, 13),
    ]


NAMES = {
    "trainer": ("wait", "compute", "publish", "checkpoint"),
    "orchestrator": ("sample", "environment", "wait_weights", "idle", "send", "update", "eval/x"),
    "inference": ("decode", "load"),
}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_path_leaves_no_hole_whatever_was_recorded(data) -> None:
    recorded = {}
    for process, names in NAMES.items():
        entries = data.draw(
            st.lists(
                st.tuples(st.sampled_from(names), st.integers(0, 30), st.integers(0, 12), st.integers(0, 3)),
                max_size=14,
            )
        )
        recorded[process] = [START, *(at(name, t, t + length, step) for name, t, length, step in entries)]
    timeline = make_timeline(recorded)
    if "trainer" not in timeline.lanes:
        assert timeline.path == []
        return
    ends = [end for _, end in timeline.lanes["trainer"].lives]
    if evaluations := timeline.lanes.get("evaluations"):
        ends.append(evaluations.spans[-1].end)
    reached = T0
    for segment in timeline.path:
        assert segment.start == reached
        assert segment.end > segment.start
        reached = segment.end
    assert reached == max(ends)


def test_durations_per_step_make_an_approximate_line() -> None:
    metrics = {
        "trainer": [
            {"step": 0, "time": T0 + 10, "time/step_s": 10.0, "time/wait_s": 6.0, "time/publish_s": 1.0},
            {"step": "x", "time": 5},
        ],
        "orchestrator": [{"step": 0, "time": T0 + 6, "time/batch_s": 5.0, "time/wait_weights_s": 2.0}],
        "eval": [{"step": 1, "time": T0 + 20, "eval/quiz/time_s": 3.0, "eval/quiz/avg@1": 0.5}],
    }
    found = {
        process: [(each.name, each.start - T0, each.end - T0, each.step) for each in spans]
        for process, spans in approximate(metrics).items()
    }
    assert found == {
        "trainer": [("wait", 0, 6, 0), ("compute", 6, 9, 0), ("publish", 9, 10, 0)],
        "orchestrator": [("wait_weights", 1, 3, 0), ("sample", 3, 6, 0), ("eval/quiz", 17, 20, 1)],
    }


def test_spans_are_written_with_each_start_and_read_back(tmp_path: Path) -> None:
    for load in (8, 16):
        log = SpanLog(tmp_path, "inference", load=load)
        assert not (tmp_path / "spans").exists() or load == 16  # nothing is written before the first span
        now = log.clock()
        log.add("decode", now, now + 1.5, 3, 4.5)
        with log.timed("load", 4):
            pass
        log.flush()
    path = tmp_path / "spans" / "inference.jsonl"
    spans = read_spans(path)
    assert [(each.name, each.step, each.load) for each in spans] == [
        ("start", -1, 8),
        ("decode", 3, 4.5),
        ("load", 4, None),
        ("start", -1, 16),
        ("decode", 3, 4.5),
        ("load", 4, None),
    ]
    assert abs(spans[1].duration_s - 1.5) <= 4 * math.ulp(spans[1].end)
    assert spans[0].start <= spans[1].start <= spans[3].start <= spans[4].start


def test_a_run_goes_on_where_its_spans_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "spans").symlink_to(tmp_path / "elsewhere")
    log = SpanLog(tmp_path, "trainer")
    for step in range(2):
        log.add("wait", 0.0, 1.0, step)
        log.flush()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (said,) = caplog.messages
    assert said.startswith("spans cannot be written: ") and "is a link" in said


def test_lines_that_are_no_spans_are_reported_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    good = '{"name":"wait","start":1.0,"end":2.0,"step":0}\n'
    bad = ['{"name":"wait","start":2.0,"end":1.0}\n', "[1]\n", '{"name":5,"start":1,"end":2}\n', "\xff\n"]
    path.write_text(good + "".join(bad) + good + '{"name":"wa')
    said: list[str] = []
    assert [each.end for each in read_spans(path, said.append)] == [2.0, 2.0]
    assert said == [f"{path}: 4 lines are no spans, or too many; they are left out"]


def write(folder: Path, recorded=TURNS) -> Path:
    (folder / "spans").mkdir(parents=True)
    (folder / "metrics").mkdir()
    for process, spans in recorded.items():
        lines = [
            json.dumps(
                {"name": each.name, "start": each.start, "end": each.end, "step": each.step}
                | ({} if each.load is None else {"load": each.load})
            )
            + "\n"
            for each in spans
        ]
        (folder / "spans" / f"{process}.jsonl").write_text("".join(lines))
    return folder


def test_a_trace_has_what_perfetto_asks_for(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    assert main(["trace", str(run), "-o", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["origin_s"] == T0
    assert trace["otherData"]["verdict"].startswith("The trainer waited for batches 58 % of the time")
    events = trace["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {
        1: "critical path",
        2: "trainer",
        3: "batches",
        4: "orchestrator",
        5: "engine",
        6: "weights",
    }
    assert [each for each in events if each["ph"] == "X" and each["pid"] == 2][1] == {
        "ph": "X",
        "name": "forward, backward",
        "cat": "work",
        "ts": 10e6,
        "dur": 6e6,
        "pid": 2,
        "tid": 1,
        "args": {"step": 0},
    }
    assert sum(each["ph"] == "X" for each in events) == 14 + 6 + 2 + 4 + 3 + 1
    arrows = [(each["ph"], each["id"], each["pid"], each["ts"]) for each in events if each["ph"] in "sf"]
    assert arrows == [
        ("s", "send-0", 3, 10e6),
        ("f", "send-0", 2, 10e6),
        ("s", "send-1", 3, 30e6),
        ("f", "send-1", 2, 30e6),
        ("s", "publish-0", 2, 18e6),
        ("f", "publish-0", 6, 20e6),
    ]
    counters = [
        (each["ts"], each["args"]["number"]) for each in events if each["ph"] == "C" and each["pid"] == 5
    ]
    assert counters == [(1e6, 16), (8e6, 0), (21e6, 16), (26e6, 0)]
    for each in events:
        assert each["ph"] in "XMCsf" and type(each["pid"]) is int and type(each["tid"]) is int
        assert each["ph"] == "M" or each["ts"] >= 0
        assert each["ph"] != "X" or each["dur"] >= 0


def test_a_trace_is_compressed_by_its_name_and_refused_without_a_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    run_trace(TraceSettings(run=run, output=tmp_path / "trace.json.gz"))
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert trace["traceEvents"] == json.loads(json.dumps(list(trace_events(make_timeline(TURNS)))))
    (tmp_path / "empty" / "metrics").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no spans and no metrics of a trainer"):
        run_trace(TraceSettings(run=tmp_path / "empty", output=tmp_path / "no.json"))
    assert not (tmp_path / "no.json").exists()


def test_the_terminal_shows_verdict_and_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(write(tmp_path / "run")), "--terminal"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "sampling is the bottleneck, with 37 % of the critical path" in printed
    assert "trainer wait for a batch 22.0 58 %" in printed
    assert "engine decode 12.0 46 % 32 %" in printed


def test_the_browser_gets_milliseconds_in_columns() -> None:
    page = as_page(make_timeline(TURNS))
    assert (page["origin"], page["end"], page["since"], page["approximate"]) == (T0, 38_000, 0, False)
    engine = page["lanes"][3]
    assert (engine["name"], engine["capacity"]) == ("engine", 64)
    assert engine["phase"] == ["decode", "load", "decode"]
    assert engine["start"] == [1000, 19_000, 21_000]
    assert engine["end"] == [8000, 20_000, 26_000]
    assert engine["load"] == [16, None, 16]
    assert engine["rest_s"] == 13  # idle: 0 to 1, 8 to 19, 20 to 21
    assert as_page(None) == {"version": 1, "lanes": []}


def test_of_a_very_long_run_the_browser_gets_the_last_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.viewer.timeline.MOST_SHOWN", 4)
    page = as_page(make_timeline({"trainer": TURNS["trainer"]}))
    assert page["since"] == 18_000
    assert page["lanes"][0]["start"] == [16_000, 18_000, 30_000, 36_000]
    assert page["lanes"][0]["seconds"] == {"wait": 22, "compute": 12, "publish": 4}  # of all of it


# In a browser.


@pytest.fixture
def open_page(tmp_path: Path):
    with chromium() as browser:

        def opened(run: Path, place: str = "", width: int = 1440):
            target = tmp_path / "page.html"
            write_page(Exports(run), target)
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(f"{target.as_uri()}#timeline{place}")
            page.wait_for_selector(".gantt-span, .notice.empty")
            page.wait_for_function("() => $main.app.view?.data")
            return page

        yield opened


def test_the_view_shows_verdict_lanes_and_numbers(tmp_path: Path, open_page) -> None:
    page = open_page(write(tmp_path / "run"))
    assert "sampling is the bottleneck" in page.inner_text(".verdict p")
    assert page.eval_on_selector_all(".verdict code", "all => all.map((one) => one.textContent)") == [
        "orchestrator.max_inflight_rollouts",
        "orchestrator.sampling.max_tokens",
        "max_async_level",
    ]
    first = page.eval_on_selector("tbody tr", "row => [...row.cells].map((one) => one.textContent)")
    assert first == ["trainer", "wait for a batch", "22 s", "57.9 %", ""]
    assert "critical path" in page.inner_text(".gantt-legend")


def test_keys_move_zoom_and_open_a_step(tmp_path: Path, open_page) -> None:
    page = open_page(write(tmp_path / "run"))
    page.focus(".gantt")
    described = lambda: page.inner_text(".gantt-span")  # noqa: E731
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.gantt-span').textContent.startsWith('trainer')")
    assert described() == "trainer · wait for a batch · 10 s · step 0 · at 0 s"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.gantt-span').textContent.includes('forward')")
    assert described() == "trainer · forward, backward · 6 s · step 0 · at 10 s · on the critical path"
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.querySelector('.gantt-span').textContent.startsWith('engine')")
    page.keyboard.press("+")
    page.wait_for_function("() => location.hash.includes('window=')")
    low, high = map(int, page.evaluate("$main.app.state.window").split(":"))
    assert high - low == 19_000
    page.keyboard.press("Escape")
    page.wait_for_function("() => !location.hash.includes('window=')")
    page.focus(".gantt")
    page.keyboard.press("Enter")  # the run has no token export: its rollouts
    page.wait_for_function("() => location.hash.startsWith('#rollouts')")
    assert page.evaluate("$main.app.state.filter") == "step = 1"


def test_a_pointer_tells_drags_and_opens(tmp_path: Path, open_page) -> None:
    page = open_page(write(tmp_path / "run"))
    box = page.locator(".gantt canvas").bounding_box()

    def x(seconds: float) -> float:
        return box["x"] + seconds / 38 * box["width"]

    lane = box["y"] + 22 + 3 * 46 + 25  # the engine's bar
    page.mouse.move(x(4), lane)
    page.wait_for_function("() => document.querySelector('.gantt-span').textContent.startsWith('engine')")
    assert page.inner_text(".gantt-span") == (
        "engine · decode · 7 s · policy version 0 · at 1 s · 16 of 64 sequences at a time"
        " · on the critical path"
    )
    page.mouse.down()
    page.mouse.move(x(19), lane, steps=4)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('window=')")
    low, high = map(int, page.evaluate("$main.app.state.window").split(":"))
    assert abs(low - 4000) <= 60 and abs(high - 19_000) <= 60
    page.get_by_role("button", name="the whole run").click()
    page.wait_for_function("() => !location.hash.includes('window=')")
    page.mouse.click(x(33), box["y"] + 22 + 25)
    page.wait_for_function("() => location.hash.startsWith('#rollouts')")
    assert page.evaluate("$main.app.state.filter") == "step = 1"


def test_no_pixel_is_drawn_twice_and_what_is_out_of_sight_not_at_all(tmp_path: Path, open_page) -> None:
    page = open_page(write(tmp_path / "run"))
    bars = page.evaluate(
        """() => {
          const start = Float64Array.from({ length: 100000 }, (_, i) => i);
          const end = start.map((time) => time + 0.9);
          const { windowed } = $draw_gantt;
          const near = windowed({ start, end }, 500, 510, 800).map(({ at }) => at);
          return [windowed({ start, end }, 0, 100000, 800).length, near,
            windowed({ start: [0, 10, 10.2], end: [10, 10.2, 10.5] }, 0, 100, 100)];
        }"""
    )
    assert bars[0] == 800
    assert bars[1] == list(range(500, 510))
    assert bars[2] == [{"at": 0, "left": 0, "right": 10}, {"at": 2, "left": 10, "right": 11}]


def test_a_run_without_timings_says_so(tmp_path: Path, open_page) -> None:
    run = tmp_path / "run"
    (run / "metrics").mkdir(parents=True)
    page = open_page(run)
    assert "No timings are recorded" in page.inner_text(".notice")
    page.click("text=look at the run")
    page.wait_for_function("() => location.hash.startsWith('#run')")


def test_a_run_that_recorded_durations_alone_is_approximate(tmp_path: Path, open_page) -> None:
    run = tmp_path / "run"
    (run / "metrics").mkdir(parents=True)
    record = {"step": 0, "time": T0, "time/step_s": 10.0, "time/wait_s": 6.0}
    (run / "metrics" / "trainer.jsonl").write_text(json.dumps(record) + "\n")
    page = open_page(run, width=390)
    assert "Approximate" in page.inner_text(".about")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    timeline = RunFolder(run).timeline()
    assert timeline is not None and timeline.is_approximate
    assert timeline.path == [
        Segment("trainer", "wait", T0 - 10, T0 - 4, 0),
        Segment("trainer", "compute", T0 - 4, T0, 0),
    ]
