"""`calculator`: problems with a tool at hand.

user        37*48
assistant   calc(37*48)     the reply is a call: the tool answers, and it is the model's turn again
tool        1776
assistant   1776            any other reply is the answer -> reward 1.0, tool_calls 1

What the tool says is context. It is in the model's prompt, and never trained on.
"""

import re

from pellucid.data import Example
from pellucid.orchestrator.environment import Environment, Score
from pellucid.orchestrator.environments.arithmetic import check_problems, draw_problem, last_number
from pellucid.orchestrator.environments.expression import evaluate
from pellucid.orchestrator.session import Session

INSTRUCTION = (
    "Solve the problem. To compute something, reply with calc(EXPRESSION) and nothing else, for example "
    "calc(12*7); the result is sent to you. Then reply with the answer."
)
_CALL = re.compile(r"\s*calc\((.*)\)\s*", re.DOTALL)


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
        check_problems(operations, max_number, num_terms)
        if max_turns < 1:
            raise ValueError(f"max_turns = {max_turns} has to be at least 1")
        self._operations = operations
        self._max_number = max_number
        self._num_terms = num_terms
        self._max_turns = max_turns
        self._opening = [{"role": "system", "content": instruction}] if instruction else []

    def example(self, index: int) -> Example:
        problem = draw_problem(self.generator(index), self._operations, self._max_number, self._num_terms)
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
