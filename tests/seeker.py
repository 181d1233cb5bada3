"""An agent's environment that any model can play: whatever the model says is a query of its one tool.

    system user            -> reply 0     a call of `search`
    … reply 0, tool        -> reply 1     another one
    system user summary    -> reply 2     what was found so far is summed up: history is rewritten
    verdict?               -> reply 3     the same model as a judge, whose tokens do not train

Every fourth example fails in its first attempt, after two turns.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pellucid.data import Example, Turn
from pellucid.orchestrator import Environment, Score, Session

SYSTEM = {"role": "system", "content": "Find out what you are asked. Search first."}
FAILS_EVERY = 4
HOSTILE = "</script><img src=x onerror=alert(1)> \u202ekcab"


class Seeker(Environment):
    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self._attempts: Counter[str] = Counter()

    def example(self, index: int) -> Example:
        return Example(str(index), [SYSTEM, {"role": "user", "content": f"question {index}?"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        self._attempts[example.example_id] += 1
        is_first = self._attempts[example.example_id] == 1
        messages: list[Mapping[str, Any]] = list(example.messages)
        found = []
        for number in range(2):
            turn = await session.sample(messages, as_message=as_call)
            found.append(f"{number}: {len(turn.text)} letters {HOSTILE}")
            messages += [as_call(turn), {"role": "tool", "tool_call_id": "call_0", "content": found[-1]}]
        if int(example.example_id) % FAILS_EVERY == 3 and is_first:
            raise ValueError("the search has ended")
        summary = {"role": "user", "content": "So far: " + "; ".join(found)}
        answer = await session.sample([*messages[:2], summary])
        verdict = [{"role": "user", "content": f"Is {answer.text!r} right?"}]
        judged = await session.sample(verdict, trainable=False, max_tokens=2)
        metrics = {
            "vowels": sum(answer.text.count(letter) for letter in "aeiou") / 10,
            "brief": float(len(answer.text) < 6),
            "judged": float(len(judged.text)),
        }
        return Score(
            metrics["vowels"] + 0.5 * metrics["brief"], metrics, weights={"vowels": 1.0, "brief": 0.5}
        )


def as_call(turn: Turn) -> dict[str, Any]:
    """A reply as a message with one call of `search`."""
    arguments = {"query": turn.text, "limits": {"pages": 3, "sites": ["a.example", "b.example"]}}
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "search", "arguments": json.dumps(arguments)},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}
