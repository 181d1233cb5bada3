"""Reads the policy versions that a trainer offers into a local folder; see `weights_offer`, `weights_store`.

    CACHE/.step_7.partial-6d1f…/     what has arrived so far; goes on at the byte where it stopped
    CACHE/step_7/ + STABLE           whole, every byte held by its digests

- A broken connection, a trainer that is started again, or this process itself: whatever ends a transfer, the
  next one asks for the rest. It is given up only after `patience_s` without a new byte.
- A wrong byte is named by its tensor, with both digests; the file is then fetched anew.
- A version that an earlier process left is held by its digests once, and fetched anew if it is damaged: by a
  power failure, say, since nothing here is synced to the disk.
- Two versions stay, the newest and the one before. A version that comes as its difference from one of them is
  made from that, also over several versions, and held by the same digests; else it is read whole.
"""

import http.client
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial as bind
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from pellucid.config.shared import WeightsConfig
from pellucid.data.files import append_whole, step_folders, writing
from pellucid.errors import DiskError, TransportError
from pellucid.guard import weights_key
from pellucid.transport.deltas import apply_deltas
from pellucid.transport.digests import (
    DIGESTS,
    OfferedVersions,
    PublishedDelta,
    PublishedDigests,
    decode_digests,
    digest_of_bytes,
    digest_of_tensor,
    read_head,
    tensors_of,
)
from pellucid.transport.spool import MARKER, is_stable, retract_folder

logger = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_S = 540.0
"""Less than the ten minutes that an orchestrator waits for a server that is loading weights."""

_SILENCE_S = 20.0
CHUNK_BYTES = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MAX_LISTING_BYTES = 1 << 28
_KEPT = 2


class RefusedError(TransportError):
    """The trainer answered, and asking again will not help."""


class OfferedWeights(Protocol):
    """A trainer's versions, as a server and an orchestrator see them."""

    @property
    def url(self) -> str: ...

    def versions(self, *, is_done: bool = False) -> dict[int, str]:
        """Returns the offered versions, each with the digest of its digests. Raises TransportError.

        `is_done` tells the trainer that nobody will ask for more.
        """

    def digests(self, version: int) -> bytes:
        """Returns the content of `digests.json`. Raises TransportError if the version is not offered."""

    def append(self, path: str, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Appends the rest of a file to what `target` has of it, until the end or the connection's."""


class OfferClient:
    """Asks a trainer's offer; each call opens a connection, so that any thread may."""

    def __init__(self, url: str, key: str, *, silence_s: float = _SILENCE_S) -> None:
        """`url`: `http://host:port`; `key`: see `guard.weights_key`. `silence_s`: how long a connection may
        deliver nothing."""
        self.url: str = url
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {"Authorization": f"Bearer {key}"}
        self._silence_s = silence_s

    def versions(self, *, is_done: bool = False) -> dict[int, str]:
        try:
            content = self.read("/weights?done" if is_done else "/weights")
            return msgspec.json.decode(content, type=OfferedVersions).versions
        except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"{self.url} offers no weights: {name_of(error)}") from error

    def digests(self, version: int) -> bytes:
        try:
            return self.read(f"/weights/step_{version}/{DIGESTS}")
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"{self.url} cannot be reached: {name_of(error)}") from error

    def read(self, path: str) -> bytes:
        """Returns a small answer, whole."""
        with closing(self._connect()) as connection:
            response = self._ask(connection, path)
            content = response.read(_MAX_LISTING_BYTES)
            if response.length:
                raise http.client.IncompleteRead(content, response.length)
            return content

    def post(self, path: str, body: bytes) -> bytes:
        """Raises OSError if there is no answer, and RefusedError if it is another than 200."""
        try:
            with closing(self._connect()) as connection:
                return self._ask(connection, path, body=body).read(_MAX_LISTING_BYTES)
        except http.client.HTTPException as error:
            raise OSError(name_of(error)) from error

    def append(self, path: str, target: Path, on_bytes: Callable[[int], None]) -> None:
        start = target.stat().st_size if target.exists() else 0
        with closing(self._connect()) as connection:
            response = self._ask(connection, path, {"Range": f"bytes={start}-"} if start else {})
            is_rest = response.status == 206 and (response.getheader("content-range") or "").startswith(
                f"bytes {start}-"
            )
            with target.open("ab" if is_rest else "wb", buffering=0) as file:
                while chunk := response.read(CHUNK_BYTES):
                    with writing(target):
                        append_whole(file, chunk)
                    on_bytes(len(chunk))

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=self._silence_s)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        method = "GET" if body is None else "POST"
        connection.request(method, path, body=body, headers={**self._headers, **(headers or {})})
        response = connection.getresponse()
        if response.status >= 500 or response.status == 429:
            raise http.client.HTTPException(f"{path} is answered with {response.status}")
        if response.status not in (200, 206):
            reason = response.read(1000).decode(errors="replace")
            remedy = ""
            if response.status == 401:
                remedy = "; both sides need the key of one run: set inference.key_file and weights.key_file"
            raise RefusedError(f"{self.url}{path} answered {response.status}: {reason}{remedy}")
        return response


def open_offer_client(weights: WeightsConfig, output_dir: Path, servers_key: Path | None) -> OfferedWeights:
    """Opens what the trainer offers over a network; `servers_key`: `inference.key_file`."""
    if weights.transport == "object-store":
        from pellucid.transport.weights_store import WeightsStore

        return WeightsStore(weights.url)
    return OfferClient(weights.url, weights_key(weights.run_key(output_dir, servers_key)))


def name_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class WeightsPuller:
    """Keeps the versions that a server serves in a folder of its own."""

    def __init__(self, offer: OfferedWeights, cache: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.offer = offer
        self._cache = cache
        self._patience_s = patience_s
        self._pulling = threading.Lock()
        self._sound: dict[int, bytes] = {}
        """Digests of the versions whose files this process has compared with them."""
        self.num_bytes = 0
        """Bytes received so far, over all versions."""

    @property
    def is_pulling(self) -> bool:
        return self._pulling.locked()

    def pull(self, version: int, *, is_served: bool = False) -> Path:
        """Returns the folder of a version, which is fetched unless it is there; blocks until it is whole.

        With `is_served` the trainer is asked once whether it published the version anew. If it is away, or
        refuses, what is there stays, which may be no folder.

        Raises TransportError if the trainer refuses it, cannot be reached for `patience_s`, or sent a wrong
        byte.
        """
        with self._pulling:
            folder = self._cache / f"step_{version}"
            try:
                ask = bind(self.offer.digests, version)
                content = ask() if is_served else self._patiently(ask)
            except TransportError as error:
                if not is_served:
                    raise
                logger.warning("%s; policy version %d is served already, and stays", error, version)
                return folder
            digests = self._decode(version, content)
            if self._has(version, content, digests):
                return folder
            partial = self._cache / f".step_{version}.partial-{digest_of_bytes(content)}"
            self._forget_partials(partial)
            partial.mkdir(parents=True, exist_ok=True)
            if not self._fetch_difference(version, digests, partial):
                self._fetch_files(version, digests, partial)
            with writing(folder):
                (partial / DIGESTS).write_bytes(content)
                (partial / MARKER).touch()
                if folder.exists():
                    retract_folder(folder)
                partial.rename(folder)
            self._sound[version] = content
            self._prune(version)
            return folder

    def _has(self, version: int, content: bytes, digests: PublishedDigests) -> bool:
        """Whether a version is there as published; its files are compared once per process."""
        folder = self._cache / f"step_{version}"
        try:
            if not is_stable(folder) or (folder / DIGESTS).read_bytes() != content:
                return False
            if self._sound.get(version) != content:
                for name, about in digests.files.items():
                    _check_file(folder / name, about.head, digests.tensors, str(folder))
                self._sound[version] = content
        except (OSError, TransportError) as error:
            logger.warning("policy version %d is fetched anew: %s", version, name_of(error))
            return False
        return True

    def _fetch_files(self, version: int, digests: PublishedDigests, partial: Path) -> None:
        for name, about in digests.files.items():
            target = partial / name
            self._fetch(f"/weights/step_{version}/{name}", target, about.num_bytes)
            self._check_arrived(version, target, about.head, digests.tensors)

    def _fetch_difference(self, version: int, digests: PublishedDigests, partial: Path) -> bool:
        """Makes a version from one that is here and the differences from there on; False if that fails, or
        is no less to read."""
        made = partial / "made.safetensors"
        targets: list[Path] = []
        is_made = False
        try:
            base, deltas = self._way_to(version, digests)
            if not deltas:
                return False
            for number, delta in deltas.items():
                targets.append(partial / f"delta_{number}")
                self._fetch(f"/weights/step_{number}/{delta.name}", targets[-1], delta.num_bytes)
                self._check_arrived(number, targets[-1], delta.digest, {})
            ((name, about),) = digests.files.items()
            with writing(made):
                apply_deltas(base / name, [target.read_bytes() for target in targets], made)
            self._check_arrived(version, made, about.head, digests.tensors)
            made.rename(partial / name)
            is_made = True
        except (TransportError, FileNotFoundError) as error:
            logger.warning("policy version %d is read whole: %s", version, error)
        for path in (made, *targets):
            path.unlink(missing_ok=True)
        return is_made

    def _way_to(self, version: int, digests: PublishedDigests) -> tuple[Path, dict[int, PublishedDelta]]:
        """Returns the folder of a version that is here, and the differences that lead from it to `version`;
        none if there is no such way, or one that is longer than the whole file."""
        deltas: dict[int, PublishedDelta] = {}
        left = sum(about.num_bytes for about in digests.files.values())
        while (delta := digests.delta) is not None and delta.num_bytes < left:
            left -= delta.num_bytes
            deltas = {version: delta, **deltas}
            version = delta.base_version
            base = self._cache / f"step_{version}"
            if is_stable(base) and digest_of_bytes((base / DIGESTS).read_bytes()) == delta.base:
                return base, deltas
            content = self.offer.digests(version)
            if digest_of_bytes(content) != delta.base:
                break
            digests = self._decode(version, content)
        return self._cache, {}

    def _decode(self, version: int, content: bytes) -> PublishedDigests:
        """Raises TransportError if these are no digests, or name what cannot be in a version's folder."""
        digests = decode_digests(content, f"{self.offer.url}: policy version {version}")
        for name in (*digests.files, *([digests.delta.name] if digests.delta else [])):
            if Path(name).name != name or name.startswith("."):
                raise TransportError(f"{self.offer.url}: {name!r} is no name of a file of weights")
        return digests

    def _fetch(self, path: str, target: Path, num_bytes: int) -> None:
        while (size := _size(target)) != num_bytes:
            if size > num_bytes:
                target.unlink()
            self._patiently(bind(self._append, path, target))

    def _check_arrived(self, version: int, target: Path, head: str, tensors: dict[str, str]) -> None:
        """Raises TransportError unless a file has its digests; then the next try fetches it anew."""
        try:
            _check_file(target, head, tensors, f"policy version {version} of {self.offer.url}")
        except TransportError:
            target.unlink()
            raise

    def _append(self, path: str, target: Path) -> None:
        """Gets some more bytes of a file; raises TransportError if none came."""
        before = self.num_bytes
        try:
            self.offer.append(path, target, self._note)
        except RefusedError:
            raise
        except (OSError, TransportError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DiskError.REMEDIES:
                raise RefusedError(str(DiskError.of(error))) from error
            if self.num_bytes == before:
                raise TransportError(f"{self.offer.url}{path}: {name_of(error)}") from error
            logger.warning(
                "the transfer of %s broke at byte %d and goes on there: %s",
                path,
                _size(target),
                name_of(error),
            )
        if self.num_bytes == before:
            raise TransportError(f"{self.offer.url}{path} delivered nothing from byte {_size(target)} on")

    def _note(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Asks until there is an answer; raises what went wrong last after `patience_s`."""
        deadline, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        is_said = False
        while True:
            try:
                return ask()
            except RefusedError:
                raise
            except TransportError as error:
                if time.monotonic() + pause_s > deadline:
                    raise TransportError(f"given up after {self._patience_s:g} s: {error}") from error
                if not is_said:
                    logger.warning("%s; trying again for %g s", error, self._patience_s)
                is_said = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _forget_partials(self, keep: Path) -> None:
        for path in self._cache.glob(".step_*.partial-*"):
            if path != keep:
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        older = sorted(version for version in step_folders(self._cache) if version != newest)
        for version in older[: -(_KEPT - 1)]:
            self._sound.pop(version, None)
            retract_folder(self._cache / f"step_{version}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_file(path: Path, head: str, tensors: dict[str, str], source: str) -> None:
    """Raises TransportError unless the file has the digests with which it was published; names the tensor."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            _require(digest_of_bytes(file.read()), head, f"{source}: {path.name}")
            return
        found = read_head(file)
        _require(digest_of_bytes(found), head, f"{source}: the head of {path.name}")
        for name, about in tensors_of(found).items():
            digest = digest_of_tensor(about.dtype, file.read(about.seek(file)))
            _require(digest, tensors.get(name, "none"), f"{source}: {name}")


def _require(found: str, published: str, what: str) -> None:
    if found != published:
        raise TransportError(
            f"{what} arrived with digest {found} and was published with {published}; it is fetched anew"
        )
