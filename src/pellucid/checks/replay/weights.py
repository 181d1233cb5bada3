"""The trainer's logprobs again, from the weights that a step was trained with, where they are still there.

Step n trains policy version n: `weights/step_n`, or the checkpoint after n steps, or for step 0 the model
that the run began with.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.checkpoint.files import STATE
from pellucid.checkpoint.state import read_model
from pellucid.config.model import ModelConfig
from pellucid.data import TokenTable
from pellucid.data.tensors import to_tensors
from pellucid.export.batch import ColumnBatch, Values
from pellucid.model import Policy, load_policy
from pellucid.trainer.step import layout_of
from pellucid.transport import is_stable
from pellucid.transport.weights import load_weights, weights_folder


def weights_of(folder: Path, step: int) -> Callable[[Policy], None] | None:
    """What puts the weights of the step into a policy; None if they are gone."""
    published = weights_folder(folder, step)
    if is_stable(published):
        return lambda policy: load_weights(policy.hf, published)
    checkpoint = folder / "checkpoints" / f"step_{step}"
    if is_stable(checkpoint):
        return lambda policy: read_model(policy, checkpoint / STATE)
    return _as_loaded if step == 0 else None


def _as_loaded(policy: Policy) -> None:
    """The initial model is what was loaded."""


class Predictor:
    """One policy that takes the weights of step after step, in ascending order."""

    def __init__(self, folder: Path, model: ModelConfig, max_tokens: int) -> None:
        self._folder = folder
        self._policy = load_policy(model, trainable=True)
        self._max_tokens = max_tokens

    def predict(self, step: int, records: ColumnBatch) -> dict[str, Values] | None:
        """Logprobs and entropy of each token, or None if the weights are gone."""
        put = weights_of(self._folder, step)
        if put is None:
            return None
        with torch.no_grad():
            put(self._policy)
            parts = [self._forward(records.take(rows)) for rows in self._chunks(records)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _chunks(self, records: ColumnBatch) -> Iterator[NDArray[np.int64]]:
        """As many records as fit under the cap of a micro batch, at least one."""
        start = 0
        while start < records.num_sequences:
            fits = np.searchsorted(records.offsets, records.offsets[start] + self._max_tokens, "right") - 1
            stop = max(start + 1, int(fits))
            yield np.arange(start, stop)
            start = stop

    def _forward(self, records: ColumnBatch) -> dict[str, Values]:
        table = _table(records)
        tokens, layout = to_tensors(table, self._policy.device), layout_of(table, share_prompts=False)
        output = self._policy(
            tokens["token_ids"], tokens.positions, tokens["temperatures"], layout.to(self._policy.device)
        )
        return {"trainer_logprobs": output.logprobs.cpu().numpy(), "entropy": output.entropy.cpu().numpy()}


def _table(records: ColumnBatch) -> TokenTable:
    everywhere = np.ones(records.num_tokens, np.bool_)  # so that every token has its own temperature
    return TokenTable(
        records.lengths,
        {
            "token_ids": records.columns["token_ids"].astype(np.uint32),
            "loss_mask": records.columns["loss_mask"],
            "sampled": everywhere,
            "inference_logprobs": np.zeros(records.num_tokens, np.float32),
            "policy_versions": np.zeros(records.num_tokens, np.int32),
            "temperatures": records.columns["temperatures"],
            "env_name": np.full(records.num_sequences, "replay", object),
        },
    )
