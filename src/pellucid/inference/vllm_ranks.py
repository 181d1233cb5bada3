"""vLLM's data parallelism behind one server: a core in a process of its own for each rank, stepped together.

    engine ── start, stop, score ──> the rank of the group ──┐
           ── step ───────────────> every rank with work ────┼──> sampled tokens of all
           ── load, receive ──────> every rank ──────────────┘    digests of each

- A group stays on one rank, so that its prompt is computed once; a new one goes to the rank with the fewest
  sequences. A rank that is full passes the rest of a group on.
- A rank steps only when told to. So new weights lie between two steps of all ranks, and all serve one
  version: each answer tells how many loads preceded it, and another number than expected ends the server.
- Ranks of a model with experts compute together: those without a request step along with an empty batch, as
  vLLM's own ranks do. Ranks of a dense model do not, and have no group.
- A rank that fails, or ends, is named, and ends the server: the others may wait for it without end.
"""

import atexit
import multiprocessing
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pellucid.config import InferenceRunConfig
from pellucid.errors import InferenceError, PellucidError
from pellucid.inference.client import SamplingParams
from pellucid.inference.vllm_core import (
    Core,
    DataParallelRank,
    RankLoad,
    RankWeights,
    RecordedLayers,
    SampledToken,
    Scored,
    VllmCore,
    agreed,
    check_published,
    max_lora_rank,
    received,
    slots_per_rank,
)
from pellucid.transport.weights_transfer import Receiving

Call = tuple[str, tuple[Any, ...]]
"""Method of a core, and its arguments."""

_MAX_HOMES = 100_000


class Reply(NamedTuple):
    num_loads: int
    """Loads of weights that the rank has done."""

    digests: dict[str, str] | None
    """Those of what it serves; None if that has not changed since its last reply."""

    result: Any
    error: str = ""


class RankProcess(Protocol):
    """A rank, as the server sees it."""

    connection: Connection

    def why_ended(self) -> str: ...

    def kill(self) -> None: ...


class RankedCore:
    def __init__(
        self,
        config: InferenceRunConfig,
        shapes: Mapping[str, torch.Size],
        recorded: RecordedLayers | None = None,
        *,
        is_coupled: bool,
        spawn: "Callable[..., RankProcess] | None" = None,
    ) -> None:
        """`is_coupled`: whether the model has experts, whose ranks compute together. `spawn` starts a rank:
        `_Spawned` by default."""
        size = config.inference.vllm.data_parallel_size
        port = _free_port()
        self._shapes, self._is_coupled = shapes, is_coupled
        lora = config.model.lora
        self._max_rank = 0 if lora is None else max_lora_rank(lora.rank)
        self._slots = slots_per_rank(config.inference)
        self._ranks = [
            (spawn or _Spawned)(config, shapes, recorded, DataParallelRank(rank, size, is_coupled, port))
            for rank in range(size)
        ]
        self._queued: list[list[Call]] = [[] for _ in self._ranks]
        """Calls that a rank gets with the next one that is answered."""

        self._places: dict[str, int] = {}
        """Rank of each request that samples."""

        self._scored_at: dict[str, int] = {}
        self._homes: dict[str, int] = {}
        """Rank of each group that began lately."""

        self._sampled: Counter[int] = Counter()
        self._digests: list[dict[str, str]] = [{} for _ in self._ranks]
        self._num_loads = 0
        atexit.register(self.close)
        self.num_workers: int = sum(self._ask_all("count_workers"))

    @property
    def digests(self) -> dict[str, str]:
        return agreed(self._digests)

    def start(
        self, key: str, token_ids: Sequence[int], params: SamplingParams, salt: str, group: str
    ) -> None:
        rank = self._place(group)
        self._places[key] = rank
        self._queued[rank].append(("start", (key, list(token_ids), params, salt)))

    def _place(self, group: str) -> int:
        """Returns the rank of a group, unless it is full; else the one with the fewest sequences."""
        loads = Counter(self._places.values())
        home = self._homes.get(group)
        if home is not None and loads[home] < self._slots:
            return home
        rank = min(range(len(self._ranks)), key=lambda each: loads[each])
        if group:
            self._homes[group] = rank
            if len(self._homes) > _MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        return rank

    def score(self, key: str, token_ids: Sequence[int]) -> None:
        loads = Counter(self._scored_at.values())
        rank = min(range(len(self._ranks)), key=lambda each: loads[each])
        self._scored_at[key] = rank
        self._queued[rank].append(("score", (key, list(token_ids))))

    def stop(self, key: str) -> None:
        for places in (self._places, self._scored_at):
            if (rank := places.pop(key, None)) is not None:
                self._queued[rank].append(("stop", (key,)))

    def step(self) -> tuple[list[SampledToken], list[Scored]]:
        busy = {*self._places.values(), *self._scored_at.values()}
        asked = range(len(self._ranks)) if self._is_coupled else sorted(busy)
        sampled: list[SampledToken] = []
        scored: list[Scored] = []
        for rank, (tokens, scores) in zip(asked, self._ask(asked, "step"), strict=True):
            self._sampled[rank] += len(tokens)
            sampled += tokens
            scored += scores
        for each in scored:
            self._scored_at.pop(each.key, None)
        return sampled, scored

    def load(self, folder: Path) -> bool:
        check_published(folder, self._shapes, self._max_rank)
        return all(self._ask_all("load", folder))

    def receive(self, receiving: Receiving) -> bool:
        def call(method: str, arguments: Mapping[str, Any]) -> dict[str, str]:
            return agreed(self._ask_all("call_workers", method, arguments))

        received(receiving, self._shapes, call)
        return all(self._ask_all("take_arrived"))

    def ranks(self) -> list[tuple[RankLoad, RankWeights]]:
        loads = Counter(tuple(self._places.values()))  # the engine may change them meanwhile
        return [
            (RankLoad(rank, loads[rank], self._sampled[rank]), RankWeights(rank, digests))
            for rank, digests in enumerate(self._digests)
        ]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        atexit.unregister(self.close)

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(range(len(self._ranks)), method, *arguments)

    def _ask(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Has ranks do something at a time; returns the result of each. Raises InferenceError, naming the
        first that fails."""
        for rank in ranks:
            calls, self._queued[rank] = [*self._queued[rank], (method, arguments)], []
            try:
                self._ranks[rank].connection.send(calls)
            except OSError:
                raise self._ended(rank) from None
        replies: dict[int, Reply] = {}
        waiting = {self._ranks[rank].connection: rank for rank in ranks}
        while waiting:
            for ready in wait(list(waiting)):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    reply: Reply = self._ranks[rank].connection.recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
                if reply.error:
                    raise InferenceError(f"rank {rank} of {len(self._ranks)} failed: {reply.error}")
                replies[rank] = reply
        self._take_loads(replies)
        return [replies[rank].result for rank in ranks]

    def _take_loads(self, replies: Mapping[int, Reply]) -> None:
        """Notes what the ranks serve. Raises InferenceError if one serves other weights than the others."""
        is_whole = len(replies) == len(self._ranks)
        loads = {reply.num_loads for reply in replies.values()}
        if len(loads) > 1 or (not is_whole and loads and loads != {self._num_loads}):
            of_each = ", ".join(f"rank {rank}: {reply.num_loads}" for rank, reply in sorted(replies.items()))
            raise InferenceError(
                f"the ranks serve different weights (loads so far: {of_each}); restart this server"
            )
        self._num_loads = max(loads, default=self._num_loads)
        for rank, reply in replies.items():
            if reply.digests is not None:
                self._digests[rank] = reply.digests

    def _ended(self, rank: int) -> InferenceError:
        why = self._ranks[rank].why_ended()
        return InferenceError(
            f"rank {rank} of {len(self._ranks)} {why}; its last lines are in the server's log"
        )


class _Spawned:
    """A rank in a process of its own, which ends with this one."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_rank, args=(theirs, *arguments), name="vllm-rank")
        self._process.start()
        theirs.close()

    def why_ended(self) -> str:
        self._process.join(timeout=1)
        return f"ended with exit code {self._process.exitcode}"

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _run_rank(
    connection: Connection,
    config: InferenceRunConfig,
    shapes: Mapping[str, torch.Size],
    recorded: RecordedLayers | None,
    rank: DataParallelRank,
) -> None:
    """Main function of a rank's process: the server's process says when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve_rank(connection, lambda: VllmCore(config, shapes, recorded, rank))


def _end_with_parent() -> None:
    """Ends this process once the server's is gone, even while it loads, or waits for another rank."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def serve_rank(connection: Connection, open_core: Callable[[], Core]) -> None:
    """Answers for one core until the connection ends; an error is the last answer."""
    num_loads = 0
    try:
        core = open_core()
        known: dict[str, str] | None = None
        while True:
            try:
                calls: list[Call] = connection.recv()
            except (EOFError, OSError):
                return
            for method, arguments in calls:
                if method == "count_workers":
                    result: Any = core.num_workers
                else:
                    result = getattr(core, method)(*arguments)
                num_loads += method in ("load", "take_arrived")
            digests = None if core.digests is known else core.digests
            known = core.digests
            connection.send(Reply(num_loads, digests, result))
    except Exception as error:
        reason = str(error) if isinstance(error, PellucidError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the server is gone
            connection.send(Reply(num_loads, None, None, reason))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
