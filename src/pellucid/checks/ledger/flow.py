"""The way of all tokens through the processes of a run, as a tree: what goes on, and what ends where.

sampled by the engine      1,200  100.0%
├─ cancelled                 200   16.7%  given up while they were sampled
└─ to the orchestrator     1,000   83.3%
   ├─ zero_advantage         300   25.0%  an advantage of 0: nothing to learn from
   └─ to the trainer         700   58.3%
      └─ trained             700   58.3%  their gradient is in the weights
"""

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console

from pellucid.ledger import HANDS_ON, MEANING, TAKES_IN, Flow, Report, Stage, State

_NEXT = {Stage.INFERENCE: "to the orchestrator", Stage.ORCHESTRATOR: "to the trainer"}


class FlowLine(NamedTuple):
    depth: int
    is_last: bool
    name: str
    tokens: int
    meaning: str = ""


def flow_lines(report: Report) -> Iterator[FlowLine]:
    stages = list(Stage)
    yield FlowLine(0, True, "sampled by the engine", report.stages[Stage.INFERENCE][Flow.SAMPLED.value])
    for depth, stage in enumerate(stages, start=1):
        counts = report.stages[stage]
        ends = [(state, counts[state.value]) for state in State if counts[state.value]]
        handed_on = counts[HANDS_ON[stage].value] if stage in HANDS_ON else 0
        waiting = counts[TAKES_IN[stage].value] - sum(tokens for _, tokens in ends) - handed_on
        in_flight = waiting if stage in report.running else 0
        if depth < len(stages) and stages[depth] in report.running:
            in_flight += handed_on - report.stages[stages[depth]][TAKES_IN[stages[depth]].value]
        if in_flight:
            ends.append((State.IN_FLIGHT, in_flight))
        for number, (state, tokens) in enumerate(ends, start=1):
            is_last = depth == len(stages) and number == len(ends)
            yield FlowLine(depth, is_last, state.value, tokens, MEANING[state])
        if depth < len(stages):
            following = stages[depth]
            received = report.stages[following][TAKES_IN[following].value]
            yield FlowLine(depth, True, _NEXT[stage], received)


def print_flow(report: Report, console: Console) -> None:
    lines = list(flow_lines(report))
    sampled = lines[0].tokens
    labels = [_indent(line) + line.name for line in lines]
    width, digits = max(map(len, labels)), len(f"{max(line.tokens for line in lines):,}")
    for label, line in zip(labels, lines, strict=True):
        share = f"{line.tokens / sampled:7.1%}" if sampled else ""
        console.out(
            f"{label:<{width}}  {line.tokens:>{digits},} {share}  {line.meaning}".rstrip(), highlight=False
        )
    console.out("")


def _indent(line: FlowLine) -> str:
    """Everything hangs on the last branch of what is above it, so that there is nothing to draw beside it."""
    if line.depth == 0:
        return ""
    return "   " * (line.depth - 1) + ("└─ " if line.is_last else "├─ ")
