"""A batch cut into micro batches. A micro batch never mixes training modes or runs; environments may mix.

The members of a group stay together where they fit, because their common prompt is then computed once.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pellucid.data import TokenTable
from pellucid.packing.bins import pack


@dataclass(frozen=True, slots=True)
class MicroBatch:
    table: TokenTable
    training_mode: str
    run_id: str

    @property
    def sample_count(self) -> int:
        return int((self.table["env_name"] != "").sum())


@dataclass(frozen=True, slots=True)
class PackedBatch:
    micro_batches: list[MicroBatch]
    num_trainable: int
    """Trainable tokens of the whole step: the denominator, at least 1 when used as such."""

    truncated_tokens: int
    max_tokens: int
    """The cap that the micro batches were packed under."""


def pack_batch(table: TokenTable, *, seq_len: int, max_tokens: int) -> PackedBatch:
    """Sequences are cut to `seq_len`; micro batches hold at most `max_tokens`, or one longer sequence."""
    cut = table.truncate(seq_len)
    kinds = _collect(range(cut.num_sequences), zip(cut["training_mode"], cut["run_id"], strict=True))
    micro_batches = [
        MicroBatch(cut.select(sorted(chosen)), mode, run)
        for (mode, run), indices in kinds.items()
        for chosen in _pack_together(cut, indices, max_tokens)
    ]
    return PackedBatch(micro_batches, cut.num_trainable, table.num_tokens - cut.num_tokens, max_tokens)


def _pack_together(table: TokenTable, indices: list[int], max_tokens: int) -> list[list[int]]:
    """Bins of sequences; a group that fits into a bin is packed as one."""
    units: list[list[int]] = []
    for group, members in _collect(indices, (table["group_id"][index] for index in indices)).items():
        fits = group and sum(int(table.lengths[index]) for index in members) <= max_tokens
        units += [members] if fits else [[index] for index in members]
    sizes = [sum(int(table.lengths[index]) for index in unit) for unit in units]
    return [[index for number in chosen for index in units[number]] for chosen in pack(sizes, max_tokens)]


def _collect(indices: Iterable[int], keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Indices by key, in order of appearance."""
    found: dict[Any, list[int]] = defaultdict(list)
    for index, key in zip(indices, keys, strict=True):
        found[key].append(index)
    return found
