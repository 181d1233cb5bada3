"""Tokens that a process took along when it died, by what passed between it and another. Pure.

A link is a pair of processes, `SERVER:ORCHESTRATOR`. The engine counts what it sampled, delivered and gave up
for it, the orchestrator what arrived. Both may be behind what they did, and either may be killed and started
again while the other goes on, as another process and so on another link:

                     the engine is gone                      the orchestrator is gone
    sampled          what it had not delivered is lost       the engine gives it up, or delivers it to nobody
    delivered        what arrived was delivered, even if     what did not arrive, or is in no books and not
                     it was killed before it wrote that      held for a coming batch, is lost
                     down; what did not arrive is lost

So nobody has to settle the books of a process that died at the right moment: a late answer to an orchestrator
that is gone is lost whenever it comes. On a link that both ends still serve, a difference is a difference.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from pellucid.ledger.journal import LedgerEntry
from pellucid.ledger.states import Flow, Stage, State


def link_of(server: str, orchestrator: str) -> str:
    return f"{server}:{orchestrator}"


def orchestrator_of(link: str) -> str:
    return link.rpartition(":")[2]


@dataclass(slots=True)
class _Passed:
    """The counts of one run and environment over one link."""

    at_engine: Counter[str] = field(default_factory=Counter)
    arrived: int = 0
    """Tokens in the books of the orchestrator, or held for a coming batch."""

    last_step: int = 0


class Links:
    def __init__(self) -> None:
        self._passed: dict[tuple[str, str, str], _Passed] = {}

    def add(self, entry: LedgerEntry) -> None:
        if not entry.link:
            return
        passed = self._passed.setdefault((entry.link, entry.run, entry.env), _Passed())
        if entry.stage is Stage.INFERENCE:
            passed.at_engine.update(entry.counts)
        else:
            passed.arrived += entry.counts.get(Flow.RECEIVED.value, 0) + entry.counts.get(Flow.HELD.value, 0)
            passed.last_step = max(passed.last_step, entry.step)

    def losses(self, alive: Collection[str], *, is_over: bool) -> Iterator[LedgerEntry]:
        """Yields the entries that processes that died would still have written.

        `alive`: the processes that have journals open; `is_over`: the orchestrator has closed its own, so
        that what has not arrived from an engine that is gone never will.
        """
        for (link, run, env), passed in sorted(self._passed.items()):
            server, _, orchestrator = link.rpartition(":")
            engine_died = bool(server) and server not in alive
            orchestrator_died = bool(orchestrator) and orchestrator not in alive
            delivered, gone = passed.at_engine[Flow.DELIVERED.value], 0
            if orchestrator_died or (engine_died and is_over):
                gone = max(0, delivered - passed.arrived)
                counts = {Flow.RECEIVED.value: gone, State.LOST.value: gone}
                yield LedgerEntry(Stage.ORCHESTRATOR, passed.last_step, run, env, counts)
            if engine_died:
                unwritten = max(0, passed.arrived - delivered)
                ended = delivered + unwritten + passed.at_engine[State.CANCELLED.value]
                running = passed.at_engine[Flow.SAMPLED.value] - ended
                counts = {
                    Flow.SAMPLED.value: max(0, -running),
                    Flow.DELIVERED.value: unwritten,
                    State.LOST.value: max(0, running),
                }
                yield LedgerEntry(Stage.INFERENCE, 0, run, env, counts)
