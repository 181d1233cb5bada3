"""The trainer's loop on a tiny model: gradients, records, books and files of real steps."""

import json
import random

import pytest
import torch

from pellucid.checks.verify.gradients import difference
from pellucid.config import ModelConfig, SFTConfig, TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import DataError
from pellucid.inference.client import Account, SamplingParams
from pellucid.inference.engine import Engine
from pellucid.inference.slots import Request, run_to_end
from pellucid.ledger import Journal, Stage, read_journal
from pellucid.metrics import MetricSet, Sum, read_metrics
from pellucid.model import load_policy
from pellucid.trainer import train_on_dataset
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate, train
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.sft import load_data
from pellucid.transport import Batch, MemoryChannel, encode_batch
from tolerance import gradient_bound, logprob_bound, mismatch_kl_bound, near, partial_sum


def config(model, folder, **changes) -> TrainerRunConfig:
    values = {
        "output_dir": folder,
        "max_steps": 1,
        "seq_len": 256,
        "model": {"name": str(model)},
        "trainer": {"threads": 1, "optim": {"lr": 1e-3}, "experimental": {"token_export": {}}},
    }
    return TrainerRunConfig.model_validate({**values, **changes})


def rollouts(model, count=12, group_size=1) -> list[TrainingSample]:
    """Samples that the engine drew from this very model, of ragged lengths, in two environments."""
    generator = random.Random(0)
    samples = {}

    def keep(prompt, index):
        def on_finish(completion):
            samples[index] = TrainingSample.from_turn(
                prompt,
                completion.token_ids,
                completion.logprobs,
                env_name="ab"[index % 2],
                run_id="run",
                rollout_id=f"r{index}",
                group_id=f"g{index // group_size}",
                reward=float(index),
                advantage=generator.uniform(-1, 1),
                temperature=0.8,
            )

        return on_finish

    requests = []
    for index in range(count):
        if index % group_size == 0:
            prompt = [generator.randrange(5, 101) for _ in range(generator.randint(1, 20))]
        params = SamplingParams(temperature=0.8, max_tokens=generator.randint(1, 30), seed=index)
        requests.append(Request(prompt, params, Account(), keep(prompt, index)))
    run_to_end(Engine(load_policy(ModelConfig(name=str(model))), num_slots=4, max_length=64), requests)
    return [samples[index] for index in range(count)]


def run_steps(settings, tables, journal=None):
    channel = MemoryChannel()
    for step, table in enumerate(tables):
        channel.send(step, encode_batch(Batch("run", step, table)))
    run = build_run(settings, OrchestratorBatches(channel), journal, [], publishes=True)
    try:
        train(run)
    finally:
        run.close()
    return run


def gradients(settings, table) -> dict[str, torch.Tensor]:
    """The gradients of one batch, before the optimizer takes them."""
    channel = MemoryChannel()
    channel.send(0, encode_batch(Batch("run", 0, table)))
    run = build_run(settings, OrchestratorBatches(channel), None, [])
    if run.exporter is not None:
        run.exporter.close()
        run.exporter = None
    accumulate(run, run.next_batch(0))
    run.close()
    return {name: parameter.grad for name, parameter in run.policy.named_parameters()}


def rounding(model, table) -> float:
    """The difference that two computations of one gradient may have, as `difference` measures it."""
    return gradient_bound(model, table.num_tokens)


def test_the_gradient_does_not_depend_on_sharing_prompts(tiny_model, tmp_path) -> None:
    """Groups of four with a common prompt, and two samples without one."""
    samples = rollouts(tiny_model, count=14, group_size=4)
    table = TokenTable.from_samples(samples)
    results = []
    for share in (False, True):
        trainer = {"threads": 1, "share_prompts": share}
        results.append(gradients(config(tiny_model, tmp_path / str(share), trainer=trainer), table))
    assert difference(*results) <= rounding(tiny_model, table)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"mm_tensors": b"pixels"}, "sequence 2: mm_tensors holds multimodal tensors"),
        ({"mm_token_type_ids": [0, 1, 0]}, "sequence 2: mm_token_type_ids holds multimodal tokens"),
    ],
)
def test_samples_that_are_not_text_alone_are_refused(tiny_model, tmp_path, columns, message) -> None:
    """Types of 0 are text, and no bytes are no tensors."""
    text = [
        TrainingSample.from_turn(
            [1, 2], [3], [-1.0], env_name="a", mm_token_type_ids=[0, 0, 0], mm_tensors=b""
        ),
        TrainingSample.from_turn([1], [2], [-1.0], env_name="a", advantage=1.0),
    ]
    settings = config(tiny_model, tmp_path)
    run_steps(settings, [TokenTable.from_samples(text)])
    image = TrainingSample.from_turn([1, 2], [3], [-1.0], env_name="b", sample_id="s", **columns)
    with pytest.raises(DataError, match=message):
        run_steps(settings, [TokenTable.from_samples([*text, image])])


@pytest.mark.parametrize("cap", [128, 64, 2])
def test_the_gradient_does_not_depend_on_packing(tiny_model, tmp_path, cap) -> None:
    table = TokenTable.from_samples(rollouts(tiny_model))
    whole = gradients(config(tiny_model, tmp_path / "whole"), table)
    trainer = {"threads": 1, "micro_batch_max_tokens": cap}
    cut = gradients(config(tiny_model, tmp_path / "cut", trainer=trainer), table)
    assert difference(whole, cut) <= rounding(tiny_model, table)


LOSSES = [
    {"type": "dppo", "reduction": "sequence"},
    {"type": "ppo_clip", "reduction": "group"},
    {"type": "cispo"},
    {"type": "gspo"},
    {"type": "icepop"},
    {"type": "tis", "reduction": "sequence"},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["type"])
def test_no_loss_depends_on_packing(tiny_model, tmp_path, loss) -> None:
    table = TokenTable.from_samples(rollouts(tiny_model, group_size=3))
    results = []
    for cap in (256, 48):
        trainer = {"threads": 1, "micro_batch_max_tokens": cap, "loss": loss}
        results.append(gradients(config(tiny_model, tmp_path / str(cap), trainer=trainer), table))
    assert difference(*results) <= rounding(tiny_model, table)


@pytest.mark.parametrize(("reduction", "size"), [("sequence", 1), ("group", 3)])
def test_a_mean_over_units_is_the_mean_of_their_own_gradients(tiny_model, tmp_path, reduction, size) -> None:
    samples = rollouts(tiny_model, group_size=3)
    trainer = {"threads": 1, "loss": {"type": "dppo", "reduction": reduction}}
    whole = gradients(
        config(tiny_model, tmp_path / "whole", trainer=trainer), TokenTable.from_samples(samples)
    )
    units = [samples[start : start + size] for start in range(0, len(samples), size)]
    alone = [
        gradients(config(tiny_model, tmp_path / f"{index}"), TokenTable.from_samples(unit))
        for index, unit in enumerate(units)
    ]
    mean = {name: torch.stack([each[name] for each in alone]).mean(0) for name in whole}
    assert difference(mean, whole) <= rounding(tiny_model, TokenTable.from_samples(samples))


def test_the_gradient_is_the_mean_over_trainable_tokens(tiny_model, tmp_path) -> None:
    """Against the formula written out, one sequence at a time, with autograd over plain HF logits."""
    samples = rollouts(tiny_model, count=4)
    table = TokenTable.from_samples(samples)
    ours = gradients(config(tiny_model, tmp_path), table)
    policy = load_policy(ModelConfig(name=str(tiny_model))).double()
    policy.hf.set_attn_implementation("eager")
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.from_numpy(sample.arrays["token_ids"].array().astype("int64"))
        logits = policy.hf(input_ids=ids[None], use_cache=False).logits[0, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][-sample.num_sampled :]
        log_ratio = logprobs - torch.from_numpy(sample.arrays["inference_logprobs"].array().copy())
        total = total + (-sample.values["advantage"] * log_ratio.exp() + 1e-3 * log_ratio**2).sum()
    (total / table.num_trainable).backward()
    exact = {name: parameter.grad for name, parameter in policy.named_parameters()}
    assert difference(exact, ours) <= rounding(tiny_model, table)


class OtherRankLost(Ranks):
    """Beside this rank another one, whose disk was full in step 0."""

    def gather(self, value):
        if not isinstance(value, tuple):
            return [value]
        lost = MetricSet()
        lost.add("export/lost_sequences", Sum(5))
        return [value, (lost, *value[1:])]


def test_a_step_that_a_rank_did_not_export_is_not_marked_whole(tiny_model, tmp_path) -> None:
    table = TokenTable.from_samples(rollouts(tiny_model, count=2))
    channel = MemoryChannel()
    for step in range(2):
        channel.send(step, encode_batch(Batch("run", step, table)))
    settings = config(tiny_model, tmp_path, max_steps=2)
    run = build_run(settings, OrchestratorBatches(channel), None, [], OtherRankLost())
    train(run)
    run.close()
    whole = [(tmp_path / "token_exports" / f"step_{step}" / "STABLE").exists() for step in range(2)]
    assert whole == [False, True]
    assert [
        metrics["export/lost_sequences"] for metrics in read_metrics(tmp_path / "metrics/trainer.jsonl")
    ] == [5, 5]


def test_a_step_leaves_record_books_and_weights_that_agree(tiny_model, tmp_path) -> None:
    table = TokenTable.from_samples(rollouts(tiny_model))
    journal = Journal(tmp_path / "ledger" / "trainer.jsonl", Stage.TRAINER)
    run = run_steps(config(tiny_model, tmp_path, max_steps=2), [table, table], journal)

    metrics = list(read_metrics(tmp_path / "metrics" / "trainer.jsonl"))
    for step in range(2):
        folder = tmp_path / "token_exports" / f"step_{step}"
        assert (folder / "STABLE").exists()
        records = [json.loads(line) for line in (folder / "rank_0.jsonl").read_text().splitlines()]
        assert len(records) == 12
        losses = [value for record in records for value in record["token_loss"]]
        loss = metrics[step]["loss"] * table.num_trainable
        assert sum(losses) == near(loss, terms=len(losses), scale=partial_sum(losses))
        assert {record["denominator"] for record in records} == {table.num_trainable}
        assert sum(sum(record["loss_mask"]) for record in records) == table.num_trainable

    # The first batch was sampled by the very weights that train on it.
    largest = -min(table["inference_logprobs"])
    allowed = logprob_bound(tiny_model, max(table.lengths), largest)
    assert metrics[0]["mismatch_kl/all/mean"] <= mismatch_kl_bound(allowed)
    assert metrics[0]["is_masked/all"] == 0
    assert metrics[1]["mismatch_kl/all/mean"] > metrics[0]["mismatch_kl/all/mean"]
    assert metrics[0]["tokens"] == table.num_tokens

    totals: dict[str, int] = {}
    for entry in read_journal(tmp_path / "ledger" / "trainer.jsonl"):
        for name, tokens in entry.counts.items():
            totals[name] = totals.get(name, 0) + tokens
    assert totals["received"] == 2 * table.num_sampled
    assert totals["trained"] + totals.get("masked", 0) == totals["received"]
    assert totals["computed"] == 2 * table.num_tokens
    assert totals["context"] == 2 * (table.num_tokens - table.num_sampled)

    published = load_policy(ModelConfig(name=str(tiny_model)))
    Engine(published, num_slots=1, max_length=8).update_weights(2, tmp_path / "weights" / "step_2")
    final = load_policy(ModelConfig(name=str(tmp_path / "model")))
    for trained, sent, saved in zip(
        run.policy.parameters(), published.parameters(), final.parameters(), strict=True
    ):
        assert torch.equal(trained, sent)
        assert torch.equal(trained, saved)


def test_truncated_and_untrainable_tokens_are_counted(tiny_model, tmp_path) -> None:
    sample = TrainingSample.from_turn(
        [5, 6],
        [7] * 10,
        [-1.0] * 10,
        completion_mask=[False, True] * 5,
        env_name="a",
        run_id="run",
        advantage=1.0,
    )
    journal = Journal(tmp_path / "ledger.jsonl", Stage.TRAINER)
    settings = config(tiny_model, tmp_path, seq_len=8)
    run_steps(settings, [TokenTable.from_samples([sample])], journal)
    counts = next(iter(read_journal(tmp_path / "ledger.jsonl"))).counts
    assert counts["received"] == 10
    assert counts["truncated"] == 4
    assert counts["untrainable"] == 3
    assert counts["trained"] + counts.get("masked", 0) == 3
    assert (counts["context"], counts["computed"]) == (2, 8)
    assert next(read_metrics(tmp_path / "metrics" / "trainer.jsonl"))["truncated_tokens"] == 4


def test_sft_learns_through_the_same_loop(tiny_model, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    chats = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
        for word in ("abc", "xyz", "hello")
    ]
    data.write_text("\n".join(json.dumps(chat) for chat in chats))
    settings = SFTConfig.model_validate(
        {
            "output_dir": tmp_path,
            "max_steps": 40,
            "seq_len": 256,
            "model": {"name": str(tiny_model)},
            "data": {"path": data, "batch_size": 3},
            "trainer": {"threads": 1, "optim": {"lr": 1e-2}, "experimental": {"token_export": {}}},
        }
    )
    train_on_dataset(settings, load_data(settings, load_tokenizer(str(tiny_model))), [])
    losses = [record["loss"] for record in read_metrics(tmp_path / "metrics" / "trainer.jsonl")]
    assert losses[0] > 3
    assert losses[-1] < 0.3
    record = json.loads((tmp_path / "token_exports" / "step_0" / "rank_0.jsonl").read_text().splitlines()[0])
    assert record["training_mode"] == "sft"
    assert set(record["importance_ratio"]) == set(record["is_masked"]) == {None}
    assert record["reward"] is None and set(record["rewards"]) == {None}
    assert not (tmp_path / "ledger").exists()
    assert not (tmp_path / "weights").exists()
