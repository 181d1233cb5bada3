"""An environment and a filter for the runs of `mutate.py`: an untrained model scores in it now and then."""

from pellucid.data import Example
from pellucid.orchestrator import Environment, Score, Session
from pellucid.orchestrator.verdict import FilterInputs


class Turns(Environment):
    """A reply, a tool's response, a reply; then a question that forgets both, whose reply does not train.

    Rewards are read off the replies. One reply in eleven makes the environment raise.
    """

    def example(self, index: int) -> Example:
        return Example(str(index), [{"role": "user", "content": f"What follows {index}?"}])

    async def rollout(self, example: Example, session: Session) -> Score:
        first = await session.respond(example.messages)
        answered = {"role": "assistant", "content": first}
        second = await session.respond([*example.messages, answered, {"role": "tool", "content": "42"}])
        session.withdraw(await session.sample([*example.messages, {"role": "user", "content": "Sure?"}]))
        number = sum(map(ord, first + second))
        if number % 11 == 3:
            raise ValueError(f"{number} is a reply that this environment cannot read")
        return Score(number % 5 / 4, {"number": float(number)})


def keep_long(inputs: FilterInputs) -> list[bool]:
    """Keeps rollouts of two tokens and more."""
    return [sum(turn.num_tokens for turn in rollout.turns) > 1 for rollout in inputs.rollouts]
