"""Lanes: the spans of a run, by who did what, none beside another in its lane.

trainer        wait ── pack ── compute ── optimizer ── publish ── observe ── wait …       steps
batches        send                                                                       steps
orchestrator   sample ── environment ── wait_weights ── sample …                          steps
engine         decode ── load ── decode …                                                 policy versions
versions       write, beside the trainer's next step                                      policy versions
weights        update: the servers load what was published                                policy versions
evaluations    eval/NAME                                                                  policy versions
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pellucid.data.spans import START, Span

TRAINER, BATCHES, ORCHESTRATOR, VERSIONS, WEIGHTS, EVALUATIONS = (
    "trainer",
    "batches",
    "orchestrator",
    "versions",
    "weights",
    "evaluations",
)
OTHER = "other"
EVALUATION = "eval/"


class Phase(NamedTuple):
    label: str
    kind: str
    """`work`, `wait`, or `rest` for time that nothing is recorded of."""

    part: str
    """Part of the pipeline that is named as the bottleneck when it has most of the critical path."""

    about: str


PHASES: Mapping[str, Phase] = {
    "wait": Phase("wait for a batch", "wait", "delivery", "the trainer waits for the batch of its next step"),
    "pack": Phase("pack", "work", "training", "samples are packed into micro batches"),
    "compute": Phase("forward, backward", "work", "training", "all micro batches of the step"),
    "optimizer": Phase("optimizer", "work", "training", "gradient norm, clipping, update"),
    "publish": Phase(
        "publish", "work", "publishing", "weights are copied; a version still written is waited for"
    ),
    "write": Phase("write weights", "work", "publishing", "a version is written while the next step trains"),
    "observe": Phase("record", "work", "recording", "ledger, token export and metrics of the step"),
    "validate": Phase("validate", "work", "validation", "loss on the validation examples"),
    "checkpoint": Phase("checkpoint", "work", "checkpoints", "checkpoint or final model"),
    "send": Phase("send", "work", "sending", "books, snapshot and the batch itself are written"),
    "sample": Phase("sample", "work", "sampling", "rollouts wait for the engine's answers"),
    "environment": Phase("environment", "work", "environments", "rollouts run, none waits for an engine"),
    "wait_weights": Phase(
        "wait for weights", "wait", "weights", "nothing may start until newer weights come"
    ),
    "idle": Phase("idle", "wait", "pauses", "no rollout is in flight"),
    "decode": Phase("decode", "work", "sampling", "prompts and next tokens; its height is how full it is"),
    "load": Phase("load weights", "work", "weights", "a policy version is loaded; nothing is sampled"),
    "update": Phase("update", "work", "weights", "from the order to load a version until a server has it"),
    "pick_up": Phase("pick up", "wait", "weights", "published, and not yet noticed"),
    "evaluate": Phase("evaluate", "work", "evaluations", "a policy version is evaluated"),
    OTHER: Phase("not recorded", "rest", "the rest", "between two spans: logging, start and end"),
}


def phase_of(name: str) -> str:
    """`eval/held-out` -> `evaluate`; names that nobody knows are `other`."""
    if name.startswith(EVALUATION):
        return "evaluate"
    return name if name in PHASES else OTHER


@dataclass(frozen=True, slots=True)
class Lane:
    """Spans of one kind of one process, in order, none beside another."""

    name: str
    spans: Sequence[Span]
    lives: Sequence[tuple[float, float]] = ()
    """From start to end of the process, once for each time that it was started."""

    capacity: float | None = None
    """Sequences that fit into an engine."""

    _starts: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", [span.start for span in self.spans])

    def before(self, time: float) -> Span | None:
        """Returns the last span that starts before `time`."""
        place = bisect_left(self._starts, time)
        return self.spans[place - 1] if place else None

    @property
    def lived_s(self) -> float:
        return sum(end - start for start, end in self.lives)

    def seconds(self) -> Counter[str]:
        """Seconds of each phase."""
        total: Counter[str] = Counter()
        for span in self.spans:
            total[phase_of(span.name)] += span.duration_s  # type: ignore[assignment]
        return total

    def mean_load(self, name: str) -> float | None:
        counted = [span for span in self.spans if span.name == name and span.load is not None]
        if not (seconds := sum(span.duration_s for span in counted)):
            return None
        return sum((span.load or 0.0) * span.duration_s for span in counted) / seconds


def make_lanes(recorded: Mapping[str, Sequence[Span]]) -> dict[str, Lane]:
    """`recorded`: spans by the name of the process, as in `spans/PROCESS.jsonl`."""
    lanes: list[Lane] = []
    for process, spans in recorded.items():
        lives = list(_lives(spans))
        capacity = next((span.load for span in reversed(spans) if span.name == START), None)
        by_lane: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.name != START:
                by_lane[_lane_of(process, span.name)].append(span)
        for name, its in by_lane.items():
            if pieces := list(exclusive(its)):
                lanes.append(Lane(name, pieces, lives, capacity))
    lanes.sort(key=lambda lane: (_LANE_ORDER.get(lane.name, len(_LANE_ORDER)), lane.name))
    lanes.sort(key=lambda lane: lane.name in (VERSIONS, WEIGHTS, EVALUATIONS))  # below the engines
    return {lane.name: lane for lane in lanes}


_LANE_ORDER = {TRAINER: 0, BATCHES: 1, ORCHESTRATOR: 2}


def _lane_of(process: str, name: str) -> str:
    if process == "orchestrator":
        if name.startswith(EVALUATION):
            return EVALUATIONS
        return {"send": BATCHES, "update": WEIGHTS}.get(name, ORCHESTRATOR)
    if process.startswith("inference"):
        label = process.removeprefix("inference").strip("_")
        return "teacher" if label == "teacher" else f"engine {label}".strip()
    return VERSIONS if name == "write" else process


def _lives(spans: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """Yields (start, end) of every start of the process; the end is that of its last span."""
    start = end = None
    for span in spans:
        if start is None or end is None or span.name == START:
            if start is not None and end is not None:
                yield start, end
            start = end = span.start
        start, end = min(start, span.start), max(end, span.end)
    if start is not None and end is not None:
        yield start, end


def exclusive(spans: Iterable[Span]) -> Iterator[Span]:
    """Yields pieces of the spans of which none overlap: at every moment, the span that began last.

    A span around others is cut: wait 0–10 and pack 4–6 are wait 0–4, pack 4–6, wait 6–10.
    """
    opened: list[Span] = []
    reached = 0.0

    def close(until: float | None) -> Iterator[Span]:
        nonlocal reached
        while opened and (until is None or opened[-1].end <= until):
            last = opened.pop()
            if last.end > reached:
                yield msgspec.structs.replace(last, start=reached)
                reached = last.end

    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        yield from close(span.start)
        if opened and span.start > reached:
            yield msgspec.structs.replace(opened[-1], start=reached, end=span.start)
        reached = max(reached, span.start)
        opened.append(span)
    yield from close(None)
