"""`make chaos` in short: three blows at random moments, and its checks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import warm
from chaos import rampage, struck, table

start = partial(warm.start, merged=True)


@pytest.mark.slow
def test_three_kills_at_random_moments_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orchestrator and the launcher die in training, the trainer while it starts."""
    summary = rampage(tmp_path, 3, seed=174, start=start, start_s=1.0)
    assert summary.startswith("3 blows ({'orchestrator': 1, 'launcher': 1, 'trainer': 1}), ")
    assert "balanced: every one of the" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_a_hang_and_a_full_disk_lose_nothing_though_the_blows_are_interrupted(
    tmp_path: Path,
) -> None:
    starts = iter(range(2))

    def start_once(arguments: list[str]) -> Any:
        if next(starts):
            raise KeyboardInterrupt
        return start(arguments)

    with pytest.raises(KeyboardInterrupt):
        rampage(tmp_path, 3, seed=4551, start=start_once, start_s=1.0)
    (first,) = struck(tmp_path)
    assert first.name in ("checkpoint, trainer", "trainer")  # it may have finished its checkpoint first
    summary = rampage(tmp_path, 3, seed=4551, start=start, start_s=1.0)
    assert summary.startswith(f"3 blows ({{'{first.name}': 1, 'hang, ")
    assert len(table(struck(tmp_path)).splitlines()) == 4
