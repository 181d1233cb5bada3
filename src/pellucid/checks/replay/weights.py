"""The trainer's logprobs again, from the weights that a step was trained with, where they are still there.

Step n trains policy version n: `weights/step_n`, or the checkpoint after n steps, or for step 0 the model
that the run began with.
"""

from collections.abc import Iterator
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
from pellucid.model import load_policy
from pellucid.trainer.step import layout_of
from pellucid.transport import is_stable
from pellucid.transport.adapter import ServedWeights
from pellucid.transport.weights import weights_folder


class Predictor:
    """One policy that takes the weights of step after step, in ascending order."""

    def __init__(self, folder: Path, model: ModelConfig, max_tokens: int) -> None:
        self._folder = folder
        self._policy = load_policy(model, trainable=True)
        self._weights = ServedWeights(self._policy.hf)
        self._is_whole = model.lora is None
        self._max_tokens = max_tokens

    def predict(self, step: int, records: ColumnBatch) -> dict[str, Values] | None:
        """Logprobs and entropy of each token, or None if the weights are gone."""
        if not self._load(step):
            return None
        with torch.no_grad():
            parts = [self._forward(records.take(rows)) for rows in self._chunks(records)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _load(self, step: int) -> bool:
        """Whether they are there. The checkpoint of an adapter does not fit a model without one."""
        published = weights_folder(self._folder, step)
        checkpoint = self._folder / "checkpoints" / f"step_{step}"
        if is_stable(published):
            self._weights.load(published)
        elif is_stable(checkpoint) and self._is_whole:
            read_model(self._policy, checkpoint / STATE)
        else:
            return step == 0
        return True

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
