"""The oracle against recorded cases, against torch, and against the code that it judges."""

import ast
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import pellucid.checks.oracle
from pellucid.checks.oracle.conversation import (
    FinishedGroup,
    Sampled,
    advantages_of,
    expected_batches,
    expected_samples,
    off_policy_levels,
    response_ids_of,
    response_length_of,
    truncated,
)
from pellucid.checks.oracle.losses import KNOWN, loss_weights_of, token_losses
from pellucid.checks.oracle.training import (
    AdamWState,
    ReferenceModel,
    ReferenceSequence,
    adamw_step,
    clip_factor,
    learning_rate,
)
from pellucid.checks.verify.training_stages import Bounds
from pellucid.config import LossConfig, ModelConfig, SchedulerConfig
from pellucid.data import Completion, Example, Rollout, Turn
from pellucid.loss import LossInputs, Ratios, loss_for, sequence_weights
from pellucid.model import load_policy, packed_layout
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator.advantage import AdvantageInputs, ScoredRollout, load_advantage
from pellucid.orchestrator.verdict import build_samples
from pellucid.trainer.optimizer import lr_factor
from tolerance import eps, near, near_logprobs

ORACLE = Path(pellucid.checks.oracle.__file__).parent
LOSSES = TypeAdapter(LossConfig)
DPPO = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "teacher_tau": 0.0}


def test_it_imports_nothing_of_what_it_judges() -> None:
    for path in sorted(ORACLE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert not name.startswith("pellucid") or name.startswith("pellucid.checks.oracle"), (
                    f"{path.name} imports {name}"
                )


def check_golden(case: dict[str, Any], mode: str) -> None:
    values, expected = case["inputs"], case["outputs"]
    teacher = values["teacher_logprobs"]
    found = token_losses(
        mode,
        {"type": "dppo", **(case["config"] or {})},
        log_pi=np.array(values["trainer_logprobs"]),
        log_mu=np.array(values["inference_logprobs"]),
        advantages=np.array(values["advantages"]),
        trainable=np.array(values["loss_mask"]),
        lengths=[len(values["loss_mask"])],
        teacher=None if teacher is None else np.array(teacher, np.float64),
    )
    terms = len(found.loss) + 8  # the record was computed in float32
    assert found.loss.sum() == near(expected["loss"], terms=terms, scale=np.abs(found.loss).sum())
    assert found.slope == near(expected["grad_trainer_logprobs"], terms=terms)


@pytest.mark.golden("loss_rl")
def test_golden_rl(case: dict[str, Any]) -> None:
    check_golden(case, "rl")


@pytest.mark.golden("loss_sft")
def test_golden_sft(case: dict[str, Any]) -> None:
    check_golden(case, "sft")


@pytest.mark.golden("loss_opd")
def test_golden_opd(case: dict[str, Any]) -> None:
    if "raises" not in case:
        check_golden(case, "opd")


@pytest.mark.golden("loss_packed")
def test_golden_packed(case: dict[str, Any]) -> None:
    values, expected = case["inputs"], case["outputs"]
    found = token_losses(
        "rl",
        {"type": "dppo", **case["config"]},
        log_pi=np.array(list(chain(*values["trainer_logprobs"]))),
        log_mu=np.array(list(chain(*values["inference_logprobs"]))),
        advantages=np.repeat(values["advantage_per_sequence"], values["lengths"]),
        trainable=np.array(list(chain(*values["loss_mask"]))),
        lengths=values["lengths"],
    )
    scale = values["loss_scale"]
    terms = len(found.loss) + 8
    assert found.loss.sum() / scale == near(expected["loss"], terms=terms, scale=np.abs(found.loss).sum())
    assert found.slope / scale == near(list(chain(*expected["grads"])), terms=terms)


PENALTIES = {
    "none": None,
    "tokens w1/0": {"type": "tokens", "completion_weight": 1.0, "tool_response_weight": 0.0},
    "tokens w1/1": {"type": "tokens", "completion_weight": 1.0, "tool_response_weight": 1.0},
    "tokens w0/1": {"type": "tokens", "completion_weight": 0.0, "tool_response_weight": 1.0},
    "turns": {"type": "turns"},
}


@pytest.mark.golden("advantage_group")
def test_golden_advantages(case: dict[str, Any]) -> None:
    rollouts = case["rollouts"]
    found = advantages_of(
        "default",
        [each["reward"] for each in rollouts],
        completion_tokens=[sum(each["completion_tokens_per_turn"]) for each in rollouts],
        tool_tokens=[each["tool_response_tokens"] for each in rollouts],
        num_turns=[len(each["completion_tokens_per_turn"]) for each in rollouts],
        length_penalty=PENALTIES[case["length_penalty"]],
    )
    assert found == near(case["advantages"], terms=32)


SETTINGS = {
    "dppo": {
        "dppo_mask_low": 0.1,
        "dppo_mask_high": 0.15,
        "adv_tau": 0.7,
        "teacher_tau": 0.3,
        "kl_tau": 0.02,
    },
    "ppo_clip": {"clip_low": 0.1, "clip_high": 0.3, "kl_tau": 0.01},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1, "kl_tau": 0.01},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2, "kl_tau": 0.01},
    "tis": {"max_ratio": 1.2, "kl_tau": 0.01},
    "icepop": {"min_ratio": 0.8, "max_ratio": 1.2, "kl_tau": 0.01},
}


def test_every_built_in_loss_has_a_formula() -> None:
    configs = get_args(get_args(LossConfig)[0])
    kinds = {kind for each in configs for kind in get_args(each.model_fields["type"].annotation)}
    assert kinds - {"custom"} == KNOWN == SETTINGS.keys()


@pytest.mark.parametrize("kind", sorted(SETTINGS))
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_losses_and_slopes_are_those_of_the_trainer(kind: str, seed: int, lengths: list[int]) -> None:
    """In float64, so that no mask may differ; the trainer's own bounds are float32 numbers, though."""
    draw, total = np.random.default_rng(seed), sum(lengths)
    log_pi, log_mu = -draw.exponential(0.7, total), -draw.exponential(0.7, total)
    advantages = draw.choice([-1.0, -0.4, 0.0, 0.3, 2.0], total)
    trainable = draw.random(total) < 0.7
    teacher = np.where(draw.random(total) < 0.8, -draw.exponential(0.7, total), np.nan)
    config = LOSSES.validate_python({"type": kind, **SETTINGS[kind]})
    found = token_losses(
        "rl",
        config.model_dump(),
        log_pi=log_pi,
        log_mu=log_mu,
        advantages=advantages,
        trainable=trainable,
        lengths=lengths,
        teacher=teacher,
    )
    logprobs = torch.tensor(log_pi, requires_grad=True)
    inference = torch.tensor(log_mu)
    inputs = LossInputs(
        logprobs,
        inference,
        torch.tensor(advantages),
        torch.tensor(trainable),
        torch.tensor(teacher),
        Ratios.of(logprobs, inference),
        lengths,
    )
    record = loss_for(config)["rl"](inputs)
    record.token_loss.sum().backward()
    scale = 1 + np.abs(found.loss).max(initial=0)
    assert record.token_loss == near(found.loss, terms=4, scale=scale)
    assert logprobs.grad == near(found.slope, terms=4, scale=scale)
    for name in ("is_masked", "is_masked_high", "is_masked_low"):
        own, other = getattr(found, name), getattr(record, name)
        assert (own is None) == (other is None)
        assert own is None or own.tolist() == other.tolist(), name


@pytest.mark.parametrize("reduction", ["token", "sequence", "group"])
@given(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_weights_are_those_of_the_trainer(reduction: Any, numbers: list[int], seed: int) -> None:
    groups = [
        f"g{number}" if number else "" for number in np.random.default_rng(seed).integers(0, 3, len(numbers))
    ]
    trained = sequence_weights(reduction, np.array(numbers), groups)
    found = loss_weights_of(reduction, numbers, groups, ["rl"] * len(numbers))
    counted = [index for index, number in enumerate(numbers) if number]
    assert trained[counted] == near(np.array(found)[counted], terms=4, each=True)


def test_only_rl_samples_are_averaged_over_sequences() -> None:
    assert loss_weights_of("sequence", [1, 3, 5], ["", "", ""], ["rl", "rl", "sft"]) == [2, 2 / 3, 1]


@pytest.mark.parametrize("kind", ["default", "rloo", "grpo_std", "max_rl", "none"])
@given(rewards=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6))
def test_advantages_are_those_of_the_orchestrator(kind: str, rewards: list[float]) -> None:
    from pellucid.config import AdvantageConfig

    config = TypeAdapter(AdvantageConfig).validate_python({"type": kind})
    scored = [ScoredRollout(reward, [3], 0, "env", "e", "g") for reward in rewards]
    trained = load_advantage(config).function(AdvantageInputs(scored)).advantages
    size = [1] * len(rewards)
    found = advantages_of(kind, rewards, completion_tokens=size, tool_tokens=size, num_turns=size)
    spread = max(rewards) - min(rewards)
    mean = abs(sum(rewards)) / len(rewards)
    scale: float = max(1.0, *map(abs, rewards))
    if kind == "grpo_std" and spread:
        scale *= scale / spread  # a distance that rounding has touched, divided by an equally small deviation
    if kind == "max_rl" and mean:
        scale *= scale / mean * (1 + scale / mean)
    assert trained == near(found, terms=64, scale=scale)


@st.composite
def conversations(draw: st.DrawFn) -> list[Sampled]:
    """Turns that go on from earlier ones, branch off, or start anew, over an alphabet of three."""
    ids = st.lists(st.integers(1, 3), max_size=3)
    turns: list[Sampled] = []
    for _ in range(draw(st.integers(1, 5))):
        base: list[int] = []
        if turns and draw(st.booleans()):
            last = draw(st.sampled_from(turns))
            base = [*last.prompt_ids, *last.reply_ids]
        reply = draw(ids)
        turns.append(
            Sampled(
                [*base, *draw(ids), draw(st.integers(1, 3))],
                reply,
                [-float(draw(st.integers(1, 9))) for _ in reply],
                [draw(st.integers(0, 3))] * len(reply),
                draw(st.booleans()),
            )
        )
    return turns


@given(conversations())
def test_samples_are_those_of_the_orchestrator(turns: list[Sampled]) -> None:
    rollout = Rollout("r", "g", Example("e", []), "env", 1.0)
    for turn in turns:
        versions = [(turn.versions[0], len(turn.reply_ids))] if turn.reply_ids else []
        completion = Completion(list(turn.reply_ids), list(turn.logprobs), versions, "stop")
        rollout.turns.append(Turn(list(turn.prompt_ids), completion, "", [], turn.is_trainable))
    rollout.reward = 1.0
    samples = build_samples(rollout, run_id="run", advantage=0.5)
    expected = expected_samples(turns)
    assert len(samples) == len(expected)
    for sample, own in zip(samples, expected, strict=True):
        arrays = {name: array.array().tolist() for name, array in sample.arrays.items()}
        sampled = [index for index, flag in enumerate(own.is_sampled) if flag]
        assert arrays["token_ids"] == own.token_ids
        assert arrays["sampled"] == own.is_sampled
        assert arrays["loss_mask"] == own.is_trainable
        assert arrays["inference_logprobs"] == [own.logprobs[index] for index in sampled]
        assert arrays["policy_versions"] == [own.versions[index] for index in sampled]


def test_truncation_keeps_the_beginning_and_levels_count_from_the_step() -> None:
    [sample] = expected_samples([Sampled([1, 2], [7, 8, 9], [-1.0, -2.0, -3.0], [0, 0, 1])])
    assert off_policy_levels(3, sample) == [3, 3, 2]
    short = truncated(sample, 4)
    assert short.token_ids == [1, 2, 7, 8]
    assert short.is_trainable == [False, False, True, True]
    assert short.logprobs == [0.0, 0.0, -1.0, -2.0]


def test_batches_take_whole_groups_in_order_and_leave_out_the_stale_ones() -> None:
    groups = [
        FinishedGroup("a", 3, 0),
        FinishedGroup("flat", 0, 0),
        FinishedGroup("b", 2, 0),
        FinishedGroup("c", 4, 0),
        FinishedGroup("old", 3, 0),
        FinishedGroup("d", 1, 1),
        FinishedGroup("e", 3, 2),
        FinishedGroup("late", 3, 2),
    ]
    batches, stale = expected_batches(groups, batch_size=4, max_off_policy_steps=1, num_batches=3)
    assert batches == [["a", "b"], ["c"], ["d", "e"]]
    assert stale == {"old"}


def test_a_response_counts_without_the_opening_of_the_next_reply() -> None:
    tokenizer = character_tokenizer()  # a token per character, and one per marker
    messages = [{"role": "user", "content": "hi"}]
    assert response_length_of(tokenizer, messages, {"role": "tool", "content": "42"}) == len("(tool.42).")
    added = response_ids_of(tokenizer, messages, tokenizer.eos_token_id, {"role": "tool", "content": "42"})
    assert len(added) == len(".(tool.42).(assistant.")  # from the end of the reply on


def test_adamw_with_clipping_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in "ab"}
    theirs = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(theirs.values(), lr=1.0, betas=(0.8, 0.9), weight_decay=0.1)
    state = AdamWState()
    for step in range(5):
        gradients = {name: torch.randn(3, 4, generator=generator, dtype=torch.float64) for name in "ab"}
        for name, gradient in gradients.items():
            theirs[name].grad = gradient.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.5))
        lr = learning_rate(step, peak=0.01, kind="cosine", warmup_steps=2, max_steps=5)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        factor = clip_factor(norm, 1.5)
        scaled = {name: gradient * factor for name, gradient in gradients.items()}
        weights = adamw_step(weights, scaled, state, lr=lr, betas=(0.8, 0.9), weight_decay=0.1)
        for name, weight in weights.items():
            assert theirs[name] == near(weight, terms=32, dtype=np.float64)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_the_trainer(kind: Any) -> None:
    for warmup in (0, 1, 3):
        scheduler = SchedulerConfig(type=kind, warmup_steps=warmup)
        for step in range(10):
            found = learning_rate(step, peak=2.0, kind=kind, warmup_steps=warmup, max_steps=8)
            assert 2 * lr_factor(step, scheduler, 8) == near(found, terms=4, scale=2, dtype=np.float64)


def parameters_of(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("hf."): value.detach() for name, value in policy.named_parameters()}


@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_moe"])
def test_logprobs_and_entropy_are_those_of_the_policy(request: pytest.FixtureRequest, fixture: str) -> None:
    folder: Path = request.getfixturevalue(fixture)
    policy = load_policy(ModelConfig(name=str(folder)), trainable=True)
    model = ReferenceModel(str(folder), parameters_of(policy))
    ids = [3, 9, 14, 5, 5, 20, 7]
    temperatures = np.linspace(0.7, 1.3, len(ids))
    with torch.no_grad():
        output = policy(
            torch.tensor(ids),
            torch.arange(len(ids)),
            torch.tensor(temperatures, dtype=torch.float32),
            packed_layout([len(ids)], np.ones(len(ids), np.bool_)),
        )
    logprobs, entropy = model.logprobs(ids, temperatures)
    assert output.logprobs == near_logprobs(logprobs, folder)
    assert output.entropy == near_logprobs(entropy, folder)


def test_the_gradient_is_the_derivative_of_the_loss(tiny_model: Path) -> None:
    """By a difference quotient along the gradient: the loss moves by norm² · h."""
    policy = load_policy(ModelConfig(name=str(tiny_model)), trainable=True)
    model = ReferenceModel(str(tiny_model), parameters_of(policy))
    ids = [3, 9, 14, 5, 5, 20, 7]
    ones = np.ones(len(ids))
    trainable = np.array([False, False, False, True, True, True, True])
    log_mu = model.logprobs(ids, ones)[0].detach().numpy() + 0.01
    settings = {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "kl_tau": 0.1}
    sequences = [
        ReferenceSequence(ids, trainable, log_mu, ones * 0.5, ones, group="a"),
        ReferenceSequence(ids[:5], trainable[:5], log_mu[:5], -ones[:5], ones[:5], group="b"),
    ]
    start, step = dict(model.parameters), model.step(sequences, settings, "group")
    assert step.denominator == 6
    assert step.weights == [6 / 2 / 4, 6 / 2 / 2]
    h = 1e-5 / step.grad_norm
    losses = []
    for sign in (1, -1):
        model.parameters = {name: value + sign * h * step.gradients[name] for name, value in start.items()}
        losses.append(model.step(sequences, settings, "group").loss)
    slope = (losses[0] - losses[1]) / (2 * h)
    # Central differences err by h²; the losses themselves are known to eps, divided by h.
    assert slope == near(step.grad_norm**2, within=1e-6 * step.grad_norm**2 + 64 * eps(np.float64) / h)


def test_what_is_left_of_a_gradient_that_cancels_is_held_to_its_parts(tiny_model: Path) -> None:
    """A token that is all but certain, with a ratio of e¹⁶: in float32 nothing of its gradient is right."""
    policy = load_policy(ModelConfig(name=str(tiny_model)), trainable=True)
    model = ReferenceModel(str(tiny_model), parameters_of(policy))
    prompt = [3, 9, 14, 5, 5, 20]
    ids = [*prompt, model.likeliest(prompt)]
    trainable = np.arange(len(ids)) == len(prompt)
    temperature = 1.0
    while model.top_probability(prompt, temperature) < 1 - 1e-9:
        temperature /= 1.2
    temperatures, log_mu = np.full(len(ids), temperature), np.where(trainable, -16.0, 0.0)
    sequence = ReferenceSequence(ids, trainable, log_mu, -np.ones(len(ids)), temperatures)
    step = model.step([sequence], {"type": "dppo", "kl_tau": 0.0, **DPPO}, "token")
    layout = packed_layout([len(ids)], trainable)
    places, scales = torch.arange(len(ids)), torch.tensor(temperatures, dtype=torch.float32)
    ratio = (policy(torch.tensor(ids), places, scales, layout).logprobs - torch.tensor(log_mu)).exp()
    ratio[-1].backward()
    found = {name.removeprefix("hf."): value.grad.double() for name, value in policy.named_parameters()}
    gap = max(float((found[name] - value).abs().max()) for name, value in step.gradients.items())
    largest = max(float(value.abs().max()) for value in step.gradients.values())
    allowed = Bounds.of(policy, len(ids)).gradient(1, float(np.abs(step.logprobs[0]).max()))
    assert allowed * largest < gap <= allowed * step.largest_part
