"""The task of examples/reverse_text with TRL's GRPO trainer; run by peers.py, in TRL's environment.

    python -m benchmarks.trl_grpo MODEL CURVE.json --seed 0 --target 0.9

Settings of a careful user without a GPU: float32, all cores in one process, the whole batch in one micro
batch, no gradient checkpointing, no reference model, nothing saved or logged on the way. The words are those
that pellucid's environment gives, in the same order, and so is the reward.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.curve import Curve
from pellucid.config import EnvConfig
from pellucid.orchestrator.built_in import ReverseText
from pellucid.orchestrator.environment import load_environment

NUM_WORDS, GROUP_SIZE, MAX_STEPS = 16, 8, 1000


class Watch(TrainerCallback):
    """Starts the clock, and stops the training when the task is learned or the time is over."""

    def __init__(self, curve: Curve, called: float, target: float, max_s: float) -> None:
        self.curve = curve
        self.started = 0.0
        self._called = called
        self._target = target
        self._max_s = max_s

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        self.started = time.time()
        self.curve.startup_s = self.started - self._called

    def scored(self, rewards: list[float]) -> None:
        self.curve.points.append((time.time() - self.started, sum(rewards) / len(rewards)))

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        is_over = time.time() - self.started > self._max_s
        control.should_training_stop = is_over or self.curve.reached(self._target) is not None
        return control


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("curve", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--max-s", type=float, default=600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--called", type=float, default=time.time(), help="when the command was given")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    args = {"min_letters": 4, "max_letters": 8}
    words = load_environment(EnvConfig(id="reverse-text", args=args), seed=options.seed)
    assert isinstance(words, ReverseText)
    examples = [words.example(index) for index in range(NUM_WORDS * MAX_STEPS)]
    rows = [{"prompt": example.messages, "place": place} for place, example in enumerate(examples)]
    watch = Watch(Curve("TRL", options.seed), options.called, options.target, options.max_s)

    def reward(completions: list[Any], place: list[int], **columns: Any) -> list[float]:
        pairs = zip(completions, place, strict=True)
        rewards = [words.reward(examples[index], reply[0]["content"]).reward for reply, index in pairs]
        watch.scored(rewards)
        return rewards

    settings = GRPOConfig(
        output_dir=str(options.curve.parent / "trl"),
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=NUM_WORDS * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        shuffle_dataset=False,
        max_completion_length=12,
        temperature=1.0,
        loss_type="dapo",
        epsilon=0.2,
        beta=0.0,
        scale_rewards="group",
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=MAX_STEPS,
        logging_steps=MAX_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    watch.curve.save(options.curve)


if __name__ == "__main__":
    main()
