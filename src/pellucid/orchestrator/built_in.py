"""The environments that pellucid brings along; `environment.BUILT_IN` lists them by id.

reverse-text   user: "stream"   "maerts" -> reward 1.0, exact 1     "maert" -> reward 0.909, exact 0
arithmetic     user: "37+48"    "85" or "It is 85." -> reward 1.0   "84" -> 0.0   "no idea" -> 0.0, number 0

calculator     user: "37*48"
               assistant   calc(37*48)   the reply is a call: the tool answers, and the model goes on
               tool        1776
               assistant   1776          any other reply is the answer -> reward 1.0, tool_calls 1

What the tool says is context. It is in the model's prompt, and never trained on.
"""

import ast
import operator
import random
import re
import string
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher

from pellucid.data import Example
from pellucid.orchestrator.environment import Environment, Score, SingleTurnEnvironment
from pellucid.orchestrator.session import Session

INSTRUCTION = (
    "Solve the problem. To compute something, reply with calc(EXPRESSION) and nothing else, for example "
    "calc(12*7); the result is sent to you. Then reply with the answer."
)
_CALL = re.compile(r"\s*calc\((.*)\)\s*", re.DOTALL)
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_MAX_CHARACTERS = 200
_RULE = "only whole numbers, +, -, * and parentheses"


class ReverseText(SingleTurnEnvironment):
    def __init__(self, *, seed: int, min_letters: int = 4, max_letters: int = 8) -> None:
        super().__init__(seed=seed)
        if not 1 <= min_letters <= max_letters:
            raise ValueError(
                f"min_letters = {min_letters} has to be at least 1 and at most max_letters = {max_letters}"
            )
        self._min_letters = min_letters
        self._max_letters = max_letters

    def example(self, index: int) -> Example:
        generator = self.generator(index)
        num_letters = generator.randint(self._min_letters, self._max_letters)
        word = "".join(generator.choices(string.ascii_lowercase, k=num_letters))
        return Example(str(index), [{"role": "user", "content": word}], {"answer": word[::-1]})

    def reward(self, example: Example, text: str) -> Score:
        answer = example.info["answer"]
        similarity = SequenceMatcher(None, text, answer).ratio()
        return Score(similarity, {"exact": float(text == answer)})


class Problems:
    """Problems such as `37+48*5`, with numbers from 0 on."""

    def __init__(self, operations: str, max_number: int, num_terms: int) -> None:
        if not operations or set(operations) - OPERATIONS.keys():
            known = "".join(OPERATIONS)
            raise ValueError(
                f"operations = {operations!r} has to be some of {known!r}, without anything else"
            )
        if max_number < 1 or num_terms < 2:
            raise ValueError(
                f"max_number = {max_number} has to be at least 1, num_terms = {num_terms} at least 2"
            )
        self._operations = operations
        self._max_number = max_number
        self._num_terms = num_terms

    def draw(self, generator: random.Random) -> str:
        problem = str(generator.randint(0, self._max_number))
        for _ in range(self._num_terms - 1):
            problem += generator.choice(self._operations) + str(generator.randint(0, self._max_number))
        return problem


class Arithmetic(SingleTurnEnvironment):
    def __init__(
        self, *, seed: int, operations: str = "+-*", max_number: int = 99, num_terms: int = 2
    ) -> None:
        super().__init__(seed=seed)
        self._problems = Problems(operations, max_number, num_terms)

    def example(self, index: int) -> Example:
        problem = self._problems.draw(self.generator(index))
        return Example(str(index), [{"role": "user", "content": problem}], {"answer": evaluate(problem)})

    def reward(self, example: Example, text: str) -> Score:
        answer = last_number(text)
        return Score(float(answer == example.info["answer"]), {"number": float(answer is not None)})


def last_number(text: str) -> int | None:
    """Returns the last number in the text: the answer of a model that explains itself."""
    numbers = re.findall(r"-?\d{1,100}", text)
    return int(numbers[-1]) if numbers else None


def evaluate(expression: str) -> int:
    """`evaluate("2*(3+4)") == 14`; ValueError for what is not such an expression."""
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"more than {_MAX_CHARACTERS} characters")
    if not re.fullmatch(r"[\d+\-*() ]+", expression, re.ASCII):
        raise ValueError(_RULE)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _NODES:
            return OPERATIONS[_NODES[type(op)]](_value(left), _value(right))
    raise ValueError(_RULE)


class Calculator(Environment):
    def __init__(
        self,
        *,
        seed: int,
        operations: str = "+-*",
        max_number: int = 999,
        num_terms: int = 2,
        max_turns: int = 4,
        instruction: str = INSTRUCTION,
    ) -> None:
        """`instruction` is the system message; an empty one is left out."""
        super().__init__(seed=seed)
        self._problems = Problems(operations, max_number, num_terms)
        if max_turns < 1:
            raise ValueError(f"max_turns = {max_turns} has to be at least 1")
        self._max_turns = max_turns
        self._opening = [{"role": "system", "content": instruction}] if instruction else []

    def example(self, index: int) -> Example:
        problem = self._problems.draw(self.generator(index))
        messages = [*self._opening, {"role": "user", "content": problem}]
        return Example(str(index), messages, {"answer": evaluate(problem)})

    async def rollout(self, example: Example, session: Session) -> Score:
        messages = list(example.messages)
        results: list[str] = []
        for _ in range(self._max_turns):
            reply = await session.respond(messages)
            call = _CALL.fullmatch(reply)
            if call is None:
                return _score(last_number(reply) == example.info["answer"], results)
            results.append(use_tool(call[1]))
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "tool", "content": results[-1]},
            ]
        return _score(False, results)


def use_tool(expression: str) -> str:
    try:
        return str(evaluate(expression))
    except ValueError as error:
        return f"error: {error}"


def _score(is_right: bool, results: list[str]) -> Score:
    num_errors = sum(result.startswith("error") for result in results)
    metrics = {"tool_calls": float(len(results)), "tool_errors": float(num_errors)}
    return Score(float(is_right), metrics, {"tool_results": results})
