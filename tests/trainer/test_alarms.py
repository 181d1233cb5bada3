"""The trainer's alarms: silent in sound runs of a tiny model, and what rings for which fault."""

import math

import numpy as np
import pytest
import torch

from pellucid.config import ModelConfig, OptimConfig, SchedulerConfig, TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.alarms import read_alarms
from pellucid.inference import engine as engines
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine, draw
from pellucid.inference.slots import Request, run_to_end
from pellucid.metrics import MeanZeroTest, read_metrics
from pellucid.model import load_policy
from pellucid.trainer.alarms import (
    MOST_SURPRISE,
    STUCK_STEPS,
    AlarmSums,
    TrainerAlarms,
    VersionWatch,
    fair_rollouts,
)
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import train
from pellucid.trainer.optimizer import Optimizer
from pellucid.transport import Batch, MemoryChannel, encode_batch

GROUP, LENGTH = 8, 24


def sampled(model, *, step: int = 0, num_groups: int = 16, dtype: str = "float32", **changes) -> TokenTable:
    """Groups of eight that the engine draws from the model; the first reply token decides the reward."""
    generator = np.random.default_rng(step)
    samples = {}

    def keep(index, prompt):
        def on_finish(completion) -> None:
            samples[index] = TrainingSample.from_turn(
                prompt,
                completion.token_ids,
                completion.logprobs,
                policy_versions=[
                    version for version, number in completion.policy_versions for _ in range(number)
                ],
                **{
                    "env_name": "env",
                    "run_id": "run",
                    "group_id": f"g{index // GROUP}",
                    "rollout_id": f"g{index // GROUP}-r{index % GROUP}",
                    "reward": float(completion.token_ids[0] % 2),
                    "advantage": float(completion.token_ids[0] % 2) - 0.5,
                    "temperature": 0.8,
                    "stop_reason": "stop",
                    **changes,
                },
            )

        return on_finish

    requests = []
    for index in range(num_groups * GROUP):
        if index % GROUP == 0:
            prompt = generator.integers(5, 100, 8).tolist()
        params = SamplingParams(temperature=0.8, max_tokens=LENGTH, seed=1000 * step + index)
        requests.append(Request(prompt, params, Account(), keep(index, prompt)))
    policy = load_policy(ModelConfig(name=str(model), dtype=dtype))
    engine = Engine(policy, num_slots=64, max_length=64)
    engine.version = changes.get("version", 0)
    run_to_end(engine, requests)
    return TokenTable.from_samples([samples[index] for index in range(len(requests))])


def run_steps(model, folder, tables, optim=None, lora=None, seq_len=4096, spoil=lambda run: None):
    """Trains on these batches; `spoil` may put something wrong before the first one."""
    config = TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": len(tables),
            "seq_len": seq_len,
            "model": {"name": str(model), **({} if lora is None else {"lora": lora})},
            "trainer": {"threads": 1, "optim": {"lr": 1e-4, **(optim or {})}},
        }
    )
    channel = MemoryChannel()
    for step, table in enumerate(tables):
        channel.send(step, encode_batch(Batch("run", step, table)))
    run = build_run(config, OrchestratorBatches(channel), None, [], publishes=True)
    spoil(run)
    try:
        train(run)
    finally:
        run.close()
    return {alarm.name: alarm for alarm in read_alarms(folder)}


@pytest.fixture(scope="module")
def tables(tiny_model) -> list[TokenTable]:
    """Batches that one version of the policy sampled: the later ones are off-policy."""
    return [sampled(tiny_model, step=step) for step in range(3)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": {"lr": 3e-3}},
        {"optim": {"max_norm": 1e-3, "weight_decay": 0.1}},
        {"lora": {"rank": 4}},
    ],
    ids=["plain", "fast: far off-policy", "clipped, with weight decay", "LoRA"],
)
def test_a_sound_run_is_silent(tiny_model, tmp_path, tables, settings) -> None:
    assert run_steps(tiny_model, tmp_path, [tables[step % 3] for step in range(9)], **settings) == {}
    *_, last = read_metrics(tmp_path / "metrics" / "trainer.jsonl")
    found = {name: value for name, value in last.items() if name.startswith("alarms/")}
    names = ("surprise", "versions", "update", "frozen", "stop_tokens")
    assert found == {f"alarms/{name}": 0 for name in names}


def test_an_engine_in_bfloat16_is_sound(tiny_model, tmp_path) -> None:
    rounded = [sampled(tiny_model, step=step, dtype="bfloat16") for step in range(3)]
    assert run_steps(tiny_model, tmp_path, rounded) == {}


def top_8(logits, temperatures, uniforms):
    """Draws from the eight likeliest tokens, and reports the logprobs of the whole distribution."""
    eighth = logits.topk(8).values[:, -1:]
    tokens, _ = draw(logits.masked_fill(logits < eighth, -math.inf), temperatures, uniforms)
    logprobs = torch.log_softmax(logits / torch.tensor(temperatures)[:, None], -1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def test_top_k_sampling_with_the_logprobs_of_all_tokens_rings(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(engines, "draw", top_8)
    alarm = run_steps(tiny_model, tmp_path, [sampled(tiny_model, step=step) for step in range(3)])["surprise"]
    assert alarm.value > alarm.threshold == 0.05
    assert alarm.p_value < 1e-6
    assert alarm.statistic.startswith("sampled tokens are likelier")


def test_after_the_first_steps_every_fourth_is_watched(tiny_model, tmp_path, monkeypatch) -> None:
    """Whichever steps are watched does not depend on what was sampled; all together they ring."""
    monkeypatch.setattr(engines, "draw", top_8)
    monkeypatch.setattr("pellucid.trainer.alarms.ALL_UNTIL_STEP", 1)
    spoilt = [sampled(tiny_model, step=step) for step in range(2)]
    assert run_steps(tiny_model, tmp_path, [spoilt[step % 2] for step in range(4)]) == {}
    alarm = run_steps(tiny_model, tmp_path / "longer", [spoilt[step % 2] for step in range(10)])["surprise"]
    assert alarm.step in (4, 8)


def test_a_stop_token_is_watched_in_every_fourth_step(tiny_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pellucid.trainer.alarms.ALL_UNTIL_STEP", 0)
    sound = sampled(tiny_model, num_groups=1)
    spoilt = sampled(tiny_model, num_groups=1, completion_mask=np.arange(LENGTH) < LENGTH - 1)
    assert run_steps(tiny_model, tmp_path, [sound, spoilt, spoilt, spoilt, spoilt])["stop_tokens"].step == 4


def test_rollouts_are_tested_that_are_there_whatever_they_sampled() -> None:
    """Of each half that is tested, the other half has rewards that differ."""
    rewards = {f"g{group}": [float(at == group) for at in range(8)] for group in range(9)}
    samples = [
        TrainingSample.from_turn(
            [5], [6], [-1.0], env_name="e", group_id=group, rollout_id=f"{group}-r{at}", reward=reward
        )
        for group, own in rewards.items()
        for at, reward in enumerate(own)
    ]
    found = fair_rollouts(TokenTable.from_samples(samples))
    groups = {name.split("-")[0] for name in found}
    for group in groups:
        others = [at for at in range(8) if f"{group}-r{at}" not in found]
        assert len(others) == 4
        assert len({rewards[group][at] for at in others}) == 2
    # One of eight rewards differs: it is in the half that decides, or nothing of its group is tested.
    assert len(groups) == 4


def test_groups_that_are_sent_for_their_rewards_are_no_fair_sample_but_the_tested_half_is() -> None:
    """One token, right in 5 % of the cases, wrong in fifty ways; groups of equal rewards are not sent."""
    chances = np.array([0.05, *[0.019] * 50])
    entropy = -(chances * np.log(chances)).sum()
    drawn = np.random.default_rng(0).choice(51, (3000, GROUP), p=chances)
    sent = {f"g{at}": own for at, own in enumerate(drawn) if 0 < (own == 0).sum() < GROUP}
    tokens = {f"{group}-r{at}": token for group, own in sent.items() for at, token in enumerate(own)}
    samples = TrainingSample.build_all(
        [
            {
                "token_ids": [5, 6],
                "sampled": [False, True],
                "loss_mask": [False, True],
                "inference_logprobs": [-1.0],
                "policy_versions": [0],
                "env_name": "e",
                "group_id": name.split("-")[0],
                "rollout_id": name,
                "reward": float(token == 0),
            }
            for name, token in tokens.items()
        ]
    )
    fair = fair_rollouts(TokenTable.from_samples(samples))
    tests = {}
    for which, names in (("sent", tokens), ("fair", fair)):
        values = entropy + np.log(chances[[tokens[name] for name in names]])
        tests[which] = MeanZeroTest(MOST_SURPRISE, 0.0)
        tests[which].add(len(values), values.sum(), np.square(values).sum())
    assert tests["sent"].mean > 0.05 and tests["sent"].rings
    assert tests["fair"].count > 1500
    assert tests["fair"].p_value > 0.01


def test_a_stop_token_that_does_not_train_rings(tiny_model, tmp_path) -> None:
    mask = np.arange(LENGTH) < LENGTH - 1
    alarm = run_steps(tiny_model, tmp_path, [sampled(tiny_model, num_groups=1, completion_mask=mask)])[
        "stop_tokens"
    ]
    assert (alarm.value, alarm.threshold, alarm.example) == (0.0, 1.0, "rollout 'g0-r0'")


@pytest.mark.parametrize("changes", [{"completion_mask": False}, {"stop_reason": "length"}])
def test_replies_that_do_not_train_or_do_not_stop_are_no_fault(tiny_model, tmp_path, changes) -> None:
    mask = {"completion_mask": np.arange(LENGTH) < LENGTH - 1} | changes
    assert run_steps(tiny_model, tmp_path, [sampled(tiny_model, num_groups=1, **mask)]) == {}


def test_a_reply_that_is_cut_off_at_seq_len_is_no_fault(tiny_model, tmp_path) -> None:
    """Its last token but three is not trainable, and the last three are cut off."""
    table = sampled(tiny_model, num_groups=1, completion_mask=np.arange(LENGTH) != LENGTH - 4)
    assert run_steps(tiny_model, tmp_path, [table], seq_len=8 + LENGTH - 3) == {}


def ten_times(run) -> None:
    step = run.optimizer.adamw.step

    def faster() -> None:
        for group in run.optimizer.adamw.param_groups:
            group["lr"] *= 10
        step()

    run.optimizer.adamw.step = faster


def twice(run) -> None:
    step = run.optimizer.adamw.step
    run.optimizer.adamw.step = lambda: (step(), step())


@pytest.mark.parametrize(("spoil", "factor"), [(ten_times, 10.0), (twice, 2.0)])
def test_another_update_than_adamws_rings(tiny_model, tmp_path, tables, spoil, factor) -> None:
    alarm = run_steps(tiny_model, tmp_path, tables[:1], spoil=spoil)["update"]
    assert alarm.step == 0 and alarm.value > 100
    assert f"moved {factor:.3g} × as far as AdamW moves it" in alarm.example


def test_gradients_that_are_not_clipped_ring(tiny_model, tmp_path, tables, monkeypatch) -> None:
    """AdamW's first step is the same whatever the size of the gradient; its moments are not."""
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *arguments: None)
    alarm = run_steps(tiny_model, tmp_path, tables[:1], optim={"max_norm": 1e-3})["update"]
    assert "first moments" in alarm.statistic


def freeze(run) -> None:
    """The first layer is put back after every step."""
    step = run.optimizer.adamw.step
    layer = list(run.policy.layers[0].parameters())

    def stay() -> None:
        before = [each.detach().clone() for each in layer]
        step()
        with torch.no_grad():
            for each, old in zip(layer, before, strict=True):
                each.copy_(old)

    run.optimizer.adamw.step = stay


def test_a_layer_that_stays_as_it_is_rings_with_its_name(tiny_model, tmp_path, tables) -> None:
    found = run_steps(tiny_model, tmp_path, [tables[0]] * 9, spoil=freeze)
    assert "layers.0." in found["frozen"].example
    assert "has a gradient, and AdamW would have moved it" in found["frozen"].example
    assert "update" not in found


def test_a_parameter_without_a_gradient_rings(tmp_path) -> None:
    alarms = TrainerAlarms(tmp_path, publishes=False, lr=1.0, frozen=["layers.0.weight"])
    table = versions_of([0])
    assert alarms.judge(0, table, [AlarmSums()], lr=1.0)["alarms/frozen"] == 1
    assert read_alarms(tmp_path)[0].example == "layers.0.weight does not require a gradient"


def test_alarms_judge_the_tokens_of_all_ranks(tmp_path) -> None:
    alarms = TrainerAlarms(tmp_path, publishes=False, lr=1.0, frozen=[])
    ranks = [
        AlarmSums(num_tokens=6_000, total=3_000.0, squares=6_000.0, num_stops=3),
        AlarmSums(
            num_tokens=2_000, total=1_000.0, squares=2_000.0, num_stops=1, num_untrained=1, untrained="r7"
        ),
    ]
    alarms.judge(0, versions_of([0]), ranks, lr=1.0)
    found = {alarm.name: alarm for alarm in read_alarms(tmp_path)}
    assert (found["stop_tokens"].value, found["stop_tokens"].example) == (0.75, "rollout 'r7'")
    assert (found["surprise"].value, found["surprise"].example) == (0.5, "8,000 tokens")


def test_updates_that_round_to_nothing_ring_but_not_in_a_warm_up() -> None:
    """A weight of 1,000 in bfloat16 has steps of 4: AdamW moves it by lr."""
    model = torch.nn.Linear(64, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1000.0)
    optimizer = Optimizer(model, OptimConfig(lr=1e-5, weight_decay=0.0), SchedulerConfig(), max_steps=1)
    model(torch.ones(64, dtype=torch.bfloat16)).sum().backward()
    (look,) = optimizer.step().looks
    assert (look.is_lost, look.has_changed) == (True, False)


def versions_of(*sequences) -> TokenTable:
    return TokenTable.from_samples(
        [
            TrainingSample.from_turn(
                [5], [6] * len(own), [-1.0] * len(own), policy_versions=own, env_name="e", rollout_id=f"r{at}"
            )
            for at, own in enumerate(sequences)
        ]
    )


def test_versions_that_grow_are_sound() -> None:
    watch = VersionWatch(publishes=True)
    for step in range(3 * STUCK_STEPS):
        oldest = max(0, step - 8)
        assert watch.fault(step, versions_of([oldest, oldest + 1 if step > 8 else oldest], [oldest])) is None


@pytest.mark.parametrize(
    ("step", "sequences", "value", "example"),
    [
        (3, [[2, 2], [2, 3, 1]], 1, "rollout 'r1': 3, then 1"),
        (3, [[2, 2], [4]], 4, "rollout 'r1'"),
    ],
)
def test_versions_that_fall_or_are_yet_to_come_ring(step, sequences, value, example) -> None:
    alarm = VersionWatch(publishes=True).fault(step, versions_of(*sequences))
    assert (alarm.value, alarm.example) == (value, example)


def test_a_version_that_never_changes_rings_where_weights_are_published() -> None:
    watch, quiet = VersionWatch(publishes=True), VersionWatch(publishes=False)
    faults = [watch.fault(step, versions_of([0])) for step in range(STUCK_STEPS + 1)]
    assert [fault is None for fault in faults] == [True] * STUCK_STEPS + [False]
    assert faults[-1].value == STUCK_STEPS
    assert all(quiet.fault(step, versions_of([0])) is None for step in range(2 * STUCK_STEPS))
    assert VersionWatch(publishes=True).fault(99, versions_of([-1])) is None  # a teacher's
