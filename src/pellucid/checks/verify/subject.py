"""What is verified: the user's trainer, an engine beside it, and samples that the engine drew."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pellucid.config import TrainerRunConfig, VerifyConfig
from pellucid.data import Completion, TokenTable, TrainingSample, join_experts
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import DataError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.model import Policy, load_policy
from pellucid.model.tiny import make_tiny_model
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.environment import load_environment
from pellucid.trainer.build import build_run
from pellucid.trainer.run import Run

NUM_GROUPS, GROUP_SIZE = 4, 3
MAX_TOKENS = 48


class _NoBatches:
    def next(self, step: int) -> TokenTable:
        raise DataError("nothing is received while a run is verified")

    def release_before(self, step: int) -> None:
        """Nothing is kept."""


@dataclass
class Subject:
    config: VerifyConfig
    folder: Path
    """For what the checks write; gone afterwards."""

    run: Run
    engine: Engine
    served: Policy
    """The engine's."""

    tokenizer: Any
    prompts: list[list[int]]
    samples: list[TrainingSample]

    @property
    def temperature(self) -> float:
        return self.config.orchestrator.sampling.temperature

    @property
    def table(self) -> TokenTable:
        return TokenTable.from_samples(self.samples)

    def sample(self, seed: int = 0) -> list[TrainingSample]:
        """Groups of ragged completions, at the run's temperature."""
        generator = random.Random(seed)
        longest = min(MAX_TOKENS, self.config.orchestrator.sampling.max_tokens)
        samples: dict[int, TrainingSample] = {}
        requests = []
        for group, prompt in enumerate(self.prompts):
            for member in range(GROUP_SIZE):
                index = group * GROUP_SIZE + member
                params = SamplingParams(
                    temperature=self.temperature,
                    max_tokens=generator.randint(1, longest),
                    seed=generator.randrange(2**31),
                )
                keep = partial(self._keep, samples, index, prompt, generator.uniform(-1, 1))
                requests.append(Request(prompt, params, Account(), keep))
        run_to_end(self.engine, requests)
        return [samples[index] for index in sorted(samples)]

    def _keep(
        self,
        samples: dict[int, TrainingSample],
        index: int,
        prompt: Sequence[int],
        advantage: float,
        completion: Completion,
    ) -> None:
        samples[index] = TrainingSample.from_turn(
            prompt,
            completion.token_ids,
            completion.logprobs,
            completion_mask=[position % 5 != 3 for position in range(len(completion.token_ids))],
            env_name=f"env-{index % 2}",
            run_id="verify",
            group_id=f"g{index // GROUP_SIZE}",
            rollout_id=f"r{index}",
            temperature=np.float32(self.temperature),
            reward=np.float32(advantage + 1),
            advantage=np.float32(advantage),
            routed_experts=join_experts([completion.routed_experts]),
        )


@contextmanager
def opened(config: VerifyConfig) -> Iterator[Subject]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        if config.model.name == config.model.DEMO:
            make_tiny_model(folder / "demo", num_kv_heads=2)
            model = config.model.model_copy(update={"name": str(folder / "demo")})
            config = config.model_copy(update={"model": model})
        if (lora := config.model.lora) is not None:  # what is drawn at random cannot be compared
            model = config.model.model_copy(update={"lora": lora.model_copy(update={"dropout": 0.0})})
            config = config.model_copy(update={"model": model})
        trainer = config.trainer.model_copy(
            update={"experimental": config.trainer.experimental.model_copy(update={"token_export": None})}
        )
        quiet = config.model_copy(update={"output_dir": folder / "run", "trainer": trainer, "resume": False})
        part = quiet.part(TrainerRunConfig, monitors={})
        assert isinstance(part, TrainerRunConfig)
        run = build_run(part, _NoBatches(), None, [])
        tokenizer = load_tokenizer(config.model.name)
        prompts = _prompts(config, tokenizer)
        longest = max(map(len, prompts)) + MAX_TOKENS
        served = load_policy(config.model)
        recorded = config.trainer.enable_router_replay
        engine = Engine(served, num_slots=8, max_length=longest, record_experts=recorded)
        subject = Subject(config, folder, run, engine, served, tokenizer, prompts, [])
        try:
            subject.samples = subject.sample()
            yield subject
        finally:
            run.close()


def _prompts(config: VerifyConfig, tokenizer: Any) -> list[list[int]]:
    """Of the run's environments in turn, as the orchestrator would send them, cut to half of `seq_len`."""
    chat = ChatTemplate(tokenizer)
    environments = [load_environment(env, config.seed) for env in config.orchestrator.env]
    prompts = []
    for index in range(NUM_GROUPS):
        example = environments[index % len(environments)].example(index)
        prompts.append(chat.prompt(example.messages).token_ids[: config.trainer.model.seq_len // 2])
    return prompts
