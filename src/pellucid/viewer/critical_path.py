"""The critical path: the chain of spans that the run could not have ended earlier without.

It is walked backwards from the last span of the trainer, or the evaluation after it. At every moment one lane
has it:

- the trainer, at work: the path stays with the trainer.
- the trainer, waiting for batch n: the path goes to the sending of batch n, from when it arrived on.
- sending: to the orchestrator at the moment at which the batch was complete.
- the orchestrator, sampling: to an engine that decodes or loads; where none does, it stays.
- the orchestrator, waiting for weights: to the update of the weights that ended the wait.
- an update: to an engine that loads, then to the evaluation that held the update up, if there was one, else
  to the writing of that version, and from there to the trainer at the moment at which it was copied.
- an evaluation: to the update of the weights that it is of.

A wait whose cause is not recorded stays on the path as what it is. Segments never overlap and leave no hole.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pellucid.data.spans import NO_STEP, Span
from pellucid.viewer.lanes import (
    BATCHES,
    EVALUATIONS,
    ORCHESTRATOR,
    OTHER,
    TRAINER,
    VERSIONS,
    WEIGHTS,
    Lane,
)

CLOSE_S = 0.005
"""Two events that are no further apart count as one: processes do not look at the clock at once."""


class Segment(NamedTuple):
    """A part of the critical path."""

    lane: str
    name: str
    start: float
    end: float
    step: int = NO_STEP


def critical_path(lanes: Mapping[str, Lane]) -> list[Segment]:
    """Walks back from the end of each of the trainer's starts; segments in order of time."""
    trainer = lanes.get(TRAINER)
    if trainer is None:
        return []
    found: list[Segment] = []
    for place, (start, end) in enumerate(trainer.lives):
        until = trainer.lives[place + 1][0] if place + 1 < len(trainer.lives) else float("inf")
        found += _Walk(lanes, start).back_from(end, until)
    return found


_MAX_HOPS = 8
"""Changes of lane at one moment, beyond which the path stays with the trainer: no real run has so many."""


class _Walk:
    """The way back through one start of the trainer.

    Each `_at_LANE` takes a time at which the path is in that lane, adds segments, and returns where to go on.
    """

    def __init__(self, lanes: Mapping[str, Lane], begin: float) -> None:
        self._begin = begin
        empty = Lane("", [])
        self._trainer = lanes[TRAINER]
        self._batches, self._orchestrator, self._weights, self._evaluations = (
            lanes.get(name, empty) for name in (BATCHES, ORCHESTRATOR, WEIGHTS, EVALUATIONS)
        )
        engines = {name: lane for name, lane in lanes.items() if name.startswith("engine")}
        self._work = list(engines.values())
        self._loads = [Lane(name, _named(lane, "load")) for name, lane in engines.items()]
        self._sent = _by_step(self._batches.spans)
        self._published = _by_step(_named(self._trainer, "publish"))
        self._written = _by_step(lanes.get(VERSIONS, empty).spans)
        self._updated = _by_step(self._weights.spans)
        self._found: list[Segment] = []

    def back_from(self, end: float, until: float) -> list[Segment]:
        """`until`: when the trainer starts again; an evaluation after its last span is part of the path."""
        lane, time = TRAINER, end
        last = self._evaluations.before(until)
        if last is not None and last.end > end:
            lane, time = EVALUATIONS, min(last.end, until)
        num_hops = 0
        while time > self._begin:
            before = time
            if num_hops > _MAX_HOPS:
                lane, time = self._train(time, follow=False)
            else:
                lane, time = getattr(self, f"_at_{lane}")(time)
            num_hops = num_hops + 1 if time == before else 0
        return self._found[::-1]

    def _add(self, lane: str, name: str, start: float, end: float, step: int = NO_STEP) -> None:
        start = max(start, self._begin)
        if end > start:
            self._found.append(Segment(lane, name, start, end, step))

    def _at_trainer(self, time: float) -> tuple[str, float]:
        return self._train(time, follow=True)

    def _train(self, time: float, *, follow: bool) -> tuple[str, float]:
        span, start = self._covering(self._trainer, time)
        if span is None:
            return TRAINER, start
        if follow and span.name == "wait":
            for sent in reversed(self._sent[span.step]):
                if sent.start < time and sent.end > span.start:
                    arrived = min(sent.end, time)
                    self._add(TRAINER, "wait", arrived, time, span.step)
                    return BATCHES, arrived
        self._add(TRAINER, span.name, span.start, time, span.step)
        return TRAINER, span.start

    def _at_batches(self, time: float) -> tuple[str, float]:
        sent = self._batches.before(time)
        assert sent is not None
        earlier = self._batches.before(sent.start)
        if earlier is not None and earlier.end >= sent.start - CLOSE_S:  # it was the earlier one's turn
            self._add(BATCHES, sent.name, earlier.end, time, sent.step)
            return BATCHES, earlier.end
        self._add(BATCHES, sent.name, sent.start, time, sent.step)
        return ORCHESTRATOR, sent.start

    def _at_orchestrator(self, time: float) -> tuple[str, float]:
        span, start = self._covering(self._orchestrator, time)
        if span is None:
            return ORCHESTRATOR, start
        if span.name == "wait_weights":
            update = self._last_update(time)
            if update is not None and update.end > span.start:
                ended = min(update.end, time)
                self._add(ORCHESTRATOR, span.name, ended, time, span.step)
                return WEIGHTS, ended
        if span.name == "sample":
            self._through_engines(self._work, ORCHESTRATOR, span, time)
        else:
            self._add(ORCHESTRATOR, span.name, span.start, time, span.step)
        return ORCHESTRATOR, span.start

    def _at_weights(self, time: float) -> tuple[str, float]:
        update = self._weights.before(time)
        assert update is not None
        self._through_engines(self._loads, WEIGHTS, update, time)
        copied, written = (
            next((each for each in reversed(spans) if each.start < update.start), None)
            for spans in (self._published[update.step - 1], self._written[update.step])
        )
        published = written or copied
        there = None if published is None else min(published.end, update.start)
        held = self._evaluations.before(update.start)
        if held is not None and (there is None or held.end > there) and held.end > self._begin:
            ended = min(held.end, update.start)
            self._add(WEIGHTS, "pick_up", ended, update.start, update.step)
            return EVALUATIONS, ended
        if there is None:
            return TRAINER, update.start
        self._add(WEIGHTS, "pick_up", there, update.start, update.step)
        if written is not None:
            self._add(VERSIONS, written.name, written.start, there, update.step)
            return TRAINER, written.start
        return TRAINER, there

    def _at_evaluations(self, time: float) -> tuple[str, float]:
        span = self._evaluations.before(time)
        assert span is not None
        earlier = self._evaluations.before(span.start)
        update = next((each for each in self._updated[span.step] if each.end <= span.start + CLOSE_S), None)
        if earlier is not None and earlier.step == span.step:
            start, lane = min(earlier.end, span.start), EVALUATIONS
        elif update is not None:
            start, lane = min(update.end, span.start), WEIGHTS
        else:
            start, lane = span.start, ORCHESTRATOR
        self._add(EVALUATIONS, span.name, start, time, span.step)
        return lane, start

    def _covering(self, lane: Lane, time: float) -> tuple[Span | None, float]:
        """Returns the span of `lane` up to `time`; or None, and the time before a hole, which is added."""
        span = lane.before(time)
        if span is not None and span.end >= time:
            return span, span.start
        start = self._begin if span is None else max(span.end, self._begin)
        self._add(lane.name or ORCHESTRATOR, OTHER, start, time)
        return None, start

    def _last_update(self, time: float) -> Span | None:
        update = self._weights.before(time + CLOSE_S)
        if update is not None and update.end > time + CLOSE_S:
            update = self._weights.before(update.start)
        return update

    def _through_engines(self, engines: Sequence[Lane], lane: str, span: Span, time: float) -> None:
        """Adds who worked from the start of `span` to `time`: an engine, until its span starts, then the one
        that worked last before; where none did, `span` itself."""
        low = max(span.start, self._begin)
        while time > low:
            worked = [(found, each.name) for each in engines if (found := each.before(time)) is not None]
            last, name = max(
                worked,
                key=lambda each: (min(each[0].end, time), -each[0].start),
                default=(None, ""),
            )
            if last is None or last.end <= low:
                self._add(lane, span.name, low, time, span.step)
                return
            end, start = min(last.end, time), max(last.start, low)
            self._add(lane, span.name, end, time, span.step)
            self._add(name, last.name, start, end, last.step)
            time = start


def _named(lane: Lane, name: str) -> list[Span]:
    return [span for span in lane.spans if span.name == name]


def _by_step(spans: Sequence[Span]) -> defaultdict[int, list[Span]]:
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.step].append(span)
    return found
