"""Training with replayed experts: batches as the engine recorded them, over the wire, into gradients."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid.checks.verify import gradients as verify
from pellucid.config import ModelConfig, TrainerRunConfig
from pellucid.data import RecordedExperts, TokenTable, TrainingSample, join_experts
from pellucid.data.rules import check_experts
from pellucid.data.tensors import to_tensors
from pellucid.errors import ConfigError, DataError, ModelError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.metrics import read_metrics
from pellucid.model import RouterShape, load_policy
from pellucid.model.routing import known_routers
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate, train
from pellucid.trainer.step import layout_of
from pellucid.transport import Batch, MemoryChannel, decode_batch, encode_batch
from tolerance import gradient_bound, logprob_bound, mismatch_kl_bound, near

SHAPE = RouterShape(num_layers=2, top_k=2, num_experts=8)


def settings(weights, folder, lora=None, **trainer) -> TrainerRunConfig:
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": 2,
            "seq_len": 128,
            "model": {"name": str(weights), **({} if lora is None else {"lora": lora})},
            "trainer": {"threads": 1, "enable_router_replay": True, "optim": {"lr": 1e-3}, **trainer},
        }
    )


@pytest.fixture(scope="module")
def samples(tiny_moe) -> list[TrainingSample]:
    """Four groups of three with a common prompt, as the engine sampled and routed them."""
    generator, samples = random.Random(0), {}

    def keep(prompt, index):
        advantage = generator.uniform(-1, 1)

        def on_finish(completion):
            samples[index] = TrainingSample.from_turn(
                prompt,
                completion.token_ids,
                completion.logprobs,
                env_name="ab"[index // 3 % 2],
                run_id="run",
                sample_id=f"s{index}",
                group_id=f"g{index // 3}",
                advantage=advantage,
                routed_experts=join_experts([RecordedExperts.of(completion.routed_experts)]),
            )

        return on_finish

    requests = []
    for index in range(12):
        if index % 3 == 0:
            prompt = [generator.randrange(5, 100) for _ in range(generator.randint(4, 20))]
        params = SamplingParams(max_tokens=generator.randint(2, 30), seed=index)
        requests.append(Request(prompt, params, Account(), keep(prompt, index)))
    policy = load_policy(ModelConfig(name=str(tiny_moe)))
    run_to_end(Engine(policy, num_slots=6, max_length=64, record_experts=True), requests)
    return [samples[index] for index in range(12)]


@pytest.fixture(scope="module")
def table(samples) -> TokenTable:
    return TokenTable.from_samples(samples)


@pytest.fixture
def build(tiny_moe, tmp_path):
    """A run on these tables, and with these settings of the trainer; closed at the end."""
    runs = []

    def build(*tables: TokenTable, **trainer):
        channel = MemoryChannel()
        for step, table in enumerate(tables):
            channel.send(step, encode_batch(Batch("run", step, table)))
        config = settings(tiny_moe, tmp_path / str(len(runs)), **trainer)
        runs.append(build_run(config, OrchestratorBatches(channel), None, []))
        return runs[-1]

    yield build
    for run in runs:
        run.close()


def shuffled(table: TokenTable) -> TokenTable:
    """Experts that no router would have chosen, the same for tokens that are shared."""
    columns = {name: table[name] for name in table.columns}
    others = (columns["routed_experts"] + 1 + columns["token_ids"][:, None, None] % 7) % 8
    return TokenTable(table.lengths, {**columns, "routed_experts": others.astype(np.uint8)})


def test_experts_travel_as_bytes_and_shared_prompts_once(table) -> None:
    payload = encode_batch(Batch("run", 0, table))
    decoded = decode_batch(payload, sender="test").table
    assert decoded["routed_experts"].dtype == np.uint8
    assert (decoded["routed_experts"] == table["routed_experts"]).all()
    without = {name: rows for name, rows in table.columns.items() if name != "routed_experts"}
    plain = encode_batch(Batch("run", 0, TokenTable(table.lengths, without)))
    prompts = table.prompt_lengths.reshape(4, 3)
    assert (prompts == prompts[:, :1]).all()
    num_sent = table.num_tokens - 2 * int(prompts[:, 0].sum())
    assert len(payload) - len(plain) == pytest.approx(4 * num_sent, abs=80)


def test_steps_train_what_the_engine_sampled(build, table) -> None:
    run = build(table, table)
    before = {name: own.detach().clone() for name, own in run.policy.named_parameters()}
    train(run)
    first, second = read_metrics(run.output_dir / "metrics" / "trainer.jsonl")
    logprobs = logprob_bound(run.policy, max(table.lengths))
    assert first["mismatch_kl/all/mean"] <= mismatch_kl_bound(logprobs)
    assert first["router_replace_rate/all"] < 1e-3
    # One step later the trainer would route some tokens otherwise: that is what the metric tells.
    assert 1e-3 < second["router_replace_rate/all"] < 0.5
    assert {"router_replace_rate/a", "router_replace_rate/b"} <= second.keys()
    moved = {name for name, own in run.policy.named_parameters() if not torch.equal(own, before[name])}
    assert {f"hf.model.layers.{layer}.mlp.gate.weight" for layer in (0, 2)} <= moved


PACKINGS = (
    {"cap": 24},
    {"cap": 24, "share": False},
    {"cap": 500, "share": False},
    {"cap": 64, "multiple": 16},
    {"cap": 32, "num_ranks": 2},
)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_is_the_same_under_any_packing(build, table, checkpointed) -> None:
    """Of experts that the routers would not choose: a token that got another's would be noticed."""
    run = build(model={"seq_len": 128, "activation_checkpointing": checkpointed})
    expected = verify.gradients(run, shuffled(table), cap=500)
    for how in PACKINGS:
        allowed = gradient_bound(run.policy, table.num_tokens)
        assert verify.difference(expected, verify.gradients(run, shuffled(table), **how)) <= allowed, how
    own = verify.gradients(run, table, cap=500)
    assert verify.difference(expected, own) > 0.1


WEIGHED = {"replay_expert_weights": True}


def weighed(table: TokenTable, weights: np.ndarray | None = None) -> TokenTable:
    """With weights of experts: by default some that no router would give, equal where tokens are."""
    columns = {name: table[name] for name in table.columns}
    if weights is None:
        first = 0.2 + 0.6 * np.sin(columns["token_ids"].astype(np.float32)) ** 2
        weights = np.stack([first, 1 - first], axis=-1)[:, None].repeat(2, axis=1).astype(np.float32)
    return TokenTable(table.lengths, {**columns, "expert_weights": weights})


def test_weights_travel_and_shared_prompts_once(table) -> None:
    batch = weighed(table)
    payload = encode_batch(Batch("run", 0, batch))
    decoded = decode_batch(payload, sender="test").table
    assert decoded["expert_weights"].dtype == np.float32
    assert (decoded["expert_weights"] == batch["expert_weights"]).all()
    columns = {name: batch[name] for name in batch.columns if name != "expert_weights"}
    plain = encode_batch(Batch("run", 0, TokenTable(table.lengths, columns)))
    num_sent = table.num_tokens - 2 * int(table.prompt_lengths.reshape(4, 3)[:, 0].sum())
    assert len(payload) - len(plain) == pytest.approx(16 * num_sent, abs=80)
    assert b"expert_weights" not in plain


def test_replayed_weights_change_the_forward_under_any_packing_and_leave_routers_alone(build, table) -> None:
    run = build(**WEIGHED)
    expected = verify.gradients(run, weighed(table), cap=500)
    for how in PACKINGS:
        allowed = gradient_bound(run.policy, table.num_tokens)
        assert verify.difference(expected, verify.gradients(run, weighed(table), **how)) <= allowed, how
    gates = {name for name, gradient in expected.items() if gradient.abs().max() == 0}
    assert gates == {f"hf.model.layers.{layer}.mlp.gate.weight" for layer in (0, 2)}
    assert verify.difference(expected, verify.gradients(build(), table, cap=500)) > 0.1
    # Recorded weights that nobody replays change nothing but what is shared.
    plain = build()
    own, beside = (verify.gradients(plain, each, cap=500) for each in (table, weighed(table)))
    assert verify.difference(own, beside) == 0


def test_members_share_a_prompt_as_far_as_its_weights_are_equal(table) -> None:
    batch = weighed(table)
    weights = batch["expert_weights"].copy()
    alike, shared = (len(layout_of(each, share_prompts=True).computed) for each in (table, batch))
    assert alike == shared
    weights[int(table.token_offsets[1]) + 1] += 0.01
    assert len(layout_of(weighed(table, weights), share_prompts=True).computed) > shared


@pytest.mark.parametrize("weighs", [False, True])
def test_experts_of_the_wire_are_replayed_in_rows(build, table, weighs) -> None:
    """Padding of rows has no experts, though bytes of the wire have no number for that."""
    batch = weighed(shuffled(table)) if weighs else shuffled(table)
    assert batch["routed_experts"].dtype == np.uint8
    packed, rows = (
        build(model={"seq_len": 128, "layout": layout}, replay_expert_weights=weighs)
        for layout in ("packed", "rows")
    )
    assert rows.policy.way == "rows"
    expected, found = (verify.gradients(run, batch, cap=200) for run in (packed, rows))
    assert verify.difference(expected, found) <= gradient_bound(packed.policy, table.num_tokens)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (None, "sequence 0: expert_weights is missing, and trainer.replay_expert_weights = true replays it"),
        (math.nan, "sequence 1: expert_weights is missing"),
        (-0.5, "sequence 1: expert_weights holds a weight that is negative or infinite"),
    ],
)
def test_weights_that_cannot_be_replayed_are_refused(build, table, spoil, why) -> None:
    batch = weighed(table)
    if spoil is None:
        batch = table
    else:
        weights = batch["expert_weights"].copy()
        weights[table.token_offsets[1]] = spoil
        batch = weighed(table, weights)
    with pytest.raises(DataError, match=why):
        train(build(batch, **WEIGHED))


BALANCED = {"seq_len": 128, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_balancing_loss_is_one_of_the_whole_step(build, table, replays, checkpointed) -> None:
    """Its gradient and value are the same under any packing and number of ranks; the loss is without it."""
    table = shuffled(table) if replays else table
    model = {**BALANCED, "activation_checkpointing": checkpointed}
    run = build(model=model, enable_router_replay=replays)
    plain = build(enable_router_replay=replays)
    expected = verify.gradients(run, table, cap=500)
    allowed = gradient_bound(run.policy, table.num_tokens)
    for how in PACKINGS:
        assert verify.difference(expected, verify.gradients(run, table, **how)) <= allowed, how
    assert verify.difference(expected, verify.gradients(plain, table, cap=500)) > 0.01
    reports = []
    for each, cap in ((run, 128), (run, 24), (plain, 24)):
        each.config = each.config.model_copy(update={"micro_batch_max_tokens": cap})
        observer = accumulate(each, each.pack(0, table))
        reports.append(observer.report([observer.metrics()]))
    value = reports[0]["router_balance_loss"]
    assert 1.5 < value < 8
    assert reports[1]["router_balance_loss"] == near(value, terms=table.num_tokens)
    assert "router_balance_loss" not in reports[2]
    assert reports[1]["loss"] == reports[2]["loss"]


def test_experts_are_counted_under_the_dropout_that_trains(build, table) -> None:
    """A step with a balancing loss and LoRA's dropout; something else draws numbers between its forwards."""
    lora = {"rank": 4, "dropout": 0.3}
    run = build(model=BALANCED, lora=lora, enable_router_replay=False, micro_batch_max_tokens=60)
    with torch.no_grad():
        for name, parameter in run.trained.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    chosen = []
    router = known_routers(run.policy.hf)[-1]
    router.register_forward_hook(lambda module, inputs, output: chosen.append(output[2].sort().values))
    batch = run.pack(0, table)
    with torch.no_grad():
        for each in batch.micro_batches:
            run.predict(each.tokens, each.layout)
    without = chosen.copy()
    chosen.clear()
    with run.balanced([batch]):
        counted = chosen.copy()
        chosen.clear()
        for each in batch.micro_batches:
            run.forward(each)
            torch.rand(3)
    assert len(chosen) == len(counted) == len(without) > 2
    assert all(map(torch.equal, chosen, counted))
    assert not any(map(torch.equal, chosen, without))


def test_dropout_that_a_compiled_forward_may_draw_otherwise_is_refused(build, table) -> None:
    model = {**BALANCED, "compile": True}
    with pytest.raises(
        ConfigError, match="router_aux_loss_coef counts experts under model.lora.dropout = 0.3"
    ):
        build(model=model, lora={"rank": 4, "dropout": 0.3}, enable_router_replay=False)


def test_the_weight_of_the_balancing_loss_is_its_gradients(build, table) -> None:
    """With the record of its own experts, replay or not, the loss is the same."""
    plain, half, whole, replayed = (
        verify.gradients(run, table, cap=500)
        for run in (
            build(enable_router_replay=False),
            build(model=BALANCED, enable_router_replay=False),
            build(model={**BALANCED, "router_aux_loss_coef": 1.0}, enable_router_replay=False),
            build(model={**BALANCED, "router_aux_loss_coef": 1.0}),
        )
    )
    allowed = gradient_bound(build().policy, table.num_tokens)
    doubled = {name: 2 * half[name] - plain[name] for name in plain}
    assert verify.difference(whole, doubled) <= 4 * allowed
    assert verify.difference(whole, replayed) <= allowed


def replace_rates(run, table, *, cap) -> dict[str, float]:
    run.config = run.config.model_copy(update={"micro_batch_max_tokens": cap})
    observer = accumulate(run, run.pack(0, table))
    report = observer.report([observer.metrics()])
    return {name: value for name, value in report.items() if name.startswith("router_replace_rate/")}


def test_the_replace_rate_is_a_mean_over_trainable_tokens(build, table) -> None:
    run = build()
    whole = replace_rates(run, shuffled(table), cap=128)
    mean = {name: near(rate, terms=table.num_tokens) for name, rate in whole.items()}
    assert replace_rates(run, shuffled(table), cap=20) == mean
    layout = layout_of(table, share_prompts=False)
    with torch.no_grad():
        tokens = to_tensors(shuffled(table), run.policy.device)
        replaced = run.predict(tokens, layout).replaced.numpy()
    scopes = {env: table.dense("env_name") == env for env in "ab"} | {"all": True}
    assert whole == {
        f"router_replace_rate/{scope}": near(
            replaced[table["loss_mask"] & chosen].mean(dtype=np.float64), terms=table.num_tokens
        )
        for scope, chosen in scopes.items()
    }
    assert 0.5 < whole["router_replace_rate/all"] < 1


def without_experts(sample: TrainingSample) -> TrainingSample:
    arrays = {name: array for name, array in sample.arrays.items() if name != "routed_experts"}
    return replace(sample, arrays=arrays)


def test_a_sample_without_experts_is_refused(build, samples) -> None:
    bare = [without_experts(sample) for sample in samples]
    for chosen, row in ((bare, 0), ([*samples[:4], bare[4], *samples[5:]], 4)):
        run = build(TokenTable.from_samples(chosen))
        with pytest.raises(DataError, match=f"sequence {row}: routed_experts is missing, and trainer.en"):
            train(run)


def test_experts_of_another_model_are_refused(table) -> None:
    check_experts(table.columns, SHAPE.experts)
    with pytest.raises(
        DataError, match=r"sequence 0: routed_experts has 2 layers × 2 .* the model has 3 × 2"
    ):
        check_experts(table.columns, replace(SHAPE, num_layers=3).experts)
    with pytest.raises(DataError, match="2 layers × 2 experts per token; the model has 2 × 4"):
        check_experts(table.columns, replace(SHAPE, top_k=4).experts)
    with pytest.raises(DataError, match=r"sequence \d+: routed_experts holds 7; the model has 7 experts"):
        check_experts(table.columns, replace(SHAPE, num_experts=7).experts)


def test_a_model_without_routers_is_refused(tiny_model, tmp_path) -> None:
    with pytest.raises(ModelError, match="trainer.enable_router_replay = true, but Qwen3ForCausalLM has no"):
        build_run(settings(tiny_model, tmp_path), None, None, [])


def test_without_replay_recorded_experts_have_no_effect(build, table) -> None:
    run = build(enable_router_replay=False)
    own = verify.gradients(run, table, cap=500)
    others = verify.gradients(run, shuffled(table), cap=500, share=False)
    assert verify.difference(own, others) <= gradient_bound(run.policy, table.num_tokens)
    observer = accumulate(run, run.pack(0, table))
    assert not any("router" in name for name in observer.report([observer.metrics()]))
