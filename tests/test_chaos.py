"""`make chaos` in short: three kills at random moments, one while a run starts, and its checks."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "chaos.py"
SEED = 50
"""The launcher and the orchestrator die in training, the trainer while it starts."""


@pytest.mark.slow
def test_three_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, str(CHAOS), "--kills", "3", "--seed", str(SEED), "--folder", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith("3 kills ({'launcher': 1, 'orchestrator': 1, 'trainer': 1}), ")
    assert "balanced: every one of the" in done.stdout
