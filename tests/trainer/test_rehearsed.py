"""Micro batches on the pretend accelerator: no sync, few copies, and the gradients of a CPU."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import distributed as dist

from pellucid.checks.rehearsal import _REPLACED, rehearsing
from pellucid.checks.verify.gradients import difference, take_gradients
from pellucid.config import ModelConfig, TrainerConfig, TrainerRunConfig
from pellucid.data import PackedArray, TokenTable, TrainingSample
from pellucid.data.tensors import to_device
from pellucid.errors import ModelError
from pellucid.trainer.build import build_run
from pellucid.trainer.parallel import Ranks
from tolerance import eps

DENSE, CHECKPOINTED = {}, {"trainer": {"model": {"activation_checkpointing": True}}}
LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}}
EXPERTS = {"trainer": {"enable_router_replay": True}}
EXPERTS_AGAIN = {"trainer": {"enable_router_replay": True, **CHECKPOINTED["trainer"]}}
VARIANTS = {
    "dense": DENSE,
    "checkpointed": CHECKPOINTED,
    "lora": LORA,
    "lora, checkpointed": LORA | CHECKPOINTED,
    "experts": EXPERTS,
    "experts, checkpointed": EXPERTS_AGAIN,
}
PHASES = ("load", "forward", "loss", "backward")
LAYERS = {"tiny_model": 2, "tiny_moe": 3}


def samples(lengths, *, prompt=12, group_size=3, experts=None) -> TokenTable:
    generator = random.Random(0)
    made = []
    for index, length in enumerate(lengths):
        if index % group_size == 0:
            ids = [generator.randrange(5, 101) for _ in range(prompt)]
            of_prompt = [_experts(generator, experts) for _ in ids]
        own = [generator.randrange(5, 101) for _ in range(length)]
        routed = np.array([*of_prompt, *(_experts(generator, experts) for _ in own)], np.uint8)
        made.append(
            TrainingSample.from_turn(
                ids,
                own,
                [-4.0] * length,
                env_name="a",
                run_id="run",
                rollout_id=f"r{index}",
                group_id=f"g{index // group_size}",
                reward=1.0,
                advantage=generator.uniform(-1, 1),
                temperature=0.8,
                routed_experts=experts and PackedArray(routed.tobytes(), routed.shape, "uint8"),
            )
        )
    return TokenTable.from_samples(made)


def _experts(generator, shape) -> list[list[int]]:
    layers, top_k, number = shape or (1, 1, 1)
    return [generator.sample(range(number), top_k) for _ in range(layers)]


def build(model, folder, device, variant, ranks_of=Ranks.alone):
    changes = {"threads": 1, **variant.get("trainer", {})}
    values = {
        "output_dir": folder,
        "max_steps": 1,
        "seq_len": 256,
        "model": {"name": str(model), **variant.get("model", {})},
        "trainer": changes,
    }
    config = TrainerRunConfig.model_validate(values)
    return build_run(config, None, None, [], ranks_of(config.trainer, device))


def model_of(name, request):
    return request.getfixturevalue("tiny_moe" if "experts" in name else "tiny_model")


def shape_of(run):
    return None if run.policy.replay is None else run.policy.replay.shape.experts


def train(run, table, rehearsal):
    """Trains the micro batch of a step, phase by phase."""
    batch = run.pack(0, table)
    loaded = iter(batch.micro_batches)
    with rehearsal.phase("load"):
        micro_batch = next(loaded)
    with rehearsal.phase("forward"):
        output = run.forward(micro_batch)
    with rehearsal.phase("loss"):
        result = run.loss(micro_batch, output, batch.denominator)
    with rehearsal.phase("backward"):
        result.loss.backward()
    assert next(loaded, None) is None
    return micro_batch


def one_after_the_other(run, table):
    batch = run.pack(0, table)
    for micro_batch in batch.micro_batches:
        run.loss(micro_batch, run.forward(micro_batch), batch.denominator).loss.backward()
    return take_gradients(run)


def test_arrays_of_any_kind_reach_the_device_in_one_copy() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([True, False, True]),
        np.zeros(0, np.int64),
        np.arange(6, dtype=np.uint8).reshape(3, 2, 1),
        np.arange(7, dtype=np.float32)[::2],
        np.array([3], np.int32),
    ]
    with rehearsing() as rehearsal:
        moved = to_device(arrays, rehearsal.device)
        assert (rehearsal.count("h2d"), rehearsal.count("sync")) == (1, 0)
        for array, tensor in zip(arrays, moved, strict=True):
            assert tensor.device.type == "rehearsal"
            assert np.array_equal(tensor.cpu().numpy(), array)
    shared = to_device(arrays[:1], torch.device("cpu"))
    arrays[0][0] = 7
    assert shared[0].tolist() == [7, 1, 2, 3, 4]


@pytest.mark.parametrize("name", VARIANTS)
def test_no_micro_batch_makes_the_host_wait(name, tmp_path, request) -> None:
    model = model_of(name, request)
    with rehearsing() as rehearsal:
        run = build(model, tmp_path, rehearsal.device, VARIANTS[name])
        train(run, samples([3, 9, 5, 1, 7, 7], experts=shape_of(run)), rehearsal)
        for phase in PHASES:
            assert rehearsal.count("sync", phase) == 0, rehearsal.table("sync")
        # Columns and indices before the forward pass, places of the sequences in the first attention.
        assert [rehearsal.count("h2d", phase) for phase in PHASES] == [2, 1, 0, 0], rehearsal.table("h2d")
        num_layers = len(run.policy.layers)
        kernels = {event.operation for event in rehearsal.events["attention"] if event.phase in PHASES}
        assert kernels == {"varlen"}
        assert rehearsal.count("attention", "forward") == num_layers
        again = num_layers if "checkpointed" in name else 0
        assert rehearsal.count("attention", "backward") == again
        run.close()


@pytest.mark.parametrize("group_size", [1, 3])
def test_in_float32_it_does_not_wait_either_and_computes_what_a_cpu_does(
    tiny_model, tmp_path, group_size
) -> None:
    """SDPA takes a launch per sequence and layer, or per batch of members that share prompts."""
    wide = {"trainer": {"model": {"precision": "float32"}}}
    table = samples([3, 9, 5, 1, 7, 7], group_size=group_size)
    run = build(tiny_model, tmp_path / "cpu", torch.device("cpu"), wide)
    expected = one_after_the_other(run, table)
    run.close()
    with rehearsing() as rehearsal:
        run = build(tiny_model, tmp_path / "gpu", rehearsal.device, wide)
        train(run, table, rehearsal)
        for phase in PHASES:
            assert rehearsal.count("sync", phase) == 0, rehearsal.table("sync")
        # With shared prompts: indices of two calls, one mask, and the order of what they return.
        num_copies = {1: 0, 3: 4}[group_size]
        copies = [rehearsal.count("h2d", phase) for phase in PHASES]
        assert copies == [2, num_copies, 0, 0], rehearsal.table("h2d")
        num_calls = {1: 6, 3: 2}[group_size]
        assert rehearsal.count("attention", "forward") == num_calls * len(run.policy.layers)
        found = {key: value.cpu() for key, value in take_gradients(run).items()}
        run.close()
    # Both compute in float32: sixteen roundings per layer forward and as many back, of half an eps each.
    assert difference(expected, found) <= (2 * 16 * LAYERS["tiny_model"]) ** 0.5 * eps(torch.float32)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_launches_do_not_depend_on_the_number_of_sequences(name, tmp_path, request) -> None:
    model = model_of(name, request)
    with rehearsing() as rehearsal:
        run = build(model, tmp_path, rehearsal.device, VARIANTS[name])
        launches = set()
        for lengths in ([6, 6, 6], [6] * 9, [1, 2, 3] * 5):
            before = rehearsal.count("launch")
            train(run, samples(lengths, prompt=2, experts=shape_of(run)), rehearsal)
            launches.add(rehearsal.count("launch") - before)
            run.policy.zero_grad(set_to_none=True)
        assert len(launches) == 1
        run.close()


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_a_cpu_in_float32(name, tmp_path, request) -> None:
    """They differ by what bfloat16 rounds; a wrong mask would change gradients by their own size."""
    model = model_of(name, request)
    run = build(model, tmp_path / "cpu", torch.device("cpu"), VARIANTS[name])
    table = samples([3, 9, 5, 1, 7, 7], experts=shape_of(run))
    expected = one_after_the_other(run, table)
    run.close()
    with rehearsing() as rehearsal:
        run = build(model, tmp_path / "gpu", rehearsal.device, VARIANTS[name])
        assert run.ranks.computes_in == "bfloat16"
        found = {key: value.cpu() for key, value in one_after_the_other(run, table).items()}
        run.close()
    assert {value.dtype for value in found.values()} == {torch.float32}
    layers = LAYERS["tiny_moe" if "experts" in name else "tiny_model"]
    # Sixteen roundings per layer forward and as many back, of half an eps each.
    assert difference(expected, found) <= (2 * 16 * layers) ** 0.5 * eps(torch.bfloat16)


@pytest.mark.parametrize("name", ["dense", "checkpointed", "lora"])
def test_one_process_in_bfloat16_computes_bit_by_bit_what_fsdp_computes(name, tmp_path, request) -> None:
    """Where torchrun starts a process, FSDP2 casts the weights; where nothing does, the policy."""
    model, variant = model_of(name, request), VARIANTS[name]
    settings = variant.get("trainer", {})
    half = {**settings, "model": {**settings.get("model", {}), "precision": "bfloat16"}}
    table, cpu = samples([3, 9, 5, 1, 7, 7]), torch.device("cpu")
    run = build(model, tmp_path / "alone", cpu, {**variant, "trainer": half})
    found = one_after_the_other(run, table)
    run.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = partial(Ranks.of, group=dist.group.WORLD)
        run = build(
            model, tmp_path / "fsdp", cpu, {**variant, "trainer": half}, lambda c, d: sharded(c, device=d)
        )
        assert run.ranks.computes_in == "bfloat16"
        expected = one_after_the_other(run, table)
        run.close()
    finally:
        dist.destroy_process_group()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_each_process_checks_the_kernel_of_its_device_though_the_model_is_proved_on_the_host(
    tiny_model, monkeypatch
) -> None:
    def missing(*_):
        raise RuntimeError("no kernel image is available")

    model = ModelConfig(name=str(tiny_model))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with rehearsing() as rehearsal:
            ranks = Ranks(group=dist.group.WORLD, device=rehearsal.device)
            policy, _ = ranks.load(model, 64)
            assert {buffer.device.type for buffer in policy.buffers()} == {"cpu"}
            assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}
            monkeypatch.setitem(_REPLACED, "_varlen_attn", missing)
            with pytest.raises(ModelError, match="no flash attention on rehearsal:0: no kernel image"):
                ranks.load(model, 64)
    finally:
        dist.destroy_process_group()


def test_precisions_that_do_not_train_are_refused_by_name() -> None:
    for precision in ("fp8", "float16", "tf32"):
        with pytest.raises(ValueError, match="precision"):
            TrainerConfig.model_validate({"model": {"precision": precision}})
    on_cpu, on_gpu = torch.device("cpu"), torch.device("cuda")
    for precision, expected in (
        ("auto", ("float32", "bfloat16")),
        ("float32", ("float32", "float32")),
        ("bfloat16", ("bfloat16", "bfloat16")),
    ):
        config = TrainerConfig.model_validate({"model": {"precision": precision}})
        assert tuple(Ranks.alone(config, each).computes_in for each in (on_cpu, on_gpu)) == expected


def test_float32_products_are_not_rounded_to_tf32(tiny_model, tmp_path) -> None:
    torch.set_float32_matmul_precision("high")
    build(tiny_model, tmp_path, torch.device("cpu"), DENSE).close()
    assert torch.get_float32_matmul_precision() == "highest"
