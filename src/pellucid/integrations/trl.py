"""TRL's GRPO trainer, with every token that it trains exported.

    from pellucid.integrations.trl import ExportingGRPOTrainer

    trainer = ExportingGRPOTrainer(…as GRPOTrainer…, export_dir="outputs/trl")
    trainer.train()

Nothing of the training changes. What is recorded is what TRL's loss read: its batches after they were
shuffled and split, the logprobs and entropies of its own forward, its advantages, and the old logprobs that
ratios are taken against (its own, where TRL takes none because it trains on its samples at once). Losses and
clip decisions of single tokens are not to be had from TRL; they are computed from these values by the
built-in loss that TRL's settings amount to (`translate`), and `replay` holds their mean to the loss that
TRL optimised.

Tested with TRL 1.16: the methods that are wrapped here are not part of its public interface.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from pellucid.config import (
    CispoLossConfig,
    ExportFormat,
    GspoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    Reduction,
    TrainerPrecision,
)
from pellucid.config.tools import RecordedConfig
from pellucid.errors import ConfigError, MissingPackageError
from pellucid.integrations.recorder import TokenRecorder

try:
    import trl
    from trl import GRPOTrainer
except ImportError as error:
    raise MissingPackageError(
        f"pellucid.integrations.trl needs TRL, which cannot be imported ({error}); run "
        "`pip install 'pellucid[trl]'`"
    ) from error

_ROWS = "exported_rows"
"""Our key in TRL's batches, for a dict per completion: further arguments of `TokenRecorder.add`. TRL shuffles
and splits lists along with the tensors."""


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

    def rows(self, inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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
                {
                    "env_name": str(example.get("env_name", self._env_name)),
                    "example_id": str(example.get("example_id", "")),
                    "group_id": group,
                    "rollout_id": f"{group}-r{place % size}",
                    "rewards": float(rewards[place]),
                    "policy_version": trainer.state.global_step,
                }
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
        rows: list[dict[str, Any]] = inputs[_ROWS]
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
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
            temperature=self._trainer.args.temperature,
            **columns,
        )
        self._rewards_of_step += [row["rewards"] for row in rows]


_CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")


@dataclass(frozen=True, slots=True)
class Translation:
    loss: LossConfig | None
    """None: each token's loss is computed otherwise, for the reason in `no_loss`."""

    no_loss: str = ""
    no_sum: str = ""
    """Why the optimised loss is not the mean of these token losses; empty if it is."""


def translate(settings: Any, *, num_processes: int, has_aux_loss: bool) -> Translation:
    """Maps the settings of a `GRPOConfig` to a built-in loss, and names those that no built-in loss covers.

    loss_type               ours                          its mean
    dapo (TRL's default)    ppo_clip                      over tokens, if a generation batch is one step
    grpo                    ppo_clip                      over sequences
    bnpo                    ppo_clip                      over tokens, if the step is one micro batch
    dr_grpo, luspo          ppo_clip                      neither: the sum is not compared
    cispo                   cispo without a lower bound   as dapo
    any but cispo, with importance_sampling_level = "sequence": gspo
    """
    if reason := next(_other_tokens(settings), ""):
        return Translation(None, no_loss=f"TRL was run with {reason}")
    reason = next(_other_mean(settings, num_processes, has_aux_loss), "")
    return Translation(_loss(settings), no_sum=f"TRL was run with {reason}" if reason else "")


def _loss(settings: Any) -> LossConfig:
    low = settings.epsilon
    high = low if settings.epsilon_high is None else settings.epsilon_high
    reduction: Reduction = "sequence" if settings.loss_type == "grpo" else "token"
    if settings.loss_type == "cispo":
        return CispoLossConfig(type="cispo", clip_low=1.0, clip_high=high - 1)
    low = min(low, 1.0)  # a ratio is never below 0
    if settings.importance_sampling_level == "sequence":
        return GspoLossConfig(type="gspo", clip_low=low, clip_high=high, reduction=reduction)
    return PpoClipLossConfig(type="ppo_clip", clip_low=low, clip_high=high, reduction=reduction)


def _other_tokens(settings: Any) -> Iterator[str]:
    """Yields the settings by which TRL's loss of a token differs from the built-in one."""
    kind, high = settings.loss_type, settings.epsilon_high
    if kind not in (*_CLIPPED, "cispo"):
        yield f"loss_type = {kind!r}, which is none of the built-in losses"
    if kind == "cispo" and settings.importance_sampling_level == "sequence":
        yield "loss_type = 'cispo' and one ratio per sequence"
    if kind == "cispo" and (settings.epsilon if high is None else high) < 1:
        yield f"loss_type = 'cispo' and epsilon_high = {high}, which bounds the weights below 1"
    if settings.beta:
        yield f"beta = {settings.beta}: a KL to the reference model"
    if settings.delta is not None and kind in _CLIPPED:
        yield f"delta = {settings.delta}: a second bound of the ratio"
    if settings.top_entropy_quantile < 1:
        yield f"top_entropy_quantile = {settings.top_entropy_quantile}: tokens of low entropy have no loss"
    if settings.off_policy_mask_threshold is not None:
        yield f"off_policy_mask_threshold = {settings.off_policy_mask_threshold}"
    if settings.use_vllm and settings.vllm_importance_sampling_correction:
        yield "vllm_importance_sampling_correction: a weight for the difference from vLLM's logprobs"


def _other_mean(settings: Any, num_processes: int, has_aux_loss: bool) -> Iterator[str]:
    kind, num_micro_batches = settings.loss_type, settings.gradient_accumulation_steps
    if kind == "dr_grpo":
        yield "loss_type = 'dr_grpo', which divides by the longest possible completions"
    if kind == "luspo":
        yield "loss_type = 'luspo', which adds up the tokens of a sequence"
    if kind == "bnpo" and num_micro_batches * num_processes > 1:
        yield "loss_type = 'bnpo', which takes the mean of the micro batches' means"
    if kind in ("dapo", "cispo") and settings.steps_per_generation != num_micro_batches:
        yield (
            f"loss_type = {kind!r} and steps_per_generation = {settings.steps_per_generation}, which divides "
            "by the mean number of tokens over the steps of a generation batch"
        )
    if kind == "grpo" and settings.mask_truncated_completions:
        yield "mask_truncated_completions, which counts sequences without a loss in the mean"
    if settings.entropy_coef or settings.use_adaptive_entropy:
        yield "an entropy bonus beside the losses of the tokens"
    if has_aux_loss:
        yield "a load-balancing loss beside the losses of the tokens"


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
