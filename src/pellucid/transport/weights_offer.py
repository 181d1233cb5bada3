"""The trainer offers its policy versions over HTTP: a thread of its main process, and files as they lie.

    GET /weights               {"versions": {"7": "6d1f…"}}: what can be read, with the digest of its digests
    GET /weights?done          the same, from an orchestrator that will not ask again
    GET /weights/step_7/NAME   a file of version 7, whole or a range of it; `digests.json` names the others,
                               also the difference from version 6, if there is one; see `deltas`
    POST /weights/step_7/transfer   the next call of a transfer from GPU to GPU; see `weights_transfer`

- Any client reads it that shows the key (`guard.weights_key`), curl for one. No cache may keep an answer: a
  version may be published anew.
- Many read at once, and training waits for none of them.
- A version that somebody reads is kept beyond `trainer.keep_weights`: as long as bytes flow, and for a minute
  after a connection broke, so that the reader can go on where it was. Whoever comes later finds it withdrawn,
  and takes a newer one.
"""

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from pellucid.data.files import step_number
from pellucid.errors import ConfigError, TransportError
from pellucid.guard import answers_to, is_foreign, shows_key
from pellucid.transport.digests import DIGESTS, OfferedVersions, digest_of_bytes, read_digests
from pellucid.transport.punctual import PunctualProtocol
from pellucid.transport.spool import is_stable, stable_steps
from pellucid.transport.weights import WEIGHTS_FILE
from pellucid.transport.weights_transfer import PATIENCE_S, TransferAsk, TransferCall, WeightsSender

logger = logging.getLogger(__name__)

RESUME_S = 60.0
"""Seconds that a version is kept after its reader got the last byte, unless that was the end of the file."""

_NEXT_FILE_S = 5.0
_MAX_CONNECTIONS = 1024
_POLL_S = 0.05
_FRESH = {"cache-control": "no-store"}


class Leases:
    """Versions that are being read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[int, tuple[int, float]] = {}
        """Version and end of each lease, by number."""
        self._numbers = itertools.count()
        self._changing = threading.Lock()

    def open(self) -> int:
        return next(self._numbers)

    def extend(self, number: int, version: int, seconds: float) -> None:
        with self._changing:
            self._ends[number] = version, self._clock() + seconds

    def holds(self, version: int) -> bool:
        now = self._clock()
        with self._changing:
            self._ends = {number: lease for number, lease in self._ends.items() if lease[1] > now}
            return any(held == version for held, _ in self._ends.values())


class WeightsOffer:
    """A listener that answers from `start` on until it is closed; who connects earlier waits."""

    def __init__(
        self, run_dir: Path, host: str, port: int, key: str, sender: WeightsSender | None = None
    ) -> None:
        """`key`: see `guard.weights_key`. Raises ConfigError if the port cannot be used."""
        self._sender = sender
        self._transfers: dict[str, int] = {}
        """Lease of each transfer, by its session."""
        self._run_dir, self._host, self._key = run_dir, host, key
        self.leases = Leases()
        self._asked_at = time.monotonic()
        """When the listing was asked for last, or this started."""
        self._is_done = False
        """Whether who asked last will not ask again."""
        self._known: dict[int, tuple[tuple[int, int], str]] = {}
        """Inode and time of each version's digests, with their digest: they are asked for often."""
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            self.app(),
            http=PunctualProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=_MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        arguments = ([self._listener],)
        self._thread = threading.Thread(target=self._server.run, args=arguments, name="weights", daemon=True)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/weights", self._list, methods=["GET"]),
                Route("/weights/{folder}/transfer", self._transfer, methods=["POST"]),
                Route("/weights/{folder}/{name}", self._file, methods=["GET"]),
            ],
        )

    def start(self) -> None:
        self._asked_at = time.monotonic()
        self._thread.start()

    def wait_until_quiet(self) -> None:
        """Returns once the orchestrator has said that it needs no more versions, or nobody has asked for them
        for a minute and none is being read."""
        while not self._is_done and (
            time.monotonic() - self._asked_at < RESUME_S
            or any(map(self.leases.holds, stable_steps(self._run_dir / "weights")))
        ):
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    async def _list(self, http: Request) -> Response:
        if refusal := self._refusal(http):
            return refusal
        self._asked_at = time.monotonic()
        self._is_done = "done" in http.query_params
        versions = await asyncio.to_thread(self._versions)
        return Response(
            msgspec.json.encode(OfferedVersions(versions)), media_type="application/json", headers=_FRESH
        )

    def _versions(self) -> dict[int, str]:
        folder = self._run_dir / "weights"
        known, found = self._known, {}  # several threads list at once
        for version in stable_steps(folder):
            path = folder / f"step_{version}" / DIGESTS
            if path.parent.is_symlink():
                continue
            with suppress(FileNotFoundError):  # withdrawn meanwhile, or of an older pellucid
                about = path.stat()
                file = about.st_ino, about.st_mtime_ns
                if version in known and known[version][0] == file:
                    found[version] = known[version]
                else:
                    found[version] = file, digest_of_bytes(path.read_bytes())
        self._known = found
        return {version: digest for version, (_, digest) in found.items()}

    async def _file(self, http: Request) -> Response:
        if refusal := self._refusal(http):
            return refusal
        name = str(http.path_params["name"])
        folder = self._run_dir / "weights" / str(http.path_params["folder"])
        if (version := step_number(folder.name)) is None:
            return Response("only /weights and /weights/step_N/NAME are offered", status_code=404)
        number = self.leases.open()
        self.leases.extend(number, version, _NEXT_FILE_S)  # before the look: it may be about to go
        if not await asyncio.to_thread(_is_offered, folder, name):
            return Response(f"policy version {version} has no {name}, or was withdrawn", status_code=404)
        return _LeasedFile(folder / name, lambda seconds: self.leases.extend(number, version, seconds))

    async def _transfer(self, http: Request) -> Response:
        if refusal := self._refusal(http):
            return refusal
        try:
            ask = msgspec.json.decode(await http.body(), type=TransferAsk)
        except msgspec.DecodeError as error:
            return Response(str(error), status_code=400)
        folder = self._run_dir / "weights" / str(http.path_params["folder"])
        version = step_number(folder.name)
        if version is None or self._sender is None:
            call = TransferCall("refused", reason='the trainer has weights.transfer = "files"')
        else:
            number = self._transfers.setdefault(ask.session, self.leases.open())
            self.leases.extend(number, version, _NEXT_FILE_S)
            host = http.scope["server"][0]  # of this connection, wherever the port is bound
            if await asyncio.to_thread(_is_offered, folder, WEIGHTS_FILE):
                call = await asyncio.to_thread(self._sender.answer, folder, ask, host)
            else:
                call = TransferCall("broken", reason=f"policy version {version} was withdrawn")
            if call.method in ("done", "broken", "refused") or ask.error:
                del self._transfers[ask.session]
            else:
                self.leases.extend(number, version, PATIENCE_S if call.method != "wait" else RESUME_S)
        return Response(msgspec.json.encode(call), media_type="application/json", headers=_FRESH)

    def _refusal(self, http: Request) -> Response | None:
        host = http.headers.get("host", "")
        if not answers_to(self._host, host):
            return Response(f"this trainer does not answer to {host[:200]!r}", status_code=421)
        if is_foreign(http.headers.get("origin"), host):
            return Response("a page of another site may not ask this trainer", status_code=403)
        if not shows_key(http.headers.get("authorization", ""), self._key):
            reason = "this needs the key that is derived from the run's; set weights.key_file on both sides"
            return Response(reason, status_code=401, headers={"www-authenticate": "Bearer"})
        return None


class _LeasedFile(FileResponse):
    chunk_size = 1 << 20  # a turn of Python per chunk: training wants the interpreter, too

    def __init__(self, path: Path, extend: Callable[[float], None]) -> None:
        super().__init__(path, media_type="application/octet-stream", headers=_FRESH)
        self._extend = extend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))

        async def noting(message: Message) -> None:
            if gone.done():
                raise _GoneError
            await send(message)
            is_end = message["type"] == "http.response.body" and not message.get("more_body")
            self._extend(_NEXT_FILE_S if is_end else RESUME_S)

        try:
            await super().__call__(scope, receive, noting)
        except _GoneError:
            logger.debug("a reader of %s went away", self.path)
        finally:
            gone.cancel()


class _GoneError(Exception):
    """The reader went away."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_offered(folder: Path, name: str) -> bool:
    """Whether `name` is a file of the version in `folder`: one that its digests name, or these."""
    try:
        digests = read_digests(folder)
    except TransportError:
        return False
    names = () if digests is None else (DIGESTS, *digests.files, digests.delta and digests.delta.name)
    path = folder / name
    is_link = folder.is_symlink() or path.is_symlink()
    return name in names and is_stable(folder) and path.is_file() and not is_link


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"weights.port = {port} cannot be used on weights.host = {host} ({error.strerror}); choose "
            "another port"
        ) from error
    return listener
