"""`make chaos` in short: three kills at random moments, one while a run starts, and its checks."""

from functools import partial
from pathlib import Path

import pytest

import warm
from chaos import rampage

SEED = 50
"""The launcher and the orchestrator die in training, the trainer while it starts."""


@pytest.mark.slow
def test_three_kills_at_random_moments_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = rampage(tmp_path, 3, SEED, start=partial(warm.start, merged=True), start_s=1.0)
    assert summary.startswith("3 kills ({'launcher': 1, 'orchestrator': 1, 'trainer': 1}), ")
    assert "balanced: every one of the" in capsys.readouterr().out
