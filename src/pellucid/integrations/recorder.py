"""The exporter for loops that are not pellucid's.

A step's micro batches are held until it is finished, because every record carries the trainable tokens of the
whole step, and a mean over sequences weighs them by it. With `torch.distributed` at work, `finish_step` is
called by every process: denominators are those of all of them, each writes its own file, and `STABLE` appears
when all have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from pellucid.config import ExportFormat, LossConfig, ModelConfig, TrainerPrecision
from pellucid.config.base import Section, save
from pellucid.config.tools import RecordedConfig
from pellucid.data import COLUMNS, Axis, Column, TokenTable, TrainingMode
from pellucid.data.rules import check_rules
from pellucid.data.schema import SCHEMA
from pellucid.data.tensors import to_tensors
from pellucid.errors import ColumnError, ConfigError, DataError
from pellucid.export import TokenExporter
from pellucid.export import open as open_export
from pellucid.integrations.arrange import Given, PerSequence, TensorArrangement, as_array
from pellucid.loss import LossInputs, loss_for, sequence_weights
from pellucid.metrics import Guarded, JsonlSink

_CPU = torch.device("cpu")


class _RecordedLoss(Section):
    loss: LossConfig


class _Config(Section):
    """`configs/trainer.toml`, as far as `view` and `replay` need it."""

    recorded: RecordedConfig
    model: ModelConfig | None = None
    trainer: _RecordedLoss | None = None


@dataclass(frozen=True)
class _Held:
    table: TokenTable
    observed: Mapping[str, torch.Tensor | None]
    is_rl: bool


class TokenRecorder:
    """Writes the tokens that another trainer trains, and what its loss did with them, into a run folder."""

    def __init__(
        self,
        run_dir: Path | str,
        *,
        loss: LossConfig | Mapping[str, Any] | str | None = None,
        model: Path | str | None = None,
        env_name: str = "train",
        format: ExportFormat = "jsonl",
        precision: TrainerPrecision = "float32",
        first_step: int = 0,
        about: RecordedConfig | None = None,
    ) -> None:
        """`loss` is one of pellucid's, by its name or with the keys of `[trainer.loss]`; None if the loop has
        another one, of which `replay` then checks less.

        `model` is the folder or hub name that training started from: `view` takes the tokenizer from it, and
        `replay` computes the logprobs of step 0 again, in the `precision` of the loop's forward (that of
        autocast, if it uses it). `first_step` above 0 goes on after a checkpoint: steps from there on are
        written again. `about` says in words who trains and how its loss is different.
        """
        self._dir = Path(run_dir)
        self._loss = _parse_loss(loss)
        self._losses = loss_for(self._loss)
        self._env_name = env_name
        self._step = first_step
        self._held: list[_Held] = []
        self._rank, num_ranks = _own_rank(), _num_ranks()
        _check_folder(self._dir, first_step)
        _gather(None)  # all have looked before the first one writes
        self._exporter = TokenExporter(self._dir, rank=self._rank, format=format, precision=precision)
        self._exporter.forget_from(first_step)
        self._metrics: Guarded | None = None
        if self._rank == 0:
            self._exporter.forget_ranks_from(num_ranks, first_step)
            self._save_config(model, about or RecordedConfig())
            path = self._dir / "metrics" / "trainer.jsonl"
            self._metrics = Guarded(JsonlSink(path, resume=True), str(path))

    @property
    def step(self) -> int:
        """The step that `add` adds to."""
        return self._step

    def add(
        self,
        *,
        token_ids: Given,
        loss_mask: Given,
        trainer_logprobs: Given,
        attention_mask: Given | None = None,
        lengths: PerSequence | None = None,
        training_mode: str = TrainingMode.RL.value,
        **others: Given | PerSequence | float | str | Sequence[str] | None,
    ) -> None:
        """Adds one micro batch, as it was trained. Tensors may be on any device; none of them is kept.

        `others` are columns of the schema; one that is None is not given:

            inference_logprobs    those that the loss compared with: of the sampler, or of the old policy; not
                                  needed for sft
            advantages            one per sequence or per token
            rewards               one per sequence, NaN (the default) where nobody scored it
            sampled               `loss_mask` if not given
            entropy, teacher_logprobs
            temperature, policy_version           one for all or one per sequence
            token_loss            the loop's own, before any mean
            is_masked_high, is_masked_low         what was clipped
            env_name, example_id, group_id, rollout_id, sample_id, stop_reason
                                  texts of the sequences, one for all or one for each

        A token's loss, or a mask, that is not given is what the named loss makes of the logprobs.
        """
        where = TensorArrangement.of(token_ids, loss_mask, attention_mask, lengths)
        given: dict[str, Any] = {
            "token_ids": token_ids,
            "loss_mask": loss_mask,
            "sampled": loss_mask,
            "trainer_logprobs": trainer_logprobs,
            "policy_version": COLUMNS["policy_versions"].fill,
            "training_mode": training_mode,
            "env_name": self._env_name,
            **{name: value for name, value in others.items() if value is not None},
        }
        values = {
            column.name: where.column(name, column, given[name])
            for name, column in _columns_of(given, where).items()
        }
        trainable, sampled = values["loss_mask"], values["sampled"]
        if "inference_logprobs" not in values:
            if training_mode != TrainingMode.SFT.value:
                raise ColumnError(
                    "inference_logprobs",
                    None,
                    "is missing; give those that the loss compared with. A loop that trains on its own "
                    "samples at once has trainer_logprobs.detach() there",
                )
            values["inference_logprobs"] = np.zeros(where.num_tokens, np.float32)
        table = TokenTable(
            where.lengths,
            {
                name: column[sampled] if COLUMNS[name].stored is Axis.SAMPLED else column
                for name, column in values.items()
                if name in COLUMNS
            },
        )
        check_rules(table.columns, is_trained=True)
        observed = {name: column for name, column in values.items() if name not in COLUMNS}
        for name in observed.keys() & {"trainer_logprobs", "token_loss"}:
            where.require_numbers(name, observed[name], trainable)
        for name in observed.keys() - {"trainer_logprobs", "entropy"}:
            observed[name] = np.where(trainable, observed[name], observed[name].dtype.type(0))
        self._held.append(self._observe(table, observed, training_mode))

    def finish_step(self, *, loss: float | torch.Tensor | None = None, **metrics: float) -> None:
        """Writes this optimizer step, all of which has been added, and advances `step`.

        `loss` is the optimised one, which `replay` holds the tokens' losses to; with several processes it is
        the mean of theirs. `metrics` are drawn by the viewer: give `reward=…` at least.
        """
        held, self._held = self._held, []
        denominator, weights = self._weigh(held)
        for index, (each, weight) in enumerate(zip(held, weights, strict=True)):
            token_loss = each.observed["token_loss"]
            assert token_loss is not None
            per_token = torch.from_numpy(np.repeat(weight, each.table.lengths))
            self._exporter.add(
                each.table,
                {**each.observed, "token_loss": token_loss * per_token},
                step=self._step,
                micro_step=index,
                denominator=denominator,
            )
        self._exporter.finish(self._step)
        losses = _gather(loss.item() if isinstance(loss, torch.Tensor) else loss)
        if self._metrics is not None:  # only now: all of them have written
            self._exporter.mark_stable(self._step)
            known = [value for value in losses if value is not None]
            own = {"loss": sum(known) / len(known)} if known else {}
            self._metrics.log(
                self._step, own | {_metric_name(name): float(value) for name, value in metrics.items()}
            )
        self._step += 1

    def close(self) -> None:
        """Closes the files; a step that was not finished is not written."""
        self._exporter.close()
        if self._metrics is not None:
            self._metrics.close()

    def __enter__(self) -> "TokenRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _observe(self, table: TokenTable, given: Mapping[str, NDArray[Any]], mode: str) -> _Held:
        """Returns the values that the loop gave, with those that the named loss computes from them."""
        tensors = {name: torch.from_numpy(values) for name, values in given.items()}
        inputs = LossInputs.of(to_tensors(table, _CPU), tensors["trainer_logprobs"])
        observed: dict[str, torch.Tensor | None] = {
            "entropy": None,
            **self._losses[mode](inputs).columns(),
            **tensors,
        }
        sides = [tensors[name] for name in ("is_masked_high", "is_masked_low") if name in tensors]
        if sides:
            observed["is_masked"] = torch.stack(sides).any(dim=0)
        return _Held(table, observed, mode == TrainingMode.RL.value)

    def _weigh(self, held: Sequence[_Held]) -> tuple[int, list[NDArray[np.float32]]]:
        """Returns the step's denominator, and the weight of each sequence's tokens in its mean."""
        own = [(each.is_rl, each.table.trainable_lengths, each.table["group_id"].tolist()) for each in held]
        ranks = _gather(own)
        denominator = max(1, sum(int(counts.sum()) for rank in ranks for _, counts, _ in rank))
        weights = [np.ones(each.table.num_sequences, np.float32) for each in held]
        if self._loss is None or self._loss.reduction == "token":
            return denominator, weights
        counts = [counts for rank in ranks for is_rl, counts, _ in rank if is_rl]
        groups = [group for rank in ranks for is_rl, _, groups in rank if is_rl for group in groups]
        if counts:
            of_all = sequence_weights(self._loss.reduction, np.concatenate(counts), groups)
            start = sum(len(counts) for rank in ranks[: self._rank] for is_rl, counts, _ in rank if is_rl)
            for index, each in enumerate(held):
                if each.is_rl:
                    weights[index] = of_all[start : start + each.table.num_sequences]
                    start += each.table.num_sequences
        return denominator, weights

    def _save_config(self, model: Path | str | None, recorded: RecordedConfig) -> None:
        config = _Config(
            recorded=recorded,
            model=None if model is None else ModelConfig(name=str(model)),
            trainer=None if self._loss is None else _RecordedLoss(loss=self._loss),
        )
        save(config, self._dir / "configs" / "trainer.toml")


def _parse_loss(loss: LossConfig | Mapping[str, Any] | str | None) -> LossConfig | None:
    if loss is None or isinstance(loss, Section):
        return loss
    try:
        parsed: LossConfig = TypeAdapter(LossConfig).validate_python(
            {"type": loss} if isinstance(loss, str) else dict(loss)
        )
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(["loss", *(str(part) for part in problem["loc"][1:])])
        raise ConfigError(
            f"{key}: {problem['msg']}; see docs/losses.md, or give None for another loss"
        ) from error
    return parsed


def _check_folder(folder: Path, first_step: int) -> None:
    if first_step == 0 and (folder / "token_exports").is_dir() and any((folder / "token_exports").iterdir()):
        try:
            steps = open_export(folder).steps
        except DataError:  # none that was finished
            return
        raise DataError(
            f"{folder} holds an export of steps {steps[0]} to {steps[-1]} already; give another folder, or "
            "first_step to go on from a checkpoint"
        )


_ARGUMENTS = {"rewards": "reward", "policy_version": "policy_versions"}
"""Arguments of `add` that are not called like their columns."""

_TEXTS = [name for name, column in COLUMNS.items() if column.dtype is str and name != "training_mode"]
_OBSERVED = ("trainer_logprobs", "entropy", "token_loss", "is_masked_high", "is_masked_low")


def _columns_of(given: Mapping[str, Any], where: TensorArrangement) -> dict[str, Column]:
    """Finds the column of each argument: advantages are a column of the tokens or of the sequences."""
    found = {}
    for name in given:
        column = SCHEMA.get(_ARGUMENTS.get(name, name))
        if column is None or not (column.in_batch or name in _OBSERVED):
            texts = ", ".join(each for each in _TEXTS)
            raise DataError(f"add({name}=…): no such column; texts of a sequence are {texts}")
        if name == "advantages" and where.is_per_sequence(as_array(name, given[name])):
            column = SCHEMA["advantage"]
        found[name] = column
    return found


def _metric_name(name: str) -> str:
    return "reward/all" if name == "reward" else name


def _own_rank() -> int:
    return torch.distributed.get_rank() if _num_ranks() > 1 else 0


def _num_ranks() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1


def _gather(value: Any) -> list[Any]:
    """Gathers the values of all processes, in order of rank; every process has to call it."""
    if (num_ranks := _num_ranks()) == 1:
        return [value]
    gathered: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(gathered, value)
    return gathered
