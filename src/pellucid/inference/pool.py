"""Several inference servers as one client.

- A group stays on the server that its first request went to: the one with the fewest requests running.
- A server that cannot be reached is left out; its requests have failed. It is asked again now and then, and
  comes back once it answers and serves the current weights.
- A weight update goes to all servers that can be reached, and is done when each of them serves it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.data import Completion
from pellucid.errors import InferenceError
from pellucid.inference.client import Account, InferenceClient, SamplingParams, UnreachableError

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 2.0
_MAX_HOMES = 100_000  # groups whose server is remembered


@dataclass(slots=True)
class _Server:
    name: str
    client: InferenceClient
    running: set[str] = field(default_factory=set)
    is_dead: bool = False


class ServerPool:
    def __init__(
        self,
        clients: Mapping[str, InferenceClient],
        group_of: Callable[[str], str],
        *,
        ask_again_s: float = _ASK_AGAIN_S,
    ) -> None:
        """`group_of` a request id: requests with the same answer stay together."""
        self._servers = [_Server(name, client) for name, client in clients.items()]
        self._group_of = group_of
        self._ask_again_s = ask_again_s
        self._homes: dict[str, _Server] = {}
        self._weights: tuple[int, Path] | None = None
        self._revivals: set[asyncio.Task[None]] = set()

    async def wait_until_ready(self) -> None:
        await asyncio.gather(*(server.client.wait_until_ready() for server in self._servers))

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        with self._serving(request_id) as server:
            return await server.client.generate(prompt_ids, params, account, request_id)

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        with self._serving(request_id) as server:
            return await server.client.score(token_ids, temperature, request_id)

    @contextmanager
    def _serving(self, request_id: str) -> Iterator[_Server]:
        """The server of the request's group, while that runs; one that goes away meanwhile is left out."""
        server = self._home(self._group_of(request_id))
        server.running.add(request_id)
        try:
            yield server
        except UnreachableError as error:
            self._leave_out(server, error)
            raise
        finally:
            server.running.discard(request_id)

    async def update_weights(self, version: int, folder: Path) -> None:
        self._weights = version, folder
        await asyncio.gather(*(self._update(server, version, folder) for server in self._alive()))
        self._alive()

    async def abort(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        for server in self._servers:
            if not server.is_dead and (mine := sorted(wanted & server.running)):
                with suppress(UnreachableError):  # its requests are failing by themselves
                    await server.client.abort(mine)

    async def close(self) -> None:
        for revival in self._revivals:
            revival.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    def _alive(self) -> list[_Server]:
        alive = [server for server in self._servers if not server.is_dead]
        if not alive:
            names = ", ".join(server.name for server in self._servers)
            raise UnreachableError(f"none of the inference servers can be reached: {names}")
        return alive

    def _home(self, group_id: str) -> _Server:
        home = self._homes.get(group_id)
        if home is None or home.is_dead:
            home = min(self._alive(), key=lambda server: len(server.running))
            self._homes[group_id] = home
            if len(self._homes) > _MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        return home

    async def _update(self, server: _Server, version: int, folder: Path) -> None:
        try:
            await server.client.update_weights(version, folder)
        except UnreachableError as error:
            self._leave_out(server, error)

    def _leave_out(self, server: _Server, error: InferenceError) -> None:
        if not server.is_dead:
            server.is_dead = True
            log.warning("inference server %s is left out: %s", server.name, error)
            revival = asyncio.create_task(self._revive(server))
            self._revivals.add(revival)
            revival.add_done_callback(self._revivals.discard)

    async def _revive(self, server: _Server) -> None:
        while server.is_dead:
            await asyncio.sleep(self._ask_again_s)
            weights = self._weights
            with suppress(InferenceError):
                await server.client.wait_until_ready()
                if weights is not None:
                    await server.client.update_weights(*weights)
                # Otherwise newer ones came meanwhile: once more.
                server.is_dead = weights != self._weights
        log.warning("inference server %s is back", server.name)
