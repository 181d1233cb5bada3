"""Serves what the trainer publishes: the newest version, each once."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from pellucid.errors import InferenceError
from pellucid.inference.client import InferenceClient
from pellucid.transport import stable_steps

log = logging.getLogger(__name__)

_POLL_S = 0.01
_RETRY_S = 0.5
_MAX_TRIES = 3


async def follow_weights(weights: Path, client: InferenceClient, on_update: Callable[[int], None]) -> None:
    """Never returns. A refused version is tried again, or the one that is the newest by then."""
    served = num_failures = 0
    while True:
        version = max(stable_steps(weights), default=0)
        if version > served:
            try:
                await client.update_weights(version, weights / f"step_{version}")
            except InferenceError as error:
                num_failures += 1
                if num_failures == _MAX_TRIES:
                    raise InferenceError(
                        f"no weights could be served in {_MAX_TRIES} tries; policy version {version}: {error}"
                    ) from error
                log.warning("policy version %d could not be served, trying again: %s", version, error)
                await asyncio.sleep(_RETRY_S)
            else:
                served, num_failures = version, 0
                on_update(version)
        await asyncio.sleep(_POLL_S)
