"""Policy versions in an object store, by its URL through fsspec: `s3://bucket/run`, `gs://…`, `file:///mnt/run`.

    URL/weights                 {"versions": {"7": "6d1f…"}}: as a trainer that listens answers `GET /weights`
    URL/weights_files/step_7/NAME

- A thread of the trainer makes the store hold what its run folder holds: files first, `digests.json` after
  them, the list last; what goes leaves the list first. A store that cannot be reached is tried again, and
  said once; training goes on.
- Readers are those of `weights_pull`, with ranges and digests. Nobody tells the trainer who reads: a version
  goes once it is older than `trainer.keep_weights`, and whoever reads it then takes a newer one.
- Who may read and write is the store's business; credentials are where its fsspec package looks for them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import fsspec
import msgspec

from pellucid.data.files import append_whole, step_number
from pellucid.errors import ConfigError, TransportError
from pellucid.transport.digests import DIGESTS, OfferedVersions, digest_of_bytes, read_digests
from pellucid.transport.spool import stable_steps
from pellucid.transport.weights_offer import RESUME_S, Leases
from pellucid.transport.weights_pull import CHUNK_BYTES, RefusedError, name_of

log = logging.getLogger(__name__)

_LIST = "weights"
_POLL_S = 0.1
_LONGEST_PAUSE_S = 5.0


class WeightsStore:
    """The versions in a store, for whoever reads them; any thread may."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError if the URL cannot be used: its package is missing, for one."""
        self.url = url.rstrip("/")
        try:
            self.files, self._root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"weights.store = {url!r} cannot be used: {name_of(error)}") from error

    def path(self, name: str) -> str:
        """Returns the object of a path of the offer, such as `/weights/step_7/digests.json`."""
        return f"{self._root}/{name.strip('/').replace(f'{_LIST}/', f'{_LIST}_files/', 1)}"

    def versions(self, *, is_done: bool = False) -> dict[int, str]:
        """Returns the offered versions, each with the digest of its digests; none before a trainer was here.

        Raises TransportError. `is_done` is for trainers that listen.
        """
        try:
            content = self._read(f"/{_LIST}")
        except RefusedError:
            return {}
        try:
            return msgspec.json.decode(content, type=OfferedVersions).versions
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"{self.url} holds no list of weights: {error}") from error

    def digests(self, version: int) -> bytes:
        """Returns the content of `digests.json`. Raises TransportError if the version is not offered."""
        return self._read(f"/{_LIST}/step_{version}/{DIGESTS}")

    def append(self, path: str, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Appends the rest of a file to what `target` has of it.

        Raises OSError if that cannot be written, which is no fault of the store.
        """
        with self.reached(path):
            opened = self.files.open(self.path(path), "rb")
        with closing(opened) as source, target.open("ab", buffering=0) as file:
            with self.reached(path):
                source.seek(file.tell())
            while chunk := self._read_chunk(path, source):
                append_whole(file, chunk)
                on_bytes(len(chunk))

    def _read_chunk(self, path: str, source: BinaryIO) -> bytes:
        with self.reached(path):
            return source.read(CHUNK_BYTES)

    def _read(self, path: str) -> bytes:
        with self.reached(path):
            content: bytes = self.files.cat_file(self.path(path))
        return content

    @contextmanager
    def reached(self, path: str) -> Iterator[None]:
        """Context manager: raises TransportError for whatever a store's package raises."""
        try:
            yield
        except FileNotFoundError as error:
            raise RefusedError(f"{self.url} has no {path}, or it was withdrawn") from error
        except Exception as error:
            raise TransportError(f"{self.url} cannot be reached: {name_of(error)}") from error


class StoredOffer:
    """The trainer's end, in the place of `WeightsOffer`: nothing is listed until it is started."""

    def __init__(self, run_dir: Path, store: WeightsStore) -> None:
        """Raises TransportError if the store cannot be written to."""
        self._folder, self._store = run_dir / "weights", store
        self.leases = Leases()
        """None is ever taken."""
        self._listed: dict[int, str] = {}
        self._stored = self._find_stored()
        """Versions of which the store has files, whole or not."""

        self._failing_since_s: float | None = None
        """When the store could no longer be written to; nothing was written since."""

        self._is_ending = threading.Event()
        self._write_list()  # versions that a resumed trainer takes back are offered no more
        self._thread = threading.Thread(target=self._follow, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_quiet(self) -> None:
        """Returns once the store holds the last version, or could not be written to for a minute."""
        while self._listed != self._published():
            since_s = self._failing_since_s
            if not self._thread.is_alive():
                log.error("%s does not hold the last weights: what writes them has ended", self._store.url)
                return
            if since_s is not None and time.monotonic() - since_s > RESUME_S:
                log.error(
                    "%s does not hold the last weights: it could not be written to for %g s",
                    *(self._store.url, RESUME_S),
                )
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        pause_s, is_said = _POLL_S, False
        while not self._is_ending.wait(pause_s):
            try:
                self._update()
            except (TransportError, OSError) as error:
                self._failing_since_s = self._failing_since_s or time.monotonic()
                if not is_said:
                    log.warning("%s; trying again until it works", name_of(error))
                pause_s, is_said = min(2 * pause_s, _LONGEST_PAUSE_S), True
            else:
                pause_s, is_said, self._failing_since_s = _POLL_S, False, None

    def _published(self) -> dict[int, str]:
        found = {}
        for version in stable_steps(self._folder):
            path = self._folder / f"step_{version}" / DIGESTS
            if path.exists():
                found[version] = digest_of_bytes(path.read_bytes())
        return found

    def _find_stored(self) -> set[int]:
        """Lists the store, which may have versions of an earlier process."""
        path, found = f"/{_LIST}_files", []
        with self._store.reached(path), suppress(FileNotFoundError):
            found = self._store.files.ls(self._store.path(path), detail=False)
        numbers = (step_number(each.rstrip("/").rpartition("/")[2]) for each in found)
        return {number for number in numbers if number is not None}

    def _update(self) -> None:
        published = self._published()
        kept = {version: each for version, each in self._listed.items() if published.get(version) == each}
        if kept != self._listed:
            self._listed = kept
            self._write_list()
        for version in sorted(published.keys() - self._listed.keys()):
            if not self._has(version, published[version]):
                self._upload(version)
            self._listed = {**self._listed, version: published[version]}
            self._write_list()
        for version in sorted(self._stored - self._listed.keys()):
            self._remove(version)

    def _has(self, version: int, digest: str) -> bool:
        """Whether the store has this very version: its digests are written last, and removed first."""
        try:
            return version in self._stored and digest_of_bytes(self._store.digests(version)) == digest
        except RefusedError:
            return False

    def _remove(self, version: int) -> None:
        folder = f"/{_LIST}/step_{version}"
        for path, is_folder in ((f"{folder}/{DIGESTS}", False), (folder, True)):
            with self._store.reached(path), suppress(FileNotFoundError):
                self._store.files.rm(self._store.path(path), recursive=is_folder)
        self._stored.discard(version)

    def _upload(self, version: int) -> None:
        folder = self._folder / f"step_{version}"
        digests = read_digests(folder)
        if digests is None:
            raise TransportError(f"policy version {version} was withdrawn meanwhile")
        if version in self._stored:
            self._remove(version)
        self._stored.add(version)
        names = [*digests.files, *([digests.delta.name] if digests.delta else []), DIGESTS]
        for name in names:
            path = f"/{_LIST}/step_{version}/{name}"
            with self._store.reached(path):
                self._store.files.makedirs(self._store.path(path).rpartition("/")[0], exist_ok=True)
                self._store.files.put_file(str(folder / name), self._store.path(path))
            self._failing_since_s = None

    def _write_list(self) -> None:
        with self._store.reached(f"/{_LIST}"):
            path = self._store.path(f"/{_LIST}")
            self._store.files.makedirs(path.rpartition("/")[0], exist_ok=True)
            # Where objects are files, one that is being written could be read.
            self._store.files.pipe_file(f"{path}.new", msgspec.json.encode(OfferedVersions(self._listed)))
            self._store.files.mv(f"{path}.new", path)
