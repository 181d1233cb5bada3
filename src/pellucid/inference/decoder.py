"""Computes the next logits of the engine's running sequences, and keeps what that takes.

    PackedDecoder    kv_cache.py    policies that attention plans are proven for: one forward per step
    CohortDecoder    cohorts.py     any other, by transformers' own forward: one forward per cohort and step

Invariants:
- A row stands for one sequence, from its first step to its end.
- Rows that start with the same prompt need one computation of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data.tensors import read_together, to_device
from pellucid.inference.slots import Scoring
from pellucid.model import Policy, packed_layout
from pellucid.model.lean import HiddenStates


@dataclass(eq=False, slots=True)
class SequenceRow:
    """All that is computed of one sequence."""

    length: int
    """Tokens of the sequence, with the one that the next step computes."""


RowT = TypeVar("RowT", bound=SequenceRow)


@dataclass(frozen=True, slots=True)
class Prompt(Generic[RowT]):
    """A prompt that this step computes, without its last token, and the rows that start with it."""

    token_ids: NDArray[np.int64]
    rows: list[RowT]
    mm_tensors: bytes = b""
    """Tensors of its images."""


class Decoder(ABC, Generic[RowT]):
    why_no_images = "the model takes text alone"
    """Why prompts with images cannot be computed; empty if they can."""

    starts_together = False
    """Whether requests that wait with the same prompt should start in one step, which makes later steps
    cheaper; else they start as slots get free."""

    @abstractmethod
    def add(self, length: int) -> RowT:
        """Returns a row for a new sequence; nothing is computed yet."""

    @abstractmethod
    def remove(self, row: RowT) -> None:
        """Frees what a row holds."""

    @abstractmethod
    def copy_prefix(self, source: RowT, target: RowT, length: int) -> None:
        """Gives a new row the first tokens of another, both of which start with the same prompt."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Frees prompts that are kept for `copy_prefix` alone: other weights are served from now on."""

    @abstractmethod
    def arrange(self) -> list[RowT]:
        """Returns all rows in the order of the next step."""

    @abstractmethod
    def logits(
        self, prompts: Sequence[Prompt[RowT]], rows: Sequence[RowT], last_tokens: Sequence[int]
    ) -> Tensor:
        """Computes the logits that follow the last token of each row; `prompts` are those of new rows.

        `rows` are those of `arrange`. A new row without a prompt has one that was copied, or has one token.
        """

    @abstractmethod
    def experts(self) -> Tensor:
        """Returns the experts of the tokens that `logits` computed last: all prompts', then one per row."""

    @abstractmethod
    def score(self, scorings: Sequence[Scoring]) -> list[list[float]]:
        """Returns one logprob per token of each sequence; that of the first is NaN."""


def score_together(
    policy: Policy, hidden_states: HiddenStates, scorings: Sequence[Scoring]
) -> list[list[float]]:
    """Scores sequences by one forward of the trainer."""
    device = policy.device
    lengths = [len(each.token_ids) for each in scorings]
    layout = packed_layout(lengths).to(device)
    token_ids, positions, temperatures = to_device(
        [
            np.concatenate([np.asarray(each.token_ids, np.int64) for each in scorings]),
            np.concatenate([np.arange(length) for length in lengths]),
            np.repeat(np.array([each.temperature for each in scorings], np.float32), lengths),
        ],
        device,
    )
    hidden = hidden_states(token_ids, positions, layout.plan)
    logprobs = torch.full((len(token_ids),), torch.nan, device=device)
    logprobs[layout.predicted] = policy.predict(hidden, token_ids, temperatures, layout).logprobs
    (found,) = read_together([logprobs])
    return [part.tolist() for part in np.split(found, np.cumsum(lengths)[:-1])]
