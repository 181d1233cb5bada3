"""Scoring: the logprob of every token of a given sequence, by prefill alone.

    token ids   5     6     9            asked
    logprobs    nan   -0.2  -1.7         of 6 after 5, and of 9 after 5 6; nothing predicts the first

Nothing is sampled, so nothing is counted as sampled, and no slot of the cache is taken. Values are those that
the trainer computes for the same tokens, weights and temperature.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pellucid.errors import InferenceError
from pellucid.model import Policy, packed_layout
from pellucid.model.lean_forward import HiddenStates


@dataclass(eq=False, slots=True)
class Scoring:
    """A sequence to score, and the callback that gets its logprobs or the error."""

    token_ids: Sequence[int]
    temperature: float
    on_finish: Callable[[list[float] | InferenceError], None]

    def finish(self, logprobs: list[float], version: int) -> None:
        for index, logprob in enumerate(logprobs[1:], start=1):
            if not math.isfinite(logprob):
                self.on_finish(
                    InferenceError(
                        f"policy version {version} gives token {index} of the sequence the logprob "
                        f"{logprob}; only finite ones can train"
                    )
                )
                return
        self.on_finish(logprobs)


def score(policy: Policy, hidden_states: HiddenStates, scorings: Sequence[Scoring]) -> list[list[float]]:
    """Returns one logprob per token of each sequence, computed in one packed forward."""
    device = policy.device
    lengths = [len(each.token_ids) for each in scorings]
    layout = packed_layout(lengths).to(device)
    token_ids = torch.from_numpy(np.concatenate([np.asarray(each.token_ids, np.int64) for each in scorings]))
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
    temperatures = torch.tensor([each.temperature for each in scorings]).repeat_interleave(
        torch.tensor(lengths)
    )
    token_ids, temperatures = token_ids.to(device), temperatures.to(device)
    hidden = hidden_states(token_ids, positions.to(device), layout.plan)
    logprobs = torch.full((len(token_ids),), torch.nan, device=device)
    logprobs[layout.predicted] = policy.predict(hidden, token_ids, temperatures, layout).logprobs
    return [part.tolist() for part in logprobs.split(lengths)]
