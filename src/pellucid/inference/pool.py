"""The inference servers of a run, one or several, as one client.

- A server is examined before it gets any work: at the start, at every weight update and whenever it comes
  back; see `client.Expected`. One that fails is refused; the run ends once every server is. A pool is ready
  once one server has passed; the others join when they come.
- Only servers with the current weights get requests; `servers.WaitingLine` says which of them.
- A server is alive as long as it gets on: its `/health` answers, and while it has work, what it counts there
  moves; bytes of weights that it reads are no progress of its engine. However long a generation takes, nobody
  interrupts it. A server that does not answer, or stands still, for `hang_s` is hung.
- An address that leads to several processes by turns is refused: new weights would reach one of them.
- A server that is hung, cannot be reached, was restarted or lost its weights is left out. It is asked again
  now and then, and comes back once it passes the examination and serves the current weights. While all are
  left out, requests wait.
- The requests of a server that was left out move to the others. Where there are none they stay: if it comes
  back, it may answer them yet.
- An answer is taken once or not at all. A request that was moved or given up is disowned: the server is told
  as soon as it can be reached, and counts its tokens as cancelled, whatever it made of them meanwhile.
- A server that serves other weights than were published is left out, and ends the run if it does so at the
  next examination, too; see `published`.
- Where the trainer offers its weights over a network, servers read a version while they sample on, before
  they are told to serve it.
- A weight update is done when one server serves it. The others follow, each at its own pace, and get no work
  until they have.
- Tokens that come from another process than the one that was examined, or are not of a version that this
  server can have served meanwhile, are refused: received and accounted for, never trained on.

    examined ──> serving ──hung, unreachable, restarted, other weights──> left out
       │            ^───────────────examined, updated──────────────────────────│
       └─────────── refused: ends the run, unless another server goes on ──────┘
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pellucid.data import Completion
from pellucid.errors import ConfigError, InferenceError, PellucidError
from pellucid.inference.client import (
    REFUSED,
    Account,
    BusyError,
    Expected,
    Health,
    SamplingParams,
    ServerClient,
    UnreachableError,
)
from pellucid.inference.published import WeightsToServe
from pellucid.inference.servers import PooledServer, WaitingLine
from pellucid.ledger.weights import WeightsBook

log = logging.getLogger(__name__)
T = TypeVar("T")

HANG_S = 120.0
_ASK_AGAIN_S = 2.0
_ASK_AT_START_S = 0.1
_PATIENCE_S = 600.0
_HEAD_START_S = 10.0  # for servers that come later than the first
_LAST_WORD_S = 1.0
_MAX_TRIES = 3  # a request that takes its server down must not take all of them


class HungError(UnreachableError):
    """The server does not answer, or makes no progress."""


class _MovedError(UnreachableError):
    """The request has to be sent to another server."""


class ServerPool:
    def __init__(
        self,
        clients: Mapping[str, ServerClient],
        group_of: Callable[[str], str],
        expected: Expected,
        *,
        claims: dict[str, str] | None = None,
        weights_book: WeightsBook | None = None,
        num_listed: Callable[[], float] = lambda: math.inf,
        hang_s: float = HANG_S,
        ask_again_s: float = _ASK_AGAIN_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`clients` by address; `group_of` returns the group of a request id, and a group stays on one
        server.

        `weights_book`: receives the digests that the servers report. `num_listed`: how often the folders of
        weights were made what the trainer offers, where they are a list of that. `claims`: user of each
        server, by server id; pools that share it refuse each other's servers. `hang_s`: see
        `orchestrator.server_timeout_s`. `patience_s`: how long requests wait while there is no server.
        """
        self._servers = [PooledServer(name, client) for name, client in clients.items()]
        self._expected = expected
        self._claims = {} if claims is None else claims
        self._hang_s = hang_s
        self._ask_again_s = ask_again_s
        self._patience_s = patience_s
        self._line = WaitingLine(self._servers, group_of, self._serves)
        self._weights = WeightsToServe(expected.run or "", weights_book or WeightsBook(), num_listed)
        self._keepers: list[asyncio.Task[None]] = []
        self._is_started = False
        self._changed = asyncio.Event()
        self._deserted_at: float | None = None
        """Time of the event loop since which no server serves or loads weights; None while one does."""

    async def wait_until_ready(self) -> None:
        """Returns once a server has passed its examination; raises if one fails it, or none can be reached.

        Servers that are up at the same time are examined, too; the log names the others.
        """
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self._servers]
        for keeper in self._keepers:
            keeper.add_done_callback(lambda _: self._note_change())
        self._note_change()
        started = asyncio.get_running_loop().time()
        while not self._may_start(asyncio.get_running_loop().time() - started):
            self._check_keepers()
            await _wait(self._changed, _ASK_AT_START_S)
        self._is_started = True
        for server in self._servers:
            if not server.num_examined:
                log.warning(
                    "inference server %s is not there yet, so the run starts without it: %s",
                    server.name,
                    server.problem or "no answer",
                )

    def _may_start(self, waited_s: float) -> bool:
        for server in self._servers:
            if server.refusal is not None:
                raise server.refusal
        num_examined = sum(server.num_examined > 0 for server in self._servers)
        if not num_examined and waited_s > self._patience_s:
            raise InferenceError(f"no inference server after {self._patience_s:.0f} s: {self._reasons()}")
        tried = all(server.num_examined or server.problem for server in self._servers)
        return bool(num_examined) and (tried or waited_s > _HEAD_START_S)

    async def watch(self) -> None:
        """Never returns; raises once every server is refused."""
        while not all(server.refusal for server in self._servers):
            self._check_keepers()
            await self._changed.wait()
        raise next(server.refusal for server in self._servers if server.refusal)

    def _check_keepers(self) -> None:
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, account: Account, request_id: str
    ) -> Completion:
        oldest = num_examined = 0

        def ask(server: PooledServer, wire_id: str) -> Awaitable[Completion]:
            nonlocal oldest, num_examined
            oldest, num_examined = server.version or 0, server.num_examined
            return server.client.generate(prompt_ids, params, account, wire_id)

        server, completion = await self._ask(request_id, ask, in_books=True)
        doubt = self._doubt(server, oldest, completion)
        if doubt is None:
            return completion
        if num_examined == server.num_examined:  # otherwise it has been set right since
            self._doubt_server(server, doubt)
        return msgspec.structs.replace(completion, finish_reason=REFUSED)

    def _doubt(self, server: PooledServer, oldest: int, completion: Completion) -> str | None:
        """Returns why the completion cannot be trusted, if so; `oldest`: version served when asked."""
        if server.client.server_id != server.server_id:
            return "it was restarted"
        if self._expected.run is None:
            return None
        newest = oldest if self._weights.current is None else self._weights.current[0]
        versions = [version for version, _ in completion.policy_versions]
        if all(oldest <= version <= newest for version in versions):
            return None
        return (
            f"it answers with tokens of policy versions {versions}, though this run had it serve {oldest} … "
            f"{newest}"
        )

    async def score(self, token_ids: Sequence[int], temperature: float, request_id: str) -> list[float]:
        def ask(server: PooledServer, wire_id: str) -> Awaitable[list[float]]:
            return server.client.score(token_ids, temperature, wire_id)

        server, scores = await self._ask(request_id, ask, in_books=False)
        if server.client.server_id != server.server_id:
            self._doubt_server(server, "it was restarted")
            raise InferenceError(f"{server.name} was restarted; its scores count once it has been examined")
        return scores

    async def _ask(
        self,
        request_id: str,
        ask: Callable[[PooledServer, str], Awaitable[T]],
        *,
        in_books: bool,
    ) -> tuple[PooledServer, T]:
        """Returns the server that answered, and its answer. A request that a server loses goes to another.

        `in_books`: whether tokens are sampled for it, which the ledger counts.
        """
        num_tries = 0
        while True:
            server = await self._wait_for_place(request_id)
            placed = server.placed[request_id]
            asking = asyncio.ensure_future(ask(server, placed.wire_id))
            asking.add_done_callback(partial(_pass_on, outcome=placed.outcome))
            is_answered = False
            try:
                answer: T = await placed.outcome
                is_answered = True
                return server, answer
            except UnreachableError as error:
                if not isinstance(error, _MovedError):
                    self._doubt_server(server, str(error))
                num_tries += 1
                if num_tries == _MAX_TRIES:
                    raise UnreachableError(f"given up after {num_tries} tries, the last: {error}") from error
            except BusyError as error:
                is_answered = True
                loop = asyncio.get_running_loop()
                server.busy_until = loop.time() + error.retry_after_s
                loop.call_at(server.busy_until, self._line.advance)
            except InferenceError:
                is_answered = asking.done()  # otherwise it was aborted here
                raise
            finally:
                asking.cancel()
                del server.placed[request_id]
                if in_books and not is_answered:
                    server.disowned.add(placed.wire_id)
                    server.due.set()
                self._line.advance()

    async def _wait_for_place(self, request_id: str) -> PooledServer:
        placing = self._line.place(request_id)
        try:
            while not placing.done():
                await asyncio.wait({placing}, timeout=self._patience_s)
                if not placing.done():
                    self._require_some_server()
            return placing.result()
        except BaseException:
            self._line.leave(request_id, placing)
            raise

    def _require_some_server(self) -> None:
        if self._deserted_at is None:
            return
        if asyncio.get_running_loop().time() - self._deserted_at >= self._patience_s:
            raise UnreachableError(
                f"none of the inference servers can be reached, for {self._patience_s:g} s: {self._reasons()}"
            )

    def _reasons(self) -> str:
        return "; ".join(
            f"{server.name}: {server.problem or server.refusal or 'no answer'}" for server in self._servers
        )

    async def update_weights(self, version: int, folder: Path) -> None:
        """Returns once no server with older weights gets work any more, and one has these."""
        await self._have_fetched(version)
        self._weights.set(version, folder)
        for server in self._servers:
            server.problem = None
            server.due.set()
        self._note_change()
        while not any(map(self._serves, self._servers)):
            self._require_some_server()
            problems = [server.problem for server in self._servers]
            refused = [
                each for each in problems if not isinstance(each, UnreachableError | ConfigError | None)
            ]
            if refused and all(problems):
                raise refused[0]
            await _wait(self._changed, self._patience_s)

    async def _have_fetched(self, version: int) -> None:
        """Has the servers read a version that the trainer offers, while they get work.

        Returns once all have it or failed, and at the latest when one has had it for as long as it took. What
        went wrong shows when they are told to serve it.
        """
        loop = asyncio.get_running_loop()
        started, deadline = loop.time(), math.inf
        serving = [server for server in self._servers if self._serves(server)]
        left = {
            asyncio.create_task(self._while_alive(each, each.client.fetch_weights(version)))
            for each in serving
        }
        try:
            while left and (now := loop.time()) < deadline:
                timeout_s = None if deadline == math.inf else deadline - now
                done, left = await asyncio.wait(left, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                errors = [each.exception() for each in done]  # of each, or asyncio complains of the others
                if deadline == math.inf and None in errors:
                    deadline = loop.time() + (loop.time() - started)
        finally:
            for each in left:
                each.cancel()

    async def abort(self, request_ids: Sequence[str]) -> None:
        wanted = set(request_ids)
        self._line.abort(wanted)
        await asyncio.gather(*(self._abort(server, wanted) for server in self._servers))

    async def _abort(self, server: PooledServer, request_ids: set[str]) -> None:
        """Aborts requests at the server, left out or not; one that is hung or gone gives them up."""
        placed = [each for request_id, each in server.placed.items() if request_id in request_ids]
        if server.is_out and not server.keeps_requests:
            for each in placed:
                each.fail(InferenceError(f"the request was aborted, and {server.name} does not answer"))
        elif placed:
            with suppress(UnreachableError):  # its requests are failing by themselves
                await server.client.abort(sorted(each.wire_id for each in placed))

    async def close(self) -> None:
        """Tells every server that can still be reached which answers nobody took."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        untold = [server for server in self._servers if server.disowned]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await asyncio.gather(*map(self._disown, untold), return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    def _serves(self, server: PooledServer) -> bool:
        if server.is_out or server.version is None:
            return False
        weights = self._weights.current
        return weights is None or server.version == weights[0]

    def _note_change(self) -> None:
        if any(map(self._serves, self._servers)):
            self._deserted_at = None
            for server in self._servers:
                if server.is_out and not server.keeps_requests:
                    for placed in server.placed.values():
                        placed.fail(_MovedError(f"{server.name} is left out"))
        elif self._deserted_at is None:
            self._deserted_at = asyncio.get_running_loop().time()
        self._changed.set()
        self._changed = asyncio.Event()
        self._line.advance()

    async def _keep(self, server: PooledServer) -> None:
        """Never returns: brings the server up, watches it, and brings it up again after a failure."""
        while True:
            server.due.clear()
            try:
                if self._serves(server):
                    health = await self._require_progress(server, is_asked=False)
                    if health.server_id != server.server_id:
                        raise UnreachableError("it was restarted")
                    await self._disown(server)
                else:
                    await self._bring_up(server)
            except (ConfigError, InferenceError) as error:
                self._leave_out(server, error)
            await _wait(server.due, self._ask_again_s if self._is_started else _ASK_AT_START_S)

    async def _bring_up(self, server: PooledServer) -> None:
        """Examines the server and has it serve the current weights, if there are any yet."""
        weights, expected = self._weights.current, self._expected
        if weights is not None:
            expected = replace(expected, has_weights=True)
        health = await self._health(server)
        expected.check(server.name, health)
        self._claim(server, health)
        if server.is_out and server.num_examined:
            await self._while_alive(server, server.client.abort(()))  # does the engine hear anything?
        await self._while_alive(server, self._disown(server))
        if weights is not None:
            await self._while_alive(server, server.client.update_weights(*weights, expected.run or ""))
            server.note_process(server.client.server_id)
            health = await self._health(server)
            expected.check(server.name, health)
            if health.policy_version != weights[0]:
                raise UnreachableError(
                    f"{server.name} serves policy version {health.policy_version} right after an update to "
                    f"{weights[0]}"
                )
            report = await self._while_alive(server, server.client.served_weights())
            self._weights.verify(server.name, *weights, report)
        has_older = weights is None and expected.run is not None and bool(health.run)
        if not server.num_examined:
            log.info("inference server %s is ready", server.name)
        elif server.is_out:
            log.warning("inference server %s is back, with the current weights", server.name)
        server.version = None if has_older else health.policy_version
        server.server_id = health.server_id
        server.max_concurrent, server.max_queued = health.max_concurrent, health.max_queued
        server.refusal = server.problem = None
        server.is_out, server.keeps_requests = False, True
        server.num_examined += 1
        if weights != self._weights.current:
            server.due.set()  # newer ones came meanwhile: once more
        self._note_change()

    def _claim(self, server: PooledServer, health: Health) -> None:
        """Claims the server's process for this address; raises if another address or pool has claimed it.

        Two addresses may lead to one process: `localhost` and `127.0.0.1`, or a name of the machine.
        """
        who = f"the {self._expected.role} at {server.name}"
        owner = self._claims.setdefault(health.server_id or who, who)
        if owner != who:
            raise ConfigError(
                f"{owner} and {who} are the same process (server_id = {health.server_id!r}); start a server "
                "for each, or leave one of the addresses out"
            )

    async def _health(self, server: PooledServer) -> Health:
        try:
            async with asyncio.timeout(self._hang_s):
                health = await server.client.health()
        except TimeoutError:
            raise HungError(
                f"its /health has not answered for {self._hang_s:g} s (orchestrator.server_timeout_s)"
            ) from None
        server.note_process(health.server_id)
        return health

    async def _require_progress(self, server: PooledServer, *, is_asked: bool) -> Health:
        """Raises HungError if the server stands still. `is_asked`: whether it has more to do than that."""
        health = await self._health(server)
        if (health.updating or health.fetching) and self._deserted_at is not None:
            self._deserted_at = asyncio.get_running_loop().time()
        still_s, silent_s = server.still_s(health, is_asked=is_asked)
        if still_s >= (self._patience_s if health.updating else self._hang_s):
            raise HungError(
                f"it answers, but has stood still for {still_s:.0f} s with {len(server.placed)} requests "
                f"(orchestrator.server_timeout_s = {self._hang_s:g})"
            )
        if silent_s >= self._patience_s:
            raise HungError(f"no byte of the weights that it reads has arrived there for {silent_s:.0f} s")
        return health

    async def _while_alive(self, server: PooledServer, work: Awaitable[T]) -> T:
        """Waits for the result of `work` on the server as long as the server makes progress."""
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=self._ask_again_s)
                if not working.done():
                    await self._require_progress(server, is_asked=True)
            return working.result()
        finally:
            working.cancel()

    async def _disown(self, server: PooledServer) -> None:
        if wire_ids := sorted(server.disowned):
            await server.client.disown(wire_ids)
            server.disowned.difference_update(wire_ids)

    def _doubt_server(self, server: PooledServer, reason: str) -> None:
        """Leaves out a server whose answers, or silence, are suspicious, and has it examined at once."""
        if not server.is_out:
            self._leave_out(server, UnreachableError(reason))
            server.due.set()

    def _leave_out(self, server: PooledServer, problem: PellucidError) -> None:
        """Gives the server no more requests. Those it has move, unless it only refused new weights."""
        if isinstance(problem, ConfigError):
            if str(problem) != str(server.refusal):
                log.error("%s", problem)
            server.refusal = problem
        if not server.is_out and server.num_examined:
            reason = "it is refused" if isinstance(problem, ConfigError) else problem
            log.warning("inference server %s is left out: %s", server.name, reason)
        server.problem = problem
        server.is_out = True
        server.keeps_requests &= not isinstance(problem, UnreachableError | ConfigError)
        self._note_change()


def _pass_on(asking: "asyncio.Future[Any]", outcome: "asyncio.Future[Any]") -> None:
    """Copies the result or error of `asking` to `outcome`, unless that is set already."""
    error = None if asking.cancelled() else asking.exception()
    if outcome.done():
        return
    if asking.cancelled():
        outcome.cancel()
    elif error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(asking.result())


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
