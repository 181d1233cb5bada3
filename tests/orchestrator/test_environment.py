import asyncio
import subprocess
import sys

import pytest

from pellucid.config import EnvConfig
from pellucid.data import Example
from pellucid.errors import ConfigError
from pellucid.orchestrator import Environment, load_environment
from pellucid.orchestrator.environments.reverse_text import ReverseText


def reverse_text(**args: object) -> Environment:
    return load_environment(EnvConfig(id="reverse-text", args=args), seed=3)


def test_examples_depend_on_seed_name_and_index_alone() -> None:
    words = [reverse_text().example(index).messages[0]["content"] for index in (5, 6, 5)]
    assert words[0] == words[2] != words[1]
    other_seed = load_environment(EnvConfig(id="reverse-text"), seed=4)
    other_name = load_environment(EnvConfig(id="reverse-text", name="twin"), seed=3)
    assert len({words[0], *(env.example(5).messages[0]["content"] for env in (other_seed, other_name))}) == 3


def test_words_have_the_configured_letters() -> None:
    words = [reverse_text(min_letters=2, max_letters=4).example(i).messages[0]["content"] for i in range(200)]
    assert {len(word) for word in words} == {2, 3, 4}
    assert all(word.isascii() and word.islower() and word.isalpha() for word in words)


@pytest.mark.parametrize(
    ("text", "reward", "exact"), [("maerts", 1.0, 1), ("maert", 10 / 11, 0), ("", 0.0, 0), ("xyz", 0.0, 0)]
)
def test_reward(text: str, reward: float, exact: int) -> None:
    example = Example("0", [{"role": "user", "content": "stream"}], {"answer": "maerts"})
    score = ReverseText(seed=0).reward(example, text)
    assert score.reward == pytest.approx(reward)
    assert score.metrics == {"exact": exact}


def test_single_turn_asks_once_and_scores_the_answer() -> None:
    class Echo:
        async def respond(self, messages: list[dict[str, str]]) -> str:
            return messages[0]["content"][::-1]

    environment = reverse_text()
    score = asyncio.run(environment.rollout(environment.example(0), Echo()))
    assert score.reward == 1.0


def test_import_path() -> None:
    path = "pellucid.orchestrator.environments.reverse_text:ReverseText"
    assert isinstance(load_environment(EnvConfig(id=path), seed=0), ReverseText)


@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [
        (
            "reverse-txt",
            r"'reverse-txt' is not a built-in environment \(reverse-text\).*mean 'reverse-text'\?",
        ),
        ("no.such.module:Class", r"'no.such.module:Class' cannot be imported: No module named 'no'"),
        ("pellucid.errors:Nothing", r"cannot be imported: .*has no attribute 'Nothing'"),
        ("pellucid.errors:ConfigError", r"has to be a subclass of pellucid\.orchestrator\.Environment"),
    ],
)
def test_unknown_environment(env_id: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"orchestrator\.env\.id = .*{complaint}"):
        load_environment(EnvConfig(id=env_id), seed=0)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"letters": 4}, "unexpected keyword argument 'letters'"),
        ({"min_letters": 9}, "min_letters = 9 has to be at least 1 and at most max_letters = 8"),
    ],
)
def test_wrong_args_name_the_environment_and_the_args(args: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match="environment 'reverse-text' refuses") as caught:
        reverse_text(**args)
    assert complaint in str(caught.value) and str(args) in str(caught.value)


def test_orchestrator_does_without_torch() -> None:
    program = "import sys, pellucid.orchestrator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
