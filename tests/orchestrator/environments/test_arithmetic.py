import pytest

from pellucid.config import EnvConfig
from pellucid.data import Example
from pellucid.errors import ConfigError
from pellucid.orchestrator import Environment, load_environment
from pellucid.orchestrator.environments.arithmetic import Arithmetic
from pellucid.orchestrator.environments.expression import evaluate


def arithmetic(**args: object) -> Environment:
    return load_environment(EnvConfig(id="arithmetic", args=args), seed=3)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37+48", 85), ("2*(3+4)", 14), (" 7 - 9 ", -2), ("-(2--3)", -5), ("2+3*4", 14)],
)
def test_expressions(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "only whole numbers"),
        ("2**99", "only whole numbers"),
        ("1.5", "only whole numbers"),
        ("x+1", "only whole numbers"),
        ("1(2)", "only whole numbers"),
        ("2+", "not an expression"),
        ("1 2", "not an expression"),
        ("()" * 60, "not an expression|only whole numbers"),
        ("(" * 150 + "1" + ")" * 49, "not an expression"),
        ("9" * 201, "more than 200 characters"),
        ("__import__('os')", "only whole numbers"),
    ],
)
def test_nothing_else_is_computed(expression: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        evaluate(expression)


def test_problems_are_as_configured_and_their_answers_right() -> None:
    environment = arithmetic(operations="+*", max_number=5, num_terms=3)
    examples = [environment.example(index) for index in range(100)]
    problems = [example.messages[0]["content"] for example in examples]
    assert {character for problem in problems for character in problem} == set("012345+*")
    assert {problem.count("+") + problem.count("*") for problem in problems} == {2}
    assert [example.info["answer"] for example in examples] == [evaluate(problem) for problem in problems]


@pytest.mark.parametrize(
    ("text", "reward", "number"),
    [("85", 1, 1), ("It is 85.", 1, 1), ("37+48=85", 1, 1), ("85 or 84", 0, 1), ("-85", 0, 1), ("no", 0, 0)],
)
def test_reward(text: str, reward: float, number: float) -> None:
    example = Example("0", [{"role": "user", "content": "37+48"}], {"answer": 85})
    score = Arithmetic(seed=0).reward(example, text)
    assert (score.reward, score.metrics) == (reward, {"number": number})


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"operations": "+/"}, r"operations = '\+/' has to be some of '\+-\*'"),
        ({"operations": ""}, "operations = ''"),
        ({"max_number": 0}, "max_number = 0 has to be at least 1"),
        ({"num_terms": 1}, "num_terms = 1 at least 2"),
    ],
)
def test_wrong_args(args: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        arithmetic(**args)
