"""The servers of a pool: whether a run may use one, whether it makes progress, and which one gets a request.

what differs             policy                                      teacher
key                      refused                                     refused where it is needed
vocabulary               refused                                     refused
max_model_len            refused if it is less than the run's        the same
the model that it loaded refused, where both sides can tell          anything goes
the weights that it has  those it loaded, or this run's; any         anything goes
                         other run's are refused

- A new group goes to the server with the smallest part of its room taken, and only where there is room: for
  twice as many requests as the server decodes together, so that its slots never wait for the next request.
  Whatever is beyond that waits in line for the server that finishes something first. One that hangs finishes
  nothing, so it gets nothing new.
- The other requests of a group follow the first, so that the engine shares their prompt, up to all that the
  server holds. A request whose server is gone, or full, is placed like a new one.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pellucid.errors import ConfigError, InferenceError, PellucidError
from pellucid.inference.client import Access, Health, ServerClient


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the servers of a run, checked at the start, at every update and on a return."""

    role: str
    """`policy server` or `teacher`, for messages."""

    model: str
    """`model.name` of the run."""

    vocabulary: str
    """Fingerprint of the tokenizer that the run uses."""

    max_model_len: int
    access: Access = "all"
    """Access that the run needs: `sampling` is enough for a teacher that only scores."""

    key_setting: str = "inference.key_file"
    """Which setting names the server's key, for messages."""

    run: str | None = None
    """Identity of the run; None for a teacher, which may serve any weights."""

    model_fingerprint: str = ""
    """Fingerprint of the model at `model`; "" where this machine does not have its weights."""

    has_weights: bool = False
    """Whether the run has published weights: a server that serves another version of it can load them."""

    def check(self, url: str, health: Health) -> None:
        """Raises ConfigError with both values and the remedy if the server at `url` is not the run's."""
        who = f"the {self.role} {health.model!r} at {url}"
        if health.access not in ("all", self.access):
            raise ConfigError(
                f"{who} was started with another key than this run shows; start it with the run's "
                f"output_dir, or set {self.key_setting} to the file `key` in the folder that it was started "
                "with"
            )
        if health.vocabulary != self.vocabulary:
            raise ConfigError(other_vocabulary(who, f"model.name = {self.model!r}"))
        if health.max_model_len < self.max_model_len:
            raise ConfigError(
                f"{who} takes {health.max_model_len} tokens, less than inference.max_model_len = "
                f"{self.max_model_len}; start it with a larger inference.max_model_len, or lower that of the "
                "run"
            )
        if self.run is not None:
            self._check_model(who, health)
            self._check_weights(who, health, self.run)

    def _check_model(self, who: str, health: Health) -> None:
        known = health.model_fingerprint and self.model_fingerprint
        if known and health.model_fingerprint != self.model_fingerprint:
            raise ConfigError(
                f"{who} was started with another model (weights {health.model_fingerprint}) than model.name "
                f"= {self.model!r} (weights {self.model_fingerprint}); start it with the run's model, or set "
                "model.name to its"
            )

    def _check_weights(self, who: str, health: Health, run: str) -> None:
        version = health.policy_version
        if health.run != run and (health.run or version):
            whose = f"run {health.run!r}" if health.run else "a run that it cannot name"
            raise ConfigError(
                f"{who} serves policy version {version} of {whose}, not of this run, {run!r}; if that run is "
                "going on, give this one a server of its own; if not, restart the server"
            )
        if health.run == run and version and not self.has_weights:
            raise ConfigError(
                f"{who} serves policy version {version} of this run, which has published none (it began "
                "anew); restart the server, so that it serves version 0"
            )


def other_vocabulary(who: str, model: str, remedy: str = "take one with the same tokenizer") -> str:
    return f"{who} has another vocabulary than {model}: a token id would not mean the same to both; {remedy}"


class Pulse:
    """Measures how long a server has made no progress: it has work and answers, but none of its counts moves.

    A generation may take hours: as long as tokens are sampled, prefilled or scored, the server makes
    progress.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: tuple[object, ...] = ()
        self._moved_at = clock()

    def still_s(self, health: Health, *, has_work: bool) -> float:
        """Returns the seconds since a count moved, or since the server was last seen without work."""
        counts = (
            health.server_id,
            health.policy_version,
            health.sampled_tokens,
            health.delivered_tokens,
            health.cancelled_tokens,
            health.prefill_tokens,
            health.scored_tokens,
            health.busy_s,
        )
        if counts != self._counts or not has_work:
            self._counts = counts
            self._moved_at = self._clock()
        return self._clock() - self._moved_at


_ROOM_PER_SLOT = 2
_MAX_HOMES = 100_000  # groups whose server is remembered


@dataclass(eq=False, slots=True)
class PlacedRequest:
    """A request at a server."""

    wire_id: str
    """Its id at the server, unique for good: the same request may be sent again, even to the same server."""

    outcome: "asyncio.Future[Any]"
    """Its answer, or the error why there is none."""


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

    pulse: Pulse = field(default_factory=Pulse)
    due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its keeper has to look at it now."""

    def note_limits(self, health: Health) -> None:
        self.max_concurrent, self.max_queued = health.max_concurrent, health.max_queued

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
        name_request: Callable[[str], str],
    ) -> None:
        """`group_of` returns the group of a request id, `name_request` a new wire id for a request."""
        self._servers = servers
        self._group_of = group_of
        self._serves = serves
        self._name_request = name_request
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
        outcome = asyncio.get_running_loop().create_future()
        server.placed[request_id] = PlacedRequest(self._name_request(request_id), outcome)
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
