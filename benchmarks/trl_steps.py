"""Training steps of TRL's GRPO trainer, driven by its own loop, on samples that it is handed.

Only sampling and scoring are left out: `_generate_and_score_completions` gives the prepared batch as TRL
itself would lay it out, prompts padded on the left and completions on the right. Everything else is TRL's:
shuffling, forward, loss, backward, clipping, its default optimizer (fused AdamW), metrics. Its settings are
those of a careful user: float32, no gradient checkpointing, the whole batch in one micro batch.
`loss_type="dapo"` is the clipped surrogate divided by the completion tokens of the batch.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.padding import padded
from benchmarks.training import CLIP, LR, MAX_NORM, Steps
from pellucid.data import TokenTable


class _Prepared(GRPOTrainer):  # type: ignore[misc]
    def __init__(self, batch: dict[str, Tensor], **options: Any) -> None:
        super().__init__(**options)
        self._batch = batch

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self._batch)


class _Timed(TrainerCallback):  # type: ignore[misc]
    """Takes the time of each step; after it, it is somebody else's turn."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.steps = Steps()
        self._between = between
        self._started = 0.0

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        self.steps.times_s.append(time.perf_counter() - self._started)
        self._between()

    def on_log(self, *arguments: Any, logs: Mapping[str, float], **keywords: Any) -> None:
        self.steps.reports.append(logs)


def train_with_trl(
    model: Path, table: TokenTable, folder: Path, *, num_steps: int, between: Callable[[], None]
) -> Steps:
    """`between` is called after each step."""
    num_rows = table.num_sequences
    timed = _Timed(between)
    settings = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=num_rows,
        num_generations=num_rows,
        max_completion_length=int(table.sampled_lengths.max()),
        loss_type="dapo",
        epsilon=CLIP,
        beta=0.0,
        temperature=1.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_NORM,
        max_steps=num_steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = _Prepared(
        padded(table),
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=_no_reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "never sampled from"}] * num_rows),
        callbacks=[timed],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return timed.steps


def _no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    raise AssertionError("the samples have their advantages")
