"""Work beside the event loop, which goes on sampling meanwhile.

Threads are for what waits, or computes outside Python; processes for what computes in Python, where threads
would take turns with the event loop. What goes to a process and back is pickled.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Kind = Literal["threads", "processes"]


class Workers:
    """They are started when they are first needed."""

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
        """Waits for nothing: what is still running has nobody to report to."""
        if self._executor is None:
            return
        # Python joins its workers when it exits; one that never ends would keep it for ever.
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        self._executor = None


def _executor(kind: Kind) -> Executor:
    if kind == "threads":
        return ThreadPoolExecutor(thread_name_prefix="offloaded")
    # Not forked: the threads of this process would not be there, but the locks they hold would.
    return ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
