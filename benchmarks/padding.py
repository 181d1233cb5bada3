"""A batch as TRL lays it out: a row per sample; prompts and completions apart, each padded to the longest.

prompts      a b     and  c        ->   a b     . c       padded on the left
completions  X       and  Y Z      ->   X .     Y Z       padded on the right
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pellucid.data import TokenTable


def padded(table: TokenTable) -> dict[str, Tensor]:
    """What TRL's `_generate_and_score_completions` returns, of samples of one turn."""
    turns = np.stack([table.prompt_lengths, table.lengths - table.prompt_lengths], axis=1).ravel().tolist()
    ids = torch.from_numpy(table["token_ids"].astype(np.int64)).split(turns)
    logprobs = torch.from_numpy(table.dense("inference_logprobs").copy()).split(turns)
    prompt_ids, prompt_mask = _stacked(ids[::2], side="left")
    completion_ids, completion_mask = _stacked(ids[1::2], side="right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(table["advantage"]),
        "old_per_token_logps": _stacked(logprobs[1::2], side="right")[0],
        "num_items_in_batch": completion_mask.sum(),
    }


def _stacked(rows: Sequence[Tensor], *, side: str) -> tuple[Tensor, Tensor]:
    """The rows, padded with 0, and a mask that is 1 where they are not."""

    def stack(parts: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(parts), batch_first=True, padding_side=side)

    return stack(rows), stack([torch.ones(len(row), dtype=torch.long) for row in rows])
