"""Reads the saved rollouts of a run: is what was dropped like what was kept?"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from pellucid.data.files import read_lines, step_folders
from pellucid.errors import DataError
from pellucid.orchestrator.failures import BiasFinding, DropAudit
from pellucid.orchestrator.records import FILE

T = TypeVar("T")


class Dropped(msgspec.Struct):
    """The part of a saved rollout that is looked at."""

    outcome: str
    env_name: str
    num_tokens: int
    reward: float | None = None


def audit(run: Path) -> list[BiasFinding]:
    drops = DropAudit()
    decoder = msgspec.json.Decoder(Dropped)
    for place, line in rollout_lines(run):
        rollout = decode_saved(decoder, place, line)
        drops.add(rollout.outcome, rollout.env_name, rollout.num_tokens, rollout.reward)
    return drops.findings()


def rollout_lines(run: Path) -> Iterator[tuple[str, bytes]]:
    """(place, line) of all steps, in order; a last line that is still being written is left out."""
    for _, folder in sorted(step_folders(run / "rollouts").items()):
        for number, line in read_lines(folder / FILE):
            if line.endswith(b"\n"):
                yield f"{folder / FILE}:{number}", line


def decode_saved(decoder: msgspec.json.Decoder[T], place: str, line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{place} is not a saved rollout: {error}; copy the file again") from error
