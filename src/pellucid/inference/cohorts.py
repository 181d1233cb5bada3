"""Decoding by transformers' own forward and caches, for models that attention plans are not proven for.

    prompt ──once──> prefix ──its row three times──> cohort of 3 ──> one forward per step, a token of each
                       └──────its row once─────────> cohort of 1, for a member that comes later

Prompts are computed without padding, those of equal length side by side. A cohort is rows that start together
from one of these; where the model's cache allows it, cohorts join to one. See
`methods.py` for what is right for which model.

Invariants:
- A prefix never changes, and is kept as long as a row that starts with it, and as the weights that computed
  it. From the end of its first step on, a row keeps no prompt but its own.
- A row that is removed leaves its cohort before the next forward."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pellucid.data.tensors import to_device
from pellucid.inference.decoder import Decoder, Prompt, SequenceRow, score_together
from pellucid.inference.methods import SideBySide, choose_method
from pellucid.inference.slots import Scoring
from pellucid.model import ExpertRecorder, Policy, hf_forward


@dataclass(eq=False, slots=True)
class CohortRow(SequenceRow):
    prefix: SideBySide | None = None
    """The prompt that it starts with, without the last token, and in its first step others computed with it;
    None if that leaves no token, or if other weights are served by now."""

    place: int = 0
    """Row of its prompt in `prefix`."""

    is_removed: bool = False


@dataclass(eq=False, slots=True)
class _Cohort:
    rows: list[CohortRow]
    sequences: SideBySide = field(default_factory=lambda: SideBySide([]))
    """None of them before the first step."""


class CohortDecoder(Decoder[CohortRow]):
    def __init__(self, policy: Policy, max_length: int, recorder: ExpertRecorder | None) -> None:
        self._policy = policy
        if policy.images is not None:
            self.why_no_images = f"its sequences go in rows ({policy.why_rows})"
        self._device = policy.device
        self._method = choose_method(policy, max_length)
        self.starts_together = self._method.is_batched and not self._method.joins
        self._recorder = recorder
        self._experts: list[Tensor] = []
        self._cohorts: list[_Cohort] = []
        self._new: list[CohortRow] = []

    def add(self, length: int) -> CohortRow:
        row = CohortRow(length)
        self._new.append(row)
        return row

    def remove(self, row: CohortRow) -> None:
        row.is_removed = True

    def copy_prefix(self, source: CohortRow, target: CohortRow, length: int) -> None:
        target.prefix, target.place = source.prefix, source.place

    def forget_prefixes(self) -> None:
        for cohort in self._cohorts:
            for row in cohort.rows:
                row.prefix = None

    def arrange(self) -> list[CohortRow]:
        for cohort in self._cohorts:
            self._drop_removed(cohort)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        together: defaultdict[tuple[int, ...], list[CohortRow]] = defaultdict(list)
        for row in self._new:
            if not row.is_removed:
                apart = () if self._method.is_batched else (id(row),)
                together[(row.length, id(row.prefix), *apart)].append(row)
        self._new.clear()
        # Those of one token have no cache to join yet, and come last.
        self._cohorts += sorted(map(_Cohort, together.values()), key=lambda each: each.rows[0].length == 1)
        return [row for cohort in self._cohorts for row in cohort.rows]

    def _drop_removed(self, cohort: _Cohort) -> None:
        left = [index for index, row in enumerate(cohort.rows) if not row.is_removed]
        if len(left) < len(cohort.rows):
            cohort.rows = [cohort.rows[index] for index in left]
            if left and cohort.sequences.lengths:
                cohort.sequences = self._method.take(cohort.sequences, left)

    def logits(
        self, prompts: Sequence[Prompt[CohortRow]], rows: Sequence[CohortRow], last_tokens: Sequence[int]
    ) -> Tensor:
        self._experts = self._prefill(prompts)
        self._begin()
        for prompt in prompts:
            self._part(prompt.rows)
        (tokens,) = to_device([np.asarray(last_tokens, np.int64)[:, None]], self._device)
        found = []
        for cohort, own in zip(
            self._cohorts, tokens.split([len(cohort.rows) for cohort in self._cohorts]), strict=True
        ):
            found.append(self._method.extend(cohort.sequences, own))
            self._experts += self._recorded(len(own), 1)
        return torch.cat(found)

    def _prefill(self, prompts: Sequence[Prompt[CohortRow]]) -> list[Tensor]:
        """Computes prompts, those of equal length side by side; returns the experts of each."""
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            apart = () if self._method.is_batched else (index,)
            alike[(len(prompt.token_ids), *apart)].append(index)
        experts: dict[int, Tensor] = {}
        for (length, *_), indices in alike.items():
            prefix = SideBySide([0] * len(indices))
            (ids,) = to_device([np.stack([prompts[index].token_ids for index in indices])], self._device)
            self._method.extend(prefix, ids)
            for part in self._recorded(len(indices), length):
                experts |= zip(indices, part.unflatten(0, (len(indices), length)), strict=True)
            for place, index in enumerate(indices):
                for row in prompts[index].rows:
                    row.prefix, row.place = prefix, place
        return [experts[index] for index in sorted(experts)]

    def _begin(self) -> None:
        """Copies the prompts of new cohorts, and joins cohorts where the method does."""
        for cohort in self._cohorts:
            prefix = cohort.rows[0].prefix
            if not cohort.sequences.lengths and prefix is not None:
                cohort.sequences = self._method.take(prefix, [row.place for row in cohort.rows])
            elif not cohort.sequences.lengths:
                cohort.sequences = SideBySide([0] * len(cohort.rows))
        started = [cohort for cohort in self._cohorts if cohort.sequences.kept is not None]
        if self._method.joins and len(started) > 1:
            rows = [row for cohort in started for row in cohort.rows]
            joined = self._method.join([cohort.sequences for cohort in started])
            self._cohorts = [_Cohort(rows, joined), *self._cohorts[len(started) :]]

    def _part(self, rows: Sequence[CohortRow]) -> None:
        """Copies the prompt of these rows out of those computed with it, which can then be freed."""
        prefix, place = rows[0].prefix, rows[0].place
        if prefix is not None and len(prefix.lengths) > 1:
            own = self._method.take(prefix, [place])
            for row in rows:
                row.prefix, row.place = own, 0

    def _recorded(self, num_rows: int, num_tokens: int) -> list[Tensor]:
        """Returns the experts of the last tokens of each row of the last forward, if they are recorded."""
        if self._recorder is None:
            return []
        by_row = self._recorder.last().unflatten(0, (num_rows, -1))
        return [by_row[:, -num_tokens:].flatten(0, 1)]

    def experts(self) -> Tensor:
        return torch.cat(self._experts)

    def score(self, scorings: Sequence[Scoring]) -> list[list[float]]:
        """Computes one sequence after the other: padded to the longest, they would take its memory each."""
        return [score_together(self._policy, hf_forward(self._policy), [each])[0] for each in scorings]
