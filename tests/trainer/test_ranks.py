"""Several ranks in one process: together they train, count and book what a single one does."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from pellucid.config import TrainerRunConfig
from pellucid.config.trainer import TrainerModelConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.errors import PayloadError
from pellucid.ledger import Flow, Journal, Stage, read_journal, reconcile
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import accumulate
from pellucid.trainer.parallel import Ranks
from pellucid.transport import Batch, decode_batch, encode_batch
from tolerance import gradient_chain, logprob_bound, near


def sample(index, *, mode="rl", run="one", env="a", prompt=3, completion=4, group="") -> TrainingSample:
    """Deterministic tokens; the logprobs of some are far from the model's, so that they are masked."""
    ids = [5 + (7 * index + 3 * position) % 90 for position in range(completion)]
    common = [5 + (len(group) + position) % 90 for position in range(prompt)]
    return TrainingSample.from_turn(
        common,
        ids,
        [-0.1 if position % 3 == 0 else -4.5 for position in range(completion)],
        completion_mask=[position % 4 != 3 for position in range(completion)],
        env_name=env,
        run_id=run,
        group_id=group,
        sample_id=str(index),
        training_mode=mode,
        advantage=1.0 if index % 2 else -1.0,
        teacher_logprobs=[-2.0] * (prompt + completion) if mode == "opd" else None,
    )


def mixed_batch() -> TokenTable:
    """Two runs, three environments, two modes, a group, a sample of one token and one that is truncated."""
    alone = TrainingSample.build(
        token_ids=[9],
        loss_mask=[False],
        sampled=[False],
        inference_logprobs=[],
        policy_versions=[],
        env_name="a",
        run_id="one",
    )
    return TokenTable.from_samples(
        [
            *(sample(index, completion=2 + 3 * index) for index in range(8)),
            *(sample(20 + index, env="b", prompt=12, completion=3 + index, group="g") for index in range(4)),
            *(sample(30 + index, run="two", env="a", completion=5) for index in range(3)),
            *(sample(40 + index, mode="opd", env="c", completion=6) for index in range(2)),
            sample(50, env="b", completion=60),
            alone,
        ]
    )


def settings(model, folder, **trainer) -> TrainerRunConfig:
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "seq_len": 48,
            "model": {"name": str(model)},
            "trainer": {"threads": 1, **trainer},
        }
    )


class Trained:
    """One step of `num_ranks` ranks that share a model, so that its gradient is the sum of theirs."""

    def __init__(self, config, table, num_ranks) -> None:
        run = build_run(config, batches=None, journal=None, sinks=[])
        self.micro_batches, observers, metrics = [], [], []
        for rank in range(num_ranks):
            run.ranks = Ranks(rank, num_ranks)
            batch = run.pack(0, table)
            observer = accumulate(run, batch)
            self.micro_batches += batch.packed.micro_batches(rank)
            observers.append(observer)
            metrics.append(observer.metrics())
        self.gradients = {name: parameter.grad for name, parameter in run.policy.named_parameters()}
        self.reports = [observer.report(metrics) for observer in observers]
        self.books: dict[tuple[str, str], Counter[str]] = {}
        for rank, observer in enumerate(observers):
            path = config.output_dir / "ledger" / ("trainer.jsonl" if rank == 0 else f"trainer_{rank}.jsonl")
            journal = Journal(path, Stage.TRAINER)
            observer.write_ledger(journal)
            journal.close(1)
            for entry in read_journal(path):
                self.books.setdefault((entry.run, entry.env), Counter()).update(entry.counts)
        run.close()

    @property
    def report(self) -> dict[str, float]:
        return self.reports[0]

    def booked(self, what) -> int:
        return sum(counts[what] for counts in self.books.values())


@pytest.fixture(scope="module")
def single(tiny_model, tmp_path_factory) -> Trained:
    """All of it on one rank, in as few micro batches as there are kinds."""
    trained = Trained(settings(tiny_model, tmp_path_factory.mktemp("single")), mixed_batch(), 1)
    assert trained.booked("masked") > 0
    return trained


@pytest.mark.parametrize(
    ("num_ranks", "trainer"),
    [
        (1, {"micro_batch_max_tokens": 16}),
        (1, {"pad_to_multiple_of": 16}),
        (2, {}),
        (2, {"micro_batch_max_tokens": 2}),
        (3, {"micro_batch_max_tokens": 24, "pad_to_multiple_of": 8}),
        (4, {"share_prompts": False, "pad_to_multiple_of": 4}),
        (4, {"micro_batch_max_tokens": 40}),
    ],
)
def test_ranks_add_up_to_one(tiny_model, tmp_path, single, num_ranks, trainer) -> None:
    table = mixed_batch()
    trained = Trained(settings(tiny_model, tmp_path, **trainer), table, num_ranks)

    # A metric is a mean, or the largest, of what the tokens' logprobs give.
    allowed = logprob_bound(tiny_model, max(table.lengths))
    scale = max(gradient.abs().max() for gradient in single.gradients.values())
    for name, gradient in single.gradients.items():
        terms = gradient_chain(tiny_model, table.num_tokens)
        assert trained.gradients[name] == near(gradient, terms=terms, scale=scale), name

    # Global metrics are the same on every rank, and those of one rank; only how it was packed may differ.
    packing = {"tokens", "computed_tokens", "padding_tokens", "micro_batches", "oversized_samples"}
    packing |= {"max_micro_batch_tokens", "micro_batch_max_tokens"}
    for name, value in single.report.items():
        if name not in packing and not name.startswith("local/"):
            assert trained.report[name] == near(value, within=allowed * max(1.0, abs(value))), name
    for report in trained.reports:
        assert {n: v for n, v in report.items() if not n.startswith("local/")} == {
            n: v for n, v in trained.report.items() if not n.startswith("local/")
        }
    for name in ("tokens", "computed_tokens", "trained_tokens", "loss_tokens", "samples", "micro_batches"):
        assert sum(report[f"local/{name}"] for report in trained.reports) == trained.report[name]
    assert len({report["local/micro_batches"] for report in trained.reports}) == 1

    # What was really packed.
    report, counts = trained.report, [part.counts for part in trained.micro_batches]
    assert report["samples"] == table.num_sequences
    assert report["tokens"] == sum(count.tokens for count in counts)
    assert report["truncated_tokens"] == 63 - 48
    assert report["max_micro_batch_tokens"] == max(count.tokens for count in counts)
    assert report["tokens"] - report["padding_tokens"] == table.num_tokens - report["truncated_tokens"]

    # The books agree with the metrics to the token, and with those of one rank in every account.
    assert trained.booked("computed") == report["computed_tokens"]
    assert trained.booked("padding") == report["padding_tokens"]
    assert trained.booked("trained") == report["trained_tokens"]
    assert trained.booked("truncated") == report["truncated_tokens"]
    assert trained.booked("computed") + trained.booked("saved") == report["tokens"]
    for account, expected in single.books.items():
        found = trained.books[account]
        for what in ("received", "truncated", "untrainable", "masked", "trained", "context"):
            assert found[what] == expected[what], (account, what)
    for counts in trained.books.values():
        states = sum(counts[what] for what in ("trained", "masked", "untrainable", "context", "padding"))
        assert counts["computed"] + counts["saved"] == states


def test_the_ledger_balances_with_padding_and_dummies(tiny_model, tmp_path) -> None:
    """Three ranks, each with a journal of its own, after an engine and an orchestrator that lost nothing."""
    table = mixed_batch()
    trained = Trained(settings(tiny_model, tmp_path, pad_to_multiple_of=16), table, 3)
    assert trained.booked("padding") > 0
    engine = Journal(tmp_path / "ledger" / "inference.jsonl", Stage.INFERENCE)
    orchestrator = Journal(tmp_path / "ledger" / "orchestrator.jsonl", Stage.ORCHESTRATOR)
    for (run, env), counts in trained.books.items():
        for journal, flows in ((engine, ("sampled", "delivered")), (orchestrator, ("received", "sent"))):
            for flow in flows:
                journal.count(run, env, Flow(flow), counts["received"])
    orchestrator.flush(0)
    engine.close(1)
    orchestrator.close(1)
    report = reconcile(tmp_path / "ledger")
    assert report.verdict() == [
        f"balanced: every one of the {table.num_sampled:,} sampled tokens is accounted for"
    ]


def test_masked_tokens_are_booked_to_the_run_that_they_belong_to(single) -> None:
    """Environment `a` has tokens of two runs."""
    masked = {account: counts["masked"] for account, counts in single.books.items()}
    assert masked["one", "a"] > 0
    assert masked["two", "a"] > 0
    assert sum(masked.values()) == single.report["loss_tokens"] - single.report["trained_tokens"]


def test_a_dummy_is_inert(tiny_model, tmp_path) -> None:
    """Two opd samples on three ranks: the third computes one token of padding, with a gradient of zero."""
    table = TokenTable.from_samples([sample(index, mode="opd") for index in range(2)])
    run = build_run(settings(tiny_model, tmp_path), batches=None, journal=None, sinks=[])
    run.ranks = Ranks(2, 3)
    batch = run.pack(0, table)
    observer = run.observer(batch)
    (dummy,) = batch.micro_batches
    output = run.forward(dummy)
    result = run.loss(dummy, output, batch.denominator)
    result.loss.backward()
    observer.add(dummy, output, result)
    run.close()
    assert result.loss.item() == 0
    assert all(torch.count_nonzero(parameter.grad) == 0 for parameter in run.policy.parameters())
    report = observer.metrics().report()
    assert (report["samples"], report["loss_tokens"], report["tokens"], report["padding_tokens"]) == (
        0,
        0,
        1,
        1,
    )
    journal = Journal(tmp_path / "trainer.jsonl", Stage.TRAINER)
    observer.write_ledger(journal)
    (entry,) = journal.totals()
    assert (entry.run, entry.env, entry.counts) == ("one", "", {"padding": 1, "computed": 1})


def test_what_the_main_process_judged_is_taken_by_the_others_whatever_its_size() -> None:
    """Its limits may be wider than the defaults, which a text of 40,000 bytes exceeds as 2 GiB would."""
    table = TokenTable.from_samples(
        [TrainingSample.from_turn([1], [2], [-1.0], env_name="a", example_id="x" * 40_000)]
    )
    made = Batch("", 0, table)
    with pytest.raises(PayloadError, match="a text of 40000; at most 16384"):
        decode_batch(encode_batch(made), sender="test")
    assert pickle.loads(pickle.dumps(made)).table["example_id"].tolist() == ["x" * 40_000]


def test_the_main_process_hands_on_the_bytes_that_it_received() -> None:
    table = TokenTable.from_samples([TrainingSample.from_turn([1], [2] * 900, -np.ones(900), env_name="a")])
    payload = encode_batch(Batch("run", 3, table), compression="zstd")
    received = decode_batch(payload, sender="test")
    assert payload in pickle.dumps(received), "encoded again, it would not be compressed"
    copy = pickle.loads(pickle.dumps(received))
    assert (copy.run_id, copy.step, copy.payload) == ("run", 3, payload)
    assert copy.table["token_ids"].tolist() == table["token_ids"].tolist()


@pytest.mark.parametrize(
    ("wanted", "num_weights", "has_mesh", "expected"),
    [
        ("auto", 1 << 10, True, True),
        ("auto", 1 << 40, True, False),  # 4 TiB of gradients
        ("step", 1 << 40, True, True),
        ("micro_batch", 1 << 10, True, False),
        ("step", 1 << 10, False, False),
    ],
)
def test_gradients_are_reduced_once_per_step_where_they_fit(wanted, num_weights, has_mesh, expected) -> None:
    trained = torch.nn.Linear(num_weights >> 5, 1 << 5, bias=False, device="meta")
    ranks = Ranks(model_mesh=object() if has_mesh else None)
    assert ranks.reduces_once(TrainerModelConfig(reduce_gradients=wanted), trained) == expected


def test_processes_agree_on_when_gradients_are_reduced(monkeypatch) -> None:
    """One that has too little memory for whole gradients would wait for the others in every micro batch."""
    monkeypatch.setattr(Ranks, "gather_all", lambda ranks, fits: [fits, False])
    trained = torch.nn.Linear(4, 4)
    assert not Ranks(model_mesh=object()).reduces_once(TrainerModelConfig(), trained)
