"""A batch cut into micro batches. A micro batch never mixes training modes or runs; environments may mix."""

from collections import defaultdict
from dataclasses import dataclass

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


def pack_batch(table: TokenTable, *, seq_len: int, max_tokens: int) -> PackedBatch:
    """Sequences are cut to `seq_len`; micro batches hold at most `max_tokens`, or one longer sequence."""
    cut = table.truncate(seq_len)
    micro_batches = [
        MicroBatch(cut.select(sorted(indices[number] for number in chosen)), mode, run)
        for (mode, run), indices in _kinds(cut).items()
        for chosen in pack([int(cut.lengths[index]) for index in indices], max_tokens)
    ]
    return PackedBatch(micro_batches, cut.num_trainable, table.num_tokens - cut.num_tokens)


def _kinds(table: TokenTable) -> dict[tuple[str, str], list[int]]:
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, kind in enumerate(zip(table["training_mode"], table["run_id"], strict=True)):
        kinds[kind].append(index)
    return kinds
