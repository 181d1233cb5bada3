"""Serves what the trainer publishes: the newest version, each once, and every version that is due.

A version is due if it is to be evaluated. Those are never passed over, however many are newer by then; and
whatever is made of a version is over before the next one is served.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pellucid.errors import InferenceError
from pellucid.inference.client import InferenceClient, UnreachableError
from pellucid.transport import stable_steps

log = logging.getLogger(__name__)

_POLL_S = 0.01
_RETRY_S = 0.5
_MAX_TRIES = 3


async def follow_weights(
    weights: Path,
    client: InferenceClient,
    on_update: Callable[[int], Awaitable[None]],
    is_due: Callable[[int], bool],
) -> None:
    """Serves versions as they appear; never returns. After a refusal it tries again, with the version due by
    then.

    Raises InferenceError after a few refusals in a row, and at once when no server can be reached.
    """
    served = num_failures = 0
    while True:
        version = next_version(stable_steps(weights), served, is_due)
        if version is not None:
            try:
                await client.update_weights(version, weights / f"step_{version}")
            except UnreachableError:  # the client has waited for its servers long enough
                raise
            except InferenceError as error:
                num_failures += 1
                if num_failures == _MAX_TRIES:
                    raise InferenceError(
                        f"no weights could be served in {_MAX_TRIES} tries; policy version {version}: "
                        f"{error}; go on with --resume: a damaged file is made anew"
                    ) from error
                log.warning("policy version %d could not be served, trying again: %s", version, error)
                await asyncio.sleep(_RETRY_S)
            else:
                served, num_failures = version, 0
                await on_update(version)
        await asyncio.sleep(_POLL_S)


def next_version(published: Sequence[int], served: int, is_due: Callable[[int], bool]) -> int | None:
    """Returns the first new version that is due, else the newest; None if none is newer than `served`.

    `published` is ascending.
    """
    newer = [version for version in published if version > served]
    return next(filter(is_due, newer), newer[-1] if newer else None)
