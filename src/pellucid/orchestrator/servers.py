"""The servers of a run: connects to them, states what each has to be, and serves what the trainer publishes.

- A run has an identity, `NAME-1f0c9a3e`, made when it first starts and kept in its folder. It travels with
  every weight update, so that a server can tell whose weights it serves.
- The newest version is served, each once, and every version that is due: it is to be evaluated. Those are
  never passed over, however many are newer by then; and whatever is made of a version is over before the next
  one is served.
"""

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pellucid.config import OrchestratorRunConfig
from pellucid.config.shared import base_url
from pellucid.data.files import read_whole, replace_file, step_folders
from pellucid.data.model_folder import longrope_limits, model_fingerprint
from pellucid.data.tokenizer import fingerprint
from pellucid.errors import ConfigError, DataError, InferenceError, TransportError
from pellucid.guard import read_key, server_key
from pellucid.inference.client import Expected, InferenceClient, UnreachableError, group_of_request
from pellucid.inference.pool import ServerPool
from pellucid.ledger.weights import WeightsBook
from pellucid.transport import publish_folder, retract_folder, stable_steps
from pellucid.transport.digests import DIGESTS, digest_of_bytes
from pellucid.transport.weights_pull import OfferedWeights, RefusedError, open_offer_client

log = logging.getLogger(__name__)

_MAX_IDENTITY_BYTES = 4096
_POLL_S = 0.01
_POLLS_PER_LISTING = 20
"""Polls after which a folder is listed even if its time of change is the same: not every disk tells."""
_POLL_OFFER_S = 0.1
LAST_WORD_S = 60.0
"""Seconds for which a trainer that does not answer is told that the run needs no more weights."""

_RETRY_S = 0.5
_MAX_TRIES = 3

Claims = dict[str, str]
"""Pool that uses a server, by server id: a server serves the policy or a teacher, never both."""


def connect_policy(
    config: OrchestratorRunConfig,
    tokenizer: Any,
    claims: Claims,
    process: str = "",
    weights_book: WeightsBook | None = None,
    offered: "OfferedVersionsList | None" = None,
) -> ServerPool:
    """Makes the pool of policy servers; needs a running event loop. `process`: our name in the ledger."""
    expected = Expected(
        role="policy server",
        model=config.model.name,
        vocabulary=fingerprint(tokenizer),
        max_model_len=config.inference.max_model_len,
        run=run_identity(config.output_dir, config.run_name),
        model_fingerprint=model_fingerprint(config.model.name),
        has_weights=bool(stable_steps(config.weights_dir)),
        longrope_limits=longrope_limits(config.model.name),
    )
    key = server_key(config.output_dir, config.inference.key_file)
    return _connect(config, config.inference.urls, expected, claims, key, process, weights_book, offered)


def connect_teacher(
    config: OrchestratorRunConfig, tokenizer: Any, claims: Claims, process: str = ""
) -> ServerPool | None:
    teacher = config.orchestrator.teacher
    if teacher is None:
        return None
    key_setting = "orchestrator.teacher.key_file"
    key: str | None = None
    if not teacher.servers:
        key = server_key(config.output_dir, config.inference.key_file)
    elif teacher.key_file is not None:  # somebody else's servers never get the run's key
        key = read_key(teacher.key_file, key_setting)
    expected = Expected(
        "teacher",
        config.model.name,
        fingerprint(tokenizer),
        config.inference.max_model_len,
        access="all" if teacher.mode == "sft" else "sampling",
        key_setting=key_setting,
    )
    urls = teacher.servers or (base_url(config.inference.host, teacher.port),)
    return _connect(config, urls, expected, claims, key, process)


def _connect(
    config: OrchestratorRunConfig,
    urls: Sequence[str],
    expected: Expected,
    claims: Claims,
    key: str | None,
    process: str,
    weights_book: WeightsBook | None = None,
    offered: "OfferedVersionsList | None" = None,
) -> ServerPool:
    from pellucid.inference.http import HttpInferenceClient

    return ServerPool(
        {url: HttpInferenceClient(url, key, process, config.weights.url) for url in urls},
        group_of_request,
        expected,
        claims=claims,
        weights_book=weights_book,
        num_listed=lambda: math.inf if offered is None else offered.num_listed,
        hang_s=config.orchestrator.server_timeout_s,
    )


class OfferedVersionsList:
    """The versions that a trainer offers over HTTP, as folders with their digests and nothing else.

    So that whoever looks for published versions finds them as on a shared disk.
    """

    def __init__(self, offer: OfferedWeights, folder: Path) -> None:
        self._offer, self._folder = offer, folder
        self.is_known = asyncio.Event()
        """Set once the folders were what the trainer offers."""
        self.num_listed = 0
        """How often the folders were made what the trainer offers."""

    async def follow(self) -> None:
        """Never returns. A trainer that cannot be reached is asked again, and named once."""
        is_reached = True
        while True:
            try:
                await asyncio.to_thread(self._update)
            except RefusedError as error:
                raise ConfigError(str(error)) from error
            except TransportError as error:
                if is_reached:
                    log.warning("%s; asking until it answers", error)
                is_reached = False
            else:
                if not is_reached:
                    log.warning("%s answers", self._offer.url)
                is_reached = True
                self.num_listed += 1
                self.is_known.set()
            await asyncio.sleep(_POLL_OFFER_S)

    async def finish(self, patience_s: float = LAST_WORD_S) -> None:
        """Tells the trainer that this run needs no more versions; it may still be loading its model."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            with suppress(TransportError):
                await asyncio.to_thread(self._offer.versions, is_done=True)
                return
            await asyncio.sleep(_RETRY_S)

    def _update(self) -> None:
        offered = self._offer.versions()
        for version, folder in step_folders(self._folder).items():
            if version not in offered:
                retract_folder(folder)
        for version, digest in sorted(offered.items()):
            path = self._folder / f"step_{version}" / DIGESTS
            if path.exists() and digest_of_bytes(path.read_bytes()) == digest:
                continue
            with suppress(RefusedError):  # withdrawn meanwhile
                content = self._offer.digests(version)
                publish_folder(path.parent, partial(_write_digests, content))


def _write_digests(content: bytes, folder: Path) -> None:
    (folder / DIGESTS).write_bytes(content)


def open_offered_versions(config: OrchestratorRunConfig) -> OfferedVersionsList | None:
    """Returns what follows the trainer's offer; None if versions are in the run folder."""
    if config.weights.transport == "filesystem":
        return None
    offer = open_offer_client(config.weights, config.output_dir, config.inference.key_file)
    return OfferedVersionsList(offer, config.weights_dir)


def run_identity(run_dir: Path, name: str) -> str:
    """Returns the identity of the run in this folder; makes and stores one if there is none."""
    path = run_dir / "checkpoints" / "identity"
    if not path.exists():
        replace_file(path, f"{name}-{uuid.uuid4().hex[:8]}".encode())
    identity = read_whole(path, _MAX_IDENTITY_BYTES).decode(errors="replace")
    if not identity or not identity.isprintable():
        raise DataError(f"{path} is damaged: it holds no name; delete it, and restart the run's servers")
    return identity


async def follow_weights(
    weights: Path,
    client: InferenceClient,
    on_update: Callable[[int], Awaitable[None]],
    is_due: Callable[[int], bool],
    timed: Callable[[str, int], AbstractContextManager[None]] = lambda name, version: nullcontext(),
) -> None:
    """Serves versions as they appear; never returns. After a refusal it tries again with what is due then.

    `timed("update", version)` is entered while the servers are told to load a version.

    Raises InferenceError after a few refusals in a row, and at once when no server can be reached.
    """
    served = num_failures = 0
    listed: int | None = None
    for poll in itertools.count():
        changed, version = _changed_at(weights), None
        if changed != listed or poll % _POLLS_PER_LISTING == 0:
            version = next_version(stable_steps(weights), served, is_due)
        listed = changed if version is None else None
        if version is not None:
            try:
                with timed("update", version):
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


def _changed_at(folder: Path) -> int:
    """Returns when something was last added or removed, in ns; 0 if there is no such folder."""
    with suppress(OSError):
        return folder.stat().st_mtime_ns
    return 0


def next_version(published: Sequence[int], served: int, is_due: Callable[[int], bool]) -> int | None:
    """Returns the first new version that is due, else the newest; None if none of `published` is newer."""
    newer = [version for version in published if version > served]
    return next(filter(is_due, newer), newer[-1] if newer else None)
