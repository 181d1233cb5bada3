"""Tasks that end in good order."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_S = 1.0  # for work that tidies up when it is cancelled


async def outlast(work: Coroutine[Any, Any, None]) -> None:
    """Sees `work` through to its end; a cancellation that comes meanwhile is raised only then."""
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
    """A number of seconds, from now on, that several pieces of work share.

    deadline = Deadline(60.0)
    await deadline.bound(converse())    takes 50 s
    await deadline.bound(score())       raises TimeoutError after 10 s
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = asyncio.get_running_loop().time() + seconds

    async def bound(self, work: Coroutine[Any, Any, T], what: str = "") -> T:
        """The result of `work`; TimeoutError if it takes too long, even if it will not be cancelled.

        A cancellation is passed on to `work`, which may still come to an end of its own.
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
    """The exception that ended a cancelled task: its traceback says where the task was waiting."""
    try:
        task.result()
    except asyncio.CancelledError as cancelled:
        return cancelled
    except (Exception, asyncio.InvalidStateError):
        pass  # it answered the cancellation with an error of its own, or not at all
    return None


async def _cancel_patiently(task: "asyncio.Task[T]") -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)


async def outlive(
    tasks: Collection["asyncio.Task[Any]"], note: "Callable[[asyncio.Task[Any]], None]"
) -> None:
    """Cancels what others left running; `note` is told of those that will not end for it."""
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
