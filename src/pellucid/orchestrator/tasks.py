"""Cancelling asyncio tasks: finishing despite it, deadlines, tasks that ignore it."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_S = 1.0  # for work that tidies up when it is cancelled


async def finish_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end; a cancellation that comes meanwhile is raised only then."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class Deadline:
    """A time limit, counted from now, that several pieces of work share.

    deadline = Deadline(60.0)
    await deadline.bound(converse())    takes 50 s
    await deadline.bound(score())       raises TimeoutError after 10 s
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = asyncio.get_running_loop().time() + seconds

    async def bound(self, work: Coroutine[Any, Any, T], what: str = "") -> T:
        """Returns the result of `work`; raises TimeoutError if it takes too long, even if it ignores
        cancellation.

        A cancellation is passed on to `work`, which may still return or raise by itself.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task}, timeout=self._ends_at - asyncio.get_running_loop().time())
        except asyncio.CancelledError:
            await _cancel_patiently(task)
            if not task.done():
                raise
        else:
            if not task.done():
                await _cancel_patiently(task)
                raise TimeoutError(f"{what}not finished within {self._seconds:g} s") from _cancelled_at(task)
        return task.result()


def _cancelled_at(task: "asyncio.Task[T]") -> asyncio.CancelledError | None:
    """Returns the exception that ended a cancelled task: its traceback says where the task was waiting."""
    try:
        task.result()
    except asyncio.CancelledError as cancelled:
        return cancelled
    except (Exception, asyncio.InvalidStateError):
        pass  # the task raised another error, or ignored the cancellation
    return None


async def _cancel_patiently(task: "asyncio.Task[T]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)


async def outlive(
    tasks: Collection["asyncio.Task[Any]"], note: "Callable[[asyncio.Task[Any]], None]"
) -> None:
    """Cancels tasks that were left running; calls `note` with each that ignores it for `_GRACE_S`."""
    for task in tasks:
        task.cancel()
    _, stubborn = await asyncio.wait(tasks, timeout=_GRACE_S) if tasks else (tasks, ())
    for task in stubborn:
        note(task)
        log.warning("a task will not be cancelled, and is left behind: %s", task.get_coro())


async def cancel(tasks: Collection["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
