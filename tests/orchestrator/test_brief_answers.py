"""The reward of examples/smollm: by hand."""

import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm"


@pytest.fixture
def score(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from brief_answers import score

    yield score
    sys.modules.pop("brief_answers")


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        ("Bread is baked dough.", True, 1.0),
        ("Bread is baked dough.", False, 0.6),
        (" Bread is baked dough.\n", True, 1.0),
        ("Bread is baked dough", True, 0.7),
        ("Bread. It is baked.", True, 0.7),
        ("Bread is.", True, 0.7),
        ("Bread is what people have baked for thousands of years.", True, 0.7),
        ("", False, 0.0),
    ],
)
def test_the_reward_of_a_reply(score, text, ended, reward) -> None:
    assert score(text, ended=ended).reward == pytest.approx(reward)
