"""What `make bench-peers` makes of two runs."""

from pathlib import Path

import pytest

from benchmarks.curve import Curve
from benchmarks.drawing import draw
from benchmarks.peers import curve_of, figures
from pellucid.config import RLConfig
from pellucid.config.parse import parse

ROOT = Path(__file__).parents[2]


def rising(name: str, step_s: float) -> Curve:
    """0.5 for ten steps, then 1: the mean of ten is 0.9 with the eighth 1, which is step 18."""
    rewards = [0.5] * 10 + [1.0] * 12
    return Curve(name, 3, 4.0, [(step_s * (step + 1), reward) for step, reward in enumerate(rewards)])


def test_the_task_is_learned_when_the_mean_of_ten_steps_is_the_target(tmp_path) -> None:
    curve = rising("pellucid", 0.5)
    assert curve.smoothed()[0] == (5.0, 0.5) and curve.smoothed()[8] == (9.0, pytest.approx(0.9))
    assert curve.reached(0.899) == (9.0, 18)
    assert curve.reached(1.1) is None and Curve("TRL", 0).reached(0.1) is None
    curve.save(tmp_path / "curve.json")
    assert Curve.load(tmp_path / "curve.json").reached(0.899) == (9.0, 18)


def test_the_clock_starts_with_the_first_sampling(tmp_path) -> None:
    metrics = tmp_path / "metrics" / "orchestrator.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(
        '{"step": 0, "time": 90.0, "time/batch_s": 9.0, "reward/all": 0.1}\n'
        '{"step": 0, "time": 112.0, "time/batch_s": 2.0, "reward/all": 0.4}\n'
        '{"step": 1, "time": 112.5, "time/batch_s": 0.5, "reward/all": 0.6}\n'
    )
    curve = curve_of(tmp_path, 0, started=100.0)
    assert curve.startup_s == 10.0 and [tuple(point) for point in curve.points] == [(2.0, 0.4), (2.5, 0.6)]


def test_figures_and_picture() -> None:
    curves = [rising("TRL", 1.25), rising("pellucid", 0.5)]
    *_, theirs, ours = figures(curves, 0.899).splitlines()
    assert theirs == "| 3 | TRL | 4.0 s | 18 | 1.250 s | 22.5 s |  |"
    assert ours == "| 3 | pellucid | 4.0 s | 18 | 0.500 s | 9.0 s | 2.50 × |"
    assert figures(curves, 1.1).splitlines()[-1].endswith("| not within 11 s |  |")
    picture = draw(curves, 0.9)
    assert picture.count("<polyline") == 4


def test_both_sides_have_the_same_settings() -> None:
    config = parse(RLConfig, ["@", str(ROOT / "benchmarks" / "peers.toml")], prog="rl").config
    script = (ROOT / "benchmarks" / "trl_grpo.py").read_text()
    assert config.orchestrator.rollouts_per_example == 8 and "GROUP_SIZE, MAX_STEPS = 16, 8, 1000" in script
    assert config.orchestrator.batch_size == 16 * 8
    for setting, value in (
        ("max_completion_length", config.orchestrator.sampling.max_tokens),
        ("temperature", config.orchestrator.sampling.temperature),
        ("weight_decay", config.trainer.optim.weight_decay),
        ("max_grad_norm", config.trainer.optim.max_norm),
        ("epsilon", config.trainer.loss.clip_high),
    ):
        assert f"{setting}={value}," in script
    assert config.trainer.optim.lr == 3e-4 and "learning_rate=3e-4" in script
