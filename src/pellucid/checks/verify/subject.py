"""The subject of verification: the user's trainer, an engine beside it, and samples that the engine drew."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from pellucid.config import TrainerRunConfig, VerifyConfig
from pellucid.config.base import Section
from pellucid.config.orchestrator import EnvConfig
from pellucid.config.trainer import TokenExportConfig
from pellucid.data import Completion, RecordedExperts, TokenTable, TrainingSample, join_experts
from pellucid.data.images import urls_of
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ConfigError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.ledger import Journal, Stage
from pellucid.model import Policy, load_policy
from pellucid.model.tiny import make_tiny_model
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.environment import load_environment
from pellucid.trainer.batches import BatchSource, NoBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run

NUM_GROUPS, GROUP_SIZE = 4, 3
MAX_TOKENS = 48

S = TypeVar("S", bound=Section)


def updated(section: S, **changes: Any) -> S:
    """Returns settings with some of them changed; a mapping changes keys of a section inside."""
    flat = {
        key: updated(getattr(section, key), **value) if isinstance(value, Mapping) else value
        for key, value in changes.items()
    }
    return section.model_copy(update=flat)


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
        """Samples groups of ragged completions, at the run's temperature."""
        generator = random.Random(seed)
        longest = min(MAX_TOKENS, self.config.orchestrator.sampling.max_tokens)
        drawn: dict[int, Completion] = {}
        requests, advantages = [], []
        for index in range(len(self.prompts) * GROUP_SIZE):
            params = SamplingParams(
                temperature=self.temperature,
                max_tokens=generator.randint(1, longest),
                seed=generator.randrange(2**31),
            )
            advantages.append(generator.uniform(-1, 1))
            keep = partial(drawn.__setitem__, index)
            requests.append(Request(self.prompts[index // GROUP_SIZE], params, Account(), keep))
        run_to_end(self.engine, requests)
        return [self._to_sample(index, drawn[index], advantages[index]) for index in sorted(drawn)]

    def _to_sample(self, index: int, completion: Completion, advantage: float) -> TrainingSample:
        return TrainingSample.from_turn(
            self.prompts[index // GROUP_SIZE],
            completion.token_ids,
            completion.logprobs,
            completion_mask=[position % 5 != 3 for position in range(len(completion.token_ids))],
            policy_versions=[version for version, count in completion.policy_versions for _ in range(count)],
            env_name=f"env-{index % 2}",
            run_id="verify",
            group_id=f"g{index // GROUP_SIZE}",
            rollout_id=f"r{index}",
            temperature=np.float32(self.temperature),
            reward=np.float32(advantage + 1),
            advantage=np.float32(advantage),
            routed_experts=join_experts([RecordedExperts.of(completion.routed_experts)]),
            expert_weights=join_experts([RecordedExperts.of(completion.expert_weights)]),
        )

    def draw(
        self, num_tokens: int, stop_token_ids: Sequence[int] = (), *, temperature: float | None = None
    ) -> list[Completion]:
        """Samples that many tokens after the first prompt, each on its own; by default at the run's
        temperature."""
        drawn: list[Completion] = []
        requests = []
        for seed in range(num_tokens):
            params = SamplingParams(
                temperature=self.temperature if temperature is None else temperature,
                max_tokens=1,
                seed=seed,
                stop_token_ids=list(stop_token_ids),
            )
            requests.append(Request(self.prompts[0], params, Account(), drawn.append))
        run_to_end(self.engine, requests)
        return drawn

    def linger(self) -> None:
        """Leaves a request of every prompt in flight; the next `sample` waits for them, too."""
        params = SamplingParams(temperature=self.temperature, max_tokens=MAX_TOKENS, seed=0)
        for prompt in self.prompts:
            self.engine.submit(Request(prompt, params, Account(), lambda completion: None))
        self.engine.step()


def build_quiet_run(
    config: VerifyConfig,
    folder: Path,
    ranks: Ranks | None = None,
    *,
    batches: BatchSource | None = None,
    records: bool = False,
    resume: bool = False,
) -> Run:
    """Builds the user's trainer, which writes nothing outside the folder and draws nothing at random.

    It computes in float32, where rounding hides least, unless `ranks` say otherwise.
    `records`: it exports its tokens and publishes its weights there. `resume`: it goes on with such a record.
    """
    if config.model.lora is not None:
        config = updated(config, model={"lora": {"dropout": 0.0}})
    export = TokenExportConfig(own_process=False) if records else None
    trainer = {"experimental": {"token_export": export}}
    quiet = updated(config, output_dir=folder / "run", resume=resume, trainer=trainer)
    part = quiet.part(TrainerRunConfig, monitors={})
    assert isinstance(part, TrainerRunConfig)
    path = part.output_dir / "ledger" / "trainer.jsonl"
    journal = Journal(path, Stage.TRAINER, resume=resume) if records else None
    return build_run(part, batches or NoBatches(), journal, [], ranks or Ranks(), publishes=records)


@contextmanager
def opened(config: VerifyConfig) -> Iterator[Subject]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        if config.model.name == config.model.DEMO:
            make_tiny_model(folder / "demo", num_kv_heads=2)
            config = updated(config, model={"name": str(folder / "demo")})
        tokenizer = load_tokenizer(config.model.name)
        prompts = _prompts(config, tokenizer)
        ranks = replace(Ranks.alone(config.trainer), keeps_float32=True)
        run = build_quiet_run(config, folder, ranks)
        run.policy.compute_dtype = None  # float32, which `check_precision` alone leaves
        longest = max(map(len, prompts)) + MAX_TOKENS
        served = load_policy(config.model, max_length=max(longest, config.trainer.model.seq_len))
        engine = Engine(
            served,
            num_slots=8,
            max_length=longest,
            record_experts=config.trainer.enable_router_replay,
            record_expert_weights=config.trainer.replay_expert_weights,
        )
        subject = Subject(config, folder, run, engine, served, tokenizer, prompts, [])
        try:
            subject.samples = subject.sample()
            yield subject
        finally:
            run.close()


def _prompts(config: VerifyConfig, tokenizer: Any) -> list[list[int]]:
    """Makes prompts of the environments in turn, as the orchestrator does, cut to half of `seq_len`; raises
    ConfigError for those with images."""
    chat = ChatTemplate(tokenizer)
    environments = [load_environment(env, config.seed) for env in config.orchestrator.env]
    prompts = []
    for index in range(NUM_GROUPS):
        number = index % len(environments)
        example = environments[number].example(index)
        if urls_of(example.messages):
            raise ConfigError(
                f"{EnvConfig.KEY} {config.orchestrator.env[number].label!r} shows images, and verify checks "
                "text alone; name an environment of text for it, such as reverse-text, or run "
                "`pellucid verify --model NAME`"
            )
        prompts.append(chat.prompt(example.messages).token_ids[: config.trainer.model.seq_len // 2])
    return prompts
