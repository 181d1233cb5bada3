"""Memory, traffic and times of a small model by hand, without torch; and published runs beside estimates."""

import math
from dataclasses import asdict, replace

import pytest

from pellucid.config.gpus import KNOWN_GPUS, GpuModel
from pellucid.config.tools import AssumeConfig
from pellucid.launch.estimate import (
    LOGIT_BYTES,
    MAX_LOGITS,
    ModelSize,
    PlannedServer,
    PlannedTrainer,
    Workload,
    num_micro_batches,
    sampling_s,
    serving,
    step_s,
    traffic,
    traffic_s,
    trainer_memory,
    training_flops,
    training_s,
    transfer_s,
)

SMALL = ModelSize(
    num_params=1000,
    num_outside=200,
    num_layers=2,
    largest_layer=400,
    num_active=900,
    attended=16,
    hidden=10,
    query_width=8,
    kv_width=4,
    mlp_width=30,
    vocabulary=20,
    kv_numbers=16,
    num_heads=2,
)
FOUR = PlannedTrainer(num_gpus=4, dp_replicate=1, cp=1, micro_batch_tokens=5, checkpoints_activations=False)
WORK = Workload(num_groups=4, group_size=2, prompt=10, completion=20, longest=50)
GPU = GpuModel("test", memory_gb=1, tflops=1, memory_gb_s=100, link_gb_s=10)
ASSUME = AssumeConfig(
    mfu=0.5, prefill_mfu=0.5, decode_bandwidth=0.5, decode_overhead_s=0, link_efficiency=0.5, network_gb_s=1,
    gpus_per_node=4, storage_gb_s=1, reserve_gb=0, engine_gb=0,
)  # fmt: skip


def test_activations_of_a_layer() -> None:
    """bfloat16: two norms of 4 + 2 + 2 bytes; q, k, v and the output twice; gate, silu, up, product."""
    assert SMALL.layer_activations(2) == 2 * 8 * 10 + 5 * 2 * 8 + 4 * 2 * 30
    assert SMALL.layer_activations(4) == 2 * 12 * 10 + 5 * 4 * 8 + 4 * 4 * 30
    normed = replace(SMALL, norms_heads=True)
    assert normed.layer_activations(2) == SMALL.layer_activations(2) + 6 * (8 + 4)
    experts = replace(SMALL, num_experts=8, top_k=2)
    assert experts.layer_activations(2) == SMALL.layer_activations(2) + 2 * 2 * 2 * 10


def test_memory_of_a_sharded_trainer() -> None:
    memory = trainer_memory(SMALL, FOUR)
    assert (memory.weights, memory.gradients, memory.optimizer) == (1000, 1000, 2000)
    activations = 2 * 5 * SMALL.layer_activations(2)
    logits, gradients, of_head = (4 * 4 + 2) * 5 * 20, 3 * 2 * 30 * 5, 2 * 20 * 10
    assert (memory.activations, memory.working) == (activations, logits)
    assert memory.peak == 4000 + activations + 2 * (200 + 3 * 400) + of_head + gradients
    wordy = trainer_memory(replace(SMALL, vocabulary=1000), FOUR)
    assert wordy.peak == 4000 + activations + 2 * (200 + 400) + 18 * 5 * 1000 + 2 * 1000 * 10


def test_many_logits_are_computed_in_chunks() -> None:
    """2²² words: their head has a gradient of 10 × 2²² float32 numbers, and one product as large."""
    wordy, again = replace(SMALL, vocabulary=1 << 22), replace(FOUR, checkpoints_activations=True)
    memory = trainer_memory(wordy, again)
    assert memory.working == 2 * MAX_LOGITS + 2 * 4 * 10 * (1 << 22)
    assert memory.peak == 4000 + 2 * 5 * 2 * 10 + 2 * (200 + 400) + memory.working
    # An adapter trains no head: logits alone count, as many as the device computes at a time, or as there are
    adapted = replace(wordy, num_adapter=1)
    chunks = {
        number: trainer_memory(adapted, replace(again, max_logits=number)).working
        for number in (1 << 20, MAX_LOGITS, 1 << 40)
    }
    assert chunks == {1 << 20: LOGIT_BYTES << 20, MAX_LOGITS: 8 * MAX_LOGITS, 1 << 40: 8 * 5 * (1 << 22)}
    # Few words in large chunks: their gradients, cast to bfloat16 beside the weight's
    narrow = replace(SMALL, vocabulary=1000, hidden=1)
    cast = trainer_memory(narrow, replace(again, micro_batch_tokens=40_000, max_logits=1 << 40))
    assert cast.working == 8 * 40_000_000  # which the logits of the forward pass exceed
    wide = replace(SMALL, vocabulary=1000, hidden=30_000)
    cast = trainer_memory(wide, replace(again, micro_batch_tokens=40_000, max_logits=1 << 40))
    assert cast.working == (4 + 2) * 40_000_000 + 4 * 30_000_000
    exact = trainer_memory(wide, replace(again, micro_batch_tokens=40_000, compute_bytes=4))
    assert exact.working == max(3 * 4 * 30 * 40_000, 4 * MAX_LOGITS + 4 * 30_000_000)


def test_a_large_part_outside_of_layers_peaks_as_its_gradients_are_scattered() -> None:
    """Tied, at the end; else the head's, while activations are there and the next layer is gathered."""
    tied = replace(SMALL, num_params=100_800, num_outside=100_000, vocabulary=10_000)
    few = replace(FOUR, micro_batch_tokens=1)
    assert trainer_memory(tied, few).peak == 4 * 100_800 + (2 + 4) * 100_000
    apart = replace(SMALL, num_params=200_801, num_outside=200_001, vocabulary=200, hidden=500)
    assert (tied.num_rooted, apart.num_rooted) == (100_000, 1)
    memory, activations = trainer_memory(apart, few), 2 * apart.layer_activations(2)
    assert memory.peak == 4 * 200_801 + activations + 2 * (1 + 400) + (2 + 4) * 100_000
    # The copy of the head's gradients stays while the last layer goes backward, in place of whole ones
    assert memory.gathered == 2 * (1 + 3 * 400) + 4 * 100_000
    once = trainer_memory(apart, replace(few, reduces_once=True))
    assert once.gathered == 2 * (1 + 3 * 400)
    assert once.peak == 7 * 200_801 + activations + 2 * (1 + 400) + 4 * 100_000


def test_gradients_that_are_reduced_once_are_whole_until_then() -> None:
    """4,000 bytes instead of a fourth of them; the optimizer sees the fourth."""
    once = trainer_memory(SMALL, replace(FOUR, reduces_once=True))
    each = trainer_memory(SMALL, FOUR)
    assert (once.gradients, each.gradients) == (4000, 1000)
    assert once.peak == each.peak + 3000
    # With next to no activations, the head's gradients in float32 and their copy are the most
    bare = replace(SMALL, num_params=100_800, num_outside=100_000, vocabulary=1000, hidden=100)
    few = replace(FOUR, micro_batch_tokens=1, reduces_once=True)
    assert trainer_memory(bare, few).peak == 4 * 100_800 + (4 + 4) * 100_000


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer() -> None:
    memory = trainer_memory(SMALL, replace(FOUR, checkpoints_activations=True))
    assert memory.activations == 2 * 5 * 2 * 10 + 5 * SMALL.layer_activations(2)  # the last, computed again


def test_context_parallel_ranks_have_their_share_of_the_tokens() -> None:
    halved = trainer_memory(SMALL, replace(FOUR, cp=2))
    assert halved.activations == 2 * 3 * SMALL.layer_activations(2)  # 5 tokens on 2 ranks: 3
    assert halved.weights == 1000


def test_copies_of_the_model_are_sharded_over_fewer_gpus() -> None:
    assert trainer_memory(SMALL, replace(FOUR, dp_replicate=2)).weights == 2000


def test_one_process_gathers_nothing_and_an_adapter_has_no_other_gradients() -> None:
    alone = PlannedTrainer(1, 1, 1, 5, False, compute_bytes=4, is_sharded=False)
    memory = trainer_memory(SMALL, alone)
    assert memory.gathered == 0
    assert memory.peak == 16_000 + 2 * 5 * SMALL.layer_activations(4) + 3 * 4 * 30 * 5
    adapted = trainer_memory(replace(SMALL, num_adapter=100), alone)
    assert (adapted.weights, adapted.gradients, adapted.optimizer) == (4400, 400, 800)


def test_weights_beside_an_adapter_have_the_dtype_of_the_forward() -> None:
    adapted = replace(SMALL, num_adapter=100)
    assert trainer_memory(adapted, FOUR).weights == (2 * 1000 + 4 * 100) // 4
    assert trainer_memory(adapted, replace(FOUR, compute_bytes=4)).weights == 4 * 1100 // 4


def test_traffic_of_a_step() -> None:
    """Three quarters leave and arrive: of 800 weights twice and 200 once in bfloat16, of 1,000 in float32."""
    moved = traffic(SMALL, FOUR, gpus_per_node=4, micro_batches=1)
    assert (moved.all_gather, moved.reduce_scatter) == (2 * (1600 + 200) * 0.75, 4000 * 0.75)
    assert (moved.all_reduce, moved.all_to_all, moved.spans_machines) == (0, 0, False)
    assert traffic_s(moved, GPU, ASSUME) == pytest.approx((2700 + 3000) / 5e9)
    pairs = replace(FOUR, num_gpus=8, dp_replicate=2)
    copies = traffic(SMALL, pairs, gpus_per_node=4, micro_batches=1)
    assert copies.all_reduce == 2 * 1000 / 2
    # four network cards of 1 GB/s at half speed, beside links of 10 GB/s
    assert traffic_s(copies, GPU, ASSUME) == pytest.approx((2700 + 3000) / 5e9 + 1000 / 2e9)
    wide = traffic(SMALL, replace(FOUR, num_gpus=8), gpus_per_node=4, micro_batches=1)
    assert wide.spans_machines
    assert traffic_s(wide, GPU, ASSUME) == pytest.approx((3600 + 4000) * 7 / 8 / 2e9)
    sliced = traffic(SMALL, replace(FOUR, cp=2), gpus_per_node=4, micro_batches=1)
    assert sliced.all_to_all == 8 * 2 * 8 * 2 * 3 / 2
    # 1,000 parameters of which 400 are outside: the embedding, half of them, is gathered twice, the head once
    apart = traffic(replace(SMALL, num_outside=400), FOUR, gpus_per_node=4, micro_batches=1)
    assert apart.all_gather == 2 * (2 * 800 + 200) * 0.75


def test_gradients_travel_once_per_step_where_every_process_keeps_them_whole() -> None:
    pairs = replace(FOUR, num_gpus=8, dp_replicate=2, cp=2)
    one, each, once = (
        traffic(SMALL, replace(pairs, reduces_once=is_once), 4, micro_batches=number)
        for number, is_once in ((1, False), (3, False), (3, True))
    )
    for name, expected in asdict(one).items():
        if name == "spans_machines":
            continue
        assert getattr(each, name) == 3 * expected, name
        is_reduced = name in ("reduce_scatter", "all_reduce")
        assert getattr(once, name) == (expected if is_reduced else 3 * expected), name


def test_a_prompt_is_computed_once_where_that_pays() -> None:
    assert (WORK.num_rollouts, WORK.num_sampled, WORK.num_packed) == (8, 160, 240)
    assert WORK.num_computed == 160 + 4 * 10
    assert replace(WORK, completion=81).num_computed == 8 * 91  # more than eight times the prompt
    assert replace(WORK, shares_prompts=False).num_computed == 240


def test_time_of_training() -> None:
    assert training_flops(SMALL, WORK) == 3 * 2 * 900 * 200 + 12 * 16 * 8 * 30**2 / 2
    # 25 computed tokens a rollout, 2 rollouts a rank: one micro batch of 50 tokens, or two of one rollout
    assert num_micro_batches(WORK, replace(FOUR, micro_batch_tokens=50)) == 1
    assert num_micro_batches(WORK, replace(FOUR, micro_batch_tokens=49)) == 2
    compute, moved = training_s(SMALL, FOUR, WORK, GPU, ASSUME)
    assert compute == pytest.approx(training_flops(SMALL, WORK) / (4 * 0.5e12))
    assert moved == pytest.approx(2 * 5700 / 5e9)
    again, _ = training_s(SMALL, replace(FOUR, checkpoints_activations=True), WORK, GPU, ASSUME)
    assert again == pytest.approx(compute * 4 / 3)
    three, _ = training_s(SMALL, replace(FOUR, num_gpus=3), WORK, GPU, ASSUME)
    assert three == pytest.approx(training_flops(SMALL, WORK) * 9 / 8 / (3 * 0.5e12))  # one rank has 3 of 8


def test_a_server() -> None:
    """1 GB holds 2 kB of weights; a sequence of 30 tokens, and half a block, takes 38 × 32 bytes."""
    found = serving(SMALL, PlannedServer(1, max_concurrent=10, memory_share=1.0), WORK, GPU, ASSUME)
    assert (found.weights, found.kv_cache, found.kv_per_token) == (2000, 1e9 - 2000, 32)
    assert found.concurrency == 10
    read_s = (2 * 900 + 32 * 10 * 20) / 50e9
    compute_s = 2 * 900 * 10 / 0.5e12
    assert found.decode_step_s == pytest.approx(max(read_s, compute_s))
    prefill_s = 2 * 900 * 10 / 2 / 0.5e12
    assert found.tokens_per_s == pytest.approx(10 * 20 / (20 * read_s + 10 * prefill_s))
    assert sampling_s(WORK, found, 2, is_synchronous=False) == pytest.approx(160 / (2 * found.tokens_per_s))
    assert sampling_s(WORK, found, 99, is_synchronous=True) == pytest.approx(40 * read_s)
    few = serving(SMALL, PlannedServer(1, 10), WORK, replace(GPU, memory_gb=1e-5), ASSUME)
    assert few.concurrency == math.floor((1e4 * 0.9 - 2000) / (32 * 38)) == 5
    # 4,000 bytes × 0.9: one sequence of the mean length fits, but not one of 50 tokens
    for memory_gb in (2e-6, 4e-6):
        none = serving(SMALL, PlannedServer(1, 10), WORK, replace(GPU, memory_gb=memory_gb), ASSUME)
        assert (none.concurrency, none.tokens_per_s, none.decode_step_s) == (0, 0.0, math.inf)
    assert sampling_s(WORK, none, 1, is_synchronous=False) == math.inf


def test_many_tokens_meet_all_experts() -> None:
    """8 experts of 100 weights, 2 per token, 100 other weights and an embedding of 200."""
    sparse = replace(SMALL, num_params=1100, num_active=300, num_experts=8, top_k=2)
    one = serving(sparse, PlannedServer(1, 1), WORK, GPU, ASSUME)
    assert one.decode_step_s == pytest.approx((2 * 300 + 32 * 20) / 50e9)
    many = serving(sparse, PlannedServer(1, 1000), WORK, GPU, ASSUME)
    assert many.decode_step_s == pytest.approx((2 * 900 + 32 * 1000 * 20) / 50e9)


def test_weights_are_written_and_read_in_bfloat16_and_adapters_in_float32() -> None:
    assert transfer_s(SMALL, ASSUME) == pytest.approx(2 * 2000 / 1e9)
    assert transfer_s(SMALL, ASSUME, published=4) == pytest.approx(2 * 4000 / 1e9)
    assert transfer_s(replace(SMALL, num_adapter=10), ASSUME) == pytest.approx(2 * 40 / 1e9)


def test_a_step_takes_as_long_as_its_longest_part_unless_all_wait_for_each_other() -> None:
    """Of the transfer, 8 s, the trainer writes for 4 while it trains the next step."""
    assert step_s(3, 2, 8, is_synchronous=True) == 13
    assert [step_s(*parts, is_synchronous=False) for parts in ((9, 2, 8), (3, 7, 8), (3, 2, 8))] == [9, 7, 4]


LLAMA_8B = ModelSize(
    num_params=8_030_261_248,
    num_outside=2 * 128_256 * 4096 + 4096,
    num_layers=32,
    largest_layer=218_112_000,
    num_active=7_504_658_432,
    attended=32 * 4096,
    hidden=4096,
    query_width=4096,
    kv_width=1024,
    mlp_width=14_336,
    vocabulary=128_256,
    kv_numbers=2 * 32 * 1024,
    num_heads=32,
)
LLAMA_70B = ModelSize(
    num_params=70_553_706_496,
    num_outside=2 * 128_256 * 8192 + 8192,
    num_layers=80,
    largest_layer=855_654_400,
    num_active=69_501_714_432,
    attended=80 * 8192,
    hidden=8192,
    query_width=8192,
    kv_width=1024,
    mlp_width=28_672,
    vocabulary=128_256,
    kv_numbers=2 * 80 * 1024,
    num_heads=64,
)


QWEN_32B = ModelSize(
    num_params=32_762_123_264,
    num_outside=2 * 151_936 * 5120 + 5120,
    num_layers=64,
    largest_layer=487_598_336,
    num_active=31_983_534_080,
    attended=64 * 8192,
    hidden=5120,
    query_width=8192,
    kv_width=1024,
    mlp_width=25_600,
    vocabulary=151_936,
    kv_numbers=2 * 64 * 1024,
    num_heads=64,
    norms_heads=True,
)
QWEN_30B_A3B = ModelSize(
    num_params=30_532_122_624,
    num_outside=2 * 151_936 * 2048 + 2048,
    num_layers=48,
    largest_layer=623_120_640,
    num_active=3_041_656_832,
    attended=48 * 4096,
    hidden=2048,
    query_width=4096,
    kv_width=512,
    mlp_width=8 * 768,
    vocabulary=151_936,
    kv_numbers=2 * 48 * 512,
    num_heads=32,
    num_experts=128,
    top_k=8,
    norms_heads=True,
)


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "sequences", "again", "published", "ratio"),
    [
        (LLAMA_8B, 64, "a100-80", 1, False, 2904, 0.83),
        (LLAMA_70B, 64, "a100-80", 1, True, 331, 0.63),
        (LLAMA_8B, 8, "h100", 2, False, 5762, 1.33),
        (LLAMA_8B, 128, "h100", 2, False, 5605, 1.37),
    ],
)
def test_published_rates_of_training(model, gpus, gpu, sequences, again, published, ratio) -> None:
    """Tokens per second and GPU of FSDP2, by torchtitan's benchmarks, with the default assumptions.

    `ratio` is estimate ÷ published: it pins the table of docs/sizing.md.
    """
    trainer = PlannedTrainer(gpus, 1, 1, 8192 * sequences, again)
    work = Workload(gpus * sequences, 1, 1, 8191, 8192, shares_prompts=False)
    seconds = max(training_s(model, trainer, work, KNOWN_GPUS[gpu], AssumeConfig()))
    assert work.num_packed / gpus / seconds / published == pytest.approx(ratio, abs=0.01)


def test_the_published_memory_of_more_shards() -> None:
    """torchtitan's Llama 3.1 8B takes 82.4 GiB on each of 8 GPUs, 67.0 on each of 128.

    0.91 pins the difference of the sharded states, beside which nothing depends on the number of GPUs.
    """
    few, many = (trainer_memory(LLAMA_8B, PlannedTrainer(gpus, 1, 1, 2 * 8192, False)) for gpus in (8, 128))
    assert (few.peak - many.peak) / 2**30 / (82.4 - 67.0) == pytest.approx(0.91, abs=0.01)


@pytest.mark.parametrize(
    ("model", "gpus", "length", "size", "published", "trainer_gpus", "ratio"),
    [
        (LLAMA_8B, 16, 1123, 1, 64.8, 8, 0.60),
        (QWEN_30B_A3B, 32, 3203, 2, 141, 16, 0.69),
        (QWEN_32B, 64, 3258, 4, 161, 40, 0.72),
    ],
)
def test_published_steps_of_rl(model, gpus, length, size, published, trainer_gpus, ratio) -> None:
    """GRPO one step off policy on H100, 2,048 rollouts a step, by NeMo RL; prompts of 150 are a guess.

    `ratio` is estimate ÷ published, of the division with the shortest step: it pins docs/sizing.md.
    """
    work, gpu, assume = Workload(64, 32, 150, length - 150, 4096), KNOWN_GPUS["h100"], AssumeConfig()
    served = serving(model, PlannedServer(size, 256), work, gpu, assume)
    steps = {}
    for trainer in range(8, gpus, 8):
        trains = max(training_s(model, PlannedTrainer(trainer, 1, 1, 4096, True), work, gpu, assume))
        samples = sampling_s(work, served, (gpus - trainer) // size, is_synchronous=False)
        steps[trainer] = step_s(samples, trains, transfer_s(model, assume), is_synchronous=False)
    best = min(steps, key=lambda trainer: steps[trainer])
    assert best == trainer_gpus
    assert steps[best] / published == pytest.approx(ratio, abs=0.01)
