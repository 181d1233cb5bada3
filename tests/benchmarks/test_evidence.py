"""What `make evidence` makes of its runs, and that it evaluates on questions that were never trained on."""

import json
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.evidence import (
    NUM_WARM_UP,
    OUTPUTS,
    WARM_UP_SEED,
    WARM_UP_STEPS,
    Part,
    accuracy,
    base_evaluation,
    points_of,
    publish,
    task_arguments,
    tokens_of,
    training,
    warm_up,
)
from benchmarks.evidence_page import (
    PAGE,
    README,
    RESULTS,
    START,
    STOP,
    SUMMARY_START,
    SUMMARY_STOP,
    Accuracy,
    Evidence,
    KnownResult,
    Point,
    RunResult,
    TaskResult,
    Usage,
    load,
    wilson,
    write_page,
)
from benchmarks.panels import means
from pellucid.config import RLConfig, SFTConfig
from pellucid.config.parse import parse
from tolerance import near

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make` calls the benchmark there."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("num_correct", "num_questions", "low", "high"),
    [  # with z = 2: middle (k + 2) / (n + 4), half 2 / (n + 4) · sqrt(k (n - k) / n + 1)
        (0, 10, 0.0, 4 / 14),
        (10, 10, 10 / 14, 1.0),
        (50, 100, 0.5 - 2 * 26**0.5 / 104, 0.5 + 2 * 26**0.5 / 104),
        (90, 100, (92 - 2 * 10**0.5) / 104, (92 + 2 * 10**0.5) / 104),
    ],
)
def test_wilsons_interval(num_correct: int, num_questions: int, low: float, high: float) -> None:
    interval = near((low, high), terms=8, scale=1.0, dtype=np.float64)
    assert wilson(num_correct, num_questions, z=2.0) == interval


def test_the_interval_is_one_of_95_percent() -> None:
    assert str(Accuracy(0, 10)) == "0.0 % (0.0 – 27.8)"  # z² / (n + z²) = 3.8415 / 13.8415
    assert str(Accuracy(50, 100)) == "50.0 % (40.4 – 59.6)"


def evidence() -> Evidence:
    points = [Point(step, 10.0 * (step + 1), reward, 96) for step, reward in enumerate([0.25, 0.5, 1.0])]
    usage = Usage(600.0, 150.0, (4.04, 5.0))
    run = RunResult(3, usage, Accuracy(60, 240), Accuracy(180, 240), 1234, 800, points)
    task = TaskResult("needle", 4, Usage(90.0, 45.0, (1.0, 2.0)), Accuracy(0, 240), [run])
    known = KnownResult(usage, [0.0, 0.0], [0.25, 0.75, 0.25, 0.75], [1.0, 1.0, 0.5, 0.5], 99, 66, points)
    return Evidence([task], known)


def test_the_page_follows_from_the_file(tmp_path: Path) -> None:
    results, page, readme = (tmp_path / name for name in ("evidence.json", "evidence.md", "README.md"))
    readme.write_text(f"a {SUMMARY_START}old{SUMMARY_STOP} z")
    results.write_text(json.dumps(asdict(evidence())))
    assert load(results) == evidence()
    page.write_text(f"before\n{START}old\n{STOP}after\n")
    write_page(load(results), page, tmp_path, readme)
    figures = "`needle` from 25 % to 75 % (1 seed)"
    assert readme.read_text() == f"a {SUMMARY_START}{figures}{SUMMARY_STOP} z"
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    accuracies = "0.0 % (0.0 – 1.6) | 25.0 % (19.9 – 30.8) | 75.0 % (69.2 – 80.1)"
    assert f"| `needle` | 3 | 240 | {accuracies} |" in lines
    assert "| `needle` | warm-up | 4 | | | | 1.5 min | 0.8 min | 1.0 → 2.0 |" in lines
    assert "| `needle` | 3 | 3 | 288 | 1,234 | 800 | 10.0 min | 2.5 min | 4.0 → 5.0 |" in lines
    assert "| `reverse-text` | 0 | 3 | 288 | 99 | 66 | 10.0 min | 2.5 min | 4.0 → 5.0 |" in lines
    # Of four rewards a quarter away from their mean: 1.96 · (0.25 · sqrt(4 / 3)) / sqrt(4) on each side.
    rewards = "0.000 | 0.500 (0.217 – 0.783) | 0.750 (0.467 – 1.033)"
    assert f"| mean reward | 4 | {rewards} |" in lines
    exact = f"{Accuracy(0, 2)} | {Accuracy(0, 4)} | {Accuracy(2, 4)}"
    assert f"| exactly reversed | 4 | {exact} |" in lines
    picture = (tmp_path / "evidence.svg").read_text()
    assert picture.count("<polyline") == 4 and picture.count("<circle") == 4
    again = page.read_text()
    write_page(load(results), page, tmp_path, readme)
    assert page.read_text() == again


def test_a_thick_line_is_the_mean_of_the_last_steps() -> None:
    assert means([0.0, 1.0, 1.0, 0.0], 2) == [(2, 0.5), (3, 1.0), (4, 0.5)]
    assert means([1.0], 2) == []


def test_the_page_of_the_documentation_is_up_to_date(tmp_path: Path) -> None:
    page, readme = tmp_path / "evidence.md", tmp_path / "README.md"
    page.write_text(PAGE.read_text())
    readme.write_text(README.read_text())
    write_page(load(RESULTS), page, tmp_path, readme)
    assert (page.read_text(), readme.read_text()) == (PAGE.read_text(), README.read_text())
    for picture in tmp_path.glob("*.svg"):
        assert picture.read_text() == (PAGE.parent / "images" / picture.name).read_text()


def rollout(question: str, reward: float | None, num_tokens: int, outcome: str) -> str:
    record = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": question}],
        "reward": reward,
        "metrics": {} if reward is None else {"correct": float(reward == 1.0)},
        "num_tokens": num_tokens,
        "outcome": outcome,
    }
    return json.dumps(record) + "\n"


def test_counts_come_from_saved_rollouts(tmp_path: Path) -> None:
    steps = [tmp_path / "rollouts" / f"step_{step}" for step in (0, 1)]
    for step in steps:
        step.mkdir(parents=True)
    (steps[0] / "train_rollouts.jsonl").write_text(
        rollout("a", 1.0, 3, "sent") + rollout("a", 0.0, 4, "sent") + rollout("b", 0.0, 5, "zero_advantage")
    )
    (steps[1] / "train_rollouts.jsonl").write_text(
        rollout("c", 1.0, 6, "sent") + rollout("c", None, 7, "failed")
    )
    (steps[1] / "eval_rollouts.jsonl").write_text(
        rollout("x", 1.0, 1, "eval") + rollout("x", 1.0, 1, "eval") + rollout("y", 0.9, 1, "eval")
    )
    metrics = tmp_path / "metrics" / "orchestrator.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(
        '{"step": 0, "time": 112.0, "time/batch_s": 2.0}\n{"step": 1, "time": 115.0, "time/batch_s": 1.0}\n'
    )
    assert accuracy(tmp_path, 1) == Accuracy(1, 2)
    assert list(points_of(tmp_path)) == [Point(0, 2.0, 1 / 3, 3), Point(1, 5.0, 1.0, 1)]
    assert tokens_of(tmp_path) == (25, 13)


def test_tasks_without_a_run_keep_what_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (RESULTS.parent, PAGE.parent / "images", OUTPUTS / "word_reversal"):
        folder.mkdir(parents=True)
    RESULTS.write_text(json.dumps(asdict(evidence())))
    PAGE.write_text(f"{START}{STOP}")
    README.write_text(f"{SUMMARY_START}{SUMMARY_STOP}")
    publish()
    assert load(RESULTS) == evidence()
    usage = Usage(1.0, 2.0, (3.0, 4.0))
    for part in (warm_up("word_reversal"), base_evaluation("word_reversal"), training("word_reversal", 5)):
        part.usage_path.write_text(json.dumps(asdict(usage)))
        saved = part.folder / "rollouts" / "step_0"
        saved.mkdir(parents=True)
        (saved / "eval_rollouts.jsonl").write_text(
            rollout("x", 1.0, 1, "eval") + rollout("y", None, 1, "eval")
        )
        (saved / "train_rollouts.jsonl").write_text(rollout("a", 0.5, 3, "sent"))
        metrics = part.folder / "metrics"
        metrics.mkdir()
        (metrics / "eval.jsonl").write_text('{"step": 0, "time": 1.0}\n')
        (metrics / "orchestrator.jsonl").write_text('{"step": 0, "time": 3.0, "time/batch_s": 2.0}\n')
    publish()
    half = Accuracy(1, 2)  # a rollout that failed is not right
    run = RunResult(5, usage, half, half, 3, 3, [Point(0, 2.0, 0.5, 1)])
    added = TaskResult("word_reversal", WARM_UP_STEPS["word_reversal"], usage, half, [run])
    assert load(RESULTS) == Evidence([added, *evidence().tasks], evidence().known_result)


def test_what_has_ended_is_not_run_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    part = Part(tmp_path / "run", (sys.executable, "-c", "print('ran')"))
    part.run()
    assert "ran" in capfd.readouterr().out and part.usage().cpu_s > 0.0
    part.run()
    assert capfd.readouterr().out == f"{part.folder} is there\n"


def test_what_fails_ends_the_queue_and_is_run_again(tmp_path: Path) -> None:
    part = Part(tmp_path / "run", (sys.executable, "-c", "raise SystemExit(3)"))
    for _ in range(2):
        with pytest.raises(SystemExit, match="ended with 3"):
            part.run()
    assert not part.usage_path.exists()


class Interrupted(Part):
    """A part in whose midst somebody presses Ctrl-C."""

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[int, Any]:
        raise KeyboardInterrupt


def test_a_queue_that_is_interrupted_ends_after_its_run_has(tmp_path: Path) -> None:
    script = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('ended')"
    part = Interrupted(tmp_path / "run", (sys.executable, "-c", script))
    with pytest.raises(SystemExit, match="stopped"):
        part.run()
    assert part.folder.read_text() == "ended" and not part.usage_path.exists()


def test_an_evaluation_is_interrupted_once_it_has_a_record(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, threading; path = pathlib.Path(sys.argv[2]) / 'metrics' / 'eval.jsonl';"
        'path.parent.mkdir(parents=True); path.write_text(\'{"step": 0, "time": 1.0}\\n\');'
        "threading.Event().wait()"
    )
    part = Part(tmp_path / "run", (sys.executable, "-c", script), only_evaluates=True)
    part.run()
    assert part.usage_path.exists()


@pytest.mark.parametrize("task", WARM_UP_STEPS)
def test_no_held_out_question_is_trained_on(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    from pellucid.orchestrator.environment import load_environment
    from pellucid.orchestrator.gym import ReasoningGym

    config = parse(RLConfig, task_arguments(task), prog="rl").config
    (env,), (evaluation,) = config.orchestrator.env, config.orchestrator.eval
    settings = {key: value for key, value in evaluation.args.items() if key != "seed"}
    assert settings == env.args and evaluation.num_examples >= 200

    def questions(environment: object, number: int) -> set[str]:
        return {environment.example(index).messages[-1]["content"] for index in range(number)}  # type: ignore[attr-defined]

    held_out = questions(load_environment(evaluation, 0), evaluation.num_examples)
    assert held_out == questions(load_environment(evaluation, 1), evaluation.num_examples)
    assert len(held_out) >= 200
    trained = questions(ReasoningGym(**env.args, seed=WARM_UP_SEED), NUM_WARM_UP)
    for seed in (0, 1, 2):
        trained |= questions(load_environment(env, seed), 300)
    assert not held_out & trained


def test_configurations_parse() -> None:
    sft = parse(SFTConfig, ["@", "examples/evidence/sft.toml", "--data.path", "x.jsonl"], prog="sft").config
    assert sft.data.batch_size == 32
    qwen = ["@", "examples/reverse_text_qwen/rl.toml"]
    large = parse(RLConfig, qwen, prog="rl").config
    small = parse(RLConfig, [*qwen, "@", "examples/reverse_text_qwen/smollm.toml"], prog="rl").config
    assert large.model.name == "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT" and large.model.lora is None
    assert small.model.lora is not None and small.max_steps == large.max_steps == 20
    assert [evaluation.num_examples for evaluation in small.orchestrator.eval] == [128]
    for config in (large, small):
        assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (128, 16)
        assert [env.id for env in config.orchestrator.env] == ["verifiers:reverse-text"]


def test_sentences_to_reverse_and_their_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sft" / "model").mkdir(parents=True)
    (tmp_path / "sft" / "model" / "tokenizer.json").touch()  # a model that is there is kept
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path)])
    runpy.run_path("examples/reverse_text_qwen/prepare.py", run_name="__main__")

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    warm_up_rows = rows("warmup.jsonl")
    slices = [
        [row["messages"][1]["content"] for row in warm_up_rows],
        *([row["prompt"] for row in rows(f"{name}/train.jsonl")] for name in ("data", "held_out")),
    ]
    assert [len(texts) for texts in slices] == [1000, 9 * 10 * 8 * 8 - 1128, 128]
    assert len(set().union(*slices)) == 9 * 10 * 8 * 8  # each sentence is in one of them
    text = slices[0][0]
    reply = {"role": "assistant", "content": f"<reversed_text>\n{text[::-1]}\n</reversed_text>"}
    assert warm_up_rows[0]["messages"][1:] == [{"role": "user", "content": text}, reply]
