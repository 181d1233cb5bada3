"""Reads the saved rollouts of a run: is what was dropped like what was kept?"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pellucid.orchestrator.bias import DropAudit, Finding
from pellucid.orchestrator.records import FILE
from pellucid.transport import step_folders


class Dropped(msgspec.Struct):
    """The part of a saved rollout that is looked at."""

    outcome: str
    env_name: str
    num_tokens: int
    reward: float | None = None


def audit(run: Path) -> list[Finding]:
    drops = DropAudit()
    decoder = msgspec.json.Decoder(Dropped)
    for line in rollout_lines(run):
        rollout = decoder.decode(line)
        drops.add(rollout.outcome, rollout.env_name, rollout.num_tokens, rollout.reward)
    return drops.findings()


def rollout_lines(run: Path) -> Iterator[bytes]:
    """Of all steps, in order; a last line that is not whole is left out: it is being written."""
    for _, folder in sorted(step_folders(run / "rollouts").items()):
        path = folder / FILE
        if path.exists():
            with path.open("rb") as file:
                yield from (line for line in file if line.endswith(b"\n"))
