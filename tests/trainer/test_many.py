"""Several runs in one trainer: each as if it were alone, whatever happens to the others."""

import json
import re
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import pellucid.export
from pellucid.checks.verify.gradients import difference
from pellucid.config import TrainerRunConfig
from pellucid.config.base import to_toml
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.spans import START, read_spans
from pellucid.errors import ConfigError, ProcessError
from pellucid.ledger import read_journal, sum_entries
from pellucid.metrics import read_metrics
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run, open_journal
from pellucid.trainer.loop import train
from pellucid.trainer.many import Roster, RunOutcome, join_trainer, serve_runs
from pellucid.trainer.parallel import Ranks
from pellucid.trainer.run import Run
from pellucid.transport import Batch, FilesystemSender, MemoryChannel, encode_batch
from pellucid.transport.spool import Spool
from tolerance import adapter_bound, gradient_bound, near, update_bound

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8.0}


def shared(tiny_model, folder, **many_runs) -> TrainerRunConfig:
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder / "shared",
            "seq_len": 64,
            "model": {"name": str(tiny_model), "lora": LORA},
            "trainer": {"threads": 1, "many_runs": {"max_runs": 2, "stay": False, **many_runs}},
        }
    )


def joining(tiny_model, folder, name, *, max_steps=2, trainer=None, **changes) -> TrainerRunConfig:
    own = {"threads": 1, "optim": {"lr": 1e-2}, "experimental": {"token_export": {}}, **(trainer or {})}
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder / name,
            "max_steps": max_steps,
            "seq_len": 64,
            "seed": 3,
            "model": {"name": str(tiny_model), "lora": LORA},
            "trainer": {"join": folder / "shared", **own},
            **changes,
        }
    )


def samples(run_id, seed, count=9) -> TokenTable:
    """Groups of three with ragged completions; the logprobs are what a flat model would say."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    made = []
    for index in range(count):
        if index % 3 == 0:
            prompt = draw(5, 90, size=draw(2, 9)[0])
        completion = draw(5, 90, size=draw(1, 14)[0])
        made.append(
            TrainingSample.from_turn(
                prompt,
                completion,
                [-4.6] * len(completion),
                env_name="ab"[index % 2],
                run_id=run_id,
                group_id=f"g{index // 3}",
                rollout_id=f"r{index}",
                reward=1.0,
                advantage=(-1.0) ** index * (1 + index),
            )
        )
    return TokenTable.from_samples(made)


NUM_TOKENS = 9 * (8 + 13)
"""Of the above, at most."""


def after_steps(model, values):
    """Allowed between losses and metrics of two trainings."""
    return update_bound(model, NUM_TOKENS) * np.maximum(1.0, np.abs(values))


def send(config, seed) -> None:
    sender = FilesystemSender(config.output_dir)
    for step in range(config.max_steps):
        table = samples(config.run_name, 10 * seed + step)
        sender.send(step, encode_batch(Batch(config.run_name, step, table)))


def alone(config, seed, folder) -> None:
    """The same run with a model of its own."""
    channel = MemoryChannel()
    for step in range(config.max_steps):
        table = samples(config.run_name, 10 * seed + step)
        channel.send(step, encode_batch(Batch(config.run_name, step, table)))
    own = config.model_copy(update={"output_dir": folder, "run_id": config.run_name})
    run = build_run(own, OrchestratorBatches(channel), open_journal(own, Ranks()), [], publishes=True)
    train(run)
    run.close()


@contextmanager
def on_roster(*configs):
    """Runs whose processes live, as long as this goes on; what became of each is told at the end."""
    outcomes = {}
    with ExitStack() as stack:
        roster = Roster(configs[0].trainer.join)
        for config in configs:
            absolute = config.model_copy(update={"run_id": config.run_name})
            stack.enter_context(roster.joined(config.run_name, to_toml(absolute)))
        yield outcomes
        for config in configs:
            outcomes[config.run_name] = roster.outcome(config.run_name)


def weights(folder, version) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights" / f"step_{version}" / "adapter_model.safetensors")


def token_losses(folder, step) -> list[float]:
    path = folder / "token_exports" / f"step_{step}" / "rank_0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(sum(filter(None, record["token_loss"])) for record in records)


def test_each_run_is_trained_as_if_it_were_alone(tiny_model, tmp_path) -> None:
    """Other data, losses, learning rates and numbers of steps; one starts late, for want of a place."""
    runs = [
        joining(tiny_model, tmp_path, "one"),
        joining(tiny_model, tmp_path, "two", max_steps=3, trainer={"optim": {"lr": 3e-3}}),
        joining(
            tiny_model, tmp_path, "three", trainer={"loss": {"type": "cispo", "reduction": "group"}}, seed=5
        ),
    ]
    for seed, config in enumerate(runs):
        send(config, seed)
    with on_roster(*runs) as outcomes:
        serve_runs(shared(tiny_model, tmp_path), Ranks())
    assert outcomes == {name: (RunOutcome.DONE, "") for name in ("one", "two", "three")}
    for seed, config in enumerate(runs):
        folder = tmp_path / "alone" / config.run_name
        alone(config, seed, folder)
        steps = range(config.max_steps)
        for version in (step + 1 for step in steps):
            found, expected = weights(config.output_dir, version), weights(folder, version)
            assert difference(expected, found) <= adapter_bound(tiny_model, NUM_TOKENS)
        assert weights(config.output_dir, config.max_steps).keys() == expected.keys()
        final = load_file(config.output_dir / "model" / "adapter_model.safetensors")
        assert difference(expected, final) <= adapter_bound(tiny_model, NUM_TOKENS)
        own, theirs = (
            list(read_metrics(each / "metrics" / "trainer.jsonl")) for each in (config.output_dir, folder)
        )
        for mine, other in zip(own, theirs, strict=True):
            for name in (
                "loss",
                "grad_norm",
                "loss_tokens",
                "samples",
                "entropy/all/mean",
                "mismatch_kl/a/max",
            ):
                assert mine[name] == near(other[name], within=after_steps(tiny_model, other[name])), name
        for step in steps:
            expected = token_losses(folder, step)
            assert token_losses(config.output_dir, step) == near(
                expected, within=after_steps(tiny_model, expected)
            )
        mine, theirs = (
            sum_entries(read_journal(each / "ledger" / "trainer.jsonl"))
            for each in (config.output_dir, folder)
        )
        assert [(entry.run, entry.env) for entry in mine] == [(entry.run, entry.env) for entry in theirs]
        for entry, other in zip(mine, theirs, strict=True):
            for state in ("received", "trained", "masked", "untrainable", "truncated"):
                assert entry.counts.get(state) == other.counts.get(state), state


def test_the_gradient_of_a_run_is_untouched_by_another(tiny_model, tmp_path, monkeypatch) -> None:
    """Of the first step, in many parts beside another run's, against all at once and alone."""
    gradients = {}
    update = Run.update

    def recorded(run, observer):
        named = run.trained.module.named_parameters()
        gradients[run.output_dir] = {name: each.grad.clone() for name, each in named}
        return update(run, observer)

    monkeypatch.setattr(Run, "update", recorded)
    runs = [joining(tiny_model, tmp_path, name, max_steps=1) for name in ("one", "two")]
    for seed, config in enumerate(runs):
        send(config, seed)
    with on_roster(*runs) as outcomes:
        serve_runs(shared(tiny_model, tmp_path), Ranks())
    assert outcomes == {name: (RunOutcome.DONE, "") for name in ("one", "two")}
    allowed = gradient_bound(tiny_model, NUM_TOKENS)
    for seed, config in enumerate(runs):
        folder = tmp_path / "alone" / config.run_name
        alone(config, seed, folder)
        assert difference(gradients[folder], gradients[config.output_dir]) <= allowed
    one, two = (gradients[config.output_dir] for config in runs)
    assert difference(one, two) > 0.1


def test_a_run_whose_steps_are_skipped_is_evicted_in_the_end_and_the_other_goes_on(
    tiny_model, tmp_path
) -> None:
    """One skipped step is no reason yet; two in a row are what this run allows."""
    good = joining(tiny_model, tmp_path, "good", max_steps=3)
    bad = joining(
        tiny_model,
        tmp_path,
        "bad",
        max_steps=5,
        trainer={"max_skipped_steps": 2, "loss": {"type": "custom", "import_path": "processes:broken_loss"}},
    )
    send(good, 0)
    sender = FilesystemSender(bad.output_dir)
    for step in range(bad.max_steps):
        table = samples("bad", step, count=3)
        if step in (0, 2, 3):
            table = TokenTable(
                table.lengths, {**dict(table.columns), "advantage": np.full(3, 1e19, np.float32)}
            )
        sender.send(step, encode_batch(Batch("bad", step, table)))
    with on_roster(good, bad) as outcomes:
        serve_runs(shared(tiny_model, tmp_path), Ranks())
    assert outcomes["good"] == (RunOutcome.DONE, "")
    outcome, reason = outcomes["bad"]
    assert outcome is RunOutcome.EVICTED
    assert reason.startswith(
        "steps 2 to 3 were skipped, as many in a row as trainer.max_skipped_steps = 2 allows"
    )
    records = list(read_metrics(bad.output_dir / "metrics" / "trainer.jsonl"))
    assert [record["skipped_steps"] for record in records] == [1, 0, 1, 1]
    assert difference(weights(bad.output_dir, 2), weights(bad.output_dir, 4)) == 0
    (state,) = {
        key
        for entry in read_journal(bad.output_dir / "ledger" / "trainer.jsonl")
        if entry.step == 3
        for key in entry.counts
        if key in ("skipped", "masked", "trained")
    }
    assert state == "skipped"
    alone(good, 0, tmp_path / "alone")
    allowed = adapter_bound(tiny_model, NUM_TOKENS)
    assert difference(weights(tmp_path / "alone", 3), weights(good.output_dir, 3)) <= allowed


def test_a_run_that_sends_garbage_is_evicted_and_the_other_goes_on(tiny_model, tmp_path) -> None:
    good, bad = joining(tiny_model, tmp_path, "good", max_steps=3), joining(tiny_model, tmp_path, "bad")
    send(good, 0)
    Spool(bad.output_dir).store(0, b"not a batch")
    with on_roster(good, bad) as outcomes:
        serve_runs(shared(tiny_model, tmp_path), Ranks())
    assert outcomes["good"] == (RunOutcome.DONE, "")
    outcome, reason = outcomes["bad"]
    assert outcome is RunOutcome.EVICTED and "batch.bin" in reason
    assert not (bad.output_dir / "model").exists()
    alone(good, 0, tmp_path / "alone")
    allowed = adapter_bound(tiny_model, NUM_TOKENS)
    assert difference(weights(tmp_path / "alone", 3), weights(good.output_dir, 3)) <= allowed


def test_a_run_whose_gradient_is_not_finite_leaves_nothing_behind(tiny_model, tmp_path) -> None:
    """It has taken its turns before; whoever gets its place starts with an adapter of its own."""
    loss = {"type": "custom", "import_path": "processes:steep_loss"}
    bad = joining(tiny_model, tmp_path, "bad", trainer={"loss": loss, "max_skipped_steps": 1})
    table = TokenTable.from_samples(
        [TrainingSample.from_turn([5], [6, 7], [-4.0, -4.0], env_name="a", run_id="bad", advantage=1e19)] * 4
    )
    FilesystemSender(bad.output_dir).send(0, encode_batch(Batch("bad", 0, table)))
    next_one = joining(tiny_model, tmp_path, "next")
    send(next_one, 0)
    with on_roster(bad, next_one) as outcomes:
        serve_runs(shared(tiny_model, tmp_path, max_runs=1), Ranks())
    outcome, reason = outcomes["bad"]
    assert outcome is RunOutcome.EVICTED and "the norm of the gradient is inf" in reason
    assert outcomes["next"] == (RunOutcome.DONE, "")
    alone(next_one, 0, tmp_path / "alone")
    allowed = adapter_bound(tiny_model, NUM_TOKENS)
    assert difference(weights(tmp_path / "alone", 2), weights(next_one.output_dir, 2)) <= allowed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": 128}, "trainer.model.seq_len = 128 exceeds the 64 of the trainer that it joins"),
        ({"model": {"name": "MODEL", "lora": {"rank": 8}}}, "model.lora = .* the trainer that it joins has"),
        (
            {"trainer": {"enable_router_replay": True}},
            "trainer.enable_router_replay = True; the trainer that it joins has False",
        ),
    ],
)
def test_a_run_that_does_not_fit_is_told_so(tiny_model, tmp_path, changes, reason) -> None:
    if "model" in changes:
        changes["model"]["name"] = str(tiny_model)
    odd, good = joining(tiny_model, tmp_path, "odd", **changes), joining(tiny_model, tmp_path, "good")
    send(good, 0)
    with on_roster(odd, good) as outcomes:
        serve_runs(shared(tiny_model, tmp_path), Ranks())
    assert outcomes["good"] == (RunOutcome.DONE, "")
    outcome, told = outcomes["odd"]
    assert outcome is RunOutcome.EVICTED and re.search(reason, told)


@pytest.mark.parametrize("place", ["path", "output_dir"])
def test_a_run_that_would_write_into_another_is_refused(tiny_model, tmp_path, place) -> None:
    """Both export to one path, or have one folder; the first is trained, and its export is its own."""
    if place == "path":
        export = {"experimental": {"token_export": {"path": tmp_path / "tokens.jsonl"}}}
        runs = [joining(tiny_model, tmp_path, name, trainer=export) for name in ("one", "two")]
    else:
        runs = [joining(tiny_model, tmp_path, "one"), joining(tiny_model, tmp_path, "one", run_id="two")]
    send(runs[0], 0)
    with on_roster(*runs) as outcomes:
        serve_runs(shared(tiny_model, tmp_path), Ranks())
    assert outcomes["one"] == (RunOutcome.DONE, "")
    outcome, reason = outcomes["two"]
    assert outcome is RunOutcome.EVICTED and re.search(
        r"another run \(\S*one\) is writing|earlier run", reason
    )
    export = pellucid.export.open(runs[0].output_dir)
    assert export.steps == (0, 1) and set(export.records().column("run_id")) == {"one"}


def test_a_run_comes_and_goes_and_comes_back(tiny_model, tmp_path) -> None:
    """It leaves after its first step, in the middle of the second, and ends as if it had stayed."""
    stays, leaves = (
        joining(tiny_model, tmp_path, "stays", max_steps=3),
        joining(tiny_model, tmp_path, "leaves", trainer={"optim": {"lr": 1e-2}}),
    )
    send(leaves, 1)
    roster = Roster(stays.trainer.join)
    server = threading.Thread(target=serve_runs, args=(shared(tiny_model, tmp_path), Ranks()))
    with on_roster(stays) as outcomes:
        with roster.joined("leaves", to_toml(leaves)):
            batch = leaves.output_dir / "batches" / "step_1"
            batch.rename(tmp_path / "kept")
            server.start()
            wait_for((leaves.output_dir / "weights" / "step_1" / "STABLE").exists)
            roster.leave("leaves")
            wait_for(lambda: roster.outcome("leaves") is not None)
            assert roster.outcome("leaves") == (RunOutcome.LEFT, "")
        assert (leaves.output_dir / "checkpoints" / "step_1" / "STABLE").exists()
        (tmp_path / "kept").rename(batch)
        send(stays, 0)
        with on_roster(leaves.model_copy(update={"resume": True})) as again:
            server.join()
    assert outcomes == {"stays": (RunOutcome.DONE, "")} and again == {"leaves": (RunOutcome.DONE, "")}
    for seed, config in ((0, stays), (1, leaves)):
        alone(config, seed, tmp_path / "alone" / config.run_name)
        expected = weights(tmp_path / "alone" / config.run_name, config.max_steps)
        assert difference(expected, weights(config.output_dir, config.max_steps)) <= adapter_bound(
            tiny_model, NUM_TOKENS
        )
    spans = read_spans(leaves.output_dir / "spans" / "trainer.jsonl")
    resumed = max(index for index, span in enumerate(spans) if span.name == START)
    assert next(span.step for span in spans[resumed:] if span.name == "wait") == 1


def test_a_run_whose_process_died_makes_room(tiny_model, tmp_path) -> None:
    dead, good = joining(tiny_model, tmp_path, "dead"), joining(tiny_model, tmp_path, "good")
    send(good, 0)
    folder = Roster(good.trainer.join)._runs / "dead"
    with on_roster(dead):
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with on_roster(good) as outcomes:
        serve_runs(shared(tiny_model, tmp_path, max_runs=1), Ranks())
    assert outcomes == {"good": (RunOutcome.DONE, "")}
    assert not folder.exists()


def test_joining_returns_when_the_run_is_trained(tiny_model, tmp_path) -> None:
    config = joining(tiny_model, tmp_path, "one")
    send(config, 0)
    server = threading.Thread(target=serve_runs, args=(shared(tiny_model, tmp_path), Ranks()))
    server.start()
    join_trainer(config)
    server.join()
    assert (config.output_dir / "model" / "adapter_config.json").exists()
    assert not (tmp_path / "shared" / "runs" / "one").exists()


def test_a_trainer_that_says_how_a_run_ended_may_go_at_once(tiny_model, tmp_path, monkeypatch) -> None:
    """It speaks and goes after the run has looked for its outcome, and before it looks for the trainer."""
    looks = []

    def has_trainer(roster: Roster) -> bool:
        looks.append(None)
        if len(looks) == 2:
            roster.say("one", RunOutcome.DONE)
        return len(looks) < 2

    monkeypatch.setattr(Roster, "has_trainer", has_trainer)
    join_trainer(joining(tiny_model, tmp_path, "one"))
    assert len(looks) == 2


def test_joining_ends_with_the_reason(tiny_model, tmp_path) -> None:
    config = joining(tiny_model, tmp_path, "one", seq_len=128)
    server = threading.Thread(target=serve_runs, args=(shared(tiny_model, tmp_path), Ranks()), daemon=True)
    server.start()
    with pytest.raises(ProcessError, match="run one was evicted .* exceeds the 64"):
        join_trainer(config)
    good = joining(tiny_model, tmp_path, "good", max_steps=1)
    send(good, 0)
    join_trainer(good)
    server.join()


def test_a_trainer_that_is_gone_is_missed(tiny_model, tmp_path) -> None:
    config = joining(tiny_model, tmp_path, "one")
    roster = Roster(config.trainer.join)
    failures = []

    def wait() -> None:
        try:
            join_trainer(config)
        except ProcessError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait)
    with roster.serving():
        waiting.start()
        wait_for(lambda: roster.waiting() == ["one"])
        time.sleep(0.2)
    waiting.join()
    assert "is gone; start it again" in failures[0]
    assert roster.waiting() == []


def test_names_and_trainers_are_there_once(tiny_model, tmp_path) -> None:
    config = joining(tiny_model, tmp_path, "one")
    roster = Roster(config.trainer.join)
    with roster.joined("one", ""), pytest.raises(ConfigError, match="a run 'one' is being trained by"):
        roster.joined("one", "").__enter__()
    with roster.serving(), pytest.raises(ConfigError, match="in use by a trainer"):
        roster.serving().__enter__()


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)
