"""A data set as training samples, and which of them each step trains on.

All examples are made into tokens before the first step, so that a bad one is found then and not in the
middle of a run. Which examples a step takes depends on the seed and the step alone: a run that is resumed
goes on as if it had never stopped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pellucid.config import DataConfig, SFTConfig
from pellucid.config.trainer import ValidationConfig
from pellucid.data import TokenTable, TrainingMode, TrainingSample
from pellucid.errors import ConfigError, DataError
from pellucid.trainer.sft_rows import Row, SftRows, open_rows
from pellucid.trainer.sft_tokens import ExampleTokenizer

ENV_NAME = "sft"
_HOLD_OUT_SEED = 0
_PACKED_TOGETHER = 1024

Track = Callable[[SftRows, str], Iterable[Row]]
"""Iterates over rows and may show progress; the text is the title of the bar."""


@dataclass(frozen=True, slots=True)
class SFTData:
    train: list[TrainingSample]
    validation: list[TrainingSample]
    """Empty without `[data.validation]`."""

    def validation_tables(self) -> list[TokenTable]:
        """Splits the validation samples into tables of at most 1,024, each packed on its own."""
        starts = range(0, len(self.validation), _PACKED_TOGETHER)
        return [
            TokenTable.from_samples(self.validation[start : start + _PACKED_TOGETHER]) for start in starts
        ]

    def check(self, seq_len: int) -> None:
        """Raises DataError if no example of a part has a trainable token within `seq_len`."""
        for key, samples in ((DataConfig.KEY, self.train), (ValidationConfig.KEY, self.validation)):
            if samples and DataSize.of(samples, seq_len).num_trainable == 0:
                raise DataError(
                    f"{key}: no example has a trainable token within trainer.model.seq_len = {seq_len}; "
                    "raise it"
                )


def load_data(config: SFTConfig, tokenizer: Any, track: Track = lambda rows, title: rows) -> SFTData:
    def read(rows: SftRows, title: str) -> list[TrainingSample]:
        return read_samples(track(rows, title), tokenizer, run_id=config.run_name)

    settings = config.data
    source = settings.validation_source()
    rows, validation_rows = open_rows(settings), open_rows(source) if source else None
    data = SFTData(read(rows, settings.KEY), [])
    if validation_rows is not None:
        data = SFTData(data.train, read(validation_rows, ValidationConfig.KEY))
    elif settings.validation is not None:
        data = hold_out(data.train, settings.validation)
    data.check(config.trainer.model.seq_len)
    return data


def read_samples(rows: Iterable[Row], tokenizer: Any, *, run_id: str = "") -> list[TrainingSample]:
    examples = ExampleTokenizer(tokenizer)
    return [_sample(row, examples, run_id) for row in rows]


def _sample(row: Row, examples: ExampleTokenizer, run_id: str) -> TrainingSample:
    try:
        tokens = examples.tokenize(row.record)
        return TrainingSample.build(
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            sampled=np.zeros(len(tokens.token_ids), np.bool_),
            inference_logprobs=[],
            policy_versions=[],
            role_spans=tokens.role_spans,
            env_name=ENV_NAME,
            run_id=run_id,
            example_id=row.example_id,
            sample_id=row.example_id,
            training_mode=TrainingMode.SFT.value,
        )
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error


def hold_out(samples: Sequence[TrainingSample], config: ValidationConfig) -> SFTData:
    """Keeps part of the samples for validation, chosen by their number alone; both parts stay in order."""
    total = len(samples)
    key = "fraction" if config.fraction is not None else "num_examples"
    count = config.num_examples or max(1, round(total * (config.fraction or 0.0)))
    if count >= total:
        raise ConfigError(
            f"data.validation.{key} = {getattr(config, key)} leaves nothing of {total} examples to train on; "
            "lower it"
        )
    held = set(np.random.default_rng(_HOLD_OUT_SEED).permutation(total)[:count].tolist())
    return SFTData(
        [sample for index, sample in enumerate(samples) if index not in held],
        [sample for index, sample in enumerate(samples) if index in held],
    )


class ShuffledBatches:
    """Chooses the examples of each step: consecutive ones of an endless row of epochs, each in its own order.

    5 examples, batches of 3:   epoch 0  3 0 4 1 2   epoch 1  1 4 2 0 3
                                step 0   3 0 4       step 1   1 2 1      step 2   4 2 0
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self._num_examples = num_examples
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = lru_cache(maxsize=1)(self._shuffle)

    def batch(self, step: int) -> list[int]:
        chosen: list[int] = []
        position = step * self._batch_size
        while (missing := self._batch_size - len(chosen)) > 0:
            epoch, offset = divmod(position + len(chosen), self._num_examples)
            chosen += self._epoch(epoch)[offset : offset + missing].tolist()
        return chosen

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, epoch)).permutation(self._num_examples)


@dataclass(frozen=True, slots=True)
class DataSize:
    """Counts of examples and tokens after truncation to `seq_len`."""

    num_examples: int
    num_tokens: int
    num_trainable: int
    num_cut: int
    """Examples longer than `seq_len`."""

    num_mute: int
    """Examples without a trainable token within `seq_len`; they train nothing."""

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], seq_len: int) -> "DataSize":
        trainable = [_num_trainable(sample, seq_len) for sample in samples]
        return cls(
            num_examples=len(samples),
            num_tokens=sum(min(sample.length, seq_len) for sample in samples),
            num_trainable=sum(trainable),
            num_cut=sum(sample.length > seq_len for sample in samples),
            num_mute=trainable.count(0),
        )


def _num_trainable(sample: TrainingSample, seq_len: int) -> int:
    if sample.length <= seq_len:
        return sample.num_trainable
    return int(sample.arrays["loss_mask"].array()[:seq_len].sum())
