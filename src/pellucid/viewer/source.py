"""The server's answers: bytes by name, made when asked for and cached while there is room.

    run               the head: see `summary.make_head`
    slices            its points by rank and policy version
    step/N            the index of a step
    rows/N            what its records' tokens add up to
    chunk/N/K         tokens of some of its records
    lead/N/R          the first tokens of a long one
    metrics           every metric of the run over its steps
    timeline          who worked and who waited, see `timeline.as_page`
    rollouts/N        saved rollouts of a step
    rollout/N/K       one of them, with long messages
    texts             texts of token ids
    query             an answer about the whole run, see `queries`

From a Parquet export the server reads only the columns and records that an answer needs. It parses a step of
a JSONL export whole, once, and caches all answers of the step. The least recently used answers are dropped
first. Work that reads a whole step waits for answers that show a record.
"""

import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from pellucid.errors import DataError, PellucidError
from pellucid.viewer.access import (
    ALL_FIELDS,
    Exports,
    Records,
    RunFolder,
    StepSummary,
)
from pellucid.viewer.encode import (
    LONG_TOKENS,
    chunk_spans,
    encode_chunk,
    encode_index,
    encode_lead,
    encode_step,
)
from pellucid.viewer.queries import RunQueries
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.rows import IDENTITY_FIELDS, MEASURED_FIELDS, Identity, Measures
from pellucid.viewer.summary import as_json, make_head, make_slices, summarise
from pellucid.viewer.timeline import as_page
from pellucid.viewer.vocabulary import open_vocabulary

CACHE_BYTES = 512 * 2**20
LOOK_AGAIN_S = 1.0
TOKENS_AT_A_TIME = 2**17
GIVES_WAY_S = 0.25
"""Seconds that background reading waits, at most, for answers that a user waits for."""


class ServedRun:
    def __init__(
        self,
        exports: Exports,
        *,
        tokenizer: str | None = None,
        start_record: int = 0,
        max_mismatch: float | None = None,
        trust_remote_code: bool = False,
        home: str = "",
    ) -> None:
        """`home`: address of the list that this run is part of, seen from its page."""
        self._exports = exports
        self._home = home
        self._run = RunFolder.of(exports)
        self._vocabulary, self._note = open_vocabulary(
            tokenizer, self._run.model_folder(), trust_remote_code=trust_remote_code
        )
        self._roles = RoleFinder(self._vocabulary)
        self._start_record = start_record
        self._max_mismatch = max_mismatch
        self._queries = RunQueries(exports)
        self._summaries: dict[int, dict[str, Any]] = {}
        self._rollouts = self._run.rollouts()
        self._lacks = self._rollouts.lacks()
        self._num_rollouts: dict[str, dict[str, int]] = {}
        self._rollouts_stamp: object = None
        self._head: tuple[object, bytes] = (None, b"")
        self._answers = Answers(CACHE_BYTES)
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}
        self._foreground = ForegroundWork()
        self._closed = threading.Event()
        exports.steps()  # a path that holds no export is an error now, not in the browser

    def run(self) -> bytes:
        """Returns the head; made again only when a step, a summary or a file of the run folder is new."""
        steps = self._exports.steps()
        known = [self._summaries[step] for step in steps if step in self._summaries]
        state = self._state(steps)
        if self._head[0] != state:
            head = make_head(
                self._exports.path,
                self._run,
                known,
                held=steps,
                pending=len(steps) - len(known),
                notes=[str(note) for note in (steps and self._note, *self._exports.warnings) if note],
                live=True,
                start_record=self._start_record,
                max_mismatch=self._max_mismatch,
                metrics=self._run.metrics(),
                rollouts=self._num_rollouts,
                writing=self._run.is_being_written(time.time()),
                state=state,
                home=self._home,
                lacks=self._lacks,
            )
            head["counting"] = self._rollouts_stamp is None
            self._head = state, as_json(head)
        return self._head[1]

    def slices(self) -> bytes:
        steps = self._exports.steps()
        return as_json(make_slices([self._summaries[step] for step in steps if step in self._summaries]))

    def metrics(self) -> bytes:
        return as_json(self._run.metrics())

    def timeline(self) -> bytes:
        return as_json(as_page(self._run.timeline()))

    def rollouts(self, step: int) -> bytes:
        return as_json(self._rollouts.rows(step))

    def rollout(self, step: int, number: int) -> bytes:
        return as_json(self._rollouts.row(step, number))

    def pulse(self) -> dict[str, Any]:
        """Small enough to be asked for every second: has anything changed?"""
        steps = self._exports.steps()
        return {
            "steps": len(steps),
            "summarised": len(self._summaries),
            "state": self._state(steps),
            "writing": self._run.is_being_written(time.time()),
        }

    def _state(self, steps: list[int]) -> str:
        """Changes whenever the head does."""
        counted = sum(sum(states.values()) for states in self._num_rollouts.values())
        known = sum(step in self._summaries for step in steps)
        is_counted = self._rollouts_stamp is not None
        state = (steps, known, counted, is_counted, tuple(self._exports.warnings), self._run.state())
        return f"{zlib.crc32(repr(state).encode()):08x}"

    def step(self, number: int) -> bytes:
        return self._answer(f"step/{number}", number, self._make_index)

    def rows(self, number: int) -> bytes:
        return self._answer(f"rows/{number}", number, self._make_rows)

    def chunk(self, number: int, index: int) -> bytes:
        with self._foreground:
            return self._answer(f"chunk/{number}/{index}", number, partial(self._make_chunk, index=index))

    def lead(self, number: int, record: int) -> bytes:
        with self._foreground:
            return self._answer(f"lead/{number}/{record}", number, partial(self._make_lead, record=record))

    def texts(self, token_ids: Iterable[int]) -> bytes:
        with self._lock:
            return as_json(self._vocabulary.texts(token_ids))

    def query(self, question: dict[str, Any]) -> bytes:
        return as_json({"answer": self._queries.answer(question)})

    def summarise(self) -> None:
        """Reads every step that has no summary yet, newest first, and again whenever there are new ones."""
        while not self._closed.is_set():
            self.summarise_once()
            self._closed.wait(LOOK_AGAIN_S)

    def summarise_once(self) -> None:
        """A step that cannot be read is named in a note, and has a summary without records."""
        missing = [step for step in self._exports.steps() if step not in self._summaries]
        for step in reversed(missing):
            if self._closed.is_set():
                return
            try:
                self._summarise(step)
            except (PellucidError, OSError) as error:
                self._exports.warn(step, error)
                self._summaries.setdefault(step, summarise(step, StepSummary()))
        if (stamp := self._rollouts.state()) != self._rollouts_stamp:
            self._num_rollouts, self._rollouts_stamp = self._rollouts.counts(), stamp

    def _summarise(self, step: int) -> None:
        """Takes the summary beside a JSONL export, or in the cache, without decoding its tokens; where there
        is none, or the export is columnar, makes the index of the step."""
        records = self._exports.records(step)
        known = None if self._exports.is_columnar(records) else self._exports.known_summary(step)
        if known is None or not records:
            self.step(step)
            return
        self._summaries[step] = summarise(step, known, has_masks=self._exports.has_masks(known, records))

    def close(self) -> None:
        self._closed.set()

    def _answer(self, name: str, step: int, make: Callable[[Records], bytes]) -> bytes:
        if (found := self._answers.get(name)) is not None:
            return found
        with self._lock:
            if not self._exports.has(step):
                raise DataError(f"there is no finished step {step}")
            records = self._exports.records(step)
            if not records:
                raise DataError(f"step {step} holds no records")
            is_columnar = self._exports.is_columnar(records)
            making = self._making.setdefault(name if is_columnar else f"step/{step}", threading.Lock())
        with making:  # whoever asks for the same waits; others do not
            if (found := self._answers.get(name)) is not None:
                return found
            if is_columnar:
                self._answers.put({name: (found := make(records))})
                return found
            made = encode_step(step, self._exports, records, self._roles, level=None)
            self._summaries[step] = made.summary
            parts = {f"step/{step}": made.index, f"rows/{step}": made.rows}
            parts |= {f"chunk/{step}/{index}": chunk for index, chunk in enumerate(made.chunks)}
            parts |= {f"lead/{step}/{record}": lead for record, lead in made.leads.items()}
            self._answers.put(parts)
            if name not in parts:
                raise DataError(f"step {step} has no {name}")
            return parts[name]

    def _make_index(self, records: Records) -> bytes:
        identity = Identity()
        batch = records.batch(IDENTITY_FIELDS)
        identity.add(batch)
        step = records[0].key[0]
        self._answers.put({f"lengths/{step}": batch.lengths.astype(np.int64).tobytes()})
        starts = [first for first, _ in chunk_spans(batch.lengths)]
        summary = self._exports.summary(step)
        masks_known = self._exports.has_masks(summary, records)
        index, self._summaries[step] = encode_index(
            step, identity, summary, starts, masks_known=masks_known, level=None
        )
        return index

    def _make_rows(self, records: Records) -> bytes:
        measures = Measures()
        for first, last in chunk_spans(self._lengths(records), TOKENS_AT_A_TIME):
            self._foreground.give_way(GIVES_WAY_S)
            measures.add(records[first:last].batch(MEASURED_FIELDS))
        return measures.encode(level=None)

    def _make_chunk(self, records: Records, index: int) -> bytes:
        spans = list(chunk_spans(self._lengths(records)))
        if not 0 <= index < len(spans):
            raise DataError(f"step {records[0].key[0]} has {len(spans)} chunks, there is no chunk {index}")
        first, last = spans[index]
        return encode_chunk(records[first:last].batch(ALL_FIELDS), self._roles, level=None)

    def _make_lead(self, records: Records, record: int) -> bytes:
        lengths = self._lengths(records)
        if not 0 <= record < len(lengths) or lengths[record] <= LONG_TOKENS:
            raise DataError(f"step {records[0].key[0]} has no record {record} that is long")
        batch = records[record : record + 1].batch(ALL_FIELDS)
        return encode_lead(batch, self._roles, level=None)

    def _lengths(self, records: Records) -> Any:
        """Read once per step: every chunk asks for them."""
        name = f"lengths/{records[0].key[0]}"
        if (found := self._answers.get(name)) is None:
            self._answers.put({name: (found := records.lengths.astype(np.int64).tobytes())})
        return np.frombuffer(found, np.int64)


class ForegroundWork:
    """Counts the answers in the making that a user waits for; background work calls `give_way`."""

    def __init__(self) -> None:
        self._num_now = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._num_now += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._num_now -= 1
            self._changed.notify_all()

    def give_way(self, at_most_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_now, at_most_s)


class Answers:
    """Bytes by name, up to a total; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        with self._lock:
            if name not in self._kept:
                return None
            self._kept.move_to_end(name)
            return self._kept[name]

    def put(self, parts: dict[str, bytes]) -> None:
        """Stores all of them, even if they alone exceed the total."""
        with self._lock:
            for name, data in parts.items():
                self._num_bytes += len(data) - len(self._kept.pop(name, b""))
                self._kept[name] = data
            while self._num_bytes > self._max_bytes and len(self._kept) > len(parts):
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= len(dropped)
