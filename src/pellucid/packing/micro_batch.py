"""A batch cut into micro batches. Each has one training mode, run and modality; environments may mix.

Planning takes lengths only, so every rank plans the whole batch alike. A rank copies only the tokens of its
own micro batches, each when it is trained. The caller's table is not changed.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from pellucid.data import TokenTable
from pellucid.packing.plan import Cost, Ints, MicroStep, Sequences, plan

T = TypeVar("T", bound=Hashable)


class Kind(NamedTuple):
    """Properties that all sequences of a micro batch share."""

    training_mode: str
    run_id: str
    is_multimodal: bool = False
    """Whether it has images; then its one sample is alone."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a micro batch as packed."""

    samples: int
    """Samples; 0 in a dummy, with which a rank without samples takes part in a micro step."""

    tokens: int
    """Tokens, padding included."""

    loss_tokens: int
    padding_tokens: int
    truncated_tokens: int
    """Tokens of its samples beyond `seq_len`; not among `tokens`."""

    oversized_samples: int
    """Samples longer than the cap; each is alone in its micro batch."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    table: TokenTable
    """Truncated sequences; padding, if any, is a sequence of its own, the last one."""

    kind: Kind
    counts: Counts
    indices: list[int]
    """Indices of the sequences in the batch."""

    received: Ints
    """Sampled tokens of each sequence, before truncation."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    table: TokenTable
    """The whole batch as received, before truncation."""

    steps: list[MicroStep]
    kinds: list[Kind]
    seq_len: int
    max_tokens: int
    """Cap of a micro batch, in tokens."""

    pad_to_multiple_of: int
    in_rows: bool
    """Whether each sequence has a row of its own; padding makes rows equally long, and is in no table."""

    shares_prompts: bool
    """Whether neighbours of a group compute their common prefix once."""

    trainable_lengths: Ints
    """Trainable tokens of each sequence of the batch, after truncation."""

    @property
    def num_trainable(self) -> int:
        """Trainable tokens of all ranks; the denominator of the loss is at least 1."""
        return int(self.trainable_lengths.sum())

    def micro_batches(self, rank: int) -> Iterator[MicroBatch]:
        for step in self.steps:
            yield self._micro_batch(step.bins[rank], self.kinds[step.kind])

    def _micro_batch(self, indices: list[int], kind: Kind) -> MicroBatch:
        whole = self.table.select(indices)
        cut = whole.truncate(self.seq_len)
        multiple = self.pad_to_multiple_of
        # Without sequences, padding alone has all columns of the batch, too: a loss reads them.
        padded = cut.pad_to(multiple) if indices else cut.padding(multiple)
        counts = Counts(
            samples=cut.num_sequences,
            tokens=padded.num_tokens,
            loss_tokens=padded.num_trainable,
            padding_tokens=padded.num_tokens - cut.num_tokens,
            truncated_tokens=whole.num_tokens - cut.num_tokens,
            oversized_samples=int((cut.lengths > self.max_tokens).sum()),
        )
        return MicroBatch(padded, kind, counts, indices, whole.sampled_lengths)


def pack_batch(
    table: TokenTable,
    *,
    seq_len: int,
    max_tokens: int,
    num_ranks: int = 1,
    pad_to_multiple_of: int = 1,
    share_prompts: bool = True,
    in_rows: bool = False,
    cost: Cost | None = None,
) -> PackedBatch:
    """Cuts sequences to `seq_len`; packs micro batches of at most `max_tokens`, or of one longer sequence.

    `in_rows`: a micro batch has rows as long as its longest sequence, and their tokens count. Prompts are not
    shared then, and padding to a multiple would only be another row.
    """
    lengths = np.minimum(table.lengths, seq_len)
    has_images = np.fromiter(map(bool, table["mm_tensors"]), np.bool_, table.num_sequences)
    columns = table["training_mode"].tolist(), table["run_id"].tolist(), has_images.tolist()
    codes, kinds = _numbered(map(Kind, *columns))
    lengths = np.where(has_images, np.maximum(lengths, max_tokens), lengths)  # so that each is alone
    shares_prompts = share_prompts and not in_rows
    if shares_prompts:
        groups = np.where(has_images, -1, _groups(table, codes))
        prompts = _common_prompts(table, lengths, groups)
    else:
        groups, prompts = np.full_like(lengths, -1), np.zeros_like(lengths)
    sequences = Sequences(lengths, codes, groups, prompts)
    return PackedBatch(
        table=table,
        steps=plan(
            sequences, max_tokens=max_tokens, num_ranks=num_ranks, cost=cost or Cost(), in_rows=in_rows
        ),
        kinds=kinds,
        seq_len=seq_len,
        max_tokens=max_tokens,
        pad_to_multiple_of=1 if in_rows else pad_to_multiple_of,
        in_rows=in_rows,
        shares_prompts=shares_prompts,
        trainable_lengths=table.truncate(seq_len).trainable_lengths,
    )


def _groups(table: TokenTable, kinds: Ints) -> Ints:
    """Numbers groups, separately for each kind; -1 for a sequence without a group."""
    names = table["group_id"].tolist()
    numbers, _ = _numbered(zip(names, kinds.tolist(), strict=True))
    return np.where(np.array([bool(name) for name in names], np.bool_), numbers, -1)


def _common_prompts(table: TokenTable, lengths: Ints, groups: Ints) -> Ints:
    """Estimates how many tokens of prompt the members of a group share: those of the shortest prompt.

    Each member keeps at least one token of its own. Plans use the estimate; the model shares the prefix
    that sequences really have in common.
    """
    prompts = np.minimum(table.prompt_lengths, lengths - 1)
    shortest = np.full(int(groups.max(initial=-1)) + 2, np.iinfo(np.int64).max)
    np.minimum.at(shortest, groups, prompts)
    is_shared = (groups >= 0) & (np.bincount(groups + 1)[groups + 1] > 1)
    return np.where(is_shared, shortest[groups], 0)


def _numbered(values: Iterable[T]) -> tuple[Ints, list[T]]:
    """Numbers the distinct values in order of appearance; also returns the value of each number."""
    numbers: dict[T, int] = {}
    found = [numbers.setdefault(value, len(numbers)) for value in values]
    return np.array(found, np.int64), list(numbers)
