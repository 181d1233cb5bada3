"""A task of peers.py with TRL's GRPO trainer; run by peers.py, in TRL's environment.

    python -m benchmarks.trl_grpo benchmarks/peers.toml MODEL CURVE.json --seed 0 --target 0.9

Task, algorithm and optimizer are those of the file that pellucid trains with. Beyond it, settings of a
careful user without a GPU: float32, one process, no gradient checkpointing, no reference model, nothing saved
or logged on the way; what `peers.py` tries out (`--threads`, `--steps-per-generation`, `--num-iterations`)
is given. The examples are those that pellucid's environment gives, in the same order, and
so is the reward.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.curve import Curve
from pellucid.config import PpoClipLossConfig, RLConfig
from pellucid.config.parse import parse
from pellucid.data.tokenizer import end_of_turn_ids
from pellucid.orchestrator.environment import Score, SingleTurnEnvironment, load_environment

MAX_STEPS = 1000


class Watch(TrainerCallback):
    """Takes the time of sampling and training, and stops when the task is learned or the time is over."""

    def __init__(
        self, curve: Curve, called: float, num_samples: int, is_over: Callable[[Curve], bool]
    ) -> None:
        """`called`: when the command was given; `num_samples`: of an optimizer step."""
        self.curve = curve
        self.prompts: dict[int, list[int]] = {}
        """Token ids of each example's prompt, as they were given to the model."""
        self._started = 0.0
        self._called = called
        self._num_samples = num_samples
        self._is_over = is_over
        self._asked: list[list[int]] = []

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        self._started = time.time()
        self.curve.startup_s = self._started - self._called

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the model's `generate`."""

        def timed(**inputs: Any) -> Any:
            started = time.perf_counter()
            output = generate(**inputs)
            self.curve.sampling.seconds += time.perf_counter() - started
            rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
            self._asked = [ids[mask].tolist() for ids, mask in rows]
            return output

        return timed

    def scored(self, indices: list[int], completions: list[list[int]], rewards: list[float]) -> None:
        """Takes what was generated at once, which may be enough for several steps."""
        scored_s = time.time() - self._started
        self.prompts |= dict(zip(indices, self._asked, strict=True))
        self.curve.sampling.tokens += sum(map(len, completions))
        for start in range(0, len(rewards), self._num_samples):
            step = rewards[start : start + self._num_samples]
            self.curve.points.append((scored_s, sum(step) / len(step)))

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        curve = self.curve
        curve.num_trained = state.global_step
        curve.trained_s = time.time() - self._started
        curve.training.seconds = curve.trained_s - curve.sampling.seconds
        tokens_per_step = curve.sampling.tokens / len(curve.points)
        curve.training.tokens = round(tokens_per_step * curve.num_trained)
        control.should_training_stop = self._is_over(curve)
        return control


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", help="what pellucid trains with")
    parser.add_argument("model")
    parser.add_argument("curve", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=None)
    parser.add_argument("--steps", type=int, default=MAX_STEPS)
    parser.add_argument("--max-s", type=float, default=600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps-per-generation", type=int, default=1)
    parser.add_argument("--num-iterations", type=int, default=1)
    parser.add_argument("--called", type=float, default=time.time(), help="when the command was given")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    config = parse(RLConfig, ["@", options.file], prog="rl").config
    settings = grpo_settings(
        config,
        options.curve.parent / "trl",
        seed=options.seed,
        steps_per_generation=options.steps_per_generation,
        num_iterations=options.num_iterations,
    )
    (env_config,) = config.orchestrator.env
    environment = load_environment(env_config, seed=options.seed)
    assert isinstance(environment, SingleTurnEnvironment)
    num_examples = config.orchestrator.batch_size // config.orchestrator.rollouts_per_example
    num_rows = num_examples * min(MAX_STEPS, options.steps + options.steps_per_generation)
    examples = [environment.example(index) for index in range(num_rows)]
    rows = [{"prompt": example.messages, "place": place} for place, example in enumerate(examples)]

    def is_over(curve: Curve) -> bool:
        is_learned = options.target is not None and curve.reached(options.target) is not None
        return is_learned or curve.num_trained >= options.steps or curve.trained_s > options.max_s

    watch = Watch(Curve("TRL", options.seed), options.called, config.orchestrator.batch_size, is_over)

    def reward(
        completions: list[Any], completion_ids: list[list[int]], place: list[int], **columns: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        pairs = zip(place, texts, strict=True)
        scores = [environment.reward(examples[index], text) for index, text in pairs]
        rewards = [_checked(score).reward for score in scores]
        watch.scored(place, completion_ids, rewards)
        return rewards

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    assert end_of_turn_ids(tokenizer) == [tokenizer.eos_token_id], "the two would end replies at other tokens"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[watch],
    )
    trainer.model.generate = watch.timed(trainer.model.generate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    watch.curve.save(options.curve)
    options.curve.with_suffix(".prompts").write_text(json.dumps(watch.prompts))


def grpo_settings(
    config: RLConfig,
    folder: Path,
    *,
    seed: int,
    steps_per_generation: int,
    num_iterations: int,
) -> GRPOConfig:
    """TRL's settings for the algorithm and optimizer of `config`; a step is one micro batch."""
    batch_size, optim, loss = config.orchestrator.batch_size, config.trainer.optim, config.trainer.loss
    assert isinstance(loss, PpoClipLossConfig) and config.orchestrator.advantage.type == "grpo_std"
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=batch_size,
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        num_generations=config.orchestrator.rollouts_per_example,
        shuffle_dataset=False,
        max_completion_length=config.orchestrator.sampling.max_tokens,
        temperature=config.orchestrator.sampling.temperature,
        loss_type="dapo",
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        beta=0.0,
        scale_rewards="group",
        learning_rate=optim.lr,
        lr_scheduler_type=config.trainer.scheduler.type,
        warmup_steps=config.trainer.scheduler.warmup_steps,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        max_grad_norm=optim.max_norm,
        max_steps=MAX_STEPS,
        logging_steps=MAX_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _checked(score: Any) -> Score:
    assert isinstance(score, Score), "only rewards that are computed at once are compared"
    return score


if __name__ == "__main__":
    main()
