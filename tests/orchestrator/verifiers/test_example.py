"""examples/verifiers_taskset: its configuration, its taskset, and a run of two steps."""

import os
from pathlib import Path

import pytest

pytest.importorskip("verifiers")

import warm
from pellucid.config import RLConfig
from pellucid.config.parse import parse
from pellucid.ledger import reconcile
from pellucid.metrics import read_metrics
from pellucid.orchestrator import load_environment

EXAMPLE = Path(__file__).parents[3] / "examples" / "verifiers_taskset"


def test_the_taskset(attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    config = parse(RLConfig, ["@", str(EXAMPLE / "rl.toml")], prog="pellucid rl").config
    [entry] = config.orchestrator.env
    environment = load_environment(entry, config.seed)
    assert environment.num_examples == 5000
    example = environment.example(7)
    word = example.messages[0]["content"]
    right = attempt(environment, example, [word[::-1]], state_columns=entry.state_columns)
    wrong = attempt(environment, example, [""])
    assert (right.reward, right.metrics) == (1.0, {"similarity": 1.0, "exact": 1.0})
    assert (wrong.reward, wrong.metrics) == (0.0, {"similarity": 0.0, "exact": 0.0})
    assert right.state == {"stop_condition": '"agent_completed"'}


@pytest.mark.slow
def test_two_steps(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = {
        "--model.name": tiny_model,
        "--output-dir": folder,
        "--max-steps": 2,
        "--orchestrator.batch-size": 8,
        "--orchestrator.rollouts-per-example": 4,
        "--orchestrator.sampling.max-tokens": 4,
    }
    arguments = ["rl", "@", str(EXAMPLE / "rl.toml")]
    arguments += [str(word) for pair in flags.items() for word in pair]
    finished = warm.run(arguments, env={**os.environ, "PYTHONPATH": str(EXAMPLE)})
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = reconcile(folder / "ledger")
    assert report.balanced and not report.running, report.differences
    [(account, states)] = report.states.items()
    assert account[1] == "reverse-words" and states["trained"] > 0
    steps = list(read_metrics(folder / "metrics" / "orchestrator.jsonl"))
    assert [step["reward/all"] for step in steps] == [
        pytest.approx(step["metrics/reverse-words/similarity"]) for step in steps
    ]
    log = (folder / "logs" / "orchestrator.log").read_text()
    assert "interception" not in log and "rollout start" not in log  # verifiers keeps quiet
