"""Tasks of reasoning-gym: questions, levels and rewards, on five of them for real."""

import math
import pickle
import re
import sys
from collections.abc import Callable

import pytest

from pellucid.cli import main
from pellucid.config import EnvConfig, EvalConfig
from pellucid.data import Example
from pellucid.errors import ConfigError
from pellucid.orchestrator import Environment, load_environment
from pellucid.orchestrator.built_in import evaluate

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


def gym(task: str, *, evaluates: bool = False, seed: int = 3, **args: object) -> Environment:
    kind = EvalConfig if evaluates else EnvConfig
    return load_environment(kind(id="reasoning-gym", args={"task": task, **args}), seed=seed)


def question(example: Example) -> str:
    return example.messages[-1]["content"]


def questions(environment: Environment, number: int) -> list[str]:
    return [question(environment.example(index)) for index in range(number)]


# Answers that follow from the questions alone


def add(text: str) -> str:
    return str(evaluate(re.search(r"problem: (.*) =", text)[1]))


def spell(text: str) -> str:
    return text.rpartition(": ")[2][::-1]


def divide(text: str) -> str:
    return str(math.gcd(*map(int, re.findall(r"\d+", text.rpartition(":")[2]))))


def count(text: str) -> str:
    letter, words = re.search(r'letter "(.)" appear in the text: "(.*)"', text).groups()
    return str(words.lower().count(letter))


def count_bits(text: str) -> str:
    return str(int(re.search(r"\d+\?", text)[0][:-1]).bit_count())


TASKS: dict[str, Callable[[str], str]] = {
    "chain_sum": add,
    "spell_backward": spell,
    "gcd": divide,
    "letter_counting": count,
    "count_bits": count_bits,
}


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_have_a_reward_of_1(attempt, task) -> None:
    environment = gym(task)
    for index in range(5):
        example = environment.example(index)
        right = TASKS[task](question(example))
        rollout = attempt(environment, example, [f"Let me think.\n<answer>{right}</answer>"])
        assert (rollout.reward, rollout.metrics["correct"], rollout.metrics["answered"]) == (1, 1, 1)
        rollout = attempt(environment, example, [right])
        assert (rollout.reward, rollout.metrics["correct"], rollout.metrics["answered"]) == (0, 0, 0)
        rollout = attempt(environment, example, ["<answer></answer>"])
        assert rollout.reward < 0.1 and rollout.metrics["correct"] == 0


def test_a_reward_can_be_partial(attempt) -> None:
    """spell_backward gives each letter at its place its share."""
    environment = gym("spell_backward", min_word_len=4, max_word_len=4, answer="reply")
    example = environment.example(0)
    right = spell(question(example))
    half = right[:2] + "".join("z" if letter != "z" else "y" for letter in right[2:])
    assert attempt(environment, example, [f" {right} "]).reward == 1
    rollout = attempt(environment, example, [half])
    assert (rollout.reward, rollout.metrics["correct"]) == (0.5, 0)


def test_the_system_message_asks_for_what_is_read() -> None:
    assert "<answer>" in gym("gcd").example(0).messages[0]["content"]
    assert [message["role"] for message in gym("gcd").example(0).messages] == ["system", "user"]
    assert [message["role"] for message in gym("gcd", answer="reply").example(0).messages] == ["user"]
    messages = gym("gcd", instruction="Be brief.").example(0).messages
    assert messages[0] == {"role": "system", "content": "Be brief."}


def test_questions_follow_from_seed_and_index_alone() -> None:
    expected = questions(gym("chain_sum"), 30)
    again = gym("chain_sum")
    assert [question(again.example(index)) for index in reversed(range(30))] == expected[::-1]
    assert questions(pickle.loads(pickle.dumps(again)), 30) == expected
    assert len(set(expected)) > 25
    assert set(questions(gym("chain_sum", seed=4), 30)).isdisjoint(expected)


def test_no_question_is_trained_and_evaluated() -> None:
    """Of 1,000 sums of two digits, many occur several times."""
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    trained = questions(gym("chain_sum", **settings), 150)
    evaluated = questions(gym("chain_sum", evaluates=True, **settings), 30)
    assert len(set(trained)) < 150
    assert set(trained).isdisjoint(evaluated)


def test_a_task_with_too_few_questions_is_refused() -> None:
    """Of `0 =` to `9 =`, all belong to training."""
    settings = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    assert set(questions(gym("chain_sum", **settings), 60)) == {
        f"State the final answer to the following arithmetic problem: {digit} =" for digit in range(10)
    }
    with pytest.raises(ConfigError, match="too few different questions .* none belongs to evaluations"):
        gym("chain_sum", evaluates=True, **settings)


def test_levels_rise_with_the_examples() -> None:
    environment = gym("chain_sum", level=1, raise_every=10, max_level=3)

    def most(start: int) -> tuple[int, int]:
        """Most terms of a sum, and digits of a term."""
        sums = [
            re.search(r"problem: (.*) =", question(environment.example(index)))[1]
            for index in range(start, start + 10)
        ]
        terms = [re.findall(r"\d+", each) for each in sums]
        return max(map(len, terms)), max(len(number) for each in terms for number in each)

    assert [environment.example(index).info["level"] for index in (0, 9, 10, 29, 30, 999)] == [
        1,
        1,
        2,
        3,
        3,
        3,
    ]
    for start, level in ((0, 1), (10, 2), (20, 3)):
        terms, digits = most(start)
        assert terms <= 2 + level and digits <= 1 + level
    assert most(0) < most(20)


def test_levels_end_with_those_of_the_curriculum() -> None:
    """chain_sum has 11 levels of terms, from 2 to 12, and 10 of digits."""
    environment = gym("chain_sum", raise_every=1)
    assert [environment.example(index).info["level"] for index in (0, 9, 10, 11, 99)] == [0, 9, 10, 10, 10]


def test_settings_of_the_task_go_before_its_level() -> None:
    sums = questions(gym("chain_sum", level=8, max_digits=1, min_digits=1), 20)
    assert {len(number) for text in sums for number in re.findall(r"\d+", text)} == {1}
    assert max(text.count("+") + text.count("-") for text in sums) > 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"task": "chain_sums"}, r"task = 'chain_sums' is not one of the .* nearest is 'chain_sum'"),
        ({"task": "chain_sum", "max_term": 3}, "'max_term' is no setting of .* nearest is 'max_terms'"),
        ({"task": "chain_sum", "size": 3}, "'size' is no setting of 'chain_sum'"),
        ({"task": "chain_sum", "max_terms": 0}, "'chain_sum' refuses its settings: max_terms must be"),
        ({"task": "chain_sum", "max_level": 3}, "max_level = 3 needs raise_every"),
        ({"task": "chain_sum", "level": -1}, "level = -1 has to be at least 0"),
        ({"task": "gcd", "level": 3, "raise_every": 1, "max_level": 2}, "max_level = 2 is below level = 3"),
        ({"task": "chain_sum", "level": 11}, "level 11 is above the last one of 'chain_sum', 10"),
        ({"task": "acre", "level": 1}, "task = 'acre' has no curriculum"),
        ({"task": "chain_sum", "answer": "last"}, "answer = 'last' has to be 'tag' or 'reply'"),
        ({}, "missing a required argument: 'task'"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(args, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvConfig(id="reasoning-gym", args=args), seed=0)


def test_a_missing_library_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'pellucid\[reasoning-gym\]'"):
        gym("chain_sum")


def test_it_is_tried_alone(capsys) -> None:
    args = '{"task": "gcd", "answer": "reply"}'
    assert main(["env", "try", "reasoning-gym", "--args", args, "--reply", "none", "-n", "1"]) == 0
    assert "Greatest Common Divisor" in capsys.readouterr().out
