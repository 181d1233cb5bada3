"""TRL's GRPO trainer, with every token that it trains exported.

    from pellucid.integrations.trl import ExportingGRPOTrainer

    trainer = ExportingGRPOTrainer(…as GRPOTrainer…, export_dir="outputs/trl")
    trainer.train()

Nothing of the training changes. What is recorded is what TRL's loss read: its batches after they were
shuffled and split, the logprobs and entropies of its own forward, its advantages, and the old logprobs that
ratios are taken against (its own, where TRL takes none because it trains on its samples at once). Losses and
clip decisions of single tokens are not to be had from TRL; they are computed from these values by the
built-in loss that TRL's settings amount to (`trl_loss.py`), and `replay` holds their mean to the loss that
TRL optimised.

Tested with TRL 1.16: the methods that are wrapped here are not part of its public interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from pellucid.config import ExportFormat, TrainerPrecision
from pellucid.config.tools import RecordedConfig
from pellucid.errors import ConfigError, MissingPackageError
from pellucid.integrations.recorder import TokenRecorder
from pellucid.integrations.trl_loss import translate

try:
    import trl
    from trl import GRPOTrainer
except ImportError as error:
    raise MissingPackageError(
        f"pellucid.integrations.trl needs TRL, which cannot be imported ({error}); run "
        "`pip install 'pellucid[trl]'`"
    ) from error

_ROWS = "exported_rows"
"""Our key in TRL's batches. TRL shuffles and splits lists along with the tensors."""


@dataclass(frozen=True, slots=True)
class _ScoredCompletion:
    """A scored completion: where it comes from, its reward and its policy version."""

    env: str
    example: str
    group: str
    rollout: str
    reward: float
    policy_version: int


class ExportsTokens:
    """For a subclass of `GRPOTrainer` of your own: `class Mine(ExportsTokens, MyTrainer)`."""

    def __init__(
        self,
        *arguments: Any,
        export_dir: Path | str,
        export_format: ExportFormat = "jsonl",
        env_name: str = "train",
        **options: Any,
    ) -> None:
        """Everything else is the trainer's. The run folder `export_dir` gets `token_exports`, and what `view`
        and `replay` want to know. A column `env_name` or `example_id` of the data set names its rows."""
        _check_methods(type(self))
        super().__init__(*arguments, **options)
        self._exporting = _Exporting(self, Path(export_dir), export_format, env_name)
        self.add_callback(self._exporting)  # type: ignore[attr-defined]

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        per_function: Tensor = super()._calculate_rewards(*arguments, **options)  # type: ignore[misc]
        self._exporting.scored(per_function)
        return per_function

    def _generate_and_score_completions(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return batch | {_ROWS: self._exporting.rows(inputs)}

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = super()._get_per_token_logps_and_entropies(*arguments, **options)  # type: ignore[misc]
        self._exporting.computed(*found[:2])
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            self._exporting.trained(inputs, loss)
        return loss


class ExportingGRPOTrainer(ExportsTokens, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with `export_dir`."""


class _Exporting(TrainerCallback):  # type: ignore[misc]
    """Collects the parts of a micro batch as TRL comes by them."""

    def __init__(self, trainer: Any, folder: Path, format: ExportFormat, env_name: str) -> None:
        self._trainer = trainer
        self._folder = folder
        self._format = format
        self._env_name = env_name
        self._translation = translate(
            trainer.args,
            num_processes=trainer.accelerator.num_processes,
            has_aux_loss=trainer.aux_loss_enabled,
        )
        self._recorder: TokenRecorder | None = None
        self._rewards: Tensor | None = None
        self._logprobs: Tensor | None = None
        self._entropy: Tensor | None = None
        self._loss: Tensor | float = 0.0
        self._rewards_of_step: list[float] = []
        self._num_generated = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._recorder = TokenRecorder(
            self._folder,
            loss=self._translation.loss,
            model=_start_of(self._trainer),
            format=self._format,
            precision=_precision_of(self._trainer),
            first_step=state.global_step,
            about=RecordedConfig(
                by=f"TRL {trl.__version__}, {type(self._trainer).__name__}",
                no_loss=self._translation.no_loss,
                no_sum=self._translation.no_sum,
            ),
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self._recorder is not None
        is_mean = not self._translation.no_sum
        self._recorder.finish_step(
            loss=self._loss if is_mean else None,
            reward=sum(self._rewards_of_step) / max(1, len(self._rewards_of_step)),
        )
        self._loss, self._rewards_of_step = 0.0, []

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self._recorder is not None
        self._recorder.close()

    def scored(self, per_function: Tensor) -> None:
        """Keeps the rewards of all processes; a completion that no function scored counts 0."""
        weights = self._trainer.reward_weights.to(per_function.device)
        self._rewards = (per_function * weights).nansum(dim=1)

    def rows(self, inputs: Sequence[dict[str, Any]]) -> list[_ScoredCompletion]:
        """Makes a row per completion. The members of a group follow each other, possibly across processes."""
        rewards, self._rewards = self._rewards, None
        assert rewards is not None
        trainer = self._trainer
        is_training = trainer.model.training
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        start, rows = trainer.accelerator.process_index * len(inputs), []
        for place, example in enumerate(inputs, start):
            group = f"g{self._num_generated}.{place // size}"
            rows.append(
                _ScoredCompletion(
                    env=str(example.get("env_name", self._env_name)),
                    example=str(example.get("example_id", "")),
                    group=group,
                    rollout=f"{group}-r{place % size}",
                    reward=float(rewards[place]),
                    policy_version=trainer.state.global_step,
                )
            )
        self._num_generated += 1
        return rows

    def computed(self, logprobs: Tensor, entropy: Tensor | None) -> None:
        """Keeps the values of a forward pass; the last pass before the loss is the loss's own."""
        self._logprobs, self._entropy = logprobs, entropy

    def trained(self, inputs: dict[str, Any], loss: Tensor) -> None:
        logprobs, entropy = self._logprobs, self._entropy
        self._logprobs = self._entropy = None
        assert self._recorder is not None and logprobs is not None
        self._loss = self._loss + loss.detach()
        rows: list[_ScoredCompletion] = inputs[_ROWS]
        mask = inputs["completion_mask"]
        old = inputs.get("old_per_token_logps")
        self._recorder.add(
            token_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            attention_mask=torch.cat([inputs["prompt_mask"], mask], dim=1),
            loss_mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
            inference_logprobs=logprobs if old is None else old,
            trainer_logprobs=logprobs,
            entropy=entropy,
            advantages=inputs["advantages"],
            rewards=[row.reward for row in rows],
            temperature=self._trainer.args.temperature,
            policy_version=[row.policy_version for row in rows],
            env_name=[row.env for row in rows],
            group_id=[row.group for row in rows],
            rollout_id=[row.rollout for row in rows],
            example_id=[row.example for row in rows],
        )
        self._rewards_of_step += [row.reward for row in rows]


_WRAPPED = (
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


def _check_methods(trainer: type) -> None:
    bases = [base for base in trainer.__mro__ if base is not ExportsTokens]
    missing = [name for name in _WRAPPED if not any(name in vars(base) for base in bases)]
    if missing:
        raise ConfigError(
            f"{trainer.__name__} cannot export: TRL {trl.__version__} has no {', '.join(missing)}; the "
            "tested version is 1.16"
        )


def _precision_of(trainer: Any) -> TrainerPrecision:
    """Returns the precision of the trainer's forward: that of autocast, else that of the weights."""
    if trainer.args.bf16 or trainer.model.dtype == torch.bfloat16:
        return "bfloat16"
    return "float16" if trainer.args.fp16 or trainer.model.dtype == torch.float16 else "float32"


def _start_of(trainer: Any) -> str | None:
    """The folder or hub name that the model was loaded from, if it was; an adapter starts from its base."""
    return getattr(trainer.model.config, "_name_or_path", "") or None
