"""What the server answers with: names to bytes, made when asked for and kept while there is room.

    run               the head: see `head.make_head`
    step/N            the index of a step
    chunk/N/K         tokens of some of its records
    texts             texts of token ids

A step is read once for its summary; its blobs are kept, least recently used out first.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from pellucid.errors import DataError
from pellucid.viewer.access import Exports, StepSummary
from pellucid.viewer.encode import EncodedStep, encode_step
from pellucid.viewer.head import deflate_json, make_head
from pellucid.viewer.roles import RoleFinder
from pellucid.viewer.run_folder import RunFolder
from pellucid.viewer.summary import summarise
from pellucid.viewer.vocabulary import open_vocabulary

log = logging.getLogger(__name__)

CACHE_BYTES = 512 * 2**20
DEFLATE_LEVEL = 1
"""Over loopback, less work is faster than fewer bytes."""


class ServedRun:
    def __init__(
        self,
        exports: Exports,
        *,
        tokenizer: str | None = None,
        start_record: int = 0,
        max_mismatch: float | None = None,
    ) -> None:
        self._exports = exports
        self._run = RunFolder.around(exports.path)
        self._vocabulary, self._note = open_vocabulary(tokenizer, self._run.model_folder())
        self._roles = RoleFinder(self._vocabulary)
        self._start_record = start_record
        self._max_mismatch = max_mismatch
        self._summaries: dict[int, dict[str, Any]] = {}
        self._steps: OrderedDict[int, EncodedStep] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._closed = threading.Event()
        exports.steps()  # a path that holds no export is an error now, not in the browser

    def run(self) -> bytes:
        steps = self._exports.steps()
        with self._lock:
            known = [self._summaries[step] for step in steps if step in self._summaries]
        head = make_head(
            self._exports.path,
            self._run,
            known,
            held=steps,
            pending=len(steps) - len(known),
            notes=[note for note in (self._note, *self._exports.warnings) if note],
            live=True,
            start_record=self._start_record,
            max_mismatch=self._max_mismatch,
        )
        return deflate_json(head)

    def pulse(self) -> dict[str, int]:
        """Small enough to be asked for every second: has anything changed?"""
        steps = self._exports.steps()
        return {"steps": len(steps), "last": steps[-1] if steps else -1, "summarised": len(self._summaries)}

    def step(self, number: int) -> bytes:
        return self._step(number).index

    def chunk(self, number: int, index: int) -> bytes:
        chunks = self._step(number).chunks
        if not 0 <= index < len(chunks):
            raise DataError(f"step {number} has {len(chunks)} chunks, there is no chunk {index}")
        return chunks[index]

    def texts(self, token_ids: Iterable[int]) -> bytes:
        with self._lock:
            return deflate_json(self._vocabulary.texts(token_ids))

    def summarise(self) -> None:
        """Reads every step that has no summary yet, newest first, and again whenever there are new ones."""
        while not self._closed.is_set():
            missing = [step for step in self._exports.steps() if step not in self._summaries]
            for step in reversed(missing):
                if self._closed.is_set():
                    return
                try:
                    self._step(step)
                except DataError as error:
                    self._exports.warnings.setdefault(str(error))
                    self._summaries.setdefault(step, _nothing(step))
            self._closed.wait(1.0)

    def close(self) -> None:
        self._closed.set()

    def _step(self, number: int) -> EncodedStep:
        with self._lock:
            if number in self._steps:
                self._steps.move_to_end(number)
                return self._steps[number]
        if number not in self._exports.steps():
            raise DataError(f"there is no finished step {number}")
        with self._reading:
            with self._lock:
                if number in self._steps:
                    return self._steps[number]
            records = self._exports.records(number)
            made = encode_step(number, self._exports, records, self._roles, level=DEFLATE_LEVEL)
            with self._lock:
                self._steps[number] = made
                self._summaries[number] = made.summary
                while len(self._steps) > 1 and sum(map(_num_bytes, self._steps.values())) > CACHE_BYTES:
                    self._steps.popitem(last=False)
        return made


def _num_bytes(step: EncodedStep) -> int:
    return len(step.index) + sum(map(len, step.chunks))


def _nothing(step: int) -> dict[str, Any]:
    return summarise(step, StepSummary())
