import pytest

from pellucid.config import EnvConfig
from pellucid.data import Example, TokenTable
from pellucid.errors import ConfigError
from pellucid.model.tiny import character_tokenizer
from pellucid.orchestrator import Environment, load_environment
from pellucid.orchestrator.built_in import INSTRUCTION, Arithmetic, evaluate
from pellucid.orchestrator.verdict import build_samples


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


PRODUCT = Example("0", [{"role": "user", "content": "12*3"}], {"answer": 36})


def calculator(**args: object) -> Environment:
    return load_environment(EnvConfig(id="calculator", args=args), seed=3)


def test_the_opening() -> None:
    told = calculator(operations="*", max_number=9).example(5)
    assert told.messages[0] == {"role": "system", "content": INSTRUCTION}
    assert [message["role"] for message in calculator(instruction="").example(5).messages] == ["user"]
    left, right = map(int, told.messages[1]["content"].split("*"))
    assert told.info["answer"] == left * right


@pytest.mark.parametrize(
    ("replies", "reward", "results"),
    [
        (["36"], 1, []),
        (["calc(12*3)", "36"], 1, ["36"]),
        (["calc(12*3)", "It is 36!"], 1, ["36"]),
        (["calc(12*3)", "37"], 0, ["36"]),
        (["calc(12*)", " calc(6*6)\n", "36"], 1, ["error: not an expression", "36"]),
        (["calc(12*3)"] * 4, 0, ["36"] * 4),
        (["I would calc(12*3)"], 0, []),
    ],
)
def test_a_call_goes_on_and_anything_else_is_the_answer(attempt, replies, reward, results) -> None:
    rollout = attempt(calculator(), PRODUCT, replies, state_columns=["tool_results"])
    num_errors = sum(result.startswith("error") for result in results)
    assert rollout.error is None
    assert rollout.reward == reward
    assert rollout.metrics == {"tool_calls": len(results), "tool_errors": num_errors}
    assert len(rollout.turns) == len(replies)
    assert rollout.state == {"tool_results": str(results).replace("'", '"').replace(", ", ",")}


def test_only_what_the_model_sampled_trains_and_it_trains_as_sampled(attempt) -> None:
    """Token by token, with a tokenizer that would merge what the model wrote in two tokens."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["12", "36", "lc("])
    [merged] = tokenizer.encode("36", add_special_tokens=False)
    three, six = character_tokenizer().encode("36", add_special_tokens=False)
    call = [*character_tokenizer().encode("calc(12*3)", add_special_tokens=False), tokenizer.eos_token_id]
    answer = [three, six, tokenizer.eos_token_id]
    rollout = attempt(calculator(), PRODUCT, [call, answer], tokenizer=tokenizer)

    assert rollout.reward == 1
    assert tokenizer.encode(rollout.turns[0].text, add_special_tokens=False) != call[:-1]
    [sample] = build_samples(rollout, run_id="run", advantage=1.0)
    table = TokenTable.from_samples([sample])
    blocks = [
        ("<|im_start|>user\n", False),
        ("12", False),
        ("*3<|im_end|>\n<|im_start|>assistant\n", False),
        (call, True),
        ("\n<|im_start|>tool\n36<|im_end|>\n<|im_start|>assistant\n", False),
        (answer, True),
    ]
    expected = [
        (token, trainable)
        for block, trainable in blocks
        for token in (tokenizer.encode(block, add_special_tokens=False) if isinstance(block, str) else block)
    ]
    assert list(zip(table["token_ids"].tolist(), table["loss_mask"].tolist(), strict=True)) == expected
    assert table["sampled"].tolist() == table["loss_mask"].tolist()
    assert (table["token_ids"] == merged).sum() == 1  # what the tool said is tokenised as usual
    assert rollout.num_sampled == int(table["loss_mask"].sum()) == len(call) + len(answer)


@pytest.mark.parametrize("args", [{"max_turns": 0}, {"operations": "x"}])
def test_wrong_args_of_a_calculator(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(args))):
        calculator(**args)
