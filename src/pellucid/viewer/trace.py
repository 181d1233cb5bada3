"""`pellucid trace RUN`: the time line as a trace that ui.perfetto.dev and chrome://tracing open.

    {"ph": "X", "name": "forward, backward", "cat": "work", "ts": 1500000.0, "dur": 250000.0,
     "pid": 2, "tid": 1, "args": {"step": 3}}

Times are microseconds since the first process started. Every lane is a process with one thread, and the
critical path comes first. Arrows lead from a batch that was sent to the step that it trains, and from weights
that were published to the servers that load them. Counters show sequences in engines, rollouts in flight.
"""

import gzip
import logging
from collections.abc import Iterator
from typing import Any

import orjson

from pellucid.config.tools import TraceSettings
from pellucid.data.files import replace_file
from pellucid.data.spans import Span
from pellucid.errors import DataError, printable
from pellucid.viewer.access import RunFolder
from pellucid.viewer.critical_path import Segment
from pellucid.viewer.lanes import BATCHES, PHASES, TRAINER, VERSIONS, WEIGHTS, Lane, phase_of
from pellucid.viewer.timeline import Timeline, verdict

log = logging.getLogger(__name__)

PATH_PID = 1


def run_trace(settings: TraceSettings) -> None:
    run = RunFolder.around(settings.run.resolve())
    timeline = run.timeline()
    for problem in run.problems:
        log.warning("%s", problem)
    if timeline is None:
        raise DataError(
            f"{settings.run} holds no spans and no metrics of a trainer; name a run folder whose run has "
            "trained a step"
        )
    if settings.output.is_dir():
        raise DataError(f"--output {settings.output} is a folder; name a file, such as trace.json")
    events = list(trace_events(timeline))
    found = verdict(timeline)
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"verdict": "" if found is None else found.text, "origin_s": timeline.start},
    }
    data = orjson.dumps(trace)
    replace_file(settings.output, gzip.compress(data, mtime=0) if settings.output.suffix == ".gz" else data)
    if found is not None:
        log.info("%s", found.text)
    if timeline.is_approximate:
        log.warning("this run recorded no spans: the trace is made of durations per step, and approximate")
    log.info("%s: %d events; open it at https://ui.perfetto.dev", settings.output, len(events))


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace; the times of each lane ascend."""
    pids = {name: number for number, name in enumerate(timeline.lanes, PATH_PID + 1)}
    yield from _named(PATH_PID, "critical path")
    for segment in timeline.path:
        yield _complete(timeline, PATH_PID, segment, {"lane": segment.lane})
    for name, lane in timeline.lanes.items():
        yield from _named(pids[name], name)
        for span in lane.spans:
            yield _complete(timeline, pids[name], span, {} if span.load is None else {"load": span.load})
        yield from _counters(timeline, pids[name], lane)
    yield from _arrows(timeline, pids, BATCHES, "send", TRAINER, "wait", 0)
    if VERSIONS in timeline.lanes:
        yield from _arrows(timeline, pids, TRAINER, "publish", VERSIONS, "write", 1)
        yield from _arrows(timeline, pids, VERSIONS, "write", WEIGHTS, "update", 0)
    else:
        yield from _arrows(timeline, pids, TRAINER, "publish", WEIGHTS, "update", 1)


def _named(pid: int, name: str) -> Iterator[dict[str, Any]]:
    for kind in ("process_name", "thread_name"):
        yield {"ph": "M", "name": kind, "pid": pid, "tid": 1, "args": {"name": printable(name)}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 1, "args": {"sort_index": pid}}


def _microseconds(timeline: Timeline, time: float) -> float:
    return round(1e6 * (time - timeline.start), 1)


def _complete(timeline: Timeline, pid: int, span: Span | Segment, args: dict[str, Any]) -> dict[str, Any]:
    phase = PHASES[phase_of(span.name)]
    start = _microseconds(timeline, span.start)
    return {
        "ph": "X",
        "name": printable(span.name) if span.name.startswith("eval/") else phase.label,
        "cat": phase.kind,
        "ts": start,
        "dur": round(_microseconds(timeline, span.end) - start, 1),
        "pid": pid,
        "tid": 1,
        "args": {"step": span.step, **args},
    }


def _counters(timeline: Timeline, pid: int, lane: Lane) -> Iterator[dict[str, Any]]:
    """A counter holds until its next value, so each ends with 0 unless another span follows at once."""
    counted = [span for span in lane.spans if span.load is not None]
    name = "sequences" if lane.capacity else "rollouts in flight"
    for place, span in enumerate(counted):
        values = [(span.start, span.load)]
        if place + 1 == len(counted) or counted[place + 1].start > span.end:
            values.append((span.end, 0.0))
        for time, value in values:
            at = _microseconds(timeline, time)
            yield {"ph": "C", "name": name, "ts": at, "pid": pid, "tid": 1, "args": {"number": value}}


def _arrows(
    timeline: Timeline, pids: dict[str, int], source: str, sent: str, target: str, received: str, shift: int
) -> Iterator[dict[str, Any]]:
    """Yields arrows from each span `sent` to the span `received` whose step is higher by `shift`."""
    if source not in timeline.lanes or target not in timeline.lanes:
        return
    ends = {span.step: span for span in timeline.lanes[target].spans if span.name == received}
    for span in timeline.lanes[source].spans:
        end = ends.get(span.step + shift)
        if span.name != sent or end is None or end.end < span.start:
            continue
        common = {"name": sent, "cat": "flow", "id": f"{sent}-{span.step}", "tid": 1}
        yield {
            "ph": "s",
            **common,
            "pid": pids[source],
            "ts": _microseconds(timeline, min(span.end, end.end)),
        }
        yield {"ph": "f", **common, "bp": "e", "pid": pids[target], "ts": _microseconds(timeline, end.end)}
