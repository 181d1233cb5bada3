"""The inference servers of a run, one or several, as one client.

- A server is examined before it gets any work: at the start, at every weight update and whenever it comes
  back; see `examine`. One that fails is refused; the run ends once every server is.
- A group stays on the server that its first request went to: the one with the fewest requests running.
- A server that cannot be reached, was restarted or lost its weights is left out. It is asked again now and
  then, and comes back once it passes the examination and serves the current weights. While all are left out,
  requests wait.
- A weight update goes to all servers that are not left out, and is done when each of them serves it.
- Tokens that come from another process than the one that was examined, or are not of a version that this
  server can have served meanwhile, are refused: received and accounted for, never trained on.

    examined ──> serving ──unreachable, restarted, other weights──> left out ──examined, updated──> serving
       └───────────── refused: ends the run, unless another server goes on ──────┘
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pellucid.data import Completion
from pellucid.errors import ConfigError, InferenceError
from pellucid.inference.client import REFUSED, Account, SamplingParams, ServerClient, UnreachableError
from pellucid.inference.examine import Expected

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 2.0
_PATIENCE_S = 600.0
_MAX_HOMES = 100_000  # groups whose server is remembered


@dataclass(slots=True)
class _Server:
    name: str
    client: ServerClient
    running: set[str] = field(default_factory=set)
    is_out: bool = False
    server_id: str = ""
    """Of the process that was examined."""

    version: int | None = None
    """Policy version that it is known to serve; None until it has been examined, or given weights."""

    refusal: ConfigError | None = None
    """Why it failed the last examination."""

    num_examined: int = 0

    @property
    def serves(self) -> bool:
        return not self.is_out and self.version is not None


class ServerPool:
    def __init__(
        self,
        clients: Mapping[str, ServerClient],
        group_of: Callable[[str], str],
        expected: Expected,
        *,
        ask_again_s: float = _ASK_AGAIN_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`clients` by address; `group_of` a request id: requests with the same answer stay together.

        `patience_s`: how long requests wait for a server while there is none.
        """
        self._servers = [_Server(name, client) for name, client in clients.items()]
        self._group_of = group_of
        self._expected = expected
        self._ask_again_s = ask_again_s
        self._patience_s = patience_s
        self._homes: dict[str, _Server] = {}
        self._weights: tuple[int, Path] | None = None
        self._revivals: set[asyncio.Task[None]] = set()
        self._waiting: set[str] = set()
        """Requests that no server has taken yet."""
        self._changed = asyncio.Event()

    async def wait_until_ready(self) -> None:
        """Returns once every server answers and has passed its examination; raises if one fails it."""
        await asyncio.gather(*(self._welcome(server) for server in self._servers))

    async def watch(self) -> None:
        """Never returns; raises once every server is refused."""
        while not all(server.refusal for server in self._servers):
            await self._change()
        raise next(server.refusal for server in self._servers if server.refusal)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        server = await self._home(request_id)
        oldest, num_examined = server.version or 0, server.num_examined
        with self._serving(server, request_id):
            completion = await server.client.generate(prompt_ids, params, account, request_id)
        doubt = self._doubt(server, oldest, completion)
        if doubt is None:
            return completion
        if num_examined == server.num_examined:  # otherwise it has been set right since
            self._leave_out(server, doubt)
        return msgspec.structs.replace(completion, finish_reason=REFUSED)

    def _doubt(self, server: _Server, oldest: int, completion: Completion) -> str | None:
        """Why these tokens are not what they say, if so; `oldest` is what the server served when asked."""
        if server.client.server_id != server.server_id:
            return "it was restarted"
        if self._expected.run is None:
            return None
        newest = self._weights[0] if self._weights is not None else oldest
        versions = [version for version, _ in completion.policy_versions]
        if all(oldest <= version <= newest for version in versions):
            return None
        return (
            f"it answers with tokens of policy versions {versions}, though this run had it serve {oldest} … "
            f"{newest}"
        )

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        server = await self._home(request_id)
        with self._serving(server, request_id):
            scores = await server.client.score(token_ids, temperature, request_id)
        if server.client.server_id != server.server_id:
            self._leave_out(server, "it was restarted")
            raise InferenceError(f"{server.name} was restarted; its scores count once it has been examined")
        return scores

    @contextmanager
    def _serving(self, server: _Server, request_id: str) -> Iterator[None]:
        """While a request runs on the server; one that goes away meanwhile is left out."""
        server.running.add(request_id)
        try:
            yield
        except UnreachableError as error:
            self._leave_out(server, str(error))
            raise
        finally:
            server.running.discard(request_id)

    async def update_weights(self, version: int, folder: Path) -> None:
        """Returns once no server with older weights gets work any more, and one has these."""
        self._weights = version, folder
        await asyncio.gather(*(self._update(server) for server in self._servers if not server.is_out))
        await self._some_server()

    async def abort(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        if wanted & self._waiting:
            self._waiting -= wanted
            self._note_change()
        await asyncio.gather(*(self._abort(server, wanted & server.running) for server in self._servers))

    async def _abort(self, server: _Server, request_ids: set[str]) -> None:
        """Asks the server, in or out: one that is left out may still work on what it has."""
        if request_ids:
            with suppress(UnreachableError):  # its requests are failing by themselves
                await server.client.abort(sorted(request_ids))

    async def close(self) -> None:
        for revival in self._revivals:
            revival.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    async def _home(self, request_id: str) -> _Server:
        """The server of the request's group; waits while there is none."""
        group_id = self._group_of(request_id)
        home = self._homes.get(group_id)
        if home is None or not home.serves:
            home = min(await self._some_server(request_id), key=lambda server: len(server.running))
            self._homes[group_id] = home
            if len(self._homes) > _MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        return home

    async def _some_server(self, request_id: str = "") -> list[_Server]:
        """The servers that can be given work; waits until there is one, or the request is aborted."""
        self._waiting.add(request_id)
        try:
            async with asyncio.timeout(self._patience_s):
                while not (serving := [server for server in self._servers if server.serves]):
                    await self._change()
                    if request_id not in self._waiting:
                        raise InferenceError("the request was aborted before a server took it")
        except TimeoutError as error:
            names = ", ".join(server.name for server in self._servers)
            raise UnreachableError(
                f"none of the inference servers can be reached: {names}, for {self._patience_s:g} s"
            ) from error
        finally:
            self._waiting.discard(request_id)
        return serving

    async def _change(self) -> None:
        """Returns when a server, or a request that waits, has changed."""
        await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _welcome(self, server: _Server) -> None:
        await server.client.wait_until_ready()
        await self._bring_up(server)
        log.info("inference server %s is ready", server.name)

    async def _update(self, server: _Server) -> None:
        try:
            await self._bring_up(server)
        except UnreachableError as error:
            self._leave_out(server, str(error))
        except ConfigError as error:
            self._refuse(server, error)

    async def _bring_up(self, server: _Server) -> None:
        """Examines the server and has it serve the current weights, if there are any yet."""
        weights, expected = self._weights, self._expected
        if weights is not None:
            expected = replace(expected, has_weights=True)
        health = await server.client.health()
        expected.check(server.name, health)
        if weights is not None:
            await server.client.update_weights(*weights, expected.run or "")
            health = await server.client.health()
            expected.check(server.name, health)
            if health.policy_version != weights[0]:
                raise UnreachableError(
                    f"{server.name} serves policy version {health.policy_version} right after an update to "
                    f"{weights[0]}"
                )
        has_older = weights is None and expected.run is not None and bool(health.run)
        server.version = None if has_older else health.policy_version
        server.server_id = health.server_id
        server.refusal = None
        server.num_examined += 1
        self._note_change()

    def _refuse(self, server: _Server, error: ConfigError) -> None:
        if str(error) != str(server.refusal):
            log.error("%s", error)
        server.refusal = error
        self._leave_out(server, "it is refused")
        self._note_change()

    def _leave_out(self, server: _Server, reason: str) -> None:
        if not server.is_out:
            server.is_out = True
            log.warning("inference server %s is left out: %s", server.name, reason)
            revival = asyncio.create_task(self._revive(server))
            self._revivals.add(revival)
            revival.add_done_callback(self._revivals.discard)

    async def _revive(self, server: _Server) -> None:
        while server.is_out:
            await asyncio.sleep(self._ask_again_s)
            try:
                await server.client.wait_until_ready()
                weights = self._weights
                await self._bring_up(server)
            except ConfigError as error:
                self._refuse(server, error)
            except InferenceError as error:
                log.debug("inference server %s is still left out: %s", server.name, error)
            else:
                # Otherwise newer ones came meanwhile: once more.
                server.is_out = weights != self._weights
        log.warning("inference server %s is back, with the current weights", server.name)
        self._note_change()
