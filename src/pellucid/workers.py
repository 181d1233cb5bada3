"""Pools of threads and processes for work beside the event loop; the number of cores; the C library's
memory and Python's garbage collector.

Threads are for code that waits or computes outside Python. Processes are for code that computes in Python,
where threads would take turns with the event loop; arguments and results are pickled. Work that never ends
holds up nobody, not even the exit of the process.
"""

import asyncio
import ctypes
import gc
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

Kind = Literal["threads", "processes"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h

_THRESHOLDS = (20_000, 200, 10)
"""Thresholds of the garbage collector: it looks at new objects once there are 20,000 more than before, in a
few milliseconds, and at those that survived only after every 4 million. With 2,000, looking takes about a
tenth of the event loop's time."""

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU time of this container (cgroup v2), as `QUOTA PERIOD` in µs or `max PERIOD`."""


def num_cores(quota: Path | None = None) -> int:
    """Counts the cores that this process may use: its affinity, or the container's quota if that is less.

    `150000 100000` is 1.5 cores of CPU time in every period, and counts as 2.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # there is no such file, or it says `max`
        limit, period = map(int, (quota or CPU_QUOTA).read_text().split())
        return max(1, min(cores, math.ceil(limit / period)))
    return cores


def keep_freed_memory() -> None:
    """Has glibc keep up to 256 MiB of freed memory, and take blocks below 32 MiB from it, in any thread.

    By itself it gives memory back after every backward pass and asks for it again in the next forward, page
    by page, which a small model's step notices. Threads would have memory of their own, without these limits.
    With another C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)
        mallopt(_M_ARENA_MAX, 1)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Context manager: the garbage collector rarely scans old objects, and never those made before.

    Old objects are the rollouts in flight: with Python's defaults, scanning 10,000 of them stops the event
    loop for half a second, every other second.
    """
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


class Workers:
    """Threads or processes of one environment, started when they are first needed."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._executor: Executor | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._executor is None:
            self._executor = _executor(self._kind)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, partial(function, *arguments)
            )
        except BrokenExecutor:
            self._executor = None  # a worker died; the next one who asks gets new ones
            raise

    def close(self) -> None:
        """Kills processes, leaves threads to end by themselves, waits for none and drops their results."""
        if self._executor is None:
            return
        # Python joins its processes when it exits; one that never ends would keep it for ever.
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        self._executor = None


def _executor(kind: Kind) -> Executor:
    if kind == "threads":
        return DaemonThreads()
    # Not forked: the threads of this process would not be there, but the locks they hold would.
    return ProcessPoolExecutor(num_cores(), mp_context=get_context("spawn"))


class DaemonThreads(ThreadPoolExecutor):
    """A pool of threads that end with the process, whatever they do; `ThreadPoolExecutor` joins its threads.

    It derives from that class, and uses nothing of it, because an event loop takes no other kind as its own.
    """

    def __init__(self, max_threads: int | None = None, name: str = "offloaded") -> None:
        """`max_threads`: default: as many as in Python's own pools. `name`: prefix of its threads' names."""
        super().__init__(1)
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._max_threads = max_threads or min(32, num_cores() + 4)
        self._num_threads = self._num_idle = 0
        self._changing = threading.Lock()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        with self._changing:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.put((future, partial(fn, *args, **kwargs)))
            if self._num_idle:
                self._num_idle -= 1  # an idle thread takes this call
            elif self._num_threads < self._max_threads:
                self._num_threads += 1
                name = f"{self._name}_{self._num_threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the threads end once they are done; waits for none, and cancels calls that none has taken."""
        with self._changing:
            self._is_shut = True
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call[0].cancel()
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del call, future, function  # an idle thread holds on to nothing
            with self._changing:
                self._num_idle += 1
