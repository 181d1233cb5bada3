"""Who worked and who waited: lanes, the critical path through them, and a verdict in one sentence."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.data.spans import Span, read_spans, spans_folder
from pellucid.export.foreign import number_in
from pellucid.viewer.critical_path import Segment, critical_path
from pellucid.viewer.lanes import EVALUATION, ORCHESTRATOR, OTHER, PHASES, TRAINER, Lane, make_lanes, phase_of


class Bottleneck(NamedTuple):
    text: str
    keys: tuple[str, ...]
    """Settings that would change it."""

    part: str
    """Part of the pipeline that has most of the critical path."""


@dataclass(frozen=True)
class Timeline:
    lanes: Mapping[str, Lane]
    path: Sequence[Segment]
    is_approximate: bool = False
    """Whether it is made of durations per step, because the run recorded no spans."""

    @property
    def start(self) -> float:
        return min((start for lane in self.lanes.values() for start, _ in lane.lives), default=0.0)

    @property
    def end(self) -> float:
        return max((end for lane in self.lanes.values() for _, end in lane.lives), default=0.0)

    @property
    def path_s(self) -> float:
        return sum(segment.end - segment.start for segment in self.path)

    def path_shares(self, key: Callable[[Segment], Any]) -> dict[Any, float]:
        """Shares of the critical path by `key`, largest first."""
        seconds: dict[Any, float] = defaultdict(float)
        for segment in self.path:
            seconds[key(segment)] += segment.end - segment.start
        total = self.path_s or 1.0
        return {name: seconds[name] / total for name in sorted(seconds, key=lambda each: -seconds[each])}

    def share(self, lane: str, phase: str) -> float:
        """Share of a lane's time that a phase has; 0 where there is no such lane."""
        found = self.lanes.get(lane)
        return found.seconds()[phase] / found.lived_s if found is not None and found.lived_s else 0.0

    @property
    def engines(self) -> list[Lane]:
        return [lane for name, lane in self.lanes.items() if name.startswith("engine")]


def make_timeline(recorded: Mapping[str, Sequence[Span]], *, is_approximate: bool = False) -> Timeline:
    """`recorded`: spans by the name of the process, as in `spans/PROCESS.jsonl`."""
    lanes = make_lanes(recorded)
    return Timeline(lanes, critical_path(lanes), is_approximate)


REMEDIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "training": (
        "Give the trainer more processes, or larger micro batches",
        ("trainer.num_processes", "trainer.micro_batch_max_tokens"),
    ),
    "publishing": (
        "Train fewer weights, or put the run folder on a faster disk",
        ("model.lora", "output_dir"),
    ),
    "recording": (
        "Export fewer columns, or nothing",
        ("trainer.experimental.token_export.columns", "export"),
    ),
    "validation": ("Validate less often", ("data.validation.interval",)),
    "checkpoints": (
        "Write checkpoints less often, or beside training",
        ("trainer.ckpt.interval", "trainer.ckpt.asynchronous"),
    ),
    "delivery": (
        "Send batches over the network, or compress them",
        ("transport.type", "transport.compression"),
    ),
    "sending": ("Send smaller batches, or write to a faster disk", ("transport.compression", "output_dir")),
    "environments": (
        "Speed up the environment, or have more rollouts in flight, so that engines work meanwhile",
        ("orchestrator.max_inflight_rollouts",),
    ),
    "pauses": (
        "Let more rollouts start",
        ("orchestrator.tasks_per_minute", "orchestrator.retry_backoff_s"),
    ),
    "weights": ("Let sampling run further ahead of the weights", ("max_async_level",)),
    "evaluations": (
        "Evaluate less often, or fewer examples",
        ("orchestrator.eval.interval", "orchestrator.eval.num_examples"),
    ),
}

ROOMY = 0.5
"""Share of an engine's sequences below which it counts as not full."""

TURNS = 0.2
"""Share of time that trainer and orchestrator both wait for each other if they take turns."""


def verdict(timeline: Timeline) -> Bottleneck | None:
    """Says who waited for whom, and what to change; None without a critical path."""
    shares = timeline.path_shares(lambda segment: PHASES[phase_of(segment.name)].part)
    named = {part: share for part, share in shares.items() if part != PHASES[OTHER].part}
    if not named:
        return None
    part, share = next(iter(named.items()))
    waited = timeline.share(TRAINER, "wait")
    blocked = timeline.share(ORCHESTRATOR, "wait_weights")
    verb = "is" if part.endswith(("ing", "y", "ion")) else "are"
    opening = (
        f"The trainer waited for batches {100 * waited:.0f} % of the time"
        if ORCHESTRATOR in timeline.lanes
        else f"The trainer waited for data {100 * waited:.0f} % of the time"
    )
    text = f"{opening}: {part} {verb} the bottleneck, with {100 * share:.0f} % of the critical path."
    advice, keys = _sampling_advice(timeline) if part == "sampling" else REMEDIES.get(part, ("", ()))
    if part == "delivery" and ORCHESTRATOR not in timeline.lanes:
        advice, keys = "Prepare the data set ahead of the run", ("data.path",)
    if waited >= TURNS and blocked >= TURNS and "max_async_level" not in keys:
        text += f" Sampling waited for weights {100 * blocked:.0f} % of the time in turn."
        advice += ", or let the two overlap"
        keys = (*keys, "max_async_level")
    return Bottleneck(f"{text} {advice}: {', '.join(keys)}.", keys, part)


def _sampling_advice(timeline: Timeline) -> tuple[str, tuple[str, ...]]:
    engines = [lane for lane in timeline.engines if lane.capacity and lane.mean_load("decode") is not None]
    capacity = sum(lane.capacity or 0.0 for lane in engines)
    load = sum(lane.mean_load("decode") or 0.0 for lane in engines)
    if capacity and load / capacity < ROOMY:
        return (
            f"Engines decoded {load:.0f} of {capacity:.0f} sequences at a time: have more rollouts in "
            "flight, or cut the long replies that the others wait for",
            ("orchestrator.max_inflight_rollouts", "orchestrator.sampling.max_tokens"),
        )
    full = f"Engines decoded {load:.0f} of {capacity:.0f} sequences at a time: add" if capacity else "Add"
    return (
        f"{full} servers, or shorten the replies",
        ("inference.servers", "orchestrator.sampling.max_tokens"),
    )


def read_timeline(
    folder: Path, report: Callable[[str], object], metrics: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Timeline | None:
    """Reads the spans of a run folder; without any, approximates them from its `metrics`, records by process.

    None where there are neither.
    """
    recorded = {path.stem: read_spans(path, report) for path in sorted(spans_folder(folder).glob("*.jsonl"))}
    recorded = {process: spans for process, spans in recorded.items() if spans}
    if recorded:
        return make_timeline(recorded)
    guessed = {process: spans for process, spans in approximate(metrics).items() if spans}
    return make_timeline(guessed, is_approximate=True) if guessed.get("trainer") else None


def approximate(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Span]]:
    """Spans from durations per step and the time at which they were logged: right in sum, not in order.

    A step of the trainer is taken to wait, compute, publish, record; a batch to wait for weights, then to be
    sampled. Engines are left out: they log when weights change, not when they work.
    """
    found: dict[str, list[Span]] = {"trainer": [], "orchestrator": []}
    phases = ("checkpoint", "wait", "pack", None, "optimizer", "publish", "observe", "validate")
    for record, end, step in _logged(metrics.get("trainer", ())):
        total = _seconds(record, "time/step_s")
        known = {phase: _seconds(record, f"time/{phase}_s") for phase in phases if phase}
        rest = max(0.0, total - sum(known.values()))
        found["trainer"] += _in_a_row(
            end, step, [(phase or "compute", known.get(phase or "", rest)) for phase in phases]
        )
    for record, end, step in _logged(metrics.get("orchestrator", ())):
        blocked = _seconds(record, "time/wait_weights_s")
        sampled = max(0.0, _seconds(record, "time/batch_s") - blocked)
        found["orchestrator"] += _in_a_row(end, step, [("wait_weights", blocked), ("sample", sampled)])
    for record, end, version in _logged(metrics.get("eval", ())):
        names = [
            name[: -len("/time_s")]
            for name in record
            if name.startswith(EVALUATION) and name.endswith("/time_s")
        ]
        found["orchestrator"] += _in_a_row(
            end, version, [(name, _seconds(record, f"{name}/time_s")) for name in names]
        )
    return found


def _logged(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float, int]]:
    """Yields records that have a step and the time at which they were logged, with both."""
    for record in records:
        step, end = record.get("step"), record.get("time")
        if type(step) is int and isinstance(end, float) and 0 < end < 1e12 and 0 <= step < 10**15:
            yield record, end, step


def _seconds(record: Mapping[str, Any], name: str) -> float:
    value = number_in(record.get(name))
    return value if value is not None and 0 <= value < 1e9 else 0.0


def _in_a_row(end: float, step: int, durations: Sequence[tuple[str, float]]) -> list[Span]:
    """Returns spans that follow each other, the last of which ends at `end`."""
    spans = []
    for name, seconds in reversed(durations):
        if 0 < seconds < end:
            spans.append(Span(name, end - seconds, end, step))
            end -= seconds
    return spans[::-1]


MOST_SHOWN = 100_000
"""Spans that the browser gets; of a longer run, those of its last hours."""


def as_page(timeline: Timeline | None) -> dict[str, Any]:
    """Returns what the browser draws: columns per lane, milliseconds since `origin`."""
    if timeline is None:
        return {"version": 1, "lanes": []}
    origin = timeline.start
    ends = sorted((span.end for lane in timeline.lanes.values() for span in lane.spans), reverse=True)
    since = ends[MOST_SHOWN - 1] if len(ends) > MOST_SHOWN else origin
    found = verdict(timeline)
    on_path = timeline.path_shares(lambda segment: (segment.lane, phase_of(segment.name)))

    def columns(spans: Sequence[Span] | Sequence[Segment]) -> dict[str, Any]:
        shown = [span for span in spans if span.end >= since]
        return {
            "phase": [phase_of(span.name) for span in shown],
            "start": [round(1000 * (span.start - origin), 1) for span in shown],
            "end": [round(1000 * (span.end - origin), 1) for span in shown],
            "step": [span.step for span in shown],
        }

    lanes = []
    for lane in timeline.lanes.values():
        seconds = lane.seconds()
        shown = [span for span in lane.spans if span.end >= since]
        rest = max(0.0, lane.lived_s - sum(seconds.values()))
        lanes.append(
            {
                "name": lane.name,
                "capacity": lane.capacity,
                "lives": [[round(1000 * (time - origin), 1) for time in life] for life in lane.lives],
                "lived_s": lane.lived_s,
                "seconds": dict(seconds),
                "rest_s": rest,
                "on_path": {phase: share for (owner, phase), share in on_path.items() if owner == lane.name},
                **columns(lane.spans),
                "load": [None if span.load is None else round(span.load, 1) for span in shown],
                "named": {
                    str(place): span.name
                    for place, span in enumerate(shown)
                    if span.name.startswith(EVALUATION)
                },
            }
        )
    return {
        "version": 1,
        "origin": origin,
        "end": round(1000 * (timeline.end - origin), 1),
        "since": round(1000 * (since - origin), 1),
        "approximate": timeline.is_approximate,
        "verdict": None if found is None else {"text": found.text, "keys": found.keys, "part": found.part},
        "phases": {name: phase._asdict() for name, phase in PHASES.items()},
        "parts": timeline.path_shares(lambda segment: PHASES[phase_of(segment.name)].part),
        "path_s": timeline.path_s,
        "lanes": lanes,
        "path": {
            "lane": [each.lane for each in timeline.path if each.end >= since],
            **columns(timeline.path),
        },
    }
