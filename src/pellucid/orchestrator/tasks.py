"""Tasks that end in good order."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any


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


async def cancel(tasks: Collection["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
