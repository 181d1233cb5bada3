"""The servers of a pool, and which of them gets a request.

- A new group goes to the server with the smallest part of its room taken, and only where there is room: for
  twice as many requests as the server decodes together, so that its slots never wait for the next request.
  Whatever is beyond that waits in line for the server that finishes something first. One that hangs finishes
  nothing, so it gets nothing new.
- The other requests of a group follow the first, so that the engine shares their prompt, up to all that the
  server holds. A request whose server is gone, or full, is placed like a new one.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pellucid.errors import ConfigError, InferenceError, PellucidError
from pellucid.inference.client import Health, ServerClient

_ROOM_PER_SLOT = 2
_MAX_HOMES = 100_000  # groups whose server is remembered


@dataclass(eq=False, slots=True)
class PlacedRequest:
    """A request at a server."""

    wire_id: str
    """Its id at the server, unique for good: the same request may be sent again, even to the same server."""

    outcome: "asyncio.Future[Any]"
    """Its answer, or the error why there is none."""

    def fail(self, error: InferenceError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(slots=True)
class Pulse:
    """Counts that move while something gets on."""

    counts: tuple[object, ...] = ()
    moved_at: float = 0.0
    """Time of the event loop at which they last moved, or there was last nothing to do."""

    def still_s(self, counts: tuple[object, ...], has_work: bool) -> float:
        now = asyncio.get_running_loop().time()
        if counts != self.counts or not has_work:
            self.counts, self.moved_at = counts, now
        return now - self.moved_at


@dataclass(eq=False, slots=True)
class PooledServer:
    name: str
    client: ServerClient
    placed: dict[str, PlacedRequest] = field(default_factory=dict)
    """Requests that it has, by their ids."""

    disowned: set[str] = field(default_factory=set)
    """Wire ids of requests whose answer nobody took; the server still has to be told."""

    is_out: bool = False
    """Whether the server is left out: it gets no requests until it has been brought up again."""

    keeps_requests: bool = True
    """Whether its requests stay with it while it is left out, even if other servers could take them."""

    server_id: str = ""
    """Server id of the process that was examined."""

    process: str = ""
    """Server id of the process that answered last."""

    replaced: set[str] = field(default_factory=set)
    """Server ids of processes in whose place another one has answered."""

    version: int | None = None
    """Policy version that it is known to serve; None until it has been examined, or given weights."""

    problem: PellucidError | None = None
    """Why it could not be brought up the last time."""

    refusal: ConfigError | None = None
    """Why it failed the last examination."""

    num_examined: int = 0
    max_concurrent: int = 0
    max_queued: int = 0
    busy_until: float = 0.0
    """Time of the event loop until which a server that said it was full gets no requests."""

    engine: Pulse = field(default_factory=Pulse)
    reading: Pulse = field(default_factory=Pulse)
    """Bytes of weights that it reads from the trainer."""

    due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its keeper has to look at it now."""

    def note_process(self, server_id: str) -> None:
        """Raises ConfigError if a process answers again in whose place another one had answered: a process
        that was started anew has an id of its own, so there are several behind the address."""
        if server_id in self.replaced:
            raise ConfigError(
                f"{self.name} leads to several servers by turns (server_id = {server_id!r} and "
                f"{self.process!r}), as a load balancer does, and new weights would reach one of them alone; "
                "list the address of each in inference.servers, which balances them"
            )
        if self.process not in ("", server_id):
            self.replaced.add(self.process)
        self.process = server_id

    def still_s(self, health: Health, *, is_asked: bool) -> tuple[float, float]:
        """Returns the seconds for which its engine has stood still, and for which no weights have arrived.

        Either is 0 without work: requests, or what else it `is_asked` to do, which begins once it has read
        the weights for it. A generation may take hours: as long as tokens are sampled, prefilled or scored,
        the engine makes progress.
        """
        counts = (
            *(health.server_id, health.policy_version, health.sampled_tokens, health.delivered_tokens),
            *(health.cancelled_tokens, health.prefill_tokens, health.scored_tokens, health.busy_s),
        )
        has_work = bool(self.placed) or (is_asked and not health.fetching)
        read = health.server_id, health.fetched_bytes
        return self.engine.still_s(counts, has_work), self.reading.still_s(read, health.fetching)

    def has_room(self, *, for_new_group: bool) -> bool:
        if not self.max_concurrent:
            return True  # it does not tell
        capacity = self.max_concurrent + self.max_queued
        limit = min(_ROOM_PER_SLOT * self.max_concurrent, capacity) if for_new_group else capacity
        return len(self.placed) < limit

    @property
    def load(self) -> float:
        return len(self.placed) / (self.max_concurrent or 1)


class WaitingLine:
    """Places requests, and keeps those that no server can take in order of arrival."""

    def __init__(
        self,
        servers: Sequence[PooledServer],
        group_of: Callable[[str], str],
        serves: Callable[[PooledServer], bool],
    ) -> None:
        """`group_of` returns the group of a request id; `serves`, whether a server may get requests."""
        self._servers = servers
        self._group_of = group_of
        self._serves = serves
        self._nonce, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._homes: dict[str, PooledServer] = {}
        self._waiting: dict[str, asyncio.Future[PooledServer]] = {}

    def place(self, request_id: str) -> "asyncio.Future[PooledServer]":
        """Returns a future of the server that gets the request and has it in `placed` from then on."""
        waiter: asyncio.Future[PooledServer] = asyncio.get_running_loop().create_future()
        server = self._server_for(request_id, is_next=not self._waiting)
        if server is None:
            self._waiting[request_id] = waiter
        else:
            self._put(request_id, server, waiter)
        return waiter

    def advance(self) -> None:
        """Places waiting requests where possible. Called when a request has ended or a server has changed."""
        while self._waiting:
            request_id, waiter = next(iter(self._waiting.items()))
            if not waiter.done():
                server = self._server_for(request_id, is_next=True)
                if server is None:
                    return
                self._put(request_id, server, waiter)
            del self._waiting[request_id]

    def leave(self, request_id: str, waiter: "asyncio.Future[PooledServer]") -> None:
        """Removes a request that is not wanted any more, from the line or from its server."""
        self._waiting.pop(request_id, None)
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            del waiter.result().placed[request_id]
            self.advance()
        waiter.cancel()

    def abort(self, request_ids: Collection[str]) -> None:
        for request_id in [each for each in request_ids if each in self._waiting]:
            waiter = self._waiting.pop(request_id)
            if not waiter.done():
                waiter.set_exception(InferenceError("the request was aborted before a server took it"))

    def _put(self, request_id: str, server: PooledServer, waiter: "asyncio.Future[PooledServer]") -> None:
        wire_id = f"{request_id}~{self._nonce}{next(self._numbers)}"
        server.placed[request_id] = PlacedRequest(wire_id, asyncio.get_running_loop().create_future())
        waiter.set_result(server)

    def _server_for(self, request_id: str, *, is_next: bool) -> PooledServer | None:
        group_id = self._group_of(request_id)
        home = self._homes.get(group_id)
        if home is not None and self._can_take(home, for_new_group=False):
            return home
        free = [server for server in self._servers if self._can_take(server, for_new_group=True)]
        if not free or not is_next:
            return None
        home = self._homes[group_id] = min(free, key=lambda server: server.load)
        if len(self._homes) > _MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        return home

    def _can_take(self, server: PooledServer, *, for_new_group: bool) -> bool:
        is_busy = server.busy_until > asyncio.get_running_loop().time()
        return self._serves(server) and not is_busy and server.has_room(for_new_group=for_new_group)
