"""Fine-tuning on a data set: its rows, the samples made of them, and the loss on those held out.

An error names the row by its place in the source:

    data.path = train.jsonl      train.jsonl:3                  line 3
    data.path = folder           folder[train] row 2            as `dataset[2]`
    data.name = user/chats       user/chats[train] row 2

A key without a value (null) counts as absent: data sets fill the columns that a row does not have. All
examples are made into tokens before the first step, so that a bad one is found then and not in the middle of
a run.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch

from pellucid.config import DataConfig, SFTConfig
from pellucid.config.trainer import DatasetConfig, ValidationConfig
from pellucid.data import TokenTable, TrainingMode, TrainingSample
from pellucid.data.tokenizer import first_line
from pellucid.errors import ConfigError, DataError
from pellucid.model import Policy, TokenOutput
from pellucid.trainer.sft_tokens import ExampleTokenizer
from pellucid.trainer.step import LoadedMicroBatch, StepBatch

_HOLD_OUT_SEED = 0
_PACKED_TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class Row:
    where: str
    example_id: str
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SftRows:
    num_rows: int
    read: Callable[[], Iterator[Row]]

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[Row]:
        return self.read()


Track = Callable[[SftRows, str], Iterable[Row]]
"""Iterates over rows and may show progress; the text is the title of the bar."""


def open_rows(config: DatasetConfig) -> SftRows:
    """Opens a file, a folder or a hub data set; does not parse its rows yet."""
    is_file = config.path is not None and not config.path.is_dir()
    rows = _open_jsonl(config) if is_file else _open_dataset(config)
    if not rows.num_rows:
        raise DataError(f"{_setting(config)} holds no examples")
    return rows


def _setting(config: DatasetConfig) -> str:
    """Names the setting, for errors: `data.path = 'x.jsonl'` or `data.name = 'user/chats'`."""
    key, value = ("name", config.name) if config.path is None else ("path", str(config.path))
    return f"{config.KEY}.{key} = {value!r}"


def _open_jsonl(config: DatasetConfig) -> SftRows:
    """Opens a JSONL file, which is read line by line; empty lines are skipped."""
    path = config.path
    assert path is not None
    for key in ("subset", "split"):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(
                f"{config.KEY}.{key} = {value!r} has no meaning for a file, {path}; leave it out, or give "
                "the folder of a data set"
            )

    def read() -> Iterator[Row]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise DataError(f"{path}:{number}: not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise DataError(f"{path}:{number}: expected an object, got {type(record).__name__}")
                yield _row(f"{path}:{number}", str(number), record)

    try:
        with path.open("rb") as file:
            return SftRows(sum(1 for line in file if line.strip()), read)
    except OSError as error:
        raise DataError(f"{_setting(config)} cannot be read: {error.strerror}") from error


def _row(where: str, example_id: str, record: Mapping[str, Any]) -> Row:
    return Row(where, example_id, {name: value for name, value in record.items() if value is not None})


def _open_dataset(config: DatasetConfig) -> SftRows:
    """Opens a data set with the package `datasets`, which keeps it on disk."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{_setting(config)} needs the package datasets, which cannot be imported ({error}); "
            "run `pip install 'pellucid[datasets]'`, or give a JSONL file"
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path, split = config.path, config.part[1]
    try:
        if path is not None and any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            dataset = _choose_split(datasets.load_from_disk(str(path)), config)
        else:
            dataset = datasets.load_dataset(config.name or str(path), config.subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        remedy = f"check {config.KEY}.subset, {config.KEY}.split and the files"
        if isinstance(error, ConnectionError):
            remedy = (
                "without the hub, download it elsewhere, write it with save_to_disk, and set "
                f"{config.KEY}.path to that folder"
            )
        raise DataError(f"{_setting(config)} could not be loaded ({_reason(error)}); {remedy}") from error
    title = f"{config.name or path}[{dataset.split or split}]"

    def read() -> Iterator[Row]:
        for index, record in enumerate(dataset):
            yield _row(f"{title} row {index}", str(index), record)

    return SftRows(len(dataset), read)


def _choose_split(saved: Any, config: DatasetConfig) -> Any:
    """Returns the split that `config` names, or the only one there is."""
    if config.subset is not None:
        raise ConfigError(
            f"{config.KEY}.subset = {config.subset!r}: {config.path} was written by save_to_disk and has no "
            "subsets; leave it out"
        )
    splits = saved if isinstance(saved, dict) else {str(saved.split or config.part[1]): saved}
    if config.split is None and len(splits) == 1:
        (only,) = splits.values()
        return only
    if config.part[1] not in splits:
        raise ConfigError(
            f"{config.KEY}.split = {config.part[1]!r} is not in {config.path}; it has "
            f"{', '.join(map(repr, splits))}"
        )
    return splits[config.part[1]]


def _reason(error: Exception) -> str:
    """Returns the first line of the root error; the errors around it only say that loading failed."""
    while isinstance(error.__cause__, Exception) and type(error).__module__.startswith("datasets"):
        error = error.__cause__
    return first_line(error)


@dataclass(frozen=True, slots=True)
class SFTData:
    train: list[TrainingSample]
    validation: list[TrainingSample]
    """Empty without `[data.validation]`."""

    def validation_tables(self) -> list[TokenTable]:
        """Splits the validation samples into tables of at most 1,024, each packed on its own."""
        starts, size = range(0, len(self.validation), _PACKED_TOGETHER), _PACKED_TOGETHER
        return [TokenTable.from_samples(self.validation[start : start + size]) for start in starts]


def load_data(config: SFTConfig, tokenizer: Any, track: Track = lambda rows, title: rows) -> SFTData:
    """Makes samples of all examples; raises DataError if those of a part have no trainable token."""

    def read(rows: SftRows, title: str) -> list[TrainingSample]:
        return read_samples(track(rows, title), tokenizer, run_id=config.run_name)

    settings, seq_len = config.data, config.trainer.model.seq_len
    source = settings.validation_source()
    rows, validation_rows = open_rows(settings), open_rows(source) if source else None
    samples = read(rows, DataConfig.KEY)
    if validation_rows is not None:
        data = SFTData(samples, read(validation_rows, ValidationConfig.KEY))
    else:
        data = SFTData(samples, []) if settings.validation is None else hold_out(samples, settings.validation)
    for key, samples in ((DataConfig.KEY, data.train), (ValidationConfig.KEY, data.validation)):
        if samples and DataSize.of(samples, seq_len).num_trainable == 0:
            raise DataError(
                f"{key}: no example has a trainable token within trainer.model.seq_len = {seq_len}; raise it"
            )
    return data


def read_samples(rows: Iterable[Row], tokenizer: Any, *, run_id: str = "") -> list[TrainingSample]:
    examples, samples = ExampleTokenizer(tokenizer), []
    for row in rows:
        try:
            tokens = examples.tokenize(row.record)
            sample = TrainingSample.build(
                token_ids=tokens.token_ids,
                loss_mask=tokens.loss_mask,
                sampled=np.zeros(len(tokens.token_ids), np.bool_),
                inference_logprobs=[],
                policy_versions=[],
                role_spans=tokens.role_spans,
                env_name="sft",
                run_id=run_id,
                example_id=row.example_id,
                sample_id=row.example_id,
                training_mode=TrainingMode.SFT.value,
            )
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        samples.append(sample)
    return samples


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
    kept = [sample for index, sample in enumerate(samples) if index not in held]
    return SFTData(kept, [sample for index, sample in enumerate(samples) if index in held])


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
        trainable = [
            sample.num_trainable
            if sample.length <= seq_len
            else int(sample.arrays["loss_mask"].array()[:seq_len].sum())
            for sample in samples
        ]
        return cls(
            num_examples=len(samples),
            num_tokens=sum(min(sample.length, seq_len) for sample in samples),
            num_trainable=sum(trainable),
            num_cut=sum(sample.length > seq_len for sample in samples),
            num_mute=trainable.count(0),
        )


@dataclass
class Validation:
    """The loss on examples that are never trained on.

        validation/loss          mean of −log π over the trainable tokens of all validation examples
        validation/perplexity    its exponential
        validation/tokens        the tokens that it is the mean of

    The record of step n has the values of the weights after that step, every `interval` steps and at the last
    one, so that the last record holds for the model that is saved. `validation/initial_loss`, in the record
    of step 0, is the loss before any training. Measuring computes no gradient and draws no random number: a
    run trains the same with it and without.
    """

    policy: Policy
    forward: Callable[[LoadedMicroBatch], TokenOutput]
    batches: Sequence[StepBatch]
    interval: int
    max_steps: int
    gather: Callable[[float], list[float]]
    initial_loss: float = 0.0

    def begin(self) -> None:
        """Measures the weights that training starts from."""
        self.initial_loss = self.measure()["validation/loss"]

    def report(self, step: int) -> dict[str, float]:
        """Measures after a step if validation is due, and returns its metrics; else returns none."""
        is_due = (step + 1) % self.interval == 0 or step + 1 == self.max_steps
        initial = {"validation/initial_loss": self.initial_loss} if step == 0 else {}
        return (self.measure() if is_due else {}) | initial

    def measure(self) -> dict[str, float]:
        total, num_tokens = torch.zeros((), dtype=torch.float64), 0
        was_training = self.policy.training
        self.policy.eval()
        try:
            with torch.no_grad():
                for batch in self.batches:
                    num_tokens += batch.packed.num_trainable
                    for micro_batch in batch.micro_batches:
                        logprobs = self.forward(micro_batch).logprobs
                        total -= logprobs[micro_batch.tokens["loss_mask"]].double().sum().cpu()
        finally:
            self.policy.train(was_training)
        loss = sum(self.gather(float(total))) / num_tokens
        return {
            "validation/loss": loss,
            "validation/perplexity": float(torch.tensor(loss).exp()),
            "validation/tokens": num_tokens,
        }
