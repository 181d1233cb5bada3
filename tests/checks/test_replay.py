"""`pellucid replay`: agrees with what the trainer recorded, names planted differences, answers what if."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import distributed as dist

import pellucid.export
from pellucid.checks.replay.weights import Predictor
from pellucid.cli import main
from pellucid.config import ModelConfig, TrainerConfig, TrainerRunConfig
from pellucid.data import Completion, Example, Rollout, TokenTable, TrainingSample, Turn
from pellucid.ledger import State
from pellucid.model.tiny import make_tiny_hybrid_model, make_tiny_model
from pellucid.orchestrator.records import rollout_record
from pellucid.orchestrator.verdict import Verdict
from pellucid.trainer.batches import OrchestratorBatches
from pellucid.trainer.build import build_run
from pellucid.trainer.loop import train
from pellucid.trainer.parallel import BF16, Ranks
from pellucid.transport import Batch, MemoryChannel, encode_batch
from token_exports import write_run
from tolerance import bound, near

pytestmark = pytest.mark.slow

VOCABULARY = 100
LOSSES: dict[str, dict[str, Any]] = {
    "dppo": {"dppo_mask_low": 0.005, "dppo_mask_high": 0.005},
    "dppo by sequence": {"reduction": "sequence"},
    "dppo with a teacher": {"teacher_tau": 0.5},
    "ppo_clip by group": {"type": "ppo_clip", "reduction": "group"},
    "cispo": {"type": "cispo", "kl_tau": 1e-3},
    "gspo": {"type": "gspo"},
    "icepop": {"type": "icepop", "max_ratio": 1.5},
    "tis": {"type": "tis", "max_ratio": 1.1},
    "custom": {"type": "custom", "import_path": "test_replay_loss:half", "kwargs": {"share": 0.5}},
}


UNASKED = "logprobs were not recomputed: --weights does, with the run's model and weights"


def samples(seed: int) -> list[TrainingSample]:
    """Of all modes and two environments; logprobs near those of an untrained model: some are masked."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(18):
        mode = ("rl", "rl", "opd", "sft")[index % 4]
        prompt, completion = (
            rng.integers(5, VOCABULARY, 4 + index % 3),
            rng.integers(5, VOCABULARY, 3 + index),
        )
        logprobs = np.log(1 / VOCABULARY) + rng.normal(0, 0.5, len(completion))
        teacher = np.concatenate([np.full(len(prompt), np.nan), logprobs + 0.1])
        made.append(
            TrainingSample.from_turn(
                prompt,
                completion,
                logprobs,
                env_name="ab"[index % 2],
                group_id=f"g{index // 4}",
                rollout_id=f"r{index}",
                reward=float(index % 2),
                advantage=float(rng.normal()),
                training_mode=mode,
                temperature=0.8,
                **({"teacher_logprobs": teacher} if index % 4 in (1, 2) else {}),
            )
        )
    return made


@contextmanager
def bfloat16(store: Path) -> Iterator[Ranks]:
    """One process as torchrun would start it on a GPU: FSDP2 with mixed precision, here on the CPU."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    try:
        ranks = Ranks.of(TrainerConfig(), dist.group.WORLD, torch.device("cpu"))
        yield replace(ranks, precision=BF16)
    finally:
        dist.destroy_process_group()


def train_run(
    model: Path,
    folder: Path,
    loss: dict[str, Any],
    lora: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    max_steps: int = 2,
    ranks: Ranks | None = None,
    scheduler: dict[str, Any] | None = None,
    **export: Any,
) -> Path:
    config = TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "resume": resume,
            "max_steps": max_steps,
            "seq_len": 64,
            "model": {"name": str(model), "lora": lora},
            "trainer": {
                "threads": 1,
                "optim": {"lr": 1e-2},
                "loss": {"type": "dppo", **loss},
                "scheduler": scheduler or {},
                "experimental": {"token_export": export},
            },
        }
    )
    channel = MemoryChannel()
    for step in range(2 if resume else 0, config.max_steps):
        channel.send(step, encode_batch(Batch("run", step, TokenTable.from_samples(samples(step)))))
    run = build_run(config, OrchestratorBatches(channel), None, [], ranks, publishes=True)
    try:
        run.begin(config)
        train(run)
    finally:
        run.close()
    return folder


def replay(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def by_check(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{found['check']} {found['what'].split()[0]}": found for found in report["findings"]}


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tiny_model, tmp_path_factory.mktemp("trained"), LOSSES["dppo"])


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_what_was_recorded_and_adds_up_to_what_was_logged(
    tiny_model, tmp_path, capsys, monkeypatch, name
) -> None:
    (tmp_path / "test_replay_loss.py").write_text(
        "from pellucid.loss import LossRecord\n"
        "def half(inputs, share):\n"
        "    far = inputs.ratios.mismatch_kl > 0.1\n"
        "    loss = -share * inputs.advantages * inputs.trainer_logprobs\n"
        "    return LossRecord(loss, inputs.ratios, is_masked=far)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    format = "parquet" if "by" in name else "jsonl"
    folder = train_run(tiny_model, tmp_path / "run", LOSSES[name], format=format)
    trusted = ["--trust-code"] if name == "custom" else []
    code, report = replay(capsys, folder, *trusted, *(["--weights"] if name == "dppo" else []))
    assert code == 0 and report["agrees"], report["findings"]
    found = by_check(report)
    tokens = sum(sample.length for step in range(2) for sample in samples(step))
    assert found["loss sum"]["value"] <= bound(1.0, terms=tokens) and "2 steps" in found["loss sum"]["what"]
    assert found["losses token_loss"]["what"] == f"token_loss of {tokens:,} tokens: those that differ"
    if name == "dppo":
        assert f"{tokens:,} tokens of steps with weights" in found["weights trainer_logprobs"]["what"]
    assert report["notes"] == [
        *([] if name == "dppo" else [UNASKED]),
        "advantages were not recomputed: no rollouts were saved",
    ]


def spoil(folder: Path, copy: Path, column: str, token: int, value: Any) -> Path:
    """A run whose record 3 of step 1 has another value; the file stays valid."""
    run = shutil.copytree(folder, copy)
    path = run / "token_exports" / "step_1" / "rank_0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[3][column][token] = value
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.mark.parametrize(
    ("column", "value", "caught"),
    [
        ("token_loss", 5.0, ["losses token_loss", "loss sum"]),
        ("is_masked_low", None, ["masks is_masked_low"]),
        ("entropy", 9.5, ["weights entropy"]),
        ("mismatch_kl", -1.0, ["ratios mismatch_kl"]),
        ("loss_mask", False, ["record denominator"]),
        ("trainer_logprobs", -0.5, ["ratios log_importance_ratio", "weights trainer_logprobs"]),
    ],
)
def test_a_planted_difference_is_named(trained, tmp_path, capsys, column, value, caught) -> None:
    code, report = replay(capsys, spoil(trained, tmp_path / "run", column, -2, value), "--weights")
    assert code == 1 and not report["agrees"]
    found = by_check(report)
    failed = [check for check, finding in found.items() if not finding["passed"]]
    assert set(caught) <= set(failed)
    named = found[caught[0]]["meaning"]
    if column == "loss_mask":
        assert "trainable tokens of all records: recorded 207, recomputed 206" in named
    else:
        length = json.loads(
            (trained / "token_exports" / "step_1" / "rank_0.jsonl").read_text().splitlines()[3]
        )["token_ids"]
        assert "step 1, rank 0, sequence 3 (rollout r" in named
        assert f"token {len(length) - 2}: recorded" in named
        if column in ("token_loss", "entropy"):
            assert f"recorded {value:.9g}, recomputed" in named


def test_only_the_step_asked_for_and_without_weights(trained, tmp_path, capsys) -> None:
    spoiled = spoil(trained, tmp_path / "run", "token_loss", -1, 5.0)
    code, report = replay(capsys, spoiled, "--step", "0")
    assert (code, report["steps"]) == (0, [0])
    assert not any(check.startswith("weights") for check in by_check(report))
    assert replay(capsys, spoiled, "--step", "1")[0] == 1


def test_weights_that_are_gone_are_not_missed(trained, tmp_path, capsys) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "weights")
    shutil.rmtree(run / "checkpoints")
    code, report = replay(capsys, run, "--weights")
    (tokens,) = {sum(sample.length for sample in samples(0))}
    assert code == 0
    assert f"of {tokens:,} tokens of steps with weights" in by_check(report)["weights entropy"]["what"]


def test_adapters_are_put_on_the_model_that_they_belong_to(tiny_model, tmp_path, capsys) -> None:
    folder = train_run(tiny_model, tmp_path / "run", {}, lora={"rank": 4})
    code, report = replay(capsys, folder, "--weights")
    tokens = sum(sample.length for step in range(2) for sample in samples(step))
    assert code == 0, report["findings"]
    assert f"of {tokens:,} tokens of steps" in by_check(report)["weights trainer_logprobs"]["what"]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_with_a_path_is_found_through_the_run(tiny_model, tmp_path, capsys, format) -> None:
    where = tmp_path / "far" / f"tokens.{format}"
    folder = train_run(tiny_model, tmp_path / "run", {}, format=format, path=where)
    assert len(list(where.parent.glob(f"tokens.*rank_0.{format}"))) == (1 if format == "jsonl" else 2)
    code, report = replay(capsys, folder)
    assert (code, report["steps"]) == (0, [0, 1])
    assert main(["view", str(folder), "--terminal", "--step", "1"]) == 0
    assert "step 1  18 records" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained_in_bfloat16(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16")
    with bfloat16(folder / "store") as ranks:
        return train_run(tiny_model, folder / "run", LOSSES["dppo"], ranks=ranks)


def test_bfloat16_is_replayed_in_bfloat16(trained_in_bfloat16, tmp_path, capsys) -> None:
    """In float32 the same record fails: almost no logprob is within the bound of that."""
    code, report = replay(capsys, trained_in_bfloat16, "--weights")
    tokens = sum(sample.length for step in range(2) for sample in samples(step))
    assert code == 0, report["findings"]
    assert f"of {tokens:,} tokens of steps" in by_check(report)["weights trainer_logprobs"]["what"]
    assert {each["precision"] for each in pellucid.export.open(trained_in_bfloat16).records()} == {"bfloat16"}
    run = shutil.copytree(trained_in_bfloat16, tmp_path / "run")
    for path in run.glob("token_exports/step_*/rank_0.jsonl"):
        path.write_text(path.read_text().replace('"precision":"bfloat16"', '"precision":"float32"'))
    code, report = replay(capsys, run, "--weights")
    assert code == 1 and by_check(report)["weights trainer_logprobs"]["value"] > tokens / 2


def test_adapters_are_replayed_in_bfloat16(tiny_model, tmp_path, capsys) -> None:
    with bfloat16(tmp_path / "store") as ranks:
        folder = train_run(tiny_model, tmp_path / "run", {}, lora={"rank": 4}, ranks=ranks)
    code, report = replay(capsys, folder, "--weights")
    assert code == 0 and "weights trainer_logprobs" in by_check(report), report["findings"]


@pytest.mark.parametrize(("precision", "gap"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_logprob_that_is_a_little_wrong_is_caught(
    trained, trained_in_bfloat16, tmp_path, capsys, precision, gap
) -> None:
    """The ratio that follows from it is 10 % off in bfloat16, and a ten thousandth in float32."""
    run = trained if precision == "float32" else trained_in_bfloat16
    record = pellucid.export.open(run).step(1)[3]
    value = float(record["trainer_logprobs"][-2]) + gap
    code, report = replay(capsys, spoil(run, tmp_path / "run", "trainer_logprobs", -2, value), "--weights")
    found = by_check(report)["weights trainer_logprobs"]
    assert code == 1 and found["value"] == 1 and "rounding explains" in found["meaning"]


@pytest.mark.parametrize(("num_layers", "scale"), [(1, 1), (4, 8), (12, 30)])
def test_the_bound_is_what_rounding_does(tmp_path, num_layers, scale) -> None:
    """Bfloat16 against float32, whose own rounding is 65,536 times smaller, with the same weights: an error
    is within the bound, which is for the difference of two, and the largest of a logprob is not far below.

    Layers that are three times as large change the residual stream more; a larger head makes the model surer.
    """
    make_tiny_model(tmp_path, hidden_size=64, num_layers=num_layers, num_heads=4, num_kv_heads=2)
    predictor = Predictor(tmp_path, ModelConfig(name=str(tmp_path)), max_tokens=256)
    for name, parameter in predictor._policy.named_parameters():
        if parameter.ndim == 2:
            parameter.data *= scale if "embed" in name or "head" in name else 3
        parameter.data = parameter.data.bfloat16().float()
    found, exact = (
        predictor.predict(0, records_of([each for seed in range(4) for each in samples(seed)], precision))
        for precision in ("bfloat16", "float32")
    )
    assert found is not None and exact is not None
    for name, (values, bounds) in found.items():
        errors = np.abs(values - exact[name].values)
        assert (errors <= bounds).all(), name
        assert name == "entropy" or (errors / bounds).max() > 1 / 20


def test_sequences_in_rows_are_computed_again_as_each_alone(tmp_path) -> None:
    make_tiny_hybrid_model(tmp_path)
    records = records_of(samples(0), "float32")
    together, alone = (
        Predictor(tmp_path, ModelConfig(name=str(tmp_path)), max_tokens).predict(0, records)
        for max_tokens in (256, 1)
    )
    assert together is not None and alone is not None
    for name, (values, bounds) in together.items():
        assert (np.abs(values - alone[name].values) <= np.maximum(bounds, alone[name].bounds)).all(), name
        # They follow from the longest sequence of a chunk, too.
        assert (bounds / alone[name].bounds < 16).all() and (bounds / alone[name].bounds > 1 / 16).all()


def records_of(made: list[TrainingSample], precision: str) -> TokenTable:
    table = TokenTable.from_samples(made)
    columns = {name: table.dense(name) for name in ("token_ids", "loss_mask", "temperatures")}
    return TokenTable(
        table.lengths, {**columns, "precision": np.full(table.num_sequences, precision, object)}
    )


def test_a_checkpoint_gives_the_weights_of_its_step(trained, tmp_path, capsys) -> None:
    """That of step 2, the last, put where step 1's would be: found, and found to be another's."""
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "weights")
    (run / "checkpoints" / "step_2").rename(run / "checkpoints" / "step_1")
    code, report = replay(capsys, run, "--step", "1", "--weights")
    assert code == 1 and not by_check(report)["weights trainer_logprobs"]["passed"]


def rollout(
    index: int, reward: float, advantage: float | None, num_tokens: int = 4, num_tool_tokens: int = 0
) -> dict[str, Any]:
    """A saved rollout, as the orchestrator writes it."""
    completion = Completion([7] * num_tokens, [-0.5] * num_tokens, [(0, num_tokens)], "stop")
    turn = Turn([5], completion, "y" * index, [("user", 0, 1), ("tool", 1, 1 + num_tool_tokens)])
    attempt = Rollout(f"r{index}", "g", Example("e", []), "a", 1.0, [turn], reward)
    outcome = State.FAILED_ROLLOUT if advantage is None else State.ZERO_ADVANTAGE
    record = rollout_record(0, Verdict(attempt, outcome, "", advantage), {"temperature": 1.0})
    return orjson.loads(orjson.dumps(record))


def save_rollouts(run: Path, saved: list[dict[str, Any]], orchestrator: str = "") -> None:
    (run / "configs" / "orchestrator.toml").write_text(
        f'[orchestrator]\nenv = [{{ id = "x" }}]\n{orchestrator}'
    )
    folder = run / "rollouts" / "step_0"
    folder.mkdir(parents=True)
    (folder / "train_rollouts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in saved))


def test_advantages_of_a_penalty_for_tool_tokens_come_from_saved_rollouts(trained, tmp_path, capsys) -> None:
    """Both correct, costs 4 + 2 and 4 + 6 against a mean of 8: bonus 1/4, and advantages of ±1/8."""
    run = shutil.copytree(trained, tmp_path / "run")
    penalty = 'advantage = { type = "default", length_penalty = { type = "tokens" } }\n'
    saved = [rollout(90, 1.0, 1 / 8, num_tool_tokens=2), rollout(91, 1.0, -1 / 8, num_tool_tokens=6)]
    save_rollouts(run, saved, penalty)
    code, report = replay(capsys, run, "--step", "0")
    assert code == 0 and report["notes"] == []
    assert "advantages advantage" in by_check(report)

    shutil.rmtree(run / "rollouts")
    save_rollouts(run, [{k: v for k, v in each.items() if k != "num_tool_tokens"} for each in saved], penalty)
    code, report = replay(capsys, run, "--step", "0")
    assert "weighs tool tokens, which these rollouts do not have" in report["notes"][0]


def test_a_custom_advantage_is_replayed_on_whole_rollouts(trained, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "by_text.py").write_text(
        "from pellucid.orchestrator import AdvantageOutputs\n\n\n"
        "def shaped(inputs):\n"
        "    shaped = [each.reward + len(each.rollout.turns[-1].text) for each in inputs.rollouts]\n"
        "    mean = sum(shaped) / len(shaped)\n"
        "    return AdvantageOutputs([each - mean for each in shaped], rewards=shaped)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = shutil.copytree(trained, tmp_path / "run")
    own = '[orchestrator.advantage]\ntype = "custom"\nimport_path = "by_text:shaped"\n'
    save_rollouts(run, [rollout(90, 1.0, -0.5), rollout(91, 1.0, 0.5)], own)
    code, report = replay(capsys, run, "--step", "0", "--trust-code")
    assert code == 0 and "advantages advantage" in by_check(report)


CUSTOM = {
    "loss": '[trainer.loss]\ntype = "custom"\nimport_path = "hostile_code:loss"\n',
    "advantage": '[orchestrator.advantage]\ntype = "custom"\nimport_path = "hostile_code:advantage"\n',
}


@pytest.mark.parametrize("part", CUSTOM)
@pytest.mark.parametrize("words", [(), ("--set", "SECTION.kwargs={x=1}"), ("--set", "trainer.loss.type=tis")])
def test_code_that_a_run_names_runs_only_if_it_is_trusted(
    trained, tmp_path, capsys, monkeypatch, part, words
) -> None:
    """Nor a module that lies beside the run and is named like a library that is imported late."""
    run = shutil.copytree(trained, tmp_path / "run")
    ran = tmp_path / "ran"
    for name in ("hostile_code", "duckdb", "uvicorn", "track"):
        (run / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nloss = advantage = 1"
        )
    section = {"loss": "trainer.loss", "advantage": "orchestrator.advantage"}[part]
    save_rollouts(run, [rollout(90, 1.0, -0.5), rollout(91, 1.0, 0.5)], CUSTOM["advantage"])
    if part == "loss":
        for path in run.glob("configs/**/trainer.toml"):
            path.write_text(CUSTOM["loss"])
    monkeypatch.chdir(run)
    capsys.readouterr()
    code = main(["replay", ".", "--json", *(word.replace("SECTION", section) for word in words)])
    told = capsys.readouterr()
    assert not ran.exists() and code == (2 if "SECTION.kwargs={x=1}" in words else 0)
    if words != ("--set", "trainer.loss.type=tis"):
        assert f"{section}.import_path = 'hostile_code:{part}' is code that the run's settings name" in (
            told.err + told.out
        )
    assert main(["ledger", "."]) == 1 and not ran.exists()
    assert str(run) not in sys.path
    monkeypatch.delitem(sys.modules, "hostile_code", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if not words:
        main(["replay", ".", "--trust-code"])
        assert ran.exists()


@pytest.mark.parametrize("reward", [1.0, 0.5])
def test_advantages_come_from_the_saved_rewards(trained, tmp_path, capsys, reward) -> None:
    """Rewards 1, 0, 0 of a group, and one that failed: advantages 2/3, −1/3, −1/3."""
    run = shutil.copytree(trained, tmp_path / "run")
    saved = [rollout(90, reward, 2 / 3), rollout(91, 0, -1 / 3), rollout(92, 0, -1 / 3), rollout(93, 7, None)]
    save_rollouts(run, saved)
    code, report = replay(capsys, run, "--step", "0")
    found = by_check(report)["advantages advantage"]
    assert code == (0 if reward == 1 else 1)
    if reward != 1:
        finding = next(each for each in report["findings"] if not each["passed"])
        assert finding["what"] == "advantage of 3 rollouts: those that differ" and finding["value"] == 3
        assert "group g, rollout r90: recorded 0.666666667, recomputed 0.333333" in finding["meaning"]
    assert found["check"] == "advantages"


@pytest.mark.parametrize(
    ("reward", "token_reward", "failed"),
    [
        (1.0, 1.0, []),
        (0.5, 1.0, ["rewards reward", "rewards rewards"]),
        (1.0, 0.5, ["rewards rewards"]),
    ],
)
def test_rewards_are_those_of_the_saved_rollouts(
    trained, tmp_path, capsys, reward, token_reward, failed
) -> None:
    """Rollout 1 has the reward 1, and so has each of its tokens."""
    run = shutil.copytree(trained, tmp_path / "run")
    save_rollouts(run, [rollout(1, reward, None)])
    path = run / "token_exports" / "step_0" / "rank_0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    [record] = [record for record in records if record["rollout_id"] == "r1"]
    record["rewards"][0] = token_reward
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    _, report = replay(capsys, run, "--step", "0")
    found = by_check(report)
    assert [check for check, finding in found.items() if not finding["passed"]] == failed
    assert found["rewards rewards"]["what"].startswith(f"rewards of {len(record['rewards'])} tokens")
    if failed == ["rewards rewards"]:
        assert "token 0: recorded 0.5, recomputed 1" in found["rewards rewards"]["meaning"]


def test_the_learning_rate_is_that_of_the_schedule(tiny_model, tmp_path, capsys) -> None:
    """Linear from 0.01 over four steps: 0.01, 0.0075, 0.005, 0.0025."""
    run = train_run(
        tiny_model, tmp_path / "run", {}, max_steps=4, scheduler={"type": "linear", "warmup_steps": 0}
    )
    path = run / "metrics" / "trainer.jsonl"
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["lr"] for entry in logged] == near([0.01, 0.0075, 0.005, 0.0025])
    code, report = replay(capsys, run)
    assert code == 0
    assert by_check(report)["learning rate lr"]["what"] == "lr of 4 steps: those that differ"
    logged[2]["lr"] = 0.01  # as if the schedule had started again
    path.write_text("".join(json.dumps(entry) + "\n" for entry in logged))
    code, report = replay(capsys, run)
    assert (code, report["first_difference"]) == (1, "learning rate")
    named = by_check(report)["learning rate lr"]["meaning"]
    assert "step 2, as logged: recorded 0.01, recomputed 0.005" in named


def test_exported_versions_fit_the_step_and_what_was_logged(trained, tmp_path, capsys) -> None:
    """All tokens are of version 0: at step 1 they are one step old, which a bound of 0 does not allow."""
    run = shutil.copytree(trained, tmp_path / "run")
    tokens = sum(sample.length for sample in samples(1))
    logged = {
        "step": 1,
        "batch_tokens": tokens,
        "off_policy_level/all/mean": 1.0,
        "off_policy_level/all/max": 1,
    }
    (run / "metrics" / "orchestrator.jsonl").write_text(json.dumps(logged) + "\n")
    save_rollouts(run, [], "max_off_policy_steps = 1\n")
    code, report = replay(capsys, run)
    assert code == 0
    compared = [found["what"] for found in report["findings"] if found["check"] == "off-policy"]
    assert [what.partition(" of ")[0] for what in compared] == [
        "levels within orchestrator.max_off_policy_steps",
        "mean and largest level",
    ]
    (run / "metrics" / "orchestrator.jsonl").write_text(
        json.dumps({**logged, "off_policy_level/all/mean": 0.5}) + "\n"
    )
    code, report = replay(capsys, run)
    assert (code, report["first_difference"]) == (1, "off-policy")
    assert "step 1, off_policy_level/all/mean: recorded 0.5, recomputed 1" in str(report["findings"])
    (run / "configs" / "orchestrator.toml").write_text(
        '[orchestrator]\nenv = [{ id = "x" }]\nmax_off_policy_steps = 0\n'
    )
    code, report = replay(capsys, run)
    assert "recorded 1, recomputed 0" in report["findings"][0]["meaning"]


def books_of(run: Path) -> list[dict[str, Any]]:
    """The entries of a trainer's ledger that fit the exported masks and logged counts of two steps."""
    books: list[dict[str, Any]] = []
    logged = [json.loads(line) for line in (run / "metrics" / "trainer.jsonl").read_text().splitlines()]
    for step in range(2):
        counts: dict[tuple[str, str], Counter[str]] = {}
        for line in (run / "token_exports" / f"step_{step}" / "rank_0.jsonl").read_text().splitlines():
            record = json.loads(line)
            own = counts.setdefault((record["run_id"], record["env_name"]), Counter())
            masks = zip(record["loss_mask"], record["is_masked"], strict=True)
            own.update("masked" if masked else "trained" for trains, masked in masks if trains)
        num_tokens, num_computed = (int(logged[step][name]) for name in ("tokens", "computed_tokens"))
        beside = {"computed": num_computed, "saved": num_tokens - num_computed}
        counts["run", ""] = Counter(beside, padding=int(logged[step]["padding_tokens"]))
        books += [
            {"stage": "trainer", "step": step, "run": name, "env": env, "counts": dict(own)}
            for (name, env), own in counts.items()
        ]
    return books


def write_books(run: Path, entries: list[dict[str, Any]]) -> None:
    (run / "ledger").mkdir(exist_ok=True)
    (run / "ledger" / "trainer.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))


def test_the_ledger_is_held_to_the_exported_masks(trained, tmp_path, capsys) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    *books, beside = books_of(run)

    def book(entries: list[dict[str, Any]]) -> None:
        write_books(run, [*entries, beside])

    book(books)
    code, report = replay(capsys, run)
    assert code == 0 and "ledger trained" in by_check(report)
    moved = books[-1]["counts"]
    book([*books[:-1], {**books[-1], "counts": {**moved, "trained": moved["trained"] - 1}}])
    code, report = replay(capsys, run)
    assert code == 1 and report["first_difference"] == "ledger"
    assert "step 1, " in by_check(report)["ledger trained"]["meaning"]
    book([{**each, "step": 1} for each in books])  # as a resume may leave it: summed up
    assert "ledger trained" not in by_check(replay(capsys, run)[1])


@pytest.mark.parametrize(
    ("name", "what"), [("trained_tokens", "logged counts of tokens"), ("total/tokens", "running totals")]
)
def test_logged_counts_are_held_to_the_ledger(trained, tmp_path, capsys, name, what) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    save_rollouts(run, [])
    write_books(run, books_of(run))
    path = run / "metrics" / "trainer.jsonl"
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    code, report = replay(capsys, run)
    found = [each["what"] for each in report["findings"] if each["check"] == "ledger"]
    assert code == 0 and any(each.startswith(what) for each in found)
    logged[1][name] += 1
    path.write_text("".join(json.dumps(entry) + "\n" for entry in logged))
    code, report = replay(capsys, run)
    assert (code, report["first_difference"]) == (1, "ledger")
    failed = [each for each in report["findings"] if not each["passed"]]
    assert failed[0]["what"].startswith(what) and f"step 1, {name.removeprefix('total/')}" in str(failed)


def test_the_first_line_names_the_first_stage_that_differs(trained, tmp_path, capsys) -> None:
    spoiled = spoil(trained, tmp_path / "run", "token_loss", -1, 5.0)
    assert main(["replay", str(spoiled)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "the first stage that differs: losses"
    assert main(["replay", str(trained)]) == 0
    assert "the first stage" not in capsys.readouterr().out


def small_run(folder: Path) -> Path:
    """Hand-made values; the last token of environment b is masked with π − μ = 0.471 and A = 1."""
    write_run(folder)
    (folder / "configs").mkdir()
    (folder / "configs" / "trainer.toml").write_text('[trainer.loss]\ntype = "dppo"\n')
    return folder


def test_what_if_by_hand(tmp_path, capsys) -> None:
    change = "trainer.loss.dppo_mask_high=0.5"
    code, report = replay(capsys, small_run(tmp_path), "--step", "0", "--set", change)
    assert code == 0 and report["changes"] == [change]
    effect = report["totals"]["b"]
    assert effect["recorded"] == pytest.approx(
        {"masked": 1, "masked_high": 1, "masked_low": 0, "loss": 1e-3 * 2.25 / 3}
    )
    assert effect["changed"] == pytest.approx(
        {"masked": 0, "masked_high": 0, "masked_low": 0, "loss": (-np.exp(1.5) + 1e-3 * 2.25) / 3}
    )
    assert (effect["newly_masked"], effect["no_longer_masked"]) == (0, 1)
    a, total = (report["totals"][env] for env in ("a", "all"))
    assert a["recorded"] == pytest.approx(a["changed"])
    assert total["changed"]["loss"] == pytest.approx(a["recorded"]["loss"] + effect["changed"]["loss"])


def test_several_changes_over_a_whole_run(tmp_path, capsys) -> None:
    """ℓ of a: −0.5 and 0.25, and exp 0.25 = 1.284 is above the bound. Two rl steps; sft has no masks."""
    changes = ("--set", "trainer.loss.type=icepop", "--set", "trainer.loss.max_ratio=1.2")
    code, report = replay(capsys, small_run(tmp_path), *changes)
    assert code == 0 and [entry["step"] for entry in report["steps"]] == [0, 1]
    effect = report["totals"]["a"]
    assert (effect["trainable"], effect["recorded"]["masked"], effect["changed"]["masked_high"]) == (6, 0, 2)
    losses = [sum(entry["envs"][env]["changed"]["loss"] for env in "ab") for entry in report["steps"]]
    assert report["totals"]["all"]["changed"]["loss"] == pytest.approx(sum(losses) / 2)


def test_what_if_the_advantages_were_others(tmp_path, capsys) -> None:
    run = small_run(tmp_path)
    (run / "configs" / "orchestrator.toml").write_text('[orchestrator]\nenv = [{ id = "x" }]\n')
    code, report = replay(capsys, run, "--set", "orchestrator.advantage.type=rloo")
    assert code == 0 and report["totals"]["all"]["recorded"] == pytest.approx(
        report["totals"]["all"]["changed"]
    )


def test_the_tables_for_people(tmp_path, capsys) -> None:
    run = small_run(tmp_path)
    assert main(["replay", str(run), "--step", "0", "--sequence", "1"]) == 0
    shown = capsys.readouterr().out
    assert "rank 0, sequence 1" in shown and "token_loss of 6 tokens: those that differ" in shown
    row = next(line for line in shown.splitlines() if line.split()[:2] == ["1", "8"])
    assert row.split() == [
        "1",
        "8",
        "yes",
        "-2.0000",
        "-0.5000",
        "1.0000",
        "4.4817",
        "0.4712",
        "yes",
        "0.0023",
    ]
    assert main(["replay", str(run), "--set", "trainer.loss.dppo_mask_high=0.5"]) == 0
    assert "2 steps, as recorded and under the changes" in capsys.readouterr().out
    _, report = replay(capsys, run, "--step", "0", "--sequence", "1")
    assert report["tokens"]["recorded"]["token_ids"] == [7, 8]
    assert report["tokens"]["recomputed"]["is_masked"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "9"], "has no finished export of step 9; it has 0 to 1"),
        (["--sequence", "1"], "sequence = 1 is a record of one step; name it with --step"),
        (["--step", "0", "--sequence", "7"], "--sequence 7: step 0 has 2 records, numbered from 0"),
        (
            ["--set", "trainer.loss.dppo_mask_hgih=1"],
            "--set trainer.loss.dppo_mask_hgih=1: unknown key; did you mean trainer.loss.dppo_mask_high?",
        ),
        (
            ["--set", "trainer.los.kl_tau=1"],
            "--set trainer.los.kl_tau=1: expected trainer.loss.KEY=VALUE or "
            "orchestrator.advantage.KEY=VALUE; did you mean trainer.loss.kl_tau?",
        ),
        (
            ["--set", "trainer.loss.clip_high=1"],
            "--set trainer.loss.clip_high=1: belongs to another trainer.loss.type than 'dppo'; set that, too",
        ),
        (
            ["--set", "orchestrator.advantage.length_penalty.tpye=turns"],
            "--set orchestrator.advantage.length_penalty.tpye=turns: unknown key; did you mean "
            "orchestrator.advantage.length_penalty.type?",
        ),
        (["--set", "trainer.optim.lr=1"], "other settings change what is sampled"),
        (
            ["--set", "trainer.loss.dppo_mask_high=-1"],
            "--set trainer.loss.dppo_mask_high=-1: Input should be greater",
        ),
    ],
)
def test_slips_are_explained(tmp_path, capsys, words, message) -> None:
    assert main(["replay", str(small_run(tmp_path)), *words]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_resumed_run_is_replayed_by_the_rule_that_trained_each_step(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps by one loss, two more by another."""
    run = train_run(tiny_model, tmp_path / "run", LOSSES["dppo"])
    train_run(tiny_model, run, LOSSES["icepop"], resume=True, max_steps=4)
    code, report = replay(capsys, run, "--weights")
    assert (code, report["steps"]) == (0, [0, 1, 2, 3])
    # The rule of the first steps, asked of all: it changes nothing in those that it trained.
    code, report = replay(capsys, run, "--set", "trainer.loss.type=dppo", *dppo_bounds())
    moved = [
        sum(env["newly_masked"] + env["no_longer_masked"] for env in step["envs"].values())
        for step in report["steps"]
    ]
    assert moved[:2] == [0, 0] and min(moved[2:]) > 0


def dppo_bounds() -> list[str]:
    return [
        word for key, value in LOSSES["dppo"].items() for word in ("--set", f"trainer.loss.{key}={value}")
    ]
