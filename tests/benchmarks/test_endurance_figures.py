"""What `python -m benchmarks endurance` measures over 2,000 steps, over a few: Python's memory, and syncs."""

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest

from benchmarks.endurance import PARTS, growth, orchestrate, syncing_by

EARLY, LATE = 12, 36
ALLOWED_BYTES = 4096
"""Per step, that Python allocates; a tensor is an object and no bytes."""

ALLOWED_OBJECTS = {"orchestrator": 20, "trainer": 2, "engine": 12}
"""Per step. The number of rollouts in flight differs; the engine remembers its latest 16,384 answers."""


class Held(NamedTuple):
    num_bytes: int
    num_objects: int


@pytest.fixture
def measure() -> Iterator[Callable[[], Held]]:
    def held() -> Held:
        gc.collect()
        return Held(tracemalloc.get_traced_memory()[0], len(gc.get_objects()))

    tracemalloc.start()
    yield held
    tracemalloc.stop()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_keeps_nothing_of_a_step(part: str, measure: Callable[[], Held]) -> None:
    """A batch that is kept is 49,000 bytes and 210 objects in the orchestrator, 8 objects in the trainer."""
    early, late = growth(PARTS[part], EARLY, LATE, measure)
    assert (late.num_bytes - early.num_bytes) / (LATE - EARLY) < ALLOWED_BYTES
    assert (late.num_objects - early.num_objects) / (LATE - EARLY) < ALLOWED_OBJECTS[part]


def test_a_batch_is_synced_four_times_and_never_by_the_event_loop() -> None:
    """Journal, saved rollouts, snapshot, and the folder of the snapshot."""
    sync, syncs, at_batch = os.fsync, list[str](), list[int]()

    def noted(fd: int) -> None:
        syncs.append(threading.current_thread().name)
        sync(fd)

    with syncing_by(noted):
        orchestrate(5, lambda step: at_batch.append(len(syncs)))
    assert [late - early for early, late in pairwise(at_batch)] == [4] * 4
    assert set(syncs) == {"clerk_0"}
