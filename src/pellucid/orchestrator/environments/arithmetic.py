"""`arithmetic`: sums, differences and products.

user: "37+48"   "85" -> reward 1.0     "It is 85." -> 1.0     "84" -> 0.0     "no idea" -> 0.0, number 0
"""

import random
import re

from pellucid.data import Example
from pellucid.orchestrator.environment import Score, SingleTurnEnvironment
from pellucid.orchestrator.environments.expression import OPERATIONS, evaluate


class Arithmetic(SingleTurnEnvironment):
    def __init__(
        self, *, seed: int, operations: str = "+-*", max_number: int = 99, num_terms: int = 2
    ) -> None:
        super().__init__(seed=seed)
        check_problems(operations, max_number, num_terms)
        self._operations = operations
        self._max_number = max_number
        self._num_terms = num_terms

    def example(self, index: int) -> Example:
        problem = draw_problem(self.generator(index), self._operations, self._max_number, self._num_terms)
        return Example(str(index), [{"role": "user", "content": problem}], {"answer": evaluate(problem)})

    def reward(self, example: Example, text: str) -> Score:
        answer = last_number(text)
        return Score(float(answer == example.info["answer"]), {"number": float(answer is not None)})


def draw_problem(generator: random.Random, operations: str, max_number: int, num_terms: int) -> str:
    """`37+48*5`, with numbers from 0 on."""
    problem = str(generator.randint(0, max_number))
    for _ in range(num_terms - 1):
        problem += generator.choice(operations) + str(generator.randint(0, max_number))
    return problem


def last_number(text: str) -> int | None:
    """Returns the last number in the text: the answer of a model that explains itself."""
    numbers = re.findall(r"-?\d{1,100}", text)
    return int(numbers[-1]) if numbers else None


def check_problems(operations: str, max_number: int, num_terms: int) -> None:
    if not operations or set(operations) - OPERATIONS.keys():
        raise ValueError(
            f"operations = {operations!r} has to be some of {''.join(OPERATIONS)!r}, without anything else"
        )
    if max_number < 1 or num_terms < 2:
        raise ValueError(
            f"max_number = {max_number} has to be at least 1, num_terms = {num_terms} at least 2"
        )
