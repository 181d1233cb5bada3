"""The way from a conversation to published weights, held stage by stage to the oracle.

    scenario ──> Orchestrator ──> bytes ──> Run, with its export ──> weights/step_N
        │                                           │
        └──> oracle: from what the client sampled ──┴──> the first stage that differs is named

The oracle knows what was sampled, the settings, and which rollouts are in which batch; it computes the rest.
After each step it goes on from the trainer's own weights, so that every stage is held by itself and rounding
does not add up over the steps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

import pellucid.export
from pellucid.checks.finding import Finding
from pellucid.checks.oracle import (
    AdamWState,
    Conversation,
    ReferenceModel,
    ReferenceSequence,
    ReferenceStep,
    Sampled,
    adamw_step,
    advantages_of,
    clip_factor,
    expected_samples,
    learning_rate,
    ratios_of,
    truncated,
)
from pellucid.checks.verify.scenario import (
    BROKEN,
    DOUBT,
    ENVIRONMENTS,
    NUM_STEPS,
    RESUMED_AT,
    TOOL_RESPONSE,
    Played,
    after,
    fragile_reward_of,
    play,
    reward_of,
)
from pellucid.checks.verify.subject import Subject, build_quiet_run
from pellucid.config import CustomAdvantageConfig, VerifyConfig
from pellucid.data import TokenTable
from pellucid.ledger import State
from pellucid.trainer.loop import accumulate
from pellucid.trainer.optimizer import Update
from pellucid.trainer.resume import restore
from pellucid.trainer.run import Run
from pellucid.transport.weights import weights_folder

EPS = float(np.finfo(np.float32).eps)
FLOATS = (
    "trainer_logprobs",
    "inference_logprobs",
    "entropy",
    "token_loss",
    "log_importance_ratio",
    "importance_ratio",
    "mismatch_kl",
    "prob_delta",
)
MAX_PARAMETERS = 500_000_000
"""A larger model is not loaded once more in float64."""

STAGES: Mapping[str, str] = {
    "prompts": "chat template → token ids of a prompt",
    "examples": "stream of examples → groups: each is attempted, also those of a run that was stopped",
    "samples": "turns → token ids, trainable and sampled tokens, logprobs, versions of a sample",
    "rewards": "score → reward of its own sample",
    "advantages": "rewards of a group → advantages",
    "batches": "groups → batches: whole, each rollout once, nothing without a signal",
    "truncation": "samples → sequences of at most seq_len tokens",
    "denominator": "trainable tokens of the step",
    "logprobs": "token ids → the trainer's logprobs",
    "entropy": "token ids → entropy",
    "ratios": "logprobs → ratios and mismatch KL",
    "masks": "ratios and advantages → trust region",
    "token losses": "the loss of each token, weighted",
    "loss": "token losses → the loss of the step",
    "gradient": "loss → gradient",
    "norm": "gradient → its norm",
    "learning rate": "step → learning rate",
    "update": "gradient → clipping → AdamW → weights",
    "published": "weights → weights/step_N",
    "checkpoint": "checkpoint → weights of the trainer that goes on from it",
}
"""Stages in the order in which a token meets them."""


@dataclass
class Differences:
    """The largest difference of each stage, in units of what rounding explains."""

    worst: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, excess: float, where: str) -> None:
        if not excess <= self.worst.get(stage, -1.0):
            self.worst[stage], self.where[stage] = excess, where

    def same(self, stage: str, expected: object, found: object, where: str) -> None:
        """Notes whether two values are equal; nothing rounds here."""
        equal = bool(expected == found)
        self.add(
            stage, 0.0 if equal else math.inf, where if equal else f"{where}: {found!r}, not {expected!r}"
        )

    def near(self, stage: str, expected: Any, found: Any, within: Any, where: str) -> None:
        """Notes by how many times the bound `within` the values differ, NaN being equal to NaN."""
        own, other = np.atleast_1d(np.asarray(expected, float)), np.atleast_1d(np.asarray(found, float))
        if own.shape != other.shape:
            self.add(stage, math.inf, f"{where}: shape {other.shape}, not {own.shape}")
            return
        gap = np.where(np.isnan(own) & np.isnan(other), 0.0, np.abs(own - other))
        excess = np.nan_to_num(gap / np.broadcast_to(within, own.shape), nan=math.inf)
        if excess.size:
            index = np.unravel_index(int(excess.argmax()), excess.shape)
            self.add(
                stage,
                float(excess[index]),
                f"{where}{[int(i) for i in index]}: {other[index]:.9g}, not {own[index]:.9g}",
            )

    def findings(self) -> Iterator[Finding]:
        failed = [stage for stage in STAGES if not self.worst.get(stage, 0.0) <= 1.0]
        for stage, what in STAGES.items():
            if stage in self.worst:
                order = "the first stage that differs" if failed[:1] == [stage] else "differs, too"
                yield Finding(
                    "oracle",
                    f"{stage}: {what}: largest difference ÷ what rounding explains",
                    self.worst[stage],
                    1.0,
                    f"{order}: {stage}, {self.where[stage]}",
                )


def check_oracle(subject: Subject) -> Iterator[Finding]:
    """Plays the scenario and trains on it for `NUM_STEPS` steps."""
    policy = subject.run.policy
    if sum(parameter.numel() for parameter in policy.parameters()) > MAX_PARAMETERS:
        return
    folder = Path(mkdtemp(dir=subject.folder))
    config = subject.config
    lora = config.model.lora
    model = ReferenceModel(
        config.model.name,
        trained_weights(subject.run),
        lora_scale=1.0 if lora is None else lora.alpha / lora.rank,
    )
    played = play(config, folder, subject.tokenizer, model)
    differences = Differences()
    script = Script(played, subject.tokenizer)
    script.check(differences)
    first = model.step(
        list(script.sequences(0, seq_len_of(script)).values()),
        config.trainer.loss.model_dump(),
        config.trainer.loss.reduction,
    )
    trainer = _trainer_config(config, script, first.grad_norm)
    oracle = _Oracle(script, model, differences)
    with closing(build_quiet_run(trainer, folder, batches=_Tables(script), records=True)) as run:
        oracle.train(run, range(RESUMED_AT))
        run.save_checkpoint()
        run.finish_checkpoint()
        weights = trained_weights(run)
    with closing(build_quiet_run(trainer, folder, batches=_Tables(script), records=True, resume=True)) as run:
        restore(run)
        for name, weight in trained_weights(run).items():
            same = torch.equal(weight, weights[name])
            differences.add("checkpoint", 0.0 if same else math.inf, f"{name} is not what it was")
        oracle.train(run, range(RESUMED_AT, NUM_STEPS))
    yield from differences.findings()


def trained_weights(run: Run) -> dict[str, Tensor]:
    """The parameters that a run trains, by the names in Hugging Face's or PEFT's files."""
    return {
        name.removeprefix("hf."): parameter.detach().clone()
        for name, parameter in run.trained.module.named_parameters()
    }


@dataclass(frozen=True)
class ScriptedRollout:
    """One rollout as it should be, from what the client sampled for it."""

    env_name: str
    turns: list[Sampled]
    reward: float
    samples: list[Conversation]


class Script:
    """The oracle's account of a scenario: every rollout, and every sequence of every step."""

    def __init__(self, played: Played, tokenizer: Any) -> None:
        self._config = played.config
        self._tables = [batch.table for batch in played.batches]
        self._settled = played.settled
        self._tokenizer = tokenizer
        turns: dict[str, list[Sampled]] = {}
        names: dict[str, str] = {}
        for request in played.requests:
            own = turns.setdefault(request.rollout_id, [])
            is_withdrawn = request.env_name == "tools" and len(own) == 2
            own.append(replace(request.sampled, is_trainable=not is_withdrawn))
            names[request.rollout_id] = request.env_name
        self.rollouts = {
            rollout_id: ScriptedRollout(
                names[rollout_id], own, self._reward(names[rollout_id], own), expected_samples(own)
            )
            for rollout_id, own in turns.items()
        }
        self.failed = {
            rollout_id
            for rollout_id, rollout in self.rollouts.items()
            if rollout.env_name == "fragile" and BROKEN in self._texts(rollout.turns)[0]
        }
        self.temperature = played.config.orchestrator.sampling.temperature
        self.longest_trained = max(
            int(table.lengths[table.trainable_lengths > 0].max()) for table in self._tables
        )

    def _reward(self, env_name: str, turns: Sequence[Sampled]) -> float:
        text = "".join(self._texts(turns)[:2])
        match env_name:
            case "flat":
                return 0.1
            case "fragile":
                return fragile_reward_of(text)
            case _:
                return reward_of(text)

    def _texts(self, turns: Sequence[Sampled]) -> list[str]:
        return [self._tokenizer.decode(turn.reply_ids, skip_special_tokens=True) for turn in turns]

    def check(self, differences: Differences) -> None:
        """Holds prompts, examples, samples, rewards, advantages and batches to what was sampled."""
        self._check_examples(differences)
        self._check_settled(differences)
        taken: Counter[str] = Counter()
        for step, table in enumerate(self._tables):
            found: dict[str, list[int]] = {}
            for row, rollout_id in enumerate(table["rollout_id"].tolist()):
                found.setdefault(rollout_id, []).append(row)
            taken.update(found.keys())
            for rollout_id, rows in found.items():
                where = f"step {step}, rollout {rollout_id}"
                self._check_prompts(differences, rollout_id, table["example_id"][rows[0]], where)
                self._check_samples(differences, rollout_id, table, rows, where)
            wanted = {
                member
                for group in {group_of(rollout_id) for rollout_id in found}
                for member in self._members(group)
                if self.advantage(member) != 0 or not self._config.orchestrator.drops_zero_advantages
            }
            differences.same("batches", sorted(wanted), sorted(found), f"step {step}: its rollouts")
        differences.same(
            "batches", {}, {k: n for k, n in taken.items() if n > 1}, "rollouts in several batches"
        )

    def _check_settled(self, differences: Differences) -> None:
        """Holds what was written down of all rollouts, also of those that came too late for a batch."""
        for each in self._settled:
            rollout_id, advantage = each["rollout_id"], each["advantage"]
            reason = each["reason"] if each["outcome"] == State.REJECTED else None
            differences.same("samples", None, reason, f"rollout {rollout_id}: why it was rejected")
            if advantage is not None and self._knows_advantages:
                expected = self.advantage(rollout_id)
                bound = 16 * EPS * max(1.0, abs(expected))
                differences.near("advantages", expected, advantage, bound, f"rollout {rollout_id}")

    def _check_examples(self, differences: Differences) -> None:
        """Looks for gaps: the examples of an environment are attempted from the first one on."""
        for name, kind in ENVIRONMENTS.items():
            first = {
                tuple(rollout.turns[0].prompt_ids)
                for rollout in self.rollouts.values()
                if rollout.env_name == name
            }
            prompts = [self._render(kind(seed=0).example(index).messages) for index in range(len(first))]
            missing = [index for index, prompt in enumerate(prompts) if tuple(prompt) not in first]
            differences.same("examples", [], missing, f"{name}: examples that nobody attempted")

    def _check_prompts(self, differences: Differences, rollout_id: str, example_id: str, where: str) -> None:
        rollout = self.rollouts[rollout_id]
        messages = ENVIRONMENTS[rollout.env_name](seed=0).example(int(example_id)).messages
        first, *later = rollout.turns
        differences.same("prompts", self._render(messages), list(first.prompt_ids), f"{where}, turn 0")
        for number, (turn, response) in enumerate(zip(later, (TOOL_RESPONSE, DOUBT), strict=False), 1):
            known = [*first.prompt_ids, *first.reply_ids]
            expected = known + self._after_reply(messages, known[-1], response)
            differences.same("prompts", expected, list(turn.prompt_ids), f"{where}, turn {number}")

    def _render(self, messages: Sequence[Any]) -> list[int]:
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _after_reply(self, messages: Sequence[Any], last: int, response: Any) -> list[int]:
        """Token ids between a reply, which ended in `last`, and the next one."""
        mark = "marked reply"
        text = self._tokenizer.apply_chat_template(
            after(messages, mark, response), add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self._tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"]
        return ids[1:] if ids[:1] == [last] else ids

    def _check_samples(
        self, differences: Differences, rollout_id: str, table: TokenTable, rows: Sequence[int], where: str
    ) -> None:
        rollout = self.rollouts[rollout_id]
        differences.same("samples", len(rollout.samples), len(rows), f"{where}: number of samples")
        for row, sample in zip(rows, rollout.samples, strict=False):
            tokens = slice(int(table.token_offsets[row]), int(table.token_offsets[row + 1]))
            sampled = slice(int(table.sampled_offsets[row]), int(table.sampled_offsets[row + 1]))
            chosen = [index for index, flag in enumerate(sample.is_sampled) if flag]
            own: dict[str, tuple[Sequence[Any], NDArray[Any]]] = {
                "token_ids": (sample.token_ids, table["token_ids"][tokens]),
                "loss_mask": (sample.is_trainable, table["loss_mask"][tokens]),
                "sampled": (sample.is_sampled, table["sampled"][tokens]),
                "inference_logprobs": (
                    [sample.logprobs[i] for i in chosen],
                    table["inference_logprobs"][sampled],
                ),
                "policy_versions": ([sample.versions[i] for i in chosen], table["policy_versions"][sampled]),
            }
            for name, (expected, found) in own.items():
                differences.same("samples", list(expected), found.tolist(), f"{where}, {name}")
            differences.same("rewards", np.float32(rollout.reward), table["reward"][row], where)
            differences.same("samples", rollout.env_name, table["env_name"][row], f"{where}, env_name")
            differences.same(
                "samples", np.float32(self.temperature), table["temperature"][row], f"{where}, temperature"
            )
            if self._knows_advantages:
                advantage = self.advantage(rollout_id)
                bound = 16 * EPS * max(1.0, abs(advantage))
                differences.near("advantages", advantage, table["advantage"][row], bound, where)

    @property
    def _knows_advantages(self) -> bool:
        """Whether the run's advantage function is one that the oracle has, too."""
        return not isinstance(self._config.orchestrator.advantage, CustomAdvantageConfig)

    def advantage(self, rollout_id: str) -> float:
        """The advantage of a rollout among its group, or the recorded one where a custom function made it."""
        if not self._knows_advantages:
            return float(self._recorded_advantages[rollout_id])
        members = self._members(group_of(rollout_id))
        own = [self.rollouts[member] for member in members]
        settings = self._config.orchestrator.advantage.model_dump()
        advantages = advantages_of(
            settings["type"],
            [each.reward for each in own],
            completion_tokens=[sum(len(turn.reply_ids) for turn in each.turns) for each in own],
            tool_tokens=[0 for _ in own],
            num_turns=[len(each.turns) for each in own],
            length_penalty=settings.get("length_penalty"),
        )
        return advantages[members.index(rollout_id)]

    @cached_property
    def _recorded_advantages(self) -> dict[str, float]:
        return {
            rollout_id: advantage
            for table in self._tables
            for rollout_id, advantage in zip(
                table["rollout_id"].tolist(), table["advantage"].tolist(), strict=True
            )
        }

    def _members(self, group: str) -> list[str]:
        """The rollouts of a group that an advantage compares: those that did not fail."""
        return [
            rollout_id
            for rollout_id in self.rollouts
            if group_of(rollout_id) == group and rollout_id not in self.failed
        ]

    def table(self, step: int) -> TokenTable:
        return self._tables[step]

    def sequences(self, step: int, seq_len: int) -> dict[tuple[str, int], ReferenceSequence]:
        """The sequences of a step, by rollout and number of the sample."""
        found = {}
        for rollout_id in dict.fromkeys(self._tables[step]["rollout_id"].tolist()):
            for number, whole in enumerate(self.rollouts[rollout_id].samples):
                sample = truncated(whole, seq_len)
                is_sampled = np.array(sample.is_sampled)
                found[rollout_id, number] = ReferenceSequence(
                    sample.token_ids,
                    np.array(sample.is_trainable),
                    np.array(sample.logprobs),
                    np.where(is_sampled, float(np.float32(self.advantage(rollout_id))), 0.0),
                    np.full(len(is_sampled), float(np.float32(self.temperature))),
                    group=group_of(rollout_id),
                )
        return found


def group_of(rollout_id: str) -> str:
    """`g4.1-r2` -> `g4.1`."""
    return rollout_id.rpartition("-")[0]


class _Tables:
    """The batches of a scenario as a source for the trainer."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def next(self, step: int) -> TokenTable:
        return self._script.table(step)

    def release_before(self, step: int) -> None:
        """They stay."""


def _trainer_config(config: VerifyConfig, script: Script, grad_norm: float) -> VerifyConfig:
    """The user's trainer, on sequences that are cut short and gradients that are clipped."""
    trainer = config.trainer
    return config.model_copy(
        update={
            "seq_len": seq_len_of(script),
            "max_steps": NUM_STEPS + 1,  # so that no checkpoint is due
            "trainer": trainer.model_copy(
                update={
                    "model": trainer.model.model_copy(update={"seq_len": seq_len_of(script)}),
                    "micro_batch_max_tokens": None,
                    "pad_to_multiple_of": 1,
                    "enable_router_replay": False,
                    "optim": trainer.optim.model_copy(
                        update={
                            "max_norm": min(trainer.optim.max_norm, 0.7 * grad_norm),
                            "weight_decay": max(trainer.optim.weight_decay, 0.01),
                        }
                    ),
                    "ckpt": trainer.ckpt.model_copy(update={"interval": NUM_STEPS + 2}),
                }
            ),
        }
    )


def seq_len_of(script: Script) -> int:
    """Shorter than the longest sample that trains by two tokens: its last reply is cut within."""
    return script.longest_trained - 2


@dataclass
class _Bounds:
    """What rounding in float32 explains, for a model and sequences of some length."""

    chain: int
    """Numbers that are added up on the way from a token to its logprob."""

    @classmethod
    def of(cls, model: torch.nn.Module, length: int) -> "_Bounds":
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        layers = sum(type(module).__name__.endswith("Attention") for module in model.modules())
        inputs = sum(matrix.shape[-1] for matrix in matrices)
        return cls(inputs + layers * length + max(len(matrix) for matrix in matrices))

    def logprob(self, scale: float) -> float:
        return 4 * math.sqrt(self.chain) * EPS * scale

    def gradient(self, num_tokens: int, scale: float) -> float:
        """Relative to the largest gradient: back through the model, summed over tokens with such logprobs."""
        return 4 * math.sqrt(2 * self.chain + num_tokens) * EPS + self.logprob(scale)


class _Oracle:
    """The oracle beside a trainer: its moments go on when the trainer is resumed."""

    def __init__(self, script: Script, model: ReferenceModel, differences: Differences) -> None:
        self._script = script
        self._model = model
        self._differences = differences
        self._state = AdamWState()

    def train(self, run: Run, steps: Iterable[int]) -> None:
        """Trains these steps, and holds all that comes of them to what should."""
        model, differences = self._model, self._differences
        bounds = _Bounds.of(run.policy, run.config.model.seq_len)
        for step in steps:
            sequences = self._script.sequences(step, run.config.model.seq_len)
            model.parameters = {name: value.double().cpu() for name, value in trained_weights(run).items()}
            loss = run.config.loss
            expected = model.step(list(sequences.values()), loss.model_dump(), loss.reduction)
            before = dict(model.parameters)
            observer = accumulate(run, run.next_batch(step))
            gradients = {
                name.removeprefix("hf."): torch.zeros_like(each) if each.grad is None else each.grad.clone()
                for name, each in run.trained.module.named_parameters()
            }
            update = run.update(observer)
            run.publish(step)
            run.finish(step, observer, update)
            _check_record(run.output_dir, step, sequences, expected, bounds, differences)
            _check_gradient(expected, gradients, bounds, differences, f"step {step}")
            _check_update(run, step, before, gradients, update, self._state, differences)
            _check_published(run, step, differences)


def _check_record(
    folder: Path,
    step: int,
    sequences: Mapping[tuple[str, int], ReferenceSequence],
    expected: ReferenceStep,
    bounds: _Bounds,
    differences: Differences,
) -> None:
    """Holds the exported tokens to the oracle's."""
    records = list(pellucid.export.open(folder).step(step))
    exported = {(str(record["rollout_id"]), tuple(record["token_ids"])): record for record in records}
    known = {
        (rollout_id, tuple(each.token_ids)): index
        for index, ((rollout_id, _), each) in enumerate(sequences.items())
        if each.trainable.any()
    }
    differences.same("truncation", sorted(known), sorted(exported), f"step {step}: exported sequences")
    total = rounding = 0.0
    for key, index in known.items():
        record = exported.get(key)
        if record is None:
            continue
        where = f"step {step}, rollout {key[0]}"
        each, own = list(sequences.values())[index], expected.losses[index]
        values = {name: _floats(record[name]) for name in FLOATS if record.get(name) is not None}
        differences.same("denominator", expected.denominator, record["denominator"], where)
        differences.same(
            "truncation", each.trainable.tolist(), list(record["loss_mask"]), f"{where}, loss_mask"
        )
        scale = max(math.log(2), float(np.abs(expected.logprobs[index]).max()))
        bound = bounds.logprob(scale)
        differences.near("logprobs", expected.logprobs[index], values["trainer_logprobs"], bound, where)
        differences.near("entropy", expected.entropies[index], values["entropy"], bound * scale, where)
        trained = {name: array[each.trainable] for name, array in values.items()}
        known_ratios = ratios_of(trained["trainer_logprobs"], trained["inference_logprobs"])
        for name, ratio in known_ratios.items():
            if name in trained:
                size = 1 + np.abs(ratio) + np.abs(known_ratios["log_importance_ratio"])
                differences.near("ratios", ratio, trained[name], 16 * EPS * size, f"{where}, {name}")
        decided = each.trainable if own.margin is None else each.trainable & (own.margin > 4 * bound)
        for name in ("is_masked", "is_masked_high", "is_masked_low"):
            mask = getattr(own, name)
            if mask is not None:
                found = np.array([bool(flag) for flag in record[name]])
                differences.same("masks", mask[decided].tolist(), found[decided].tolist(), f"{where}, {name}")
        weight = expected.weights[index]
        allowed = (2 * bound * np.abs(own.slope) + 16 * EPS * (1 + np.abs(own.loss))) * weight
        differences.near(
            "token losses",
            weight * own.loss[decided],
            values["token_loss"][decided],
            allowed[decided],
            where,
        )
        total += float(values["token_loss"].sum())
        rounding += float(allowed.sum())
    differences.near(
        "loss", expected.loss, total / expected.denominator, rounding / expected.denominator, f"step {step}"
    )


def _floats(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _check_gradient(
    expected: ReferenceStep,
    found: Mapping[str, Tensor],
    bounds: _Bounds,
    differences: Differences,
    where: str,
) -> None:
    differences.same("gradient", sorted(expected.gradients), sorted(found), f"{where}: trained parameters")
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    scale = max(float(np.abs(each).max()) for each in expected.logprobs)
    bound = bounds.gradient(expected.denominator, scale) * largest
    for name, gradient in expected.gradients.items():
        if name in found:
            differences.near(
                "gradient", gradient.numpy(), found[name].double().cpu().numpy(), bound, f"{where}, {name}"
            )


def _check_update(
    run: Run,
    step: int,
    before: dict[str, Tensor],
    gradients: Mapping[str, Tensor],
    update: Update,
    state: AdamWState,
    differences: Differences,
) -> None:
    """Holds norm, learning rate and new weights to what follows from the trainer's own gradient."""
    where = f"step {step}"
    own = {name: gradient.double().cpu() for name, gradient in gradients.items()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in own.values()))
    size = sum(gradient.numel() for gradient in own.values())
    differences.near("norm", norm, update.grad_norm, 4 * math.sqrt(size) * EPS * norm, where)
    optim, scheduler = run.config.optim, run.config.scheduler
    lr = learning_rate(
        step, peak=optim.lr, kind=scheduler.type, warmup_steps=scheduler.warmup_steps, max_steps=run.max_steps
    )
    differences.near("learning rate", lr, update.lr, 16 * EPS * optim.lr, where)
    factor = clip_factor(norm, optim.max_norm)
    clipped = {name: gradient * factor for name, gradient in own.items()}
    after_step = adamw_step(before, clipped, state, lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)
    for name, weight in trained_weights(run).items():
        moved = (after_step[name] - before[name]).abs()
        allowed = EPS * (4 * before[name].abs() + 64 * moved + 4 * lr)
        differences.near(
            "update",
            after_step[name].numpy(),
            weight.double().cpu().numpy(),
            allowed.numpy(),
            f"{where}, {name}",
        )


def _check_published(run: Run, step: int, differences: Differences) -> None:
    folder = weights_folder(run.output_dir, step + 1)
    published: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        published |= load_file(path)
    for name, weight in trained_weights(run).items():
        if name not in published:
            differences.add("published", math.inf, f"step {step}: {name} is missing")
        else:
            same = torch.equal(published[name].to(weight.dtype), weight.cpu())
            differences.add(
                "published", 0.0 if same else math.inf, f"step {step}: {name} differs from the trainer's"
            )
